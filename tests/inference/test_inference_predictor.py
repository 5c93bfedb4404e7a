"""A checkpoint is all that detection needs; results carry the data's own ids, names and pixels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from messages import message
from PIL import Image
from plain_kernels import OurOperators

from rtdetr.config import ConfigError
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.images import read_image
from rtdetr.engine.evaluation.evaluator import detect
from rtdetr.inference.predictor import Predictor
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.ops.compiled import WHY_NOT
from rtdetr.types import Batch, Detections, ImageInfo, Targets
from rtdetr.weights.checkpoint import load_checkpoint, make_checkpoint, save_checkpoint

CLASSES = Classes(("mug", "pen", "cup", "jar", "lid"), (3, 7, 13, 44, 90))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predictor")
    cfg = tiny_config(tiny_data(folder / "shapes"), "data.image_size=[64, 96]")
    torch.manual_seed(0)
    model = build_model(cfg.model, len(CLASSES))
    save_checkpoint(folder / "model.pth", make_checkpoint(cfg, CLASSES, model.state_dict()))
    return folder / "model.pth"


def image(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def test_detections_equal_those_of_evaluation(checkpoint: Path) -> None:
    predictor = Predictor(checkpoint, threshold=0.0)
    images = [image(96, 64), image(96, 64, seed=1)]  # the network's size: no resize in between
    tensors = torch.stack([torch.from_numpy(np.asarray(p).copy()).permute(2, 0, 1) / 255 for p in images])
    targets = Targets.stack([torch.zeros(0).long()] * 2, [torch.zeros(0, 4)] * 2, [torch.zeros(0, 4)] * 2)
    batch = Batch(tensors, targets, tuple(ImageInfo(i, "", 64, 96) for i in range(2)))
    expected = detect(predictor.model, batch, CLASSES, predictor.cfg.eval.max_detections, torch.device("cpu"))
    found = [(i, each) for i, detections in enumerate(predictor.predict(images)) for each in detections]
    for each in expected:  # evaluation does not clip
        x, y, w, h = each["bbox"]
        x1, y1, x2, y2 = max(x, 0.0), max(y, 0.0), min(x + w, 96.0), min(y + h, 64.0)
        each["bbox"] = [x1, y1, x2 - x1, y2 - y1]
    assert len(found) == len(expected) > 0
    for (i, ours), theirs in zip(found, expected):
        x1, y1, x2, y2 = ours.box
        assert (i, ours.category_id) == (theirs["image_id"], theirs["category_id"])
        assert ours.name == CLASSES.names[CLASSES.category_ids.index(ours.category_id)]
        assert ours.score == pytest.approx(theirs["score"], abs=1e-5)
        assert [x1, y1, x2 - x1, y2 - y1] == pytest.approx(theirs["bbox"], abs=1e-2)


def test_plain_kernels_detect_with_the_model_as_it_is(checkpoint: Path, tmp_path: Path) -> None:
    content = load_checkpoint(checkpoint)
    del content["config"]["kernels"]
    content["config"]["model"]["decoder"]["msda_backend"] = "torch"  # as older files say it
    save_checkpoint(tmp_path / "plain.pth", content)
    plain, fast = Predictor(tmp_path / "plain.pth", threshold=0.0), Predictor(checkpoint, threshold=0.0)
    with OurOperators() as called:
        found = plain.predict([image(96, 64)])[0]
    assert isinstance(plain.model, Network) and not called.names
    with OurOperators() as called:
        expected = fast.predict([image(96, 64)])[0]
    assert called.names or WHY_NOT["cpu"]
    assert [each.score for each in found] == pytest.approx([each.score for each in expected], abs=1e-4)
    with pytest.raises(ConfigError, match=message("expected", "compile", "auto", "False", "kernels=plain")):
        Predictor(tmp_path / "plain.pth", compile=True)
    with pytest.raises(ConfigError, match=message("expected", "kernels", "auto", "plain", "'fast'")):
        Predictor(checkpoint, kernels="fast")


def test_boxes_are_in_the_pixels_of_each_image(checkpoint: Path) -> None:
    predictor = Predictor(checkpoint, threshold=0.0)
    small = image(96, 64)
    large = small.resize((960, 192), Image.Resampling.NEAREST).resize((96, 64), Image.Resampling.NEAREST)
    assert np.array_equal(np.asarray(small), np.asarray(large))
    once, stretched = predictor.predict([small, small.resize((192, 128), Image.Resampling.NEAREST)])
    best, same = once[0], max(stretched, key=lambda d: (d.category_id == once[0].category_id, d.score))
    assert max(max(each.box) for each in stretched) > 96  # in the pixels of the larger image
    assert same.box[2] - same.box[0] == pytest.approx(2 * (best.box[2] - best.box[0]), rel=0.5)


def test_threshold_and_batches(checkpoint: Path, tmp_path: Path) -> None:
    everything = Predictor(checkpoint, threshold=0.0).predict([image(50, 40)])[0]
    middle = everything[len(everything) // 2].score
    fewer = Predictor(checkpoint, threshold=middle).predict([image(50, 40)])[0]
    assert fewer == [d for d in everything if d.score >= middle] != everything
    for i in range(5):
        image(40 + i, 30, seed=i).save(tmp_path / f"{i}.png")
    files = sorted(tmp_path.iterdir())
    predictor = Predictor(checkpoint, threshold=0.0)
    results = list(predictor.predict_files(files, batch_size=2))
    assert [each.file for each in results] == files
    assert [each.as_pil.size for each in results if each.as_pil] == [(40 + i, 30) for i in range(5)]
    alone = predictor.predict([read_image(files[4])])[0]
    assert results[4].detections[0].box == pytest.approx(alone[0].box, abs=1e-3)


def test_a_file_that_is_no_image(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_text("no image")
    with pytest.raises(DataError, match=message("not an image", "x.jpg")):
        read_image(tmp_path / "x.jpg")


def test_a_broken_file_costs_itself_alone(checkpoint: Path, tmp_path: Path) -> None:
    good = [tmp_path / f"{name}.png" for name in "ace"]
    for i, file in enumerate(good):
        image(40, 30, seed=i).save(file)
    (tmp_path / "b.png").write_bytes(good[0].read_bytes()[:700])
    (tmp_path / "d.png").mkdir()
    os.mkfifo(tmp_path / "f.png")
    predictor = Predictor(checkpoint, threshold=0.0)
    for batch_size in (1, 2, 8):
        found = list(predictor.predict_files([*sorted(tmp_path.iterdir()), tmp_path / "gone.png"], batch_size))
        assert [each.file.name[0] for each in found] == list("abcdefg")
        assert [each.file for each in found if each.image is not None] == good
        assert all(each.detections and not each.error for each in found if each.image is not None)
        errors = [each.error for each in found if each.image is None]
        assert all(str(each.file) in each.error for each in found if each.image is None)
        assert "truncated" in errors[0] and "a folder" in errors[1] and "a device" in errors[2]


def test_the_eight_orientations_of_an_image_give_the_same_boxes(checkpoint: Path, tmp_path: Path) -> None:
    """Each copy is stored turned or mirrored, and its EXIF block says how to undo that."""
    upright, turn = image(60, 40), Image.Transpose
    stored = {
        1: upright,
        2: upright.transpose(turn.FLIP_LEFT_RIGHT),
        3: upright.transpose(turn.ROTATE_180),
        4: upright.transpose(turn.FLIP_TOP_BOTTOM),
        5: upright.transpose(turn.TRANSPOSE),
        6: upright.transpose(turn.ROTATE_90),
        7: upright.transpose(turn.TRANSVERSE),
        8: upright.transpose(turn.ROTATE_270),
    }
    for orientation, each in stored.items():
        exif = Image.Exif()
        exif[0x0112] = orientation
        each.save(tmp_path / f"{orientation}.png", exif=exif)
    first, *others = Predictor(checkpoint, threshold=0.0).predict_files(sorted(tmp_path.iterdir()))
    assert first.detections and len(others) == 7
    for each in others:
        assert each.image is not None and each.size == (60, 40)
        assert [found.name for found in each.detections] == [found.name for found in first.detections]
        for ours, theirs in zip(each.detections, first.detections):
            assert ours.box == pytest.approx(theirs.box, abs=1e-2)


def test_boxes_end_where_the_image_ends(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One box across each border, one outside, one inside; evaluation keeps them as they come."""
    boxes = [(-5.0, 10.0, 20.0, 50.0), (90.0, -3.0, 99.0, 70.0), (97.0, 5.0, 99.0, 9.0), (1.0, 2.0, 3.0, 4.0)]
    offered = Detections(torch.tensor([[0.9, 0.8, 0.7, 0.6]]), torch.zeros(1, 4).long(), torch.tensor([boxes]))
    monkeypatch.setattr(Predictor, "predict_tensors", lambda *_: offered)
    found = Predictor(checkpoint, threshold=0.0).predict([image(96, 64)])[0]
    assert [each.box for each in found] == [(0.0, 10.0, 20.0, 50.0), (90.0, 0.0, 96.0, 64.0), (1.0, 2.0, 3.0, 4.0)]
    assert [each.score for each in found] == pytest.approx([0.9, 0.8, 0.6])


def test_the_best_score_is_known_when_nothing_is_found(checkpoint: Path, tmp_path: Path) -> None:
    image(40, 30).save(tmp_path / "a.png")
    (nothing,) = Predictor(checkpoint, threshold=1.0).predict_files([tmp_path / "a.png"])
    (everything,) = Predictor(checkpoint, threshold=0.0).predict_files([tmp_path / "a.png"])
    assert nothing.detections == [] and nothing.best_score == everything.detections[0].score > 0


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_score(checkpoint: Path, threshold: float) -> None:
    with pytest.raises(ValueError, match="threshold"):
        Predictor(checkpoint, threshold=threshold)


def test_detection_starts_without_compiler_and_torchvision(checkpoint: Path) -> None:
    """The first ones take as long to import as torch itself, the FLOP counter's triton as long as all else."""
    code = (
        "import sys; from PIL import Image; from rtdetr.inference.predictor import Predictor\n"
        "from rtdetr.commands import detection\n"
        "from rtdetr.inference import results, sources\n"
        f"predictor = Predictor({str(checkpoint)!r})\n"
        "predictor.predict([Image.new('RGB', (9, 9))])\n"
        "import torch; from rtdetr.ops import conv_relu\n"  # called on a GPU only
        "with torch.no_grad():\n"
        "    conv_relu.conv_relu(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1), torch.ones(1))\n"
        "    conv_relu.linear_relu(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1))\n"
        "slow = {'torchvision', 'torch._dynamo', 'scipy', 'matplotlib', 'triton', 'torch.utils.flop_counter'}\n"
        "print(*sorted(slow & set(sys.modules)))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
