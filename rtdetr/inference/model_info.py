"""Description of a model: size, work per image, classes and origin."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from rtdetr.config import Config
from rtdetr.data.classes import Classes, some
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.digest import num_bytes
from rtdetr.weights.huggingface_names import TRAINING_ONLY
from rtdetr.wording import counted


class ModelInfo(NamedTuple):
    """Description of a model, printed as lines."""

    name: str  # of the config
    parameters: int  # used in detection
    training_parameters: int  # of the parts used in training only
    gflops: float  # per image of `size`; a multiply-add counts as 2, as in papers
    size: tuple[int, int]  # (h, w) of the network's input
    classes: tuple[str, ...]
    weights: Path | None  # None: random weights
    megabytes: float | None  # of that file
    source: dict[str, str]  # licence, original file and hashes, if known

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
    """Counts on fake tensors: an exported file has no parameters to count."""
    with FakeTensorMode():
        model = build_model(cfg.model, len(classes)).eval()
        # Weights and biases, also those of frozen norms, which are buffers.
        counts = {key: each.numel() for key, each in model.state_dict().items() if key.endswith(("weight", "bias"))}
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(torch.empty(1, 3, *cfg.data.image_size))
    parts = (*TRAINING_ONLY, *(f"decoder.score_heads.{i}." for i in range(cfg.model.decoder.num_layers - 1)))
    training = sum(number for name, number in counts.items() if name.startswith(parts))
    work = sum(counts.values()) - training, training, counter.get_total_flops() / 1e9
    megabytes = None if weights is None else num_bytes(weights) / 1e6
    return ModelInfo(cfg.name, *work, cfg.data.image_size, classes.names, weights, megabytes, dict(source or {}))
