"""Precision, recall, F1 and the best threshold of each class, by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_cases import NAMES, write_checkpoint
from messages import message

from rtdetr import RTDETRv3
from rtdetr.cli import main
from rtdetr.data.formats.sources import read_document
from rtdetr.engine.evaluation.error_analysis import best_f1
from rtdetr.engine.evaluation.evaluator import NOWHERE, operating_points, score
from rtdetr.weights.checkpoint import load_checkpoint

CAT, DOG, COW, HEN = 3, 5, 7, 8
PLACES = {"a": [10, 10, 20, 20], "b": [60, 10, 20, 20], "c": [110, 10, 20, 20], "nowhere": [160, 70, 20, 20]}


def truth_of(folder: Path) -> Path:
    """Two images with cats at a and b; in the first a dog at c and a crowd of cows; no hen."""
    objects = [
        (1, CAT, "a", 0),
        (1, CAT, "b", 0),
        (2, CAT, "a", 0),
        (2, CAT, "b", 0),
        (1, DOG, "c", 0),
        (1, COW, "c", 1),
    ]
    document = {
        "images": [{"id": i, "file_name": f"{i}.png", "width": 200, "height": 100} for i in (1, 2)],
        "annotations": [
            {"id": number, "image_id": image, "category_id": category, "bbox": PLACES[place], "iscrowd": crowd}
            for number, (image, category, place, crowd) in enumerate(objects, start=1)
        ],
        "categories": [{"id": i, "name": name} for i, name in ((CAT, "cat"), (DOG, "dog"), (COW, "cow"), (HEN, "hen"))],
    }
    (folder / "truth.json").write_text(json.dumps(document))
    return folder / "truth.json"


def found(image: int, category: int, place: str, confidence: float) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": PLACES[place], "score": confidence}


DETECTIONS = [
    found(1, CAT, "a", 0.9),  # right
    found(1, CAT, "nowhere", 0.8),  # wrong: from here on 1 of 2
    found(2, CAT, "a", 0.7),  # right
    found(2, CAT, "b", 0.6),  # right: 3 of 4, F1 3/4
    found(1, CAT, "nowhere", 0.5),  # wrong
    found(2, CAT, "nowhere", 0.4),  # wrong
    found(1, CAT, "b", 0.02),  # right, and too low to be looked at
    found(1, DOG, "a", 0.75),  # wrong, as certain as the right one
    found(1, DOG, "c", 0.75),  # right
    found(1, COW, "c", 0.9),  # in the crowd
    found(2, HEN, "c", 0.9),  # there is none
]


def test_the_best_threshold_of_each_class(tmp_path: Path) -> None:
    points = operating_points(read_document(truth_of(tmp_path)), DETECTIONS)
    assert points[CAT] == pytest.approx((0.55, 3 / 4, 3 / 4, 3 / 4))  # half-way between 0.6 and 0.5
    assert points[DOG] == pytest.approx((0.4, 1 / 2, 1, 2 / 3))  # both of 0.75 or none; half-way to the lowest of all
    assert points[COW] is points[HEN] is NOWHERE


def test_at_given_thresholds(tmp_path: Path) -> None:
    given = {CAT: 0.7, DOG: 0.8, HEN: 0.5}
    points = operating_points(read_document(truth_of(tmp_path)), DETECTIONS, given)
    assert points[CAT] == pytest.approx((0.7, 2 / 3, 2 / 4, 4 / 7))  # the one of 0.7 counts
    assert points[DOG] == pytest.approx((0.8, math.nan, 0, 0), nan_ok=True)
    assert points[HEN] == pytest.approx((0.5, 0, math.nan, math.nan), nan_ok=True)


def test_equal_scores_count_as_one() -> None:
    """A threshold cannot part them, so the right one among them alone is no F1 to be had."""
    scores, right = np.array([0.9, 0.9, 0.9, 0.5]), np.array([True, False, False, True])
    assert best_f1(scores, right, 2) == (0.5, pytest.approx(4 / 6))


def test_the_table_and_the_result_have_them(tmp_path: Path) -> None:
    result = score(DETECTIONS, truth_of(tmp_path), "faster-coco-eval")
    assert "precision" not in result.table() and result.thresholds == {}
    pointed = result.with_points(tmp_path / "truth.json")
    assert pointed.thresholds == {"cat": pytest.approx(0.55), "dog": pytest.approx(0.4)}
    header, cat, dog, cow, hen = pointed.table().splitlines()[12:]
    assert header.split()[-4:] == ["threshold", "precision", "recall", "f1"]
    assert cat.split()[-4:] == ["0.5500", "0.7500", "0.7500", "0.7500"] and dog.split()[-1] == "0.6667"
    assert cow.split()[-4:] == hen.split()[-4:] == ["-"] * 4


def test_eval_writes_them_into_the_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = RTDETRv3.from_pretrained(write_checkpoint(tmp_path), device="cpu")
    weights = tmp_path / "model.pth"
    truth = json.loads((tmp_path / "annotations" / "instances_val.json").read_text())
    truth["categories"] = [{"id": i, "name": name} for i, name in zip(made.classes.category_ids, NAMES)]
    for each in truth["annotations"]:
        each["category_id"] = made.classes.category_ids[each["id"] % 2]  # no cow
    (tmp_path / "val.json").write_text(json.dumps(truth))
    data = ["-u", f"data.val.annotations={tmp_path / 'val.json'}"]
    command = ["eval", str(weights), "--device", "cpu", *data]
    assert main([*command, "--threshold", "cat=0.25", "--save-thresholds"]) == 0
    out = capsys.readouterr().out
    assert "carries the thresholds of" in out and "precision" in out
    thresholds = load_checkpoint(weights)["classes"]["thresholds"]
    evaluated = made.evaluate(data__val__annotations=str(tmp_path / "val.json"))
    assert evaluated is not None
    assert thresholds == [0.25, evaluated.thresholds.get("dog", 0.5), 0.5]
    assert RTDETRv3.from_pretrained(weights, device="cpu").classes.thresholds == tuple(thresholds)
    (tmp_path / "val.json").write_text(json.dumps(truth | {"annotations": []}))
    before = weights.stat().st_ino
    assert main([*command, "--save-thresholds"]) == 0
    assert f"{weights}: unchanged, " in capsys.readouterr().out and weights.stat().st_ino == before
    assert main([*command, "--threshold", "kat=0.25"]) == 2
    assert message("unknown class", "--threshold", "'kat'", "'cat'").search(capsys.readouterr().err)
    assert main(["eval", "model.onnx", "--save-thresholds"]) == 2
    assert "model.onnx: cannot carry thresholds" in capsys.readouterr().err
