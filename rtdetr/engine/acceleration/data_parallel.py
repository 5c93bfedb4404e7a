"""Training step under DistributedDataParallel, which averages gradients during the backward pass."""

from __future__ import annotations

from contextlib import nullcontext

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rtdetr.engine.step import Losses, Part, Step
from rtdetr.types import Targets


class AveragedLast:
    """Wraps `step` so that gradients are averaged once per optimiser step, with its last batch."""

    def __init__(self, step: Step, model: DistributedDataParallel) -> None:
        self.step, self.model = step, model

    def __call__(self, images: Tensor, targets: Targets, part: Part) -> Losses:
        with nullcontext() if part.last else self.model.no_sync():
            return self.step(images, targets, part)
