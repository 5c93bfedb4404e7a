"""The sheet of training images: what it shows, where a run leaves it, and the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_helpers import NANO, made_up_batch, tiny_config, tiny_updates
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rtdetr import cli
from rtdetr.data.sheet import CELL, COLOURS, GAP, sheet_of
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch

CPU = torch.device("cpu")
NAMES = ["a", "b", "c", "d", "Δ 猫"]


def batch_of(counts: tuple[int, ...], size: int = 64) -> Batch:
    batch = made_up_batch(counts, size=size)
    return batch._replace(images=(batch.images * 255).byte())


def test_a_sheet_shows_images_boxes_and_names() -> None:
    batch = batch_of((1, 0, 3))
    sheet = sheet_of([batch], NAMES)
    assert sheet.size == (2 * (CELL + GAP), 2 * (CELL + GAP))
    x1, _, x2, y2 = batch.targets.boxes_pixel[0, 0].tolist()
    zoom = CELL / 64
    bottom = sheet.getpixel((round(zoom * (x1 + x2) / 2), round(zoom * y2) - 1))
    assert bottom == COLOURS[int(batch.targets.labels[0, 0]) % len(COLOURS)]
    pixels = np.ascontiguousarray(batch.images[1].permute(1, 2, 0).numpy())
    plain = pixels.repeat(CELL // 64, axis=0).repeat(CELL // 64, axis=1)
    assert np.array_equal(np.asarray(sheet)[:CELL, CELL + GAP : 2 * CELL + GAP], plain)  # no boxes on it
    assert sheet.getpixel((CELL + GAP + 5, CELL + GAP + 5)) == (255, 255, 255)


def test_batches_of_several_sizes_and_no_more_than_asked_for() -> None:
    batches = [batch_of((1,), size) for size in (32, 64, 96)] + [batch_of((2,) * 5)]
    assert sheet_of(batches, NAMES, 4).size == (2 * (CELL + GAP), 2 * (CELL + GAP))
    assert sheet_of(batches, NAMES).size == (3 * (CELL + GAP), 3 * (CELL + GAP))


def test_a_run_leaves_one_at_its_start(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "train.max_iterations=2", "train.loggers=[tensorboard]")
    Trainer(cfg, tmp_path, CPU).run()
    written = (tmp_path / "train_batch.jpg").read_bytes()
    assert Image.open(tmp_path / "train_batch.jpg").size == (2 * (CELL + GAP), 2 * (CELL + GAP))
    Trainer(tiny_config(data, "train.max_iterations=3"), tmp_path, CPU, resume=tmp_path / "last.pth").run()
    assert (tmp_path / "train_batch.jpg").read_bytes() == written
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [each.step for each in events.Images("train_batch")] == [0]


def test_the_command(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["show-batch", "-c", str(NANO), "-u", *tiny_updates(data)]
    assert cli.main([*given, "data.train_batch_size=auto"]) == 0
    said = "12 training images as the model sees them in epoch 0: train_batch.jpg\n"
    assert capsys.readouterr().out == said
    for number, shown in (("16", 10), ("6", 6)):  # the last two of twelve do not fill a batch
        assert cli.main([*given, "data.train_batch_size=5", "-n", number, "-o", "fives.png", "--overwrite"]) == 0
        assert capsys.readouterr().out == f"{shown} training images as the model sees them in epoch 0: fives.png\n"
    assert Image.open("train_batch.jpg").size == (4 * (CELL + GAP), 3 * (CELL + GAP))
    assert cli.main([*given, "--epoch", "1", "-n", "4", "-o", "more/sheet.png"]) == 0
    assert Image.open("more/sheet.png").size == (2 * (CELL + GAP), 2 * (CELL + GAP))
    capsys.readouterr()
    assert cli.main(given) == 2
    assert "train_batch.jpg: exists already" in capsys.readouterr().err
    image = next((data / "train").iterdir())
    assert cli.main([*given, "-o", str(image), "--overwrite"]) == 2
    assert f"{image}: would be read and replaced" in capsys.readouterr().err
    assert cli.main([*given, "-o", "sheet.gif"]) == 2
    assert capsys.readouterr().err.startswith("error: sheet.gif: expected the name of a file that ends in .jpg, ")
    with pytest.raises(SystemExit):
        cli.main(["show-batch"])
    assert capsys.readouterr().err.startswith("error: -c CONFIG or DATA is needed")
