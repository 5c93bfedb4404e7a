"""What a model is: its size, its work per image, its classes, and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rtdetr.config import Config
from rtdetr.data.classes import Classes, some
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.wording import counted

TRAINING_PARTS = ("query_groups.", "dense_head.")


class ModelInfo(NamedTuple):
    """`print` shows it as lines."""

    name: str  # of the config
    parameters: int  # that detect
    training_parameters: int  # of the parts that are there for training alone
    gflops: float  # of one image of `size`, 2 for a multiplication with its addition, as papers count
    size: tuple[int, int]  # (h, w) of the network's input
    classes: tuple[str, ...]
    weights: Path | None  # None: random ones
    megabytes: float | None  # of that file
    source: dict[str, str]  # licence, original file and hashes, as far as they are known

    def __str__(self) -> str:
        where = f"{self.weights}, {self.megabytes:.1f} MB" if self.megabytes is not None else "random weights"
        height, width = self.size
        lines = [
            f"{self.name}: {self.parameters / 1e6:.2f} M parameters, {self.gflops:.1f} GFLOPs at {height} x {width}",
            f"for training only: {self.training_parameters / 1e6:.2f} M parameters",
            f"{counted(len(self.classes), 'class')}: {some(self.classes, 10)}",
            f"from {where}",
        ]
        return "\n".join([*lines, *(f"{key}: {value}" for key, value in self.source.items())])


def model_info(cfg: Config, classes: Classes, weights: Path | None, source: dict[str, str] | None) -> ModelInfo:
    """Counted on a model without numbers: an exported file has no parameters to look at."""
    with FakeTensorMode():
        model = build_model(cfg.model, len(classes)).eval()
        counts = {name: each.numel() for name, each in model.named_parameters()}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, *cfg.data.image_size))
    training = sum(number for name, number in counts.items() if name.startswith(TRAINING_PARTS))
    return ModelInfo(
        cfg.name,
        sum(counts.values()) - training,
        training,
        counter.get_total_flops() / 1e9,
        cfg.data.image_size,
        classes.names,
        weights,
        None if weights is None else _megabytes(weights),
        dict(source or {}),
    )


def _megabytes(path: Path) -> float:
    """Of a file, or of all in a folder."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    return sum(each.stat().st_size for each in files) / 1e6
