"""Thresholds of classes: exact by hand-made detections, and the same wherever somebody detects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_cases import PIXELS, write_checkpoint, write_images
from messages import message
from serve_cases import request, running

from rtdetr import RTDETRv3
from rtdetr.cli import main
from rtdetr.data.classes import Classes, DataError
from rtdetr.export.build import describe
from rtdetr.export.graph import make_graph
from rtdetr.export.onnx import write_onnx
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.runtimes import load
from rtdetr.inference.thresholds import lowest_scores
from rtdetr.types import Detections
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint
from rtdetr.weights.pretrained import CONFIG, CONFIG_DIGEST
from rtdetr.weights.thresholds import save_thresholds

CLASSES = Classes(("cat", "dog", "cow"), (3, 7, 9))
FOUND = [("cat", 0.9), ("dog", 0.625), ("dog", 0.5), ("cat", 0.375), ("cat", 0.25), ("cow", 0.25), ("cow", 0.125)]
OWN = [0.375, 0.5625, 0.1875]  # the first is a score itself, which counts
BY_OWN = [("cat", 0.9), ("dog", 0.625), ("cat", 0.375), ("cow", 0.25)]
AT_HALF = [("cat", 0.9), ("dog", 0.625), ("dog", 0.5)]
COW_LOW = [("cat", 0.9), ("dog", 0.625), ("dog", 0.5), ("cow", 0.25)]  # 0.5 for all, 0.2 for cows
THREE = [("cat", 0.9), ("dog", 0.625)]  # 0.5 for cats and cows, 0.625 for dogs
OWN_COW_HIGH = [("cat", 0.9), ("dog", 0.625), ("cat", 0.375)]  # the file's, 0.5 for cows


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whose every image has FOUND."""

    def predict_tensors(_: Predictor, images: torch.Tensor, sizes: Any = None) -> Detections:
        scores = torch.tensor([score for _, score in FOUND]).expand(len(images), -1)
        labels = torch.tensor([CLASSES.names.index(name) for name, _ in FOUND]).expand(len(images), -1)
        boxes = torch.tensor([[i, 1.0, i + 5, 9.0] for i in range(len(FOUND))]).expand(len(images), -1, -1)
        return Detections(scores, labels, boxes)

    monkeypatch.setattr(Predictor, "predict_tensors", predict_tensors)
    path = write_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    return path


def seen(detections: Any) -> list[tuple[str, float]]:
    """Names and scores of results, or of their JSON."""
    items = [each if isinstance(each, dict) else each._asdict() for each in detections]
    return [(each["name"], pytest.approx(each["score"])) for each in items]  # type: ignore[misc]


CASES: list[tuple[bool, dict[str, Any], list[str], list[tuple[str, float]]]] = [
    (False, {}, [], AT_HALF),
    (False, {"thresholds": {"cow": 0.2}}, ["cow=0.2"], COW_LOW),
    (True, {}, [], BY_OWN),
    (True, {"threshold": 0.5}, ["0.5"], AT_HALF),
    (True, {"threshold": 0.5, "thresholds": {"cow": 0.2}}, ["0.5", "cow=0.2"], COW_LOW),
    (True, {"thresholds": {"cow": 0.5}}, ["cow=0.5"], OWN_COW_HIGH),
    (True, {"thresholds": {"cow": 0.5, "dog": 0.625, "cat": 0.5}}, ["cow=0.5", "dog=0.625", "cat=0.5"], THREE),
]
IDS = [
    "none",
    "of a class",
    "of the file",
    "one for all",
    "one for all and of a class",
    "of the file and of a class",
    "of each",
]


@pytest.mark.parametrize(("stored", "python", "command", "expected"), CASES, ids=IDS)
def test_python_commands_and_server_agree(
    stored: bool,
    python: dict[str, Any],
    command: list[str],
    expected: list[tuple[str, float]],
    checkpoint: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stored:
        save_thresholds(checkpoint, OWN)
    options = [word for each in command for word in ("--threshold", each)]
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    assert seen(model.predict(PIXELS, **python)) == expected
    assert seen(model.predict(["a.png"], **python)[0]) == seen(model(PIXELS, **python)) == expected
    assert main(["predict", str(checkpoint), "a.png", "--device", "cpu", *options]) == 0
    listed = json.loads(Path("output/predict/results.json").read_text())
    assert seen(listed[0]["detections"]) == expected
    assert seen(answer_of_server(checkpoint, options, "", monkeypatch)) == expected
    query = "&".join(f"threshold={each}" for each in command)
    assert seen(answer_of_server(checkpoint, [], query, monkeypatch)) == expected


def answer_of_server(checkpoint: Path, options: list[str], query: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The detections that `rtdetr serve` finds in a.png. query: of the request."""
    pytest.importorskip("fastapi")
    found: list[Any] = []

    def serve(app: Any, socket: Any) -> int:
        with running(app, socket) as url:
            image = Path("a.png").read_bytes()
            found.append(request(f"{url}/detect?{query}", image).body["detections"])
            assert seen(request(f"{url}/detect?threshold=0.5", image).body["detections"]) == AT_HALF
        return 0

    monkeypatch.setattr("rtdetr.commands.serve._serve", serve)
    assert main(["serve", str(checkpoint), "--port", "0", "--device", "cpu", *options]) == 0
    return found[0]


def test_exports_and_folders_carry_them(checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    save_thresholds(checkpoint, OWN)
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    folder = model.save_pretrained(tmp_path / "folder")
    assert seen(RTDETRv3.from_pretrained(folder, device="cpu").predict(PIXELS)) == BY_OWN
    network, metadata = describe(checkpoint, "fp32", raw=False, input_type="uint8")
    write_onnx(make_graph(network, metadata, "torch"), metadata, tmp_path / "model.onnx")
    exported = RTDETRv3.from_pretrained(tmp_path / "model.onnx", device="cpu")
    assert exported.classes.thresholds == tuple(OWN) and seen(exported.predict(PIXELS)) == BY_OWN
    assert seen(load(tmp_path / "model.onnx").predict([PIXELS])[0]) == BY_OWN


def test_a_file_keeps_all_else_when_thresholds_are_written(checkpoint: Path, tmp_path: Path) -> None:
    before = load_checkpoint(checkpoint)
    save_thresholds(checkpoint, OWN)
    after = load_checkpoint(checkpoint)  # which verifies every checksum
    assert after["classes"].pop("thresholds") == OWN
    for name, tensor in before.pop("model").items():
        assert torch.equal(tensor, after["model"][name])
    assert before == {key: value for key, value in after.items() if key != "model"}
    assert not [*tmp_path.glob("*.part")] and not [*tmp_path.glob(".*.part")]
    folder = RTDETRv3.from_pretrained(checkpoint, device="cpu").save_pretrained(tmp_path / "folder")
    weights = (folder / "model.safetensors").read_bytes()
    digest = json.loads((folder / CONFIG).read_text())[CONFIG_DIGEST]
    save_thresholds(folder, [0.25, 0.5, 0.75])
    about = json.loads((folder / CONFIG).read_text())
    assert about["classes"]["thresholds"] == [0.25, 0.5, 0.75] and about[CONFIG_DIGEST] != digest
    assert (folder / "model.safetensors").read_bytes() == weights
    assert RTDETRv3.from_pretrained(folder, device="cpu").classes.thresholds == (0.25, 0.5, 0.75)


@pytest.mark.parametrize("wrong", [[0.5, 0.5], [0.5, 0.5, 2.0], [0.5, 0.5, float("nan")], "many", [1, 0, 1]])
def test_damaged_thresholds_are_refused(wrong: Any, checkpoint: Path) -> None:
    from rtdetr.weights.checkpoint import save_checkpoint

    content = load_checkpoint(checkpoint)
    content["classes"]["thresholds"] = wrong
    save_checkpoint(checkpoint, content)
    with pytest.raises(CheckpointError, match=r"the checkpoint is damaged, .*threshold"):
        load_checkpoint(checkpoint)


def test_only_own_files_take_thresholds(tmp_path: Path) -> None:
    for name in ("rtdetrv3_r18vd_6x_coco", "model.onnx", "none.pth"):
        with pytest.raises(CheckpointError, match=message("expected", name, "thresholds", ".pth")):
            save_thresholds(Path(name), OWN)


def test_lowest_scores() -> None:
    own = Classes(CLASSES.names, CLASSES.category_ids, tuple(OWN))
    assert lowest_scores(CLASSES) == 0.5 and lowest_scores(CLASSES, 0.25) == lowest_scores(own, 0.25) == 0.25
    np.testing.assert_array_equal(lowest_scores(own), OWN)
    np.testing.assert_array_equal(lowest_scores(own, None, {"dog": 1}), [OWN[0], 1, OWN[2]])
    np.testing.assert_array_equal(lowest_scores(CLASSES, 0.25, {"dog": 0}), [0.25, 0, 0.25])
    with pytest.raises(DataError, match=message("unknown class", "'kat'", "'cat'")):
        lowest_scores(CLASSES, None, {"kat": 0.5})
