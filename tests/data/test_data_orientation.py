"""Training and evaluation do not notice how the camera was held."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from image_cases import exif_block
from PIL import Image

from rtdetr.data.loader import build_val_loader
from rtdetr.engine.evaluation.evaluator import evaluate
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer

CPU = torch.device("cpu")
WIDTH, HEIGHT = 96, 64
STORED_BY_THE_CAMERA = {  # what undoes each orientation
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same images twice, without loss: plain, and stored sideways in all four ways. One annotation text for both,
    with the upright size."""
    shapes = tiny_data(tmp_path_factory.mktemp("data") / "shapes")
    folders = {name: tmp_path_factory.mktemp(name) for name in ("plain", "sideways")}
    for split in ("train", "val"):
        document = json.loads((shapes / "annotations" / f"instances_{split}.json").read_text())
        inside = [each for each in document["annotations"] if each["bbox"][1] < HEIGHT]  # the others would be dropped
        document["annotations"] = inside
        for folder in folders.values():
            (folder / split).mkdir()
            (folder / "annotations").mkdir(exist_ok=True)
        for i, image in enumerate(document["images"]):
            upright = Image.open(shapes / split / image["file_name"]).crop((0, 0, WIDTH, HEIGHT))
            image |= {"file_name": f"{i}.png", "width": WIDTH, "height": HEIGHT}
            upright.save(folders["plain"] / split / f"{i}.png")
            orientation = 5 + i % 4
            stored = upright.transpose(STORED_BY_THE_CAMERA[orientation])
            assert stored.size == (HEIGHT, WIDTH)
            stored.save(folders["sideways"] / split / f"{i}.png", exif=exif_block(orientation))
        for folder in folders.values():
            (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))
    return folders


def test_sideways_copies_train_and_score_as_the_plain_ones(sets: dict[str, Path], tmp_path: Path) -> None:
    rows, weights, results = [], [], []
    for name, folder in sets.items():
        cfg = tiny_config(folder, "train.epochs=1")
        trainer = Trainer(cfg, tmp_path / name, CPU)
        trainer.run()
        found = read_rows(tmp_path / name / "metrics.csv")
        rows.append([[row[key] for key in row if "loss" in key or "AP" in key or key == "kind"] for row in found])
        weights.append(trainer.model.state_dict())
        classes = trainer.train_loader.classes
        loader = build_val_loader(cfg, classes)
        results.append(evaluate(trainer.model.eval(), loader, cfg.data.val.annotations, classes, cfg.eval, CPU))
    assert [row[0] for row in rows[0]] == ["train"] * 3 + ["eval"] and rows[0] == rows[1]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert results[0] is not None and results[1] is not None and results[0].figures == results[1].figures
    assert len(results[0].detections) > 0 and results[0].detections == results[1].detections
