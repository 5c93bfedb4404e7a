"""Eval mode against the official model: features, the selected cells, boxes, logits, detections."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from parity import (
    DTYPES,
    Checks,
    as_float64,
    cases_of,
    config_of,
    deviation,
    eval_images,
    formula_model,
    golden_file,
    official_state,
    split_name,
)
from tolerances import FLOAT32, FLOAT64
from torch import Tensor

from rtdetr.models.postprocess import postprocess
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Predictions

CASES = list(cases_of("eval_*.npz"))


@pytest.mark.parametrize(("name", "case"), CASES, ids=[f"{name.removesuffix('.npz')}-{case}" for name, case in CASES])
def test_eval_matches_official_model(name: str, case: str) -> None:
    model_name, dtype, _ = split_name(name)
    arrays = {}
    with np.load(golden_file(name)) as stored:
        arrays = {key.split("/", 1)[1]: stored[key] for key in stored.files if key.startswith(f"{case}/")}
    images = eval_images(case).to(DTYPES[dtype])
    rectangle = images.shape[2] != images.shape[3]
    model = formula_model(config_of(model_name, rectangle), official_state(model_name), DTYPES[dtype]).eval()
    seen = watch(model)
    with torch.no_grad():
        predictions = model(images)

    checks = Checks(f"eval {dtype}", f"{name} {case}", FLOAT64 if dtype == "f64" else FLOAT32)
    compare_features(checks, images, seen, arrays)
    compare_predictions(checks, predictions, seen, arrays, relative=dtype == "f64")
    compare_detections(checks, predictions, arrays)
    checks.done()


def watch(model: Network) -> dict[str, Any]:
    """What passes through the stages of the model in its next forward, by stage."""
    seen: dict[str, Any] = {}

    def keep(name: str) -> Any:
        return lambda _module, inputs, output: seen.update({name: (inputs, output)})

    model.backbone.register_forward_hook(keep("backbone"))
    model.encoder.register_forward_hook(lambda _m, _i, output: seen.update(encoder=[each.clone() for each in output]))
    model.decoder.selector.register_forward_hook(keep("selector"))
    model.decoder.selector.score_head.register_forward_hook(keep("scores"))
    return seen


def compare_features(checks: Checks, images: Tensor, seen: dict[str, Any], arrays: dict[str, Any]) -> None:
    checks.summary("eval features", images, arrays, "image")
    for i in range(3):
        checks.summary("eval features", seen["backbone"][1][i], arrays, f"backbone{i}")
        checks.summary("eval features", seen["encoder"][i], arrays, f"neck{i}")
    checks.summary("eval features", seen["selector"][0][0].tokens, arrays, "memory")
    checks.summary("eval features", seen["scores"][1].amax(-1), arrays, "enc_score_max")


def compare_predictions(
    checks: Checks, predictions: Predictions, seen: dict[str, Any], arrays: dict[str, Any], relative: bool
) -> None:
    """Queries are put into the reference's order first: near ties may swap their ranks in single precision."""
    selection = seen["selector"][1]
    golden_index = torch.from_numpy(arrays["topk_index"].astype(np.int64))
    checks.same("eval selected cells", selection.cells.sort(1).values, golden_index.sort(1).values)
    if relative:
        checks.same("eval selected cells", selection.cells, golden_index, "in order")
    place = (selection.cells[:, None] == golden_index[:, :, None]).int().argmax(-1)  # (B, Q)
    pairs = (
        ("eval boxes", selection.box_logits.sigmoid(), "enc_topk_boxes"),
        ("eval boxes", predictions.boxes, "dec_boxes"),
        ("eval logits", selection.logits, "enc_topk_logits"),
        ("eval logits", predictions.logits, "dec_logits"),
    )
    for quantity, ours, key in pairs:
        ours = ours.gather(1, place[..., None].expand(-1, -1, ours.shape[-1]))
        scale = float(np.abs(arrays[key]).max()) if relative and quantity == "eval logits" else 1.0
        checks.near(quantity, deviation(ours, arrays[key]) / scale, key)


def compare_detections(checks: Checks, predictions: Predictions, arrays: dict[str, Any]) -> None:
    sizes = torch.from_numpy(np.floor(arrays["im_shape"] / arrays["scale_factor"] + 0.5))
    found = postprocess(predictions, sizes)
    batch = len(sizes)
    golden = arrays["bbox"].reshape(batch, -1, 6)
    assert list(arrays["bbox_num"]) == [golden.shape[1]] * batch
    checks.near("eval detections", deviation(found.scores, golden[..., 1]), "scores, best first")
    # Two detections of nearly the same score may swap: pair each of ours with the nearest golden one of its class.
    for i in range(batch):
        longer = float(sizes[i].max())
        off = np.abs(as_float64(found.boxes[i])[:, None] - golden[i][None, :, 2:]).max(-1) / longer
        off = np.maximum(off, np.abs(as_float64(found.scores[i])[:, None] - golden[i][None, :, 1]))
        off[as_float64(found.labels[i])[:, None] != golden[i][None, :, 0]] = np.inf
        checks.near("eval detections", float(off.min(1).max()), f"image {i}: ours among the official ones")
        checks.near("eval detections", float(off.min(0).max()), f"image {i}: the official ones among ours")
