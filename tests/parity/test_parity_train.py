"""One training step against the official model: forward, choices, losses, gradients, batch norm state.

The random draws of the reference are replayed. In float64 every discrete choice must agree. In float32 rounding alone
changes some of them, so the stored selections and matches are given and the numbers around them are compared.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from golden_formulas import det_image
from parity import (
    DTYPES,
    Checks,
    as_float64,
    config_of,
    deviation,
    formula_model,
    golden_file,
    golden_json,
    golden_names,
    official_state,
    split_name,
    stored_draws,
    stored_targets,
)
from tolerances import FLOAT32, FLOAT64
from torch import Tensor, nn

import rtdetr.losses.criterion as criterion_module
import rtdetr.losses.dense_criterion as dense_module
from rtdetr.losses.criterion import build_criterion, denoising_index
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Targets, TrainingOutputs
from rtdetr.weights.official_names import official_layout, official_names

NAMES = golden_names("train_*.npz")
# Paddle keeps the momentum in single precision also in a double precision run, which shows in the eighth digit.
PADDLE_MOMENTUM = float(np.float32(0.9))


class Step:
    """One forward and backward, and everything that is compared afterwards."""

    def __init__(self, name: str, given_choices: bool) -> None:
        model_name, self.dtype, self.case = split_name(name)
        self.arrays = dict(np.load(golden_file(name)))
        self.info = golden_json(name.replace(".npz", ".json"))
        height, width = self.info["height"], self.info["width"]
        dtype = DTYPES[self.dtype]
        config = config_of(model_name, official_rectangles=height != width)
        self.images = torch.from_numpy(det_image(self.info["image_tag"], 2, height, width)).to(dtype)
        self.targets: Targets = stored_targets(self.arrays, 2, dtype)
        self.state = official_state(model_name)
        self.model = formula_model(config, self.state, dtype).train()
        self.num_groups = len(self.info["num_queries"]) - 1
        self.seen: dict[str, Any] = {}
        self.batch_sizes: dict[str, int] = {}
        self._watch(self.model)
        criterion = build_criterion(config, 80)
        with self._choices(given_choices):
            outputs = self.model(self.images, self.targets, stored_draws(self.arrays, self.num_groups))
            self.losses: dict[str, Tensor] = criterion(outputs, self.targets, self.info["epoch_id"])
        self.outputs: TrainingOutputs = outputs
        self.losses["loss"].backward()

    def _watch(self, model: Network) -> None:
        seen = self.seen
        model.backbone.register_forward_hook(lambda _m, _i, out: seen.update(backbone=list(out)))
        model.encoder.register_forward_hook(lambda _m, _i, out: seen.update(encoder=list(out)))
        model.query_groups.register_forward_hook(lambda _m, _i, out: seen.update(queries=out))
        model.decoder.register_forward_hook(lambda _m, _i, out: seen.update(decoded=out))
        for name, module in model.named_modules():
            if isinstance(module, nn.BatchNorm2d):
                module.register_forward_pre_hook(functools.partial(self._count, name))

    def _count(self, name: str, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.batch_sizes[name] = inputs[0].numel() // inputs[0].shape[1]

    @contextlib.contextmanager
    def _choices(self, given: bool) -> Iterator[None]:
        """Keeps what the matcher and the assigner say; with `given`, the stored cells and matches replace the found."""
        patch = pytest.MonkeyPatch()
        match, atss, aligned = (
            criterion_module.match_together,
            dense_module.assign_atss,
            dense_module.assign_task_aligned,
        )

        def matched(*args: Any, **kwargs: Any) -> tuple[list[Tensor], Tensor]:
            found, non_finite = match(*args, **kwargs)
            self.seen["match"] = self.stored_matches(found) if given else found
            return self.seen["match"], non_finite

        def assigned(assign: Any) -> Any:
            def call(*args: Any) -> Any:
                self.seen["assigned"] = assign(*args)
                return self.seen["assigned"]

            return call

        patch.setattr(criterion_module, "match_together", matched)
        patch.setattr(dense_module, "assign_atss", assigned(atss))
        patch.setattr(dense_module, "assign_task_aligned", assigned(aligned))
        if given:
            cells = iter(range(self.num_groups + 1))
            topk = Tensor.topk

            def stored_topk(x: Tensor, k: int, dim: int = -1, **kwargs: Any) -> Any:
                best = topk(x, k, dim, **kwargs)
                if dim != 1:  # the assigners look along the last axis, the query selection along axis 1
                    return best
                index = torch.from_numpy(self.arrays[f"topk_index{next(cells)}"].astype(np.int64))
                return torch.return_types.topk((x.gather(1, index), index))

            patch.setattr(Tensor, "topk", stored_topk)
        try:
            yield
        finally:
            patch.undo()

    def stored_matches(self, like: list[Tensor]) -> list[Tensor]:
        """The stored matches in the form of the matcher's answer: one-to-one (K, G, B, Q), one-to-many (K, 1, B, Q)."""
        given = [torch.full_like(each, -1) for each in like]
        for key in (k for k in self.arrays if k.startswith("match/")):
            _, place, image = key.split("/")
            group, layer = place.split(".")
            target = given[1][:, 0] if group == "o2m" else given[0][:, int(group[1:])]
            queries, boxes = self.arrays[key].astype(np.int64)
            if len(queries):
                own = target[0 if layer == "enc" else 1 + int(layer[3:]), int(image)]
                own[torch.from_numpy(queries)] = torch.from_numpy(boxes) % self.targets.counts[int(image)]
        return given


@pytest.mark.parametrize("name", NAMES, ids=[name.removesuffix(".npz") for name in NAMES])
def test_training_step_matches_official_model(name: str) -> None:
    single = split_name(name)[1] == "f32"
    step = Step(name, given_choices=single)
    missing = [part for part, output in step.outputs._asdict().items() if output is None]
    assert not missing, f"the model leaves out {missing}"
    checks = Checks(f"train {step.dtype}", name.removesuffix(".npz"), FLOAT32 if single else FLOAT64)
    compare_forward(checks, step)
    compare_choices(checks, step, single)
    compare_losses(checks, step)
    compare_gradients(checks, step)
    compare_batch_norm(checks, step)
    checks.done()


def compare_forward(checks: Checks, step: Step) -> None:
    arrays, seen = step.arrays, step.seen
    checks.summary("train features", step.images, arrays, "image")
    for i in range(3):
        checks.summary("train features", seen["backbone"][i], arrays, f"backbone{i}")
        checks.summary("train features", seen["encoder"][i], arrays, f"neck{i}")
    queries = seen["queries"]
    checks.summary("train decoder input", queries.content, arrays, "dec_in_target")
    golden = arrays["dec_in_ref_unact"]
    ours = as_float64(queries.box_logits)
    border = np.isinf(golden)  # O9: ours is large instead of infinite
    checks.same("train discrete", ours > 1e3, border, "border cells")
    checks.near("train decoder input", deviation(ours[~border], golden[~border]), "dec_in_ref_unact")
    selected_boxes = torch.cat([s.box_logits.sigmoid() for s in queries.selections], 1)
    checks.near("train decoder input", deviation(selected_boxes, arrays["enc_topk_boxes"]), "enc_topk_boxes")
    selected_logits = torch.cat([s.logits for s in queries.selections], 1)
    checks.summary("train decoder output", selected_logits, arrays, "enc_topk_logits")
    checks.summary("train decoder output", seen["decoded"].boxes, arrays, "dec_boxes")
    checks.summary("train decoder output", seen["decoded"].logits, arrays, "dec_logits")


def compare_choices(checks: Checks, step: Step, single: bool) -> None:
    arrays, seen = step.arrays, step.seen
    groups = seen["queries"].groups
    all_of = [torch.ones(g.size, g.size, dtype=torch.bool) if g.visible is None else g.visible for g in groups]
    visible = torch.block_diag(*all_of)
    checks.same("train discrete", visible.sum(1), arrays["attn_mask.row_true"], "attention mask, rows")
    checks.same("train discrete", visible.sum(0), arrays["attn_mask.col_true"], "attention mask, columns")
    for k, selection in enumerate(seen["queries"].selections):
        checks.same("train discrete", selection.cells, arrays[f"topk_index{k}"], f"selected cells of group {k}")
    stored = step.stored_matches(seen["match"])
    for kind, ours, golden in zip(("one-to-one", "one-to-many"), seen["match"], stored, strict=True):
        checks.same("train discrete", ours, golden, f"{kind} matches")
    compare_denoising(checks, step)

    assigned = seen["assigned"]
    labels = torch.where(assigned.positive, assigned.labels, 80)
    different = int((labels.numpy() != arrays["assign.labels"]).sum())
    if single and different:
        # The task-aligned metric ranks cells by IoU^6: rounding may exchange two of them, as it does in the reference.
        assert different <= 4, f"{different} cells are assigned differently"
        return
    checks.same("train discrete", labels, arrays["assign.labels"], "assigned classes")
    checks.same("train discrete", assigned.positive.nonzero(), arrays["assign.pos_bn"], "positive cells")
    checks.near("train assigned scores", deviation(assigned.scores[assigned.positive], arrays["assign.pos_score"]))
    boxes = assigned.boxes[assigned.positive]  # the golden README says strides, the stored numbers are pixels
    checks.near("train assigned scores", deviation(boxes, arrays["assign.pos_box"]), "boxes")


def compare_denoising(checks: Checks, step: Step) -> None:
    assert step.outputs.denoising is not None
    index = denoising_index(step.outputs.denoising, step.targets)
    for group in step.info["dn"]:
        assert group["num_group"] == step.outputs.denoising.num_copies
        assert group["split"][0] == index.shape[1]
        for i, positive in enumerate(group["positive_index"]):
            checks.same("train discrete", (index[i] >= 0).nonzero().flatten(), positive, "positive denoising queries")


def compare_losses(checks: Checks, step: Step) -> None:
    golden = step.info["losses"]
    unknown = set(step.losses) - set(golden)
    assert not unknown, f"losses that the official model does not have: {sorted(unknown)}"
    for name, value in golden.items():
        ours = float(step.losses[name].detach()) if name in step.losses else 0.0
        assert name in step.losses or name.endswith("_dn_o2m_branch"), f"the loss {name} is missing"
        quantity = "train total loss" if name == "loss" else "train loss entries"
        checks.near(quantity, abs(ours - value) / (abs(value) or 1.0), name)


def compare_gradients(checks: Checks, step: Step) -> None:
    """Norms relative to the reference, with a floor: three gradients vanish analytically, a batch norm follows them."""
    names = official_names(step.model.state_dict())
    ours = {
        names[name]: None if p.grad is None else official_layout(names[name], p.grad)
        for name, p in step.model.named_parameters()
        if p.requires_grad
    }
    reached = sorted(name for name, grad in ours.items() if grad is not None)
    assert reached == sorted(step.info["grad_names"]), "parameters with a gradient differ"
    without = sorted(name for name, grad in ours.items() if grad is None)
    assert without == sorted(set(step.info["grad_none"]) & set(ours)), "trained parameters without a gradient differ"
    arrays, floor = step.arrays, 1e-9 * step.info["grad_global_norm"]
    for i, name in enumerate(step.info["grad_names"]):
        gradient = ours[name]
        if gradient is None:
            continue
        norm, golden = float(gradient.double().norm()), float(arrays["grad.norm"][i])
        checks.near("train gradient norms", max(0.0, abs(norm - golden) - floor) / max(golden, floor), name)
        index = arrays["grad.sample_index"][i]
        flat = as_float64(gradient.reshape(-1))[index[index >= 0]]
        wanted = arrays["grad.sample"][i][index >= 0]
        mean_square = golden / np.sqrt(gradient.numel())
        off = np.maximum(0.0, np.abs(flat - wanted) - floor) / np.maximum(np.abs(wanted), max(mean_square, floor))
        checks.near("train gradient samples", float(off.max()), name)
    total = torch.stack([g.double().norm() for g in ours.values() if g is not None]).norm()
    checks.near("train gradient norms", abs(float(total) / step.info["grad_global_norm"] - 1), "all together")


def compare_batch_norm(checks: Checks, step: Step) -> None:
    """Running statistics after the step. What the batch contributed is taken out of ours, turned into what Paddle would
    have added (the biased variance, O13, and its momentum), and put back. Frozen statistics must not have moved."""
    names = {official: ours for ours, official in official_names(step.model.state_dict()).items()}
    own = step.model.state_dict()
    for i, official in enumerate(step.info["bn_state_names"]):
        values, before = as_float64(own[names[official]]), step.state[official].astype(np.float64)
        module = names[official].rsplit(".", 1)[0]
        if module in step.batch_sizes:
            of_batch = (values - 0.9 * before) / 0.1
            if official.endswith("_variance"):
                of_batch *= (step.batch_sizes[module] - 1) / step.batch_sizes[module]
            values = PADDLE_MOMENTUM * before + (1 - PADDLE_MOMENTUM) * of_batch
        found = np.array([values.mean(), np.linalg.norm(values), values[0], values[-1]])
        golden = step.arrays["bn_state_after"][i]
        checks.near(
            "train batch norm state", deviation(found, golden) / max(1.0, float(np.abs(golden).max())), official
        )
