"""A checkpoint is all that detection needs; results carry the data's own ids, names and pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from PIL import Image

from rtdetr.config import ConfigError
from rtdetr.data.classes import Classes, DataError
from rtdetr.engine.evaluator import detect
from rtdetr.inference.draw import Detection, draw
from rtdetr.inference.predictor import Detector, read_picture
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import Batch, ImageInfo, Targets
from rtdetr.weights.checkpoint import load_checkpoint, make_checkpoint, save_checkpoint

CLASSES = Classes(("mug", "pen", "cup", "jar", "lid"), (3, 7, 13, 44, 90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("detector")
    cfg = tiny_config(tiny_data(folder / "shapes"), "data.image_size=[64, 96]")
    torch.manual_seed(0)
    model = build_model(cfg.model, len(CLASSES))
    save_checkpoint(folder / "model.pth", make_checkpoint(cfg, CLASSES, model.state_dict()))
    return folder / "model.pth"


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_detections_equal_those_of_evaluation(checkpoint: Path) -> None:
    detector = Detector(checkpoint, threshold=0.0)
    pictures = [picture(96, 64), picture(96, 64, seed=1)]  # the network's size: no resize in between
    tensors = torch.stack([torch.from_numpy(np.asarray(p).copy()).permute(2, 0, 1) / 255 for p in pictures])
    targets = Targets.stack([torch.zeros(0).long()] * 2, [torch.zeros(0, 4)] * 2, [torch.zeros(0, 4)] * 2)
    batch = Batch(tensors, targets, tuple(ImageInfo(i, "", 64, 96) for i in range(2)))
    expected = detect(detector.model, batch, CLASSES, detector.cfg.eval.max_detections, torch.device("cpu"))
    found = [(i, each) for i, detections in enumerate(detector.predict(pictures)) for each in detections]
    assert len(found) == len(expected) > 0
    for (i, ours), theirs in zip(found, expected):
        x1, y1, x2, y2 = ours.box
        assert (i, ours.category_id) == (theirs["image_id"], theirs["category_id"])
        assert ours.name == CLASSES.names[CLASSES.category_ids.index(ours.category_id)]
        assert ours.score == pytest.approx(theirs["score"], abs=1e-5)
        assert [x1, y1, x2 - x1, y2 - y1] == pytest.approx(theirs["bbox"], abs=1e-2)


def test_a_backend_that_cannot_run_here_is_named(checkpoint: Path, tmp_path: Path) -> None:
    content = load_checkpoint(checkpoint)
    content["config"]["model"]["decoder"]["msda_backend"] = "cuda"
    save_checkpoint(tmp_path / "cuda.pth", content)
    with pytest.raises(ConfigError, match="msda_backend=cuda cannot run on cpu: it needs --device cuda"):
        Detector(tmp_path / "cuda.pth", "cpu")


def test_boxes_are_in_the_pixels_of_each_picture(checkpoint: Path) -> None:
    detector = Detector(checkpoint, threshold=0.0)
    small = picture(96, 64)
    large = small.resize((960, 192), Image.Resampling.NEAREST).resize((96, 64), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(small), np.asarray(large))
    once, stretched = detector.predict([small, small.resize((192, 128), Image.Resampling.NEAREST)])
    best, same = once[0], max(stretched, key=lambda d: (d.category_id == once[0].category_id, d.score))
    assert max(stretched[0].box) > 96  # in the pixels of the larger picture
    assert same.box[2] - same.box[0] == pytest.approx(2 * (best.box[2] - best.box[0]), rel=0.5)


def test_threshold_and_batches(checkpoint: Path, tmp_path: Path) -> None:
    everything = Detector(checkpoint, threshold=0.0).predict([picture(50, 40)])[0]
    middle = everything[len(everything) // 2].score
    fewer = Detector(checkpoint, threshold=middle).predict([picture(50, 40)])[0]
    assert fewer == [d for d in everything if d.score >= middle] != everything
    for i in range(5):
        picture(40 + i, 30, seed=i).save(tmp_path / f"{i}.png")
    files = sorted(tmp_path.iterdir())
    detector = Detector(checkpoint, threshold=0.0)
    results = list(detector.predict_files(files, batch_size=2))
    assert [file for file, _, _ in results] == files
    assert [p.size for _, p, _ in results] == [(40 + i, 30) for i in range(5)]
    alone = detector.predict([read_picture(files[4])])[0]
    assert results[4][2][0].box == pytest.approx(alone[0].box, abs=1e-3)


def test_a_file_that_is_no_picture(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_text("no picture")
    with pytest.raises(DataError, match=r"x\.jpg: cannot be read as a picture"):
        read_picture(tmp_path / "x.jpg")


def test_boxes_are_drawn_where_they_are() -> None:
    black = Image.new("RGB", (200, 100))
    detection = Detection(3, "mug", 0.9, (50.0, 40.0, 150.0, 90.0))
    drawn = np.asarray(draw(black, [detection])).astype(int).sum(axis=2)
    assert not np.asarray(black).any()
    assert (drawn[40, 50:150] > 0).all() and (drawn[40:90, 50] > 0).all() and (drawn[90, 50:150] > 0).all()
    assert drawn[60:80, 70:140].sum() == 0 and drawn[:, :45].sum() == 0 and drawn[95:].sum() == 0
    two = draw(black, [detection, detection._replace(category_id=4, box=(0.0, 0.0, 30.0, 30.0))])
    assert two.getpixel((0, 29)) != two.getpixel((50, 89))
