"""Augmentation of the user's own: three ways to write it, what it returns is checked, and a seed makes it repeat."""

from __future__ import annotations

import importlib.util
import json
import pickle
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import tiny_config
from messages import message
from torchvision.transforms import v2

from rtdetr import RTDETRv3
from rtdetr.config import ConfigError
from rtdetr.data.classes import DataError
from rtdetr.data.custom import CustomAugmentation, checked, name_of
from rtdetr.data.loader import build_train_loader
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import load_checkpoint

CPU = torch.device("cpu")
PLAIN = ("data.augment.distort_prob=0", "data.augment.expand_prob=0", "data.augment.crop_prob=0")
STILL = (*PLAIN, "data.augment.flip_prob=0")
MODULE = '''
import random

import numpy as np
import torch


def noise(image, boxes, labels):
    """Draws from all three generators."""
    dark = 0.5 + random.random() / 2
    moved = boxes + np.random.uniform(-3, 3, boxes.shape)
    grain = torch.randint(0, 20, image.shape).numpy()
    return (image * dark + grain).clip(0, 255).astype(np.uint8), moved, labels


def left_half(image, boxes, labels):
    return image[:, : image.shape[1] // 2], boxes, labels


def broken(image, boxes, labels):
    raise KeyError("no\\nsuch key")


def wrong(image, boxes, labels):
    return image, boxes, labels + 100


class Holder:
    noise = staticmethod(noise)
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_curves: None) -> Iterator[None]:
    """In a folder with own_augment.py, which is no package's."""
    (tmp_path / "own_augment.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("own_augment", None)


def batches(data: Path, name: str, *updates: str, epoch: int = 0, function: Any = None) -> list[Batch]:
    cfg = tiny_config(data, f"data.augment.custom={json.dumps(name)}", *updates)
    loader = build_train_loader(cfg, 0, function=function)
    loader.set_epoch(epoch)
    try:
        return list(loader)
    finally:
        loader.close()


def alike(ours: list[Batch], theirs: list[Batch]) -> bool:
    return all(
        torch.equal(one.images, other.images) and torch.equal(one.targets.boxes_pixel, other.targets.boxes_pixel)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_it_comes_first_and_may_change_the_size(data: Path, kernels: str) -> None:
    whole = batches(data, "", *STILL, f"kernels={kernels}", "data.augment.interpolations=[area]")
    half = batches(data, "own_augment:left_half", *STILL, f"kernels={kernels}", "data.augment.interpolations=[area]")
    left = whole[0].images[0][:, :, :32].float()
    shrunk = half[0].images[0][:, :, ::2].float()
    assert half[0].images.shape == whole[0].images.shape and (left - shrunk).abs().mean() < 12
    found = 0
    for i, count in enumerate(whole[0].targets.counts):
        boxes = whole[0].targets.boxes_pixel[i, :count] * torch.tensor([2.0, 1.0, 2.0, 1.0])
        kept = boxes[boxes[:, 0] < 64 - 0.1].clamp(max=64)
        ours = half[0].targets.boxes_pixel[i, : half[0].targets.counts[i]]
        assert torch.allclose(ours, kept, atol=1e-3)
        found += len(kept)
    assert 0 < found < sum(whole[0].targets.counts)


def test_a_seed_per_image_and_epoch_makes_it_repeat(data: Path) -> None:
    first = batches(data, "own_augment:noise")
    assert alike(first, batches(data, "own_augment:noise", "data.num_workers=2"))
    assert not alike(first, batches(data, "own_augment:noise", epoch=1))
    assert not alike(first, batches(data, ""))
    assert alike(first, batches(data, "own_augment:Holder.noise"))


def test_random_numbers_of_the_run_are_left_alone(data: Path) -> None:
    def numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    drawn = []
    for name in ("own_augment:noise", ""):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        batches(data, name)
        drawn.append(numbers())
    assert drawn[0] == drawn[1]


def flip_of_torchvision() -> Any:
    return v2.Compose([v2.RandomHorizontalFlip(p=1.0)])


def flip_of_albumentations() -> Any:
    if importlib.util.find_spec("albumentations") is None:
        pytest.skip("needs the package albumentations")
    import albumentations

    boxes = albumentations.BboxParams("pascal_voc", label_fields=["labels"])
    return albumentations.Compose([albumentations.HorizontalFlip(p=1.0)], bbox_params=boxes)


@pytest.mark.parametrize("make", [flip_of_torchvision, flip_of_albumentations])
def test_transforms_of_other_packages(data: Path, make: Callable[[], Any]) -> None:
    before = batches(data, "", *STILL, "data.augment.interpolations=[area]")[0]
    flipped = batches(data, "augment=Compose", *STILL, "data.augment.interpolations=[area]", function=make())[0]
    assert (before.images.flip(3).float() - flipped.images.float()).abs().max() <= 1
    for i, count in enumerate(before.targets.counts):
        expected = before.targets.boxes_pixel[i, :count].clone()
        expected[:, [0, 2]] = 64 - expected[:, [2, 0]]
        assert flipped.targets.counts[i] == count
        assert torch.allclose(flipped.targets.boxes_pixel[i, :count], expected, atol=1e-3)
        assert torch.equal(flipped.targets.labels[i, :count], before.targets.labels[i, :count])


def crops_of_torchvision() -> Any:
    return v2.Compose([v2.RandomIoUCrop(), v2.ColorJitter(0.4), v2.SanitizeBoundingBoxes()])


def crops_of_albumentations() -> Any:
    transform = flip_of_albumentations()
    import albumentations

    steps = [albumentations.BBoxSafeRandomCrop(p=0.8), albumentations.GaussNoise(p=1.0), albumentations.Rotate(p=1.0)]
    boxes = albumentations.BboxParams("pascal_voc", label_fields=["labels"])
    return type(transform)(steps, bbox_params=boxes)


@pytest.mark.parametrize("make", [crops_of_torchvision, crops_of_albumentations])
def test_random_transforms_repeat_in_any_worker(data: Path, make: Callable[[], Any]) -> None:
    first = batches(data, "augment=Compose", function=make())
    assert alike(first, batches(data, "augment=Compose", "data.num_workers=2", function=make()))
    assert not alike(first, batches(data, "augment=Compose", epoch=1, function=make()))
    assert sum(sum(batch.targets.counts) for batch in first) > 0


def test_albumentations_without_boxes_is_refused() -> None:
    import_or_skip = flip_of_albumentations()
    with pytest.raises(ConfigError, match=message("knows no boxes", "Compose", "bbox_params=BboxParams")):
        CustomAugmentation("augment=Compose", type(import_or_skip)([]))


IMAGE = np.zeros((20, 30, 3), np.uint8)


def test_boxes_are_clipped_and_those_without_area_left_out() -> None:
    boxes = [[-5, -5, 10, 10], [40, 5, 50, 10], [5, 5, 5, 9], [9, 9, 4, 12], [20, 10, 99, 99]]
    _, kept, labels = checked((IMAGE, boxes, [0, 1, 2, 1, 2]), 3)
    assert kept.tolist() == [[0, 0, 10, 10], [20, 10, 30, 20]] and labels.tolist() == [0, 2]
    assert (kept.dtype, labels.dtype) == (np.float32, np.int64)
    _, kept, labels = checked((IMAGE, [], []), 3)
    assert kept.shape == (0, 4) and labels.shape == (0,)


@pytest.mark.parametrize(
    ("result", "facts"),
    [
        (None, ("NoneType", "image", "boxes", "labels")),
        ((IMAGE, []), ("2 values", "image", "boxes", "labels")),
        ((IMAGE / 255, [], []), ("float64 (20, 30, 3)", "uint8 (height, width, 3)", "RGB")),
        ((IMAGE[..., 0], [], []), ("uint8 (20, 30)", "(height, width, 3)")),
        ((IMAGE[:0], [], []), ("uint8 (0, 30, 3)", "(height, width, 3)")),
        ((IMAGE, [[1, 2, 3]], [0]), ("boxes (1, 3)", "labels (1,)", "(n, 4)", "xyxy in pixels", "(n,)")),
        ((IMAGE, [[1, 2, 3, 4]], []), ("boxes (1, 4)", "labels (0,)")),
        ((IMAGE, [], [1]), ("boxes (0, 4)", "labels (1,)")),
        ((IMAGE, [[1, 2, np.nan, 4]], [0]), ("boxes", "not finite")),
        ((IMAGE, [["a", "b", "c", "d"]], [0]), ("boxes", "no numbers")),
        ((IMAGE, [[1, 2, 3, 4]], [3]), ("labels [3]", "0 to 2")),
        ((IMAGE, [[1, 2, 3, 4]], [-1]), ("labels [-1]", "0 to 2")),
        ((IMAGE, [[1, 2, 3, 4]], [0.5]), ("labels [0.5]", "0 to 2")),
        ((IMAGE, [[1, 2, 3, 4]], ["dog"]), ("labels", "no numbers")),
        ((IMAGE, [[1, 2, 3, 4], [1, 2]], [0, 1]), ("no array",)),
    ],
)
def test_what_it_returns_wrongly_is_one_sentence(result: Any, facts: tuple[str, ...]) -> None:
    custom = CustomAugmentation("augment=own", lambda image, boxes, labels: result)
    expected = message("wrong result", "data.augment.custom", "augment=own", "a.jpg", *facts)
    with pytest.raises(DataError, match=expected) as caught:
        custom(IMAGE, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), 0, "a.jpg", 3)
    assert "\n" not in str(caught.value)


def test_a_function_of_other_arguments_is_told_what_it_gets() -> None:
    custom = CustomAugmentation("augment=own", lambda image, boxes: image)
    with pytest.raises(DataError, match=message("failed", "2 positional arguments", "image, boxes and labels")):
        custom(IMAGE, np.zeros((0, 4), np.float32), np.zeros(0, np.int64), 0, "a.jpg", 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_what_it_raises_ends_the_run_in_one_sentence(data: Path, workers: int) -> None:
    with pytest.raises(DataError) as caught:
        batches(data, "own_augment:broken", f"data.num_workers={workers}")
    cause = r"KeyError: 'no\nsuch key'"
    expected = message("failed", "data.augment.custom", "own_augment:broken", cause, "own_augment.py line 21")
    assert expected.search(str(caught.value)) and "\n" not in str(caught.value), str(caught.value)
    with pytest.raises(DataError, match=message("wrong labels", "own_augment:wrong", "image", "0 to 4")):
        batches(data, "own_augment:wrong", f"data.num_workers={workers}")


def test_what_fails_at_the_first_image_leaves_no_files(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "data.augment.custom=own_augment:broken")
    with pytest.raises(DataError, match=message("failed", "own_augment:broken")):
        Trainer(cfg, tmp_path / "run", CPU).run()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("noise", message("expected", "package.module:function", "'noise'")),
        ("own_augment:", message("expected", "package.module:function", "'own_augment:'")),
        ("../own:noise", message("expected", "package.module:function", "'../own:noise'")),
        ("no_such_module:noise", message("not imported", "no_such_module:noise", "ModuleNotFoundError")),
        ("own_augment:nois", message("not imported", "own_augment:nois", "AttributeError")),
        ("own_augment:__doc__", message("no function", "own_augment:__doc__", "None")),
        ("augment=<lambda>", message("began with", "augment=<lambda>", "give it again as augment=")),
    ],
)
def test_a_name_that_names_nothing_is_one_sentence(data: Path, name: str, sentence: re.Pattern[str]) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        batches(data, name)
    assert str(refused.value).startswith("data.augment.custom: ")


def test_names_and_workers_that_are_not_forked() -> None:
    custom = CustomAugmentation("own_augment:noise")
    assert name_of(custom.function) == "own_augment:noise"
    assert name_of(lambda *_: None).startswith("augment=") and name_of(v2.Compose([v2.Identity()])) == "augment=Compose"
    assert pickle.loads(pickle.dumps(custom)).function is custom.function
    again = pickle.loads(
        pickle.dumps(CustomAugmentation("augment=RandomHorizontalFlip", v2.RandomHorizontalFlip(p=1.0)))
    )
    assert isinstance(again.function, v2.RandomHorizontalFlip)


def test_a_resumed_run_is_the_same_bit_for_bit(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(
        data, "data.augment.custom=own_augment:noise", "data.augment.paste_prob=0.5", "data.num_workers=2"
    )
    Trainer(cfg, tmp_path / "whole", CPU).run()
    trainer = Trainer(cfg, tmp_path / "run", CPU)
    train_step = trainer.train_step

    def stopping(group: list[Batch]) -> Any:
        trainer.signals.received = 15 if trainer.state.iteration == 3 else None
        return train_step(group)

    trainer.train_step = stopping  # type: ignore[method-assign]
    assert trainer.run() == 15
    Trainer(cfg, tmp_path / "run", CPU, resume=tmp_path / "run" / "last.pth").run()
    ours, theirs = (load_checkpoint(tmp_path / name / "last.pth")["model"] for name in ("run", "whole"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    plain = read_rows(tmp_path / "whole" / "metrics.csv")
    assert [row["loss"] for row in plain] == [row["loss"] for row in read_rows(tmp_path / "run" / "metrics.csv")]


def test_in_python_it_is_an_argument(data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Trainer(tiny_config(data, "train.max_iterations=1"), tmp_path / "start", CPU).run()
    model = RTDETRv3.from_pretrained(tmp_path / "start" / "last.pth", device="cpu")
    seen = []

    def own(image: Any, boxes: Any, labels: Any) -> Any:
        seen.append(image.shape)
        return image, boxes, labels

    run = model.train(max_iterations=1, output_dir=tmp_path / "run", augment=own)
    name = "augment=test_in_python_it_is_an_argument.<locals>.own"
    assert len(seen) == 1 + 4 and model.cfg.data.augment.custom == name
    with pytest.raises(
        ConfigError,
        match=message("began with", "data.augment.custom", "augment=test_in_python_it_is_an_argument.<locals>.own"),
    ):
        model.train(resume=run.output_dir / "last.pth", max_iterations=2)
    model.train(resume=run.output_dir / "last.pth", max_iterations=2, augment=own)
    assert len(seen) == 10
    model.train(max_iterations=1, output_dir=tmp_path / "more")
    assert len(seen) == 10 and f"data.augment.custom={name} of " in caplog.text
    assert model.cfg.data.augment.custom == ""
    model.train(max_iterations=1, output_dir=tmp_path / "by_name", augment="own_augment:noise")
    assert model.cfg.data.augment.custom == "own_augment:noise"
    with pytest.raises(ConfigError, match=message("no function", "augment=int", "5")):
        model.train(max_iterations=1, output_dir=tmp_path / "number", augment=5)  # type: ignore[arg-type]
