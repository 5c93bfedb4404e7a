"""COCO figures: both evaluators agree to the digit, ids are the data's own, odd annotation files work."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coco_set import open_coco
from messages import message
from PIL import Image
from torch import Tensor, nn

from rtdetr.config import EvalConfig
from rtdetr.data.classes import NO_ID, Classes, DataError
from rtdetr.engine.evaluation.evaluator import (
    ClassAP,
    EvalResult,
    EvaluationStopped,
    Evaluator,
    evaluate,
    score,
)
from rtdetr.outputs import RunFailed
from rtdetr.types import Batch, ImageInfo, Predictions, Targets

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")  # as COCO's API
EVALUATORS: list[Evaluator] = ["faster-coco-eval", "pycocotools"]
CATEGORIES = [{"id": 7, "name": "mug"}, {"id": 3, "name": "pen"}, {"id": 90, "name": "never seen"}]


def write_truth(folder: Path, num_images: int = 12, seed: int = 0, **extra: Any) -> tuple[Path, list[dict[str, Any]]]:
    rng = np.random.default_rng(seed)
    boxes = []
    for image in range(num_images):
        for _ in range(rng.integers(0, 6)):
            x, y, w, h = (float(v) for v in (*rng.uniform(0, 300, 2), *rng.uniform(4, 200, 2)))
            crowd = int(rng.random() < 0.1)
            boxes.append({"image_id": 100 + image, "category_id": int(rng.choice([3, 7])), "bbox": [x, y, w, h]})
            boxes[-1] |= {"area": w * h, "iscrowd": crowd, "id": len(boxes) - 1}  # ids from 0, as in the wild
    images = [{"id": 100 + i, "file_name": f"{i}.jpg", "width": 500, "height": 500} for i in range(num_images)]
    path = folder / "truth.json"
    path.write_text(json.dumps({"images": images, "annotations": boxes, "categories": CATEGORIES, **extra}))
    return path, boxes


def as_detections(boxes: list[dict[str, Any]], noise: float, seed: int = 1) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    found = []
    for box in boxes:
        if box["iscrowd"]:
            continue
        for _ in range(1 if noise == 0 else 3):
            moved = [float(v + noise * rng.normal()) for v in box["bbox"]]
            category = box["category_id"] if noise == 0 or rng.random() < 0.8 else 3
            confidence = 1.0 if noise == 0 else float(np.float32(rng.random()))
            found.append({"image_id": box["image_id"], "category_id": category, "bbox": moved, "score": confidence})
    return found


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_perfect_detections_have_ap_one(tmp_path: Path, evaluator: Evaluator) -> None:
    path, boxes = write_truth(tmp_path)
    result = score(as_detections(boxes, 0.0), path, evaluator)
    assert result.figures["AP"] == pytest.approx(1.0) and result.figures["AR100"] == pytest.approx(1.0)
    assert [(each.category_id, each.name) for each in result.classes] == [(3, "pen"), (7, "mug"), (90, "never seen")]
    assert result.classes[0].ap == pytest.approx(1.0) and np.isnan(result.classes[2].ap)
    assert "mug" in result.table() and "AP  IoU .50:.95" in result.table()


def test_both_evaluators_agree_to_the_last_digit(tmp_path: Path) -> None:
    path, boxes = write_truth(tmp_path, num_images=30)
    fast, reference = (score(as_detections(boxes, 6.0), path, evaluator) for evaluator in EVALUATORS)
    assert 0.05 < reference.figures["AP"] < 0.95
    assert fast.figures == reference.figures and tuple(fast.figures) == FIGURES
    assert str(fast.classes) == str(reference.classes)  # as text: NaN equals NaN


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_detections_of_unknown_images_and_classes_do_not_count(tmp_path: Path, evaluator: Evaluator) -> None:
    path, boxes = write_truth(tmp_path)
    found = as_detections(boxes, 6.0)
    strange = [each | {"score": 1.0, key: 12345} for each in found for key in ("image_id", "category_id")]
    assert score([*strange, *found], path, evaluator).figures == score(found, path, evaluator).figures


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_no_detection_at_all(tmp_path: Path, evaluator: Evaluator) -> None:
    path, _ = write_truth(tmp_path)
    assert score([], path, evaluator).figures["AP"] == 0.0


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_scores_that_are_not_finite_are_one_sentence(tmp_path: Path, evaluator: Evaluator) -> None:
    file, boxes = write_truth(tmp_path)
    found = as_detections(boxes, noise=0.0)
    found[3]["score"] = math.nan
    with pytest.raises(RunFailed, match="not finite"):
        score(found, file, evaluator)


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_annotations_without_info_area_and_iscrowd(tmp_path: Path, evaluator: Evaluator) -> None:
    path, boxes = write_truth(tmp_path)
    document = json.loads(path.read_text())
    kept = [b for b in document["annotations"] if not b["iscrowd"]]
    path.write_text(json.dumps({**document, "annotations": kept}))
    expected = score(as_detections(boxes, 6.0), path, evaluator).figures
    bare = [{k: b[k] for k in ("image_id", "category_id", "bbox")} for b in kept]
    path.write_text(json.dumps({**document, "annotations": bare}))
    assert score(as_detections(boxes, 6.0), path, evaluator).figures == expected


@pytest.mark.parametrize("evaluator", EVALUATORS)
@pytest.mark.parametrize("crowd", [0, 1])
def test_annotations_in_every_spelling_score_the_same(tmp_path: Path, evaluator: Evaluator, crowd: int) -> None:
    """What a training reads without complaint must not end its first evaluation."""
    path, boxes = write_truth(tmp_path)
    document = json.loads(path.read_text())

    def figures(**changes: Any) -> dict[str, float]:
        changed = [box | changes if i == 3 else box for i, box in enumerate(document["annotations"])]
        path.write_text(json.dumps({**document, "annotations": changed}))
        return score(as_detections(boxes, 6.0), path, evaluator).figures

    expected = figures(iscrowd=crowd)
    assert expected != figures(iscrowd=1 - crowd)
    for value in (str(crowd), bool(crowd), float(crowd), *(() if crowd else (None,))):
        assert figures(iscrowd=value) == expected, value
    box = boxes[3]["bbox"]
    expected = figures(iscrowd=crowd, area=box[2] * box[3])
    for area in (None, str(box[2] * box[3])):
        assert figures(iscrowd=crowd, area=area) == expected, area


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_a_crowd_without_a_box_is_left_out(tmp_path: Path, evaluator: Evaluator) -> None:
    path, boxes = write_truth(tmp_path)
    document = json.loads(path.read_text())
    expected = score(as_detections(boxes, 6.0), path, evaluator).figures
    crowd = {"id": 1, "image_id": 100, "category_id": 3, "iscrowd": 1, "segmentation": {"counts": "", "size": [1, 1]}}
    for box in ({}, {"bbox": None}):
        path.write_text(json.dumps({**document, "annotations": [crowd | box, *document["annotations"]]}))
        assert score(as_detections(boxes, 6.0), path, evaluator).figures == expected


def test_annotations_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    path, _ = write_truth(tmp_path)
    document = json.loads(path.read_text())
    for box in document["annotations"][: len(document["annotations"]) // 10]:
        box["iscrowd"] = "maybe"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message("expected", "annotation 0", "iscrowd", "0 or 1", "'maybe'")):
        score([], path, "pycocotools")


def test_records_that_cannot_be_used_do_not_count(tmp_path: Path) -> None:
    path, boxes = write_truth(tmp_path)
    document = json.loads(path.read_text())
    sound = score(as_detections(boxes, 6.0), path, "pycocotools")
    document["annotations"].append(boxes[0] | {"id": 999, "bbox": None})
    path.write_text(json.dumps(document))
    assert score(as_detections(boxes, 6.0), path, "pycocotools").figures == sound.figures


WITHOUT_AREA = [
    *([-40, 10, 40, 20], [-90, -90, 50, 50], [500, 10, 40, 20], [10, 600, 5, 5]),  # outside
    *([10, 10, 0, 20], [10, 10, 20, 0], [200, 200, -20, 30], [200, 200, -20, -30]),
]


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_boxes_that_training_leaves_out_do_not_count(tmp_path: Path, evaluator: Evaluator) -> None:
    path, boxes = write_truth(tmp_path)
    sound = score(as_detections(boxes, 6.0), path, evaluator)
    bad = [{"id": 900 + i, "image_id": 103, "category_id": 3, "bbox": box} for i, box in enumerate(WITHOUT_AREA)]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"annotations": bad[:5] + boxes + bad[5:]}))
    result = score(as_detections(boxes, 6.0), path, evaluator)
    assert result.figures == sound.figures and str(result.classes) == str(sound.classes)
    Image.new("RGB", (500, 500)).save(tmp_path / "0.jpg")
    for i in range(1, 12):
        (tmp_path / f"{i}.jpg").hardlink_to(tmp_path / "0.jpg")
    data = open_coco(tmp_path, path)
    assert data.num_degenerate == len(WITHOUT_AREA)
    assert sum(len(data.targets(i)[0]) for i in range(12)) == sum(each.num_boxes for each in result.classes)


@pytest.mark.parametrize("evaluator", EVALUATORS)
def test_boxes_partly_outside_stay_as_they_are(tmp_path: Path, evaluator: Evaluator) -> None:
    """As in the official evaluation: a detection that ends with the image overlaps this box by half."""
    box = {"id": 1, "image_id": 100, "category_id": 3, "bbox": [-100.0, 0.0, 200.0, 50.0], "iscrowd": 0}
    path, _ = write_truth(tmp_path, annotations=[box])
    found = {"image_id": 100, "category_id": 3, "score": 1.0}
    assert score([found | {"bbox": box["bbox"]}], path, evaluator).figures["AP"] == pytest.approx(1.0)
    assert score([found | {"bbox": [0.0, 0.0, 100.0, 50.0]}], path, evaluator).figures["AP75"] == 0


@pytest.mark.parametrize("was_on", [True, False])
def test_scoring_leaves_the_garbage_collection_as_it_was(tmp_path: Path, was_on: bool) -> None:
    path, _ = write_truth(tmp_path)
    seen: list[bool] = []
    try:
        gc.enable() if was_on else gc.disable()
        score([], path, "pycocotools")
        seen.append(gc.isenabled())
        with pytest.raises(ValueError, match="evaluator"):
            score([], path, "other")  # type: ignore[arg-type]
        seen.append(gc.isenabled())
    finally:
        gc.enable()
    assert seen == [was_on, was_on]


def test_unknown_evaluator_is_an_error(tmp_path: Path) -> None:
    path, _ = write_truth(tmp_path)
    with pytest.raises(ValueError, match="expected faster-coco-eval or pycocotools"):
        score([], path, "other")  # type: ignore[arg-type]


class Oracle(nn.Module):
    """Predicts the box that the first pixels of an image encode, with class 1."""

    def forward(self, images: Tensor) -> Predictions:
        boxes = images[:, 0, 0, :4][:, None]
        logits = torch.full((len(images), 1, 3), -20.0)
        logits[:, :, 1] = 20.0
        return Predictions(logits, boxes)


def oracle_batches(truth: list[dict[str, Any]]) -> list[Batch]:
    batches = []
    for box in truth:
        x, y, w, h = box["bbox"]
        image = torch.zeros(1, 3, 8, 8)
        image[0, 0, 0, :4] = torch.tensor([(x + w / 2) / 500, (y + h / 2) / 500, w / 500, h / 500])
        empty = Targets.stack([torch.zeros(0).long()], [torch.zeros(0, 4)], [torch.zeros(0, 4)])
        batches.append(Batch(image, empty, (ImageInfo(box["image_id"], "x.jpg", 500, 500),)))
    return batches


def test_results_carry_the_datas_own_ids_and_pixels(tmp_path: Path) -> None:
    truth = [
        {
            "id": 1,
            "image_id": 100 + i,
            "category_id": 7,
            "bbox": [50.0 + i, 60.0, 100.0, 40.0],
            "iscrowd": 0,
            "area": 4e3,
        }
        for i in range(3)
    ]
    path, _ = write_truth(tmp_path, annotations=truth)
    classes = Classes(("pen", "mug", "never seen"), (3, 7, 90))
    cfg = EvalConfig(max_detections=1)
    result = evaluate(Oracle(), oracle_batches(truth), path, classes, cfg, torch.device("cpu"))
    assert result is not None and result.figures["AP"] == pytest.approx(1.0)
    assert [d["category_id"] for d in result.detections] == [7, 7, 7]
    assert [d["image_id"] for d in result.detections] == [100, 101, 102]
    assert result.detections[1]["bbox"] == pytest.approx([51.0, 60.0, 100.0, 40.0], abs=1e-3)


def test_the_loader_gives_the_sizes_that_the_file_does_not(tmp_path: Path) -> None:
    inside = {"id": 1, "image_id": 100, "category_id": 7, "bbox": [50.0, 60.0, 100.0, 40.0]}
    outside = inside | {"id": 2, "bbox": [501.0, 60.0, 100.0, 40.0]}
    images = [{"id": 100, "file_name": "0.jpg"}]
    path, _ = write_truth(tmp_path, annotations=[inside, outside], images=images)
    classes, cfg = Classes(("pen", "mug", "never seen"), (3, 7, 90)), EvalConfig(max_detections=1)
    result = evaluate(Oracle(), oracle_batches([inside]), path, classes, cfg, torch.device("cpu"))
    assert result is not None and result.figures["AP"] == pytest.approx(1.0)
    assert [each.num_boxes for each in result.classes] == [0, 1, 0]


def test_detections_of_classes_that_the_data_do_not_have_are_left_out(tmp_path: Path) -> None:
    path, truth = write_truth(tmp_path)
    classes = Classes(("pen", "mug", "never seen"), (3, NO_ID, 90))  # the oracle sees mugs alone
    result = evaluate(Oracle(), oracle_batches(truth), path, classes, EvalConfig(max_detections=1), torch.device("cpu"))
    assert result is not None and result.detections == []


def test_evaluation_stops_when_asked(tmp_path: Path) -> None:
    path, truth = write_truth(tmp_path)
    classes = Classes(("pen", "mug", "never seen"), (3, 7, 90))
    with pytest.raises(EvaluationStopped):
        evaluate(Oracle(), oracle_batches(truth), path, classes, EvalConfig(), torch.device("cpu"), lambda: True)


@pytest.mark.parametrize("fails", [False, True])
def test_evaluation_is_in_true_float32_and_leaves_the_settings(fails: bool) -> None:
    seen: list[tuple[str, bool]] = []

    def settings() -> tuple[str, bool]:
        return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32

    def batches() -> Iterator[Batch]:
        seen.append(settings())
        if fails:
            raise DataError("a broken image")
        yield from ()

    before = settings()
    try:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        with pytest.raises(DataError if fails else EvaluationStopped):
            evaluate(nn.Identity(), batches(), "", Classes((), ()), EvalConfig(), torch.device("cpu"), lambda: True)
        assert settings() == ("high", True)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert seen == [("highest", False)]


def test_a_figure_that_does_not_exist_is_a_dash() -> None:
    figures = dict.fromkeys(FIGURES, -1.0) | {"AP": 0.25}
    table = EvalResult(figures, [ClassAP("cup", 3, 0, math.nan, math.nan)], []).table()
    assert " 0.2500" in table and "-1" not in table and "nan" not in table


def test_classes_beyond_the_most_are_counted() -> None:
    result = EvalResult(dict.fromkeys(FIGURES, 0.5), [ClassAP(f"c{i}", i, 0, 0.5, 0.5) for i in range(1203)], [])
    assert len(result.table().splitlines()) == 1203 + 13
    assert result.table(most=100).splitlines()[-2:][1] == "  ... and 1103 more classes; `rtdetr eval` lists all"
