"""When two lists of detections are the same, and on which images a file is judged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_helpers import tiny_config

from rtdetr.export import targets
from rtdetr.export.cases import GENERATED, cases, example_images
from rtdetr.export.certificate import (
    BOUNDS,
    Arrays,
    AveragePrecisions,
    Certificate,
    Comparison,
    StoredCertificate,
    difference,
    read_stored_certificate,
    together,
)
from rtdetr.export.graph import fitting
from rtdetr.export.targets import certificate_path
from rtdetr.inference.export_metadata import Precision


def detections(scores: list[float], labels: list[int], boxes: list[list[float]]) -> Arrays:
    return Arrays(np.array(scores, np.float32), np.array(labels), np.array(boxes, np.float32).reshape(-1, 4))


def test_difference_goes_by_object_not_by_rank() -> None:
    expected = detections([0.9, 0.5, 0.5], [1, 0, 0], [[0, 0, 9, 9], [5, 5, 8, 8], [50, 50, 80, 80]])
    swapped = detections([0.9, 0.50001, 0.5], [1, 0, 0], [[0, 0, 9, 9], [50, 50, 80, 80], [5, 5, 8, 8.01]])
    found = difference(expected, swapped, BOUNDS["fp32"])
    assert found.missing == 0 and found.detections == 3
    assert found.score == pytest.approx(1e-5, rel=0.1) and found.box == pytest.approx(0.01, rel=0.01)


@pytest.mark.parametrize(
    ("scores", "labels", "shift", "missing"),
    [
        ([0.9, 0.5], [1, 1], 0, 2),  # a label: one is missing, one too many
        ([0.9, 0.4998], [1, 0], 0, 1),
        ([0.9, 0.5], [1, 0], 0.06, 2),
        ([0.9, float("nan")], [1, 0], 0, 2),
        ([0.9, 0.5, 0.2], [1, 0, 0], 0, 1),  # one that the model does not see
    ],
)
def test_difference_counts_what_has_no_counterpart(
    scores: list[float], labels: list[int], shift: float, missing: int
) -> None:
    boxes = [[10.0 * i, 0, 10 * i + 5, 9] for i in range(len(scores))]
    expected = detections([0.9, 0.5], [1, 0], boxes[:2])
    found = detections(scores, labels, [[x + shift for x in box] for box in boxes])
    assert difference(expected, found, BOUNDS["fp32"]).missing == missing


def test_the_best_scores_are_compared_if_none_is_high_enough() -> None:
    """Files in 8 bits have more queries, so more detections."""
    expected = detections([0.04, 0.02], [1, 0], [[0, 0, 9, 9]] * 2)
    for scores, missing in (([0.01, 0.04, 0.03], 0), ([0.01, 0.6, 0.03], 1)):
        found = difference(expected, detections(scores, [1, 0, 0], [[0, 0, 9, 9]] * 3), BOUNDS["int8"])
        assert found.detections == 0 and found.missing == missing
    assert difference(expected, expected, BOUNDS["int8"]).score == 0


@pytest.mark.parametrize(
    ("precision", "after", "passed"),
    [("fp32", 0.6005, True), ("fp32", 0.602, False), ("int8", 0.592, True), ("int8", 0.588, False)],
)
def test_ap_is_part_of_the_verdict(precision: Precision, after: float, passed: bool, tmp_path: Path) -> None:
    ap = AveragePrecisions(0.6, after, "87 images of x.json")
    bounds = BOUNDS[precision]
    compared = [Comparison("onnxruntime", "images", 1, 64, 64, 5, 0, 0.0, 0.0, 0, True)]
    certificate = Certificate("x", "", 0, "onnx", precision, bounds, "w", "", compared, ap=ap, certified_sha256="s")
    certificate.notes = ["a fact"]
    assert certificate.passed is passed
    assert f"AP 0.6000 in PyTorch, {after:.4f} in this file (87 images of x.json)" in certificate.table()
    assert passed or "its AP differs from PyTorch's by more than" in certificate.reason()
    certificate.save(certificate_path(tmp_path / "x"))
    stored = StoredCertificate("s", "w", "onnx", ["a fact"], ap, score=0.0, box=0.0)  # --check keeps it
    assert read_stored_certificate(tmp_path / "x") == stored


@pytest.mark.parametrize(
    ("precision", "images", "named"),
    [("int8", GENERATED, True), ("int8", "8 images of a", False), ("fp32", GENERATED, False)],
)
def test_8_bits_that_fail_on_generated_images_ask_for_others(precision: Precision, images: str, named: bool) -> None:
    compared = [Comparison("onnxruntime", "images", 1, 64, 64, 5, 5, 0.0, 0.0, 0, False)]
    certificate = Certificate("x", "", 0, "onnx", precision, BOUNDS[precision], "w", images, compared)
    assert certificate.reason().endswith("--images like those of --calibrate") is named


def test_a_file_of_which_no_image_is_decided_says_why() -> None:
    """As of a model with random weights: its cells may all have the same score."""
    compared = [Comparison("onnxruntime", "random", 1, 64, 96, 0, 0, 0.0, 0.0, 1, True)]
    certificate = Certificate("x", "", 0, "onnx", "fp32", BOUNDS["fp32"], "w", GENERATED, compared)
    assert "equal score" in certificate.reason()


@pytest.mark.parametrize(
    ("precision", "missing", "passed"),
    [
        ("fp16", 25, True),  # of 49 of one image, and 4 of all others
        ("fp16", 45, False),  # nearly all of them: no chance
        ("fp16", float("inf"), False),  # nor are numbers that are not finite
        ("fp32", 1, False),
    ],
)
def test_one_image_by_chance_fails_no_lossy_file(precision: Precision, missing: float, passed: bool) -> None:
    def comparison(batch: int, detections: int, missing: float, runtime: str = "onnxruntime") -> Comparison:
        box, missing = (missing, 1) if missing == float("inf") else (9.0, int(missing))
        within = missing <= BOUNDS[precision].missing * detections and np.isfinite(box)
        return Comparison(runtime, "images", batch, 64, 64, detections, missing, 0.1, box, 0, bool(within))

    others = [comparison(1, 42, 0), comparison(3, 133, 0), comparison(8, 349, 4 if precision == "fp16" else 0)]
    one = comparison(1, 49, missing)
    assert not one.passed or missing == float("inf")
    judged = together([*others, one], BOUNDS[precision])
    assert [each.passed for each in judged] == [True, True, True, passed]
    elsewhere = [comparison(1, 49, 25, "openvino"), comparison(3, 49, 4, "openvino")]
    assert not together([*judged, *elsewhere], BOUNDS[precision])[-2].passed  # of another runtime


def test_an_export_lies_beside_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cups").mkdir()
    monkeypatch.chdir(tmp_path / "cups")
    for name in (".", tmp_path / "cups", "../cups/../cups"):
        found = targets.default(name, "onnx", half=False, int8=False, raw=False)
        assert found.resolve() == tmp_path / "cups.onnx"


def test_an_export_of_a_model_of_the_hub_lies_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert targets.default("owner/r18-v1.5", "onnx", half=True, int8=False, raw=False) == Path("r18-v1.5-fp16.onnx")
    (tmp_path / "owner").mkdir()  # so it is a path
    assert targets.default("owner/r18", "onnx", half=False, int8=False, raw=False) == Path("owner/r18.onnx")


def test_cases_have_a_cell_for_every_query() -> None:
    assert fitting(160, 160, 40) == (160, 160) and fitting(512, 1.6 * 640, 300) == (512, 1024)
    height, width = fitting(40, 64, 300)
    assert height * width * 21 >= 300 * 32 * 32
    sizes = [each.pixels.shape for each in cases(example_images(None, tiny_config(Path())), (640, 640), 300)]
    assert (1, 3, 640, 640) in sizes and (3, 3, 512, 768) in sizes and (1, 3, 320, 1024) in sizes
