"""Varifocal loss of matched queries and its gradient by a kernel, in one pass over the logits."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.ops.fused import why_not_fused

MAX_AXES, GAMMA = 5, 2.0  # the kernel's; kVarifocalAxes and the classes


def varifocal(
    logits: Tensor, labels: Tensor, scores: Tensor, matched: Tensor, bounded: bool, alpha: float
) -> tuple[Tensor, Tensor]:
    """Losses (...), summed over classes, and their gradient (..., C) by logits (..., C); see
    losses.functional.VarifocalOfMatches, whose code is the twin."""
    dense = (each.contiguous() for each in (labels, scores, matched))
    return torch.ops.rtdetr.varifocal(logits, *dense, bounded, alpha)


def why_not(logits: Tensor, gamma: float) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    if (reason := why_not_fused(logits)) is not None:
        return reason
    if logits.dtype != torch.float32 or logits.dim() > MAX_AXES or logits.stride(-1) != 1 or gamma != GAMMA:
        return f"the kernel takes float32, at most {MAX_AXES} axes, classes side by side, and gamma {GAMMA}"
    return None
