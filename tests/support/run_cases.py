"""Runs in processes of their own that are stopped, killed and resumed."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine_helpers import NANO, tiny_updates

from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import load_checkpoint

ROOT = Path(__file__).resolve().parents[2]


def environment() -> dict[str, str]:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests" / "support"), *sys.path))
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENCV_LOG_LEVEL": "ERROR"}


def assert_ends_like(folder: Path, whole: Path) -> None:
    ours, theirs = (load_checkpoint(each / "last.pth") for each in (folder, whole))
    for part in ("model", "ema"):
        for name, tensor in theirs[part].items():
            assert torch.equal(ours[part][name], tensor), name


def without_gaps(folder: Path) -> list[dict[str, str]]:
    return [{name: text for name, text in row.items() if text} for row in read_rows(folder / "metrics.csv")]


def rows_of(folder: Path) -> list[list[Any]]:
    rows = []
    for row in without_gaps(folder):
        kind, iteration, _ = row.pop("kind"), int(row.pop("iteration")), row.pop("epoch")
        rows.append([iteration, {f"{kind}/{name}": float(text) for name, text in row.items()}])
    return rows


SCRIPT = str(ROOT / "tests" / "support" / "signal_runs.py")
OFTEN = ("train.save_seconds=0", "train.epochs=3")  # 9 steps, each followed by a save
NEVER = "kill999"


def first(data: Path, folder: Path, *updates: str) -> list[str]:
    given = [*tiny_updates(data), "train.loggers=[tensorboard]", *OFTEN, *updates]
    return ["train", "-c", str(NANO), "--device", "cpu", "--output-dir", str(folder), "--overwrite", "-u", *given]


def going_on(folder: Path) -> list[str]:
    """Whatever is there to go on with, which is a state from the first save on."""
    return ["train", "-r", str(folder / "last.pth"), "--device", "cpu"]


def at_step(trainer: Trainer, iteration: int, action: Callable[[], None]) -> None:
    step = trainer._step

    def acting(batches):  # type: ignore[no-untyped-def]
        if trainer.state.iteration == iteration:
            action()
        return step(batches)

    trainer._step = acting  # type: ignore[method-assign]


LAYER = "backbone.stages.1.0.conv1.conv"
