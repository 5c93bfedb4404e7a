"""Keeps all gradients in one flat tensor, which processes average in one collective."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rtdetr.config import ConfigError
from rtdetr.engine import distributed
from rtdetr.engine.step import BatchPosition, Losses, Step
from rtdetr.types import Targets
from rtdetr.wording import counted

ALIGNMENT = 32  # elements to which each gradient is padded: fused kernels read several at a time


class GradientBuffer:
    """Flat buffer for the gradients of `parameters`, float32.

    They are averaged after the backward pass, not during it: in a CUDA graph, work on a second stream delays every
    memset and copy by more than it saves (1 ms of a step on two H200, where averaging takes .4).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        room = [-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters]
        self.parameters, self.flat = parameters, torch.zeros(sum(room), device=parameters[0].device)
        pairs = zip(self.flat.split(room), parameters)
        self.parts = [part.as_strided(parameter.shape, parameter.stride()) for part, parameter in pairs]

    def collect(self, leaves: Sequence[Tensor]) -> None:
        """Copies gradients into the buffer and sets `grad` of the parameters to its views. leaves: for each parameter,
        the tensor that holds its gradient (itself or a cast copy); a gradient may be None."""
        moves: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # one _foreach_copy_ per source dtype
        for parameter, part, leaf in zip(self.parameters, self.parts, leaves):
            gradient, leaf.grad = leaf.grad, None
            parameter.grad = None if gradient is None else part
            if gradient is not None:
                places, found = moves.setdefault(gradient.dtype, ([], []))
                places.append(part)
                found.append(gradient)
        for places, found in moves.values():
            torch._foreach_copy_(places, found)

    def behind(self, step: Step) -> Step:
        """Wraps a step so that its gradients are collected in the buffer."""

        def collected(images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
            losses = step(images, targets, position)
            self.collect(self.parameters)
            return losses

        return collected

    def average(self) -> None:
        """Averages the gradients over all processes. Raises ConfigError if a parameter has none."""
        missing = sum(parameter.grad is None for parameter in self.parameters)
        if missing:
            raise ConfigError(
                f"{counted(missing, 'parameter')} got no gradient; make the loss depend on every parameter, or freeze "
                "the others with requires_grad_(False)"
            )
        distributed.average(self.flat)
