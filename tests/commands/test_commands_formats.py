"""One set as COCO with odd ids, as VOC and as YOLO, through train, checkpoint, eval and predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import NANO, tiny_updates
from format_sets import IDS, boxes_of, write_all

from rtdetr.cli import main
from rtdetr.data.formats.sources import read_document, source_of
from rtdetr.engine.evaluation.evaluator import score
from rtdetr.weights.checkpoint import load_checkpoint

OWN_IDS = {"coco": [0, 1203, 4000], "voc": [1, 2, 3], "yolo": [0, 1, 2]}


def updates(folder: Path) -> list[str]:
    """The config's own image folders are not there: the set brings its images."""
    chosen = [each for each in tiny_updates(folder) if not each.startswith(("data.train.", "data.val."))]
    paths = [f"data.train.annotations={folder}", f"data.val.annotations={folder}"]
    return ["-u", *chosen, *paths, "train.max_iterations=2", "data.train_batch_size=2"]


def test_the_same_figures_from_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = write_all(tmp_path)
    weights: dict[str, dict[str, Any]] = {}
    tables, scores = {}, {}
    for name, folder in sets.items():
        run, results = tmp_path / f"run {name}", tmp_path / f"{name}.json"
        arguments = ["train", "-c", str(NANO), "--output-dir", str(run), "--device", "cpu", *updates(folder)]
        assert main(arguments) == 0
        checkpoint = load_checkpoint(run / "last.pth")
        weights[name] = checkpoint
        assert checkpoint["classes"] == {"names": [IDS[each] for each in sorted(IDS)], "category_ids": OWN_IDS[name]}
        capsys.readouterr()
        assert main(["eval", "-w", str(run / "last.pth"), "--save-json", str(results), "--device", "cpu"]) == 0
        table = capsys.readouterr().out.splitlines()[1:]
        assert [int(line.split()[-8]) for line in table[13:]] == OWN_IDS[name]
        tables[name] = table[:12] + [line.split()[-7:] for line in table[13:]]
        found = json.loads(results.read_text())
        assert {each["category_id"] for each in found} <= set(OWN_IDS[name])
        scores[name] = sorted(each["score"] for each in found)
        detections = predicted(run / "last.pth", sets["coco"] / "val", tmp_path / f"predict {name}")
        assert {(each["category_id"], each["name"]) for each in detections} <= {
            (i, IDS[each]) for i, each in zip(OWN_IDS[name], sorted(IDS))
        }
        assert detections
    for name in ("voc", "yolo"):
        assert tables[name] == tables["coco"] and scores[name] == scores["coco"]
        for key, value in weights["coco"]["ema"].items():
            assert torch.equal(value, weights[name]["ema"][key]), key


def predicted(weights: Path, images: Path, out: Path) -> list[dict[str, Any]]:
    arguments = [
        "predict",
        str(images),
        "-w",
        str(weights),
        "--output-dir",
        str(out),
        "--threshold",
        "0",
        "--device",
        "cpu",
    ]
    assert main(arguments) == 0
    return [each for image in json.loads((out / "results.json").read_text()) for each in image["detections"]]


def test_one_models_figures_on_every_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model trained on the COCO file is measured on the others, which know the classes by name."""
    sets = write_all(tmp_path)
    run = tmp_path / "run"
    assert main(["train", "-c", str(NANO), "--output-dir", str(run), "--device", "cpu", *updates(sets["coco"])]) == 0
    tables = []
    for folder in sets.values():
        capsys.readouterr()
        arguments = ["eval", "-w", str(run / "last.pth"), "--device", "cpu", "-u", f"data.val.annotations={folder}"]
        assert main(arguments) == 0
        tables.append(capsys.readouterr().out.splitlines()[1:13])
    assert tables[0] == tables[1] == tables[2]


def test_figures_to_the_last_digit(tmp_path: Path) -> None:
    """Of detections that find most boxes, not quite where they are."""
    figures, classes = {}, {}
    for name, folder in write_all(tmp_path).items():
        document = read_document(source_of(folder, "val"))
        rng = np.random.default_rng(0)
        places = {each["file_name"].rpartition("/")[2]: each["id"] for each in document.images}
        found = []
        for image, boxes in enumerate(boxes_of(2)):
            for category, box in boxes * 3:
                moved = [float(np.float32(v)) for v in np.array(box) + rng.normal(0, 1.5, 4)]
                wrong = int(rng.random() < 0.2)
                label = (sorted(IDS).index(category) + wrong) % 3
                entry = {"image_id": places[f"val {image}ß.png"], "category_id": OWN_IDS[name][label], "bbox": moved}
                found.append(entry | {"score": float(np.float32(rng.random()))})
        result = score(found, folder, "faster-coco-eval")
        figures[name] = result.figures
        classes[name] = [(each.name, each.num_boxes, each.ap, each.ap50) for each in result.classes]
    assert figures["coco"] == figures["voc"] == figures["yolo"] and 0.1 < figures["coco"]["AP"] < 0.9
    assert figures["coco"]["APs"] != figures["coco"]["APm"] and classes["coco"] == classes["voc"] == classes["yolo"]
