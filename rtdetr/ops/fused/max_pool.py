"""Max pooling after the stem, by kernels that save one byte per result for backward, while torch saves eight."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

ALIGNMENT = 8  # channels


def halve(x: Tensor) -> Tensor:
    """Largest of 3 x 3 cells in steps of 2, (B, C, ceil(H / 2), ceil(W / 2)) of maps (B, C, H, W)."""
    if why_not(x) is None:
        return Halve.apply(x)
    return F.max_pool2d(x, 3, stride=2, padding=1)


def why_not(x: Tensor) -> str | None:
    """None if the kernels can run, else a sentence with the reason."""
    if (reason := why_not_fused(x)) is not None:
        return reason
    if x.dtype == torch.float64 or x.shape[1] % ALIGNMENT or not x.is_contiguous(memory_format=torch.channels_last):
        return f"the kernels need 16 or 32 bits, and channels last, by {ALIGNMENT}"
    return None


class Halve(torch.autograd.Function):
    """See `halve`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y, place = torch.ops.rtdetr.max_pool(x.permute(0, 2, 3, 1))
        ctx.save_for_backward(place)
        ctx.size = x.shape[2:]
        return y.permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (place,) = ctx.saved_tensors
        above = grad.permute(0, 2, 3, 1).contiguous()
        by_x: Tensor = torch.ops.rtdetr.max_pool_backward(above, place, *ctx.size)
        return by_x.permute(0, 3, 1, 2)
