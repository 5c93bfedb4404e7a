"""The plain training step: takes a batch, returns losses, and leaves gradients in the parameters.

Wrappers make it fast, see rtdetr/engine/acceleration/accelerate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.losses.criterion import Criterion
from rtdetr.types import Targets, TrainingOutputs, as_floats

Model = Callable[[Tensor, Targets], TrainingOutputs]  # in train mode


class BatchPosition(NamedTuple):
    """The position of a batch in a run."""

    epoch: int = 0  # from 0
    group: Sequence[int] = ()  # boxes per batch if the optimiser step accumulates several batches, see Criterion
    last: bool = True  # whether this is the last batch of its optimiser step


BEGINNING = BatchPosition()


class Losses(NamedTuple):
    """Named losses in one tensor, so that one copy takes them to the host."""

    names: tuple[str, ...]
    values: Tensor  # (len(names),) float32


Step = Callable[[Tensor, Targets, BatchPosition], Losses]  # training_step of a model, or a wrapper of it


def training_step(
    model: Model,
    images: Tensor,
    targets: Targets,
    position: BatchPosition = BEGINNING,
    *,
    criterion: Criterion,
    dtype: torch.dtype | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Losses:
    """Returns the losses of a batch and adds their gradients to those of the model's parameters.

    images: (B, 3, H, W) uint8, or floats in [0, 1]; dtype: of autocast, None for float32; scale: maps the loss to
    the value on which backward is called. Raises FloatingPointError if a prediction on a CPU is not finite.
    """
    images = as_floats(images).to(dtype or torch.float32)
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        losses = criterion(model(images, targets), targets, position.epoch, position.group)
    share = max(1, len(position.group))
    scale(losses["loss"] / share).backward()
    return Losses(tuple(losses), torch.stack([value.detach().float() for value in losses.values()]) / share)
