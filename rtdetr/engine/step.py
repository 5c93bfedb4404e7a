"""The training step without any fast path: a batch in, losses out, gradients in the parameters.

Its fast wrappers: rtdetr/engine/acceleration/accelerate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.losses.criterion import Criterion
from rtdetr.types import Targets, TrainingOutputs, as_floats

Model = Callable[[Tensor, Targets], TrainingOutputs]  # in train mode


class Part(NamedTuple):
    """The position of a batch in a run."""

    epoch: int = 0  # from 0
    group: Sequence[int] = ()  # boxes of each batch of an optimiser step that accumulates several, see Criterion
    last: bool = True  # of its optimiser step


BEGINNING = Part()


class Losses(NamedTuple):
    """Losses by name, in one tensor, which is copied to the host at once."""

    names: tuple[str, ...]
    values: Tensor  # (len(names),) float32


Step = Callable[[Tensor, Targets, Part], Losses]  # training_step of a model, or a wrapper of it


def training_step(
    model: Model,
    images: Tensor,
    targets: Targets,
    part: Part = BEGINNING,
    *,
    criterion: Criterion,
    dtype: torch.dtype | None = None,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Losses:
    """Losses of a batch; their gradients are added to those of the model's parameters.

    images: (B, 3, H, W) uint8, or floats in [0, 1]; dtype: autocast's, None: everything stays in float32; scale: maps
    the loss to the value from which the backward pass starts. Raises FloatingPointError if a CPU finds a non-finite
    prediction.
    """
    images = as_floats(images).to(dtype or torch.float32)
    with torch.autocast(images.device.type, dtype, enabled=dtype is not None):
        losses = criterion(model(images, targets), targets, part.epoch, part.group)
    share = max(1, len(part.group))
    scale(losses["loss"] / share).backward()
    return Losses(tuple(losses), torch.stack([value.detach().float() for value in losses.values()]) / share)
