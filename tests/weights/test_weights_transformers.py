"""Models of transformers, in and out, beside transformers itself, where it is installed."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_files import shared_data
from huggingface_cases import CONFIG, IMAGES, formula_entry
from PIL import Image
from safetensors.torch import load_file, save_file
from test_weights_huggingface import own_content
from torch import Tensor

from rtdetr import RTDETRv3
from rtdetr.data.classes import Classes
from rtdetr.engine.evaluation.evaluator import score
from rtdetr.export import ExportFailed, check_file, export_model
from rtdetr.inference.predictor import Predictor
from rtdetr.models.backbone import STAGE_BLOCKS
from rtdetr.ops.kernels import using
from rtdetr.weights.checkpoint import save_checkpoint
from rtdetr.weights.huggingface import save_huggingface
from rtdetr.weights.load import model_from_checkpoint, read_checkpoint


def squares_for_old(transformers: Any) -> Tensor:
    """IMAGES, or squares of them: releases before 5 give the cells of rectangles each other's position codes."""
    return IMAGES if int(transformers.__version__.split(".")[0]) >= 5 else IMAGES[..., :64]


@pytest.mark.parametrize("depth", [18, 34, 50, 101])
@pytest.mark.parametrize("kind", ["RTDetr", "RTDetrV2"])
def test_random_models_of_transformers(kind: str, depth: int, tmp_path: Path) -> None:
    """Narrow ones of every depth: logits and boxes in float64, and classes.

    In float32 too, one image at a time, by plain PyTorch: the same bits where measured (docs/measurements/fidelity.md),
    far less than what rounding alone changes anywhere.
    """
    transformers = pytest.importorskip("transformers", reason='not installed: pip install "rtdetr[transformers]"')
    deep, names = depth >= 50, 80 if (depth in (18, 50)) == (kind == "RTDetr") else 3
    channels = [each * (4 if deep else 1) for each in (8, 16, 32, 64)]
    backbone = {"depths": list(STAGE_BLOCKS[depth]), "layer_type": "bottleneck" if deep else "basic"}  # type: ignore[index]
    backbone = {**CONFIG["backbone_config"], **backbone, "hidden_sizes": channels}
    images = squares_for_old(transformers)
    changes = {"backbone_config": backbone, "encoder_in_channels": channels[1:], "id2label": None, "num_labels": names}
    settings = {
        key: value for key, value in copy.deepcopy(CONFIG | changes).items() if key not in ("model_type", "id2label")
    }
    model = getattr(transformers, f"{kind}ForObjectDetection")(getattr(transformers, f"{kind}Config")(**settings))
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not name.endswith("n_points_scale"):
                tensor.copy_(formula_entry(name, list(tensor.shape)))
    model.save_pretrained(tmp_path)
    ours, _, classes = model_from_checkpoint(tmp_path)
    assert classes == Classes(tuple(model.config.id2label.values()), tuple(range(names)))
    with torch.inference_mode(), using("plain"):
        single, theirs = ours(images[:1].float()), model.eval().float()(images[:1].float())
        found, expected = ours.double()(images), model.double()(images)
    rounding = (theirs.logits.double() - expected.logits[:1]).abs().max()
    # releases before 5 have position codes of float32 angles
    allowed = rounding / 10 if int(transformers.__version__.split(".")[0]) >= 5 else 4 * rounding
    assert (single.logits - theirs.logits).abs().max() <= allowed < 1e-3
    assert (found.logits - expected.logits).abs().max() < 1e-9 and expected.logits.std() > 0.1
    assert (found.boxes - expected.pred_boxes).abs().max() < 1e-9 and expected.pred_boxes.std() > 0.05


OPENED_THERE = """
import sys, torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForObjectDetection, pipeline
model, report = AutoModelForObjectDetection.from_pretrained(sys.argv[1], output_loading_info=True)
print(*(sorted(report[each]) for each in ("missing_keys", "unexpected_keys", "mismatched_keys")))
processor = AutoImageProcessor.from_pretrained(sys.argv[1], use_fast=True)
pixels, image = torch.load(sys.argv[2]), Image.open(sys.argv[3])
with torch.inference_mode():
    outputs = model(**processor(image, return_tensors="pt"))
    found = processor.post_process_object_detection(outputs, threshold=0, target_sizes=[image.size[::-1]])[0]
    wide = model.double()(pixels)
piped = pipeline("object-detection", model=sys.argv[1], image_processor=processor)(sys.argv[3], threshold=0)
piped = [[*each["box"].values()] for each in piped]
torch.save([wide.logits, wide.pred_boxes, model.config.id2label, found["boxes"], found["scores"], piped], sys.argv[4])
assert not any(name.split(".")[0] == "rtdetr" for name in sys.modules)
"""


@pytest.mark.parametrize("depth", [18, 50])
def test_transformers_opens_what_is_written_here(depth: int, tmp_path: Path) -> None:
    """Logits and boxes in float64; boxes of an image file within .01 px, of its pipeline in whole pixels."""
    transformers = pytest.importorskip("transformers", reason='not installed: pip install "rtdetr[transformers]"')
    images = squares_for_old(transformers)
    size = list(images.shape[2:])
    content = own_content(f"model.backbone.depth={depth}", "data.interpolation=bilinear", f"data.image_size={size}")
    save_huggingface(tmp_path / "m", content)
    torch.save(images, tmp_path / "images.pt")
    pixels = np.random.default_rng(0).integers(0, 256, (9, 15, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize((480, 360), Image.Resampling.BICUBIC).save(tmp_path / "a.png")
    paths = (str(tmp_path / each) for each in ("m", "images.pt", "a.png", "out.pt"))
    arguments = [sys.executable, "-c", OPENED_THERE, *paths]
    done = subprocess.run(arguments, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[]", "[]", "[]"]
    logits, boxes, names, in_image, scores, piped = torch.load(tmp_path / "out.pt")
    model, cfg, classes = model_from_checkpoint(tmp_path / "m")
    ours = Predictor.of(model, cfg, classes, threshold=0.0).find([Image.open(tmp_path / "a.png")])[0]
    inside = np.clip(in_image.numpy(), 0, [480, 360, 480, 360])  # as ours end
    count = min(len(scores), len(ours.scores))
    assert count == len(inside) and np.abs(ours.scores[:count] - scores.numpy()).max() < 1e-5
    assert np.abs(ours.boxes[:count] - inside).max() < 0.01
    whole = np.clip(np.array(piped), 0, [480, 360, 480, 360])
    low, high = (np.trunc(ours.boxes[:count] + error) for error in (-0.01, 0.01))
    assert whole.shape == low.shape and ((low <= whole) & (whole <= high)).all()
    with torch.inference_mode():
        found = model.double()(images)
    assert (found.logits - logits).abs().max() < 1e-9 and (found.boxes - boxes).abs().max() < 1e-9
    assert names == {0: "a", 1: "b", 2: "c"}


def test_ap_on_coco_mini_is_that_of_transformers(tmp_path: Path) -> None:
    """Way there and back, of a checkpoint that has learnt something: RTDETR_TRAINED=best.pth pytest -k coco_mini."""
    transformers = pytest.importorskip("transformers", reason='not installed: pip install "rtdetr[transformers]"')
    if not (trained := os.environ.get("RTDETR_TRAINED")):
        pytest.skip("RTDETR_TRAINED names no checkpoint of COCO's classes")
    images = shared_data("coco_mini") / "val2017"
    truth = images.parent / "annotations" / "instances_val2017.json"
    content = read_checkpoint(trained)
    content["config"]["data"]["interpolation"] = "bilinear"  # of both
    save_huggingface(tmp_path / "there", content)
    model = transformers.AutoModelForObjectDetection.from_pretrained(tmp_path / "there").eval()
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "there", use_fast=True)
    processor.save_pretrained(tmp_path / "back")
    model.save_pretrained(tmp_path / "back")
    detector = RTDETRv3.from_pretrained(tmp_path / "back", device="cpu")
    ours = detector.evaluate((images, truth), evaluator="pycocotools", num_workers=0)
    theirs: list[dict[str, Any]] = []
    for about in json.loads(truth.read_text())["images"]:
        image = Image.open(images / about["file_name"]).convert("RGB")
        with torch.inference_mode():
            outputs = model(**processor(image, return_tensors="pt"))
        found = processor.post_process_object_detection(outputs, threshold=0, target_sizes=[image.size[::-1]])[0]
        corners, scores, labels = (found[key].tolist() for key in ("boxes", "scores", "labels"))
        for (x1, y1, x2, y2), confidence, label in zip(corners, scores, labels, strict=True):
            category = detector.classes.category_ids[label]
            box = [x1, y1, x2 - x1, y2 - y1]
            theirs.append({"image_id": about["id"], "category_id": category, "bbox": box, "score": confidence})
    expected = score(theirs, truth, "pycocotools").figures
    assert ours is not None and expected["AP"] > 0.1
    assert {key: f"{each:.6f}" for key, each in ours.figures.items()} == {
        key: f"{each:.6f}" for key, each in expected.items()
    }


def test_export_is_certified_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason='transformers is not installed: pip install "rtdetr[transformers]"')
    save_checkpoint(tmp_path / "w.pth", own_content())
    exported = export_model(tmp_path / "w.pth", "transformers", tmp_path / "out")
    certificate = json.loads((tmp_path / "out.certificate.json").read_text())
    assert exported.path == tmp_path / "out" and certificate["passed"] and certificate["format"] == "transformers"
    assert {each["runtime"] for each in certificate["comparisons"]} == {"transformers"}
    check_file(tmp_path / "w.pth", tmp_path / "out")
    save_checkpoint(tmp_path / "other.pth", own_content("model.supervision.num_denoising=0"))
    entries = load_file(tmp_path / "out" / "model.safetensors")
    entries["model.enc_output.0.bias"] += 1
    save_file(entries, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ExportFailed, match=r"it holds other weights, model.enc_output.0.bias for one"):
        check_file(tmp_path / "w.pth", tmp_path / "out")
