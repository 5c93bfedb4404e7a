"""Varifocal loss of matched queries and its gradient by a kernel, in one pass over the logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

MAX_AXES, GAMMA = 5, 2.0  # the kernel's; kVarifocalAxes and the classes


def why_not(logits: Tensor, gamma: float) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    if (reason := why_not_fused(logits)) is not None:
        return reason
    if logits.dtype != torch.float32 or logits.dim() > MAX_AXES or logits.stride(-1) != 1 or gamma != GAMMA:
        return f"the kernel takes float32, at most {MAX_AXES} axes, classes side by side, and gamma {GAMMA}"
    return None


class Varifocal(torch.autograd.Function):
    """See losses.functional.varifocal_loss, which has the twin. The forward pass also computes the gradient and saves
    nothing else: a tenth of what autograd would save for the largest tensors of a step."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, scores: Tensor, matched: Tensor, bounded: bool, alpha: float
    ) -> Tensor:
        dense = (each.contiguous() for each in (labels, scores, matched))
        sums, gradient = torch.ops.rtdetr.varifocal(logits, *dense, bounded, alpha)
        ctx.save_for_backward(gradient)
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * above[..., None], *[None] * 5)
