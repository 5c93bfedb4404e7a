"""Losses of matched boxes and their gradients by one kernel, while torch needs a hundred small ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

AXES = 4  # kBoxAxes


def box_losses(boxes: Tensor, targets: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L1 distance, 1 - GIoU and, without gradient, IoU, each (K, G, B, Q), between boxes (K, G, B, Q, 4) of queries and
    their matched targets; 0 for unmatched queries.

    targets: (B, M, 4); index: (K, G, B, Q) int64 of the target in its image, or -1. Boxes are cxcywh, float32. The
    twin is losses.criterion._box_losses, whose L1 distance is not summed over the four numbers.
    """
    return BoxLosses.apply(boxes, targets, index)


def why_not(boxes: Tensor) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    reason = why_not_fused(boxes)
    if reason is None and (boxes.dtype != torch.float32 or boxes.dim() != AXES + 1 or boxes.stride(-1) != 1):
        return "the kernel takes float32 boxes (K, G, B, Q, 4), the four numbers side by side"
    return reason


class BoxLosses(torch.autograd.Function):
    """See `box_losses`."""

    @staticmethod
    def forward(ctx: Any, boxes: Tensor, targets: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        l1, overlap, scores, *gradients = torch.ops.rtdetr.box_losses(boxes, targets, index)
        ctx.save_for_backward(*gradients)
        ctx.mark_non_differentiable(scores)
        return l1, overlap, scores

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_l1: Tensor, by_overlap: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        l1, overlap = ctx.saved_tensors
        return (l1 * by_l1[..., None]).addcmul_(overlap, by_overlap[..., None]), None, None
