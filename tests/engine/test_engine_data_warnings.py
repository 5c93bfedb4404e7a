"""Each warning of a run, provoked once, and silence where there is nothing to warn of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import NUM_TRAIN, NUM_VAL, tiny_config

from rtdetr.data.doctor import files
from rtdetr.data.loader import build_val_loader, open_train_set
from rtdetr.engine.evaluation.evaluator import FIGURES, EvalResult
from rtdetr.engine.planning.data_warnings import on_data, on_no_ap, on_sizes
from rtdetr.engine.trainer import Trainer

CPU = torch.device("cpu")


@pytest.fixture
def data(data: Path, tmp_path: Path) -> Path:
    return shutil.copytree(data, tmp_path / "shapes")


def warnings(data: Path, *updates: str) -> list[str]:
    cfg = tiny_config(data, *updates)
    train = open_train_set(cfg)
    return list(on_data(train, build_val_loader(cfg, train.classes).source))


def enough_boxes(data: Path) -> None:
    """Ten boxes of every class in the first training image."""
    path = data / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    image, number = content["images"][0]["id"], 10_000
    for category in content["categories"]:
        for _ in range(10):
            number += 1
            content["annotations"].append(
                {"id": number, "image_id": image, "category_id": category["id"], "bbox": [1, 1, 20 + number % 50, 30]}
            )
    path.write_text(json.dumps(content))


def test_validation_without_a_box_is_named(data: Path) -> None:
    enough_boxes(data)
    file = data / "annotations" / "instances_val.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"annotations": []}))
    (warning,) = warnings(data)
    assert "no box" in warning and "best.pth will be the latest" in warning


@pytest.mark.parametrize(
    ("updates", "device", "about"),
    [
        ((), "cpu", []),
        (("data.image_size=[320,64]",), "cuda", ["320 x 64"]),
        (("data.image_size=[480,480]", "data.augment.batch_sizes=[480,512]"), "cpu", ["rtdetrv3_nano_shapes"]),
        (("data.image_size=[480,480]", "data.augment.batch_sizes=[480,512]"), "cuda", []),
        (("train.accumulate=3",), "cpu", []),
        (("train.accumulate=4",), "cpu", ["train.accumulate=4, but an epoch has only 3 batches"]),
    ],
)
def test_sizes(data: Path, updates: tuple[str, ...], device: str, about: list[str]) -> None:
    found = list(on_sizes(tiny_config(data, *updates), torch.device(device), NUM_TRAIN // 4))
    assert len(found) == len(about) and all(word in warning for word, warning in zip(about, found))


def test_sets_apart_with_many_boxes_are_met_with_silence(data: Path) -> None:
    enough_boxes(data)
    assert warnings(data) == []


def test_the_same_file_in_both_sets(data: Path) -> None:
    enough_boxes(data)
    same = [f"data.val.images={data}/train", f"data.val.annotations={data}/annotations/instances_train.json"]
    (warning,) = warnings(data, *same)
    assert warning.startswith(f"warning: {NUM_TRAIN} of {NUM_TRAIN} validation images are in the training set too (")


def test_an_image_listed_for_each_of_its_boxes(data: Path) -> None:
    enough_boxes(data)
    path = data / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    content["images"].append(content["images"][0] | {"id": 10_000})
    path.write_text(json.dumps(content))
    (warning,) = warnings(data)
    assert "1 training image" in warning and content["images"][0]["file_name"] in warning and "background" in warning


def test_the_same_bytes_under_another_name(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    enough_boxes(data)
    first, second = sorted((data / "train").iterdir())[0], sorted((data / "val").iterdir())[1]
    shutil.copyfile(first, second)
    (warning,) = warnings(data)
    assert f"1 of {NUM_VAL} validation images" in warning and f"({second.name})" in warning
    monkeypatch.setattr(files, "MOST_READ", 1)
    assert warnings(data) == []


def test_classes_with_few_boxes(data: Path) -> None:
    enough_boxes(data)
    path = data / "annotations" / "instances_train.json"
    content = json.loads(path.read_text())
    rare = content["categories"][0]
    kept = [box for box in content["annotations"] if box["category_id"] != rare["id"]]
    few = [box for box in content["annotations"] if box["category_id"] == rare["id"]][:9]
    path.write_text(json.dumps({**content, "annotations": kept + few}))
    (warning,) = warnings(data)
    assert warning.startswith(f"warning: classes of fewer than 10 training boxes: 1 of 5 ({rare['name']} 9); ")


def test_ap_that_stays_at_zero_is_said_once(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def evaluate(*_: Any) -> EvalResult:
        return EvalResult(dict.fromkeys(FIGURES, 0.0), [], [])

    monkeypatch.setattr("rtdetr.engine.trainer.evaluate", evaluate)
    Trainer(tiny_config(data, "train.eval_every=1"), tmp_path / "run", CPU).run()
    more = tiny_config(data, "train.eval_every=1", "train.epochs=3")
    Trainer(more, tmp_path / "run", CPU, resume=tmp_path / "run" / "last.pth").run()
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: AP is still 0")]
    assert len(said) == 1 and "after 3 of 6 iterations" in said[0]
    for cause in ("class ids or names", "optimizer.lr is too high", "too few", "boxes are wrong"):
        assert cause in said[0]
    assert "`rtdetr doctor`" in said[0] and "--overfit 8" in said[0]


@pytest.mark.parametrize(("best", "iteration", "warned"), [(0, 99, 0), (0, 100, 1), (0.01, 500, 0), (-1, 500, 0)])
def test_a_tenth_of_the_run_is_waited_for(best: float, iteration: int, warned: int) -> None:
    assert len(on_no_ap(best, iteration, 1000)) == warned


@pytest.mark.parametrize(("best", "said"), [(0.0, "0"), (0.0003, "0.0003"), (0.000312, "0.00031")])
def test_the_figure_itself_is_said(best: float, said: str) -> None:
    (warning,) = on_no_ap(best, 100, 1000)
    assert warning.startswith(f"warning: AP is still {said} after 100 of 1000 iterations; ")
