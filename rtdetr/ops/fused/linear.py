"""A linear layer with an optional ReLU, whose backward pass sums the gradient of the bias by a kernel of ours."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

ALIGNMENT = 8  # channels of the result


def linear(x: Tensor, weight: Tensor, bias: Tensor, relu: bool = False) -> Tensor:
    """x @ weight.T + bias, (..., C'), or its ReLU. x: (..., C); weight: (C', C); bias: (C',)."""
    if why_not(x, weight, bias) is None:
        return FusedLinear.apply(x, weight, bias, relu)
    y = F.linear(x, weight, bias)
    return F.relu(y) if relu else y


def why_not(x: Tensor, weight: Tensor, bias: Tensor) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    if not bias.requires_grad:
        return "the kernel is for the gradient, and there is none"
    if (reason := why_not_fused(x)) is not None:
        return reason
    if not x.dtype == weight.dtype == bias.dtype or x.dtype == torch.float64:
        return "the kernel needs tensors of one type, of 16 or 32 bits; autocast would cast them"
    if torch.is_autocast_enabled("cuda") and x.dtype != torch.get_autocast_dtype("cuda"):
        return "autocast would cast them"
    return f"the kernel needs channels by {ALIGNMENT}" if weight.shape[0] % ALIGNMENT else None


class FusedLinear(torch.autograd.Function):
    """See `linear`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, relu: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = torch._addmm_activation(bias, rows, weight.t()) if relu else torch.addmm(bias, rows, weight.t())
        ctx.save_for_backward(rows, weight, y if relu else None)
        return y.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, y = ctx.saved_tensors
        above = grad.reshape(-1, grad.shape[-1]).contiguous()
        sums, below = torch.ops.rtdetr.column_sums(above, y)
        if y is not None:
            above = below
        need_x, need_weight, *_ = ctx.needs_input_grad
        by_x = (above @ weight).view(*grad.shape[:-1], -1) if need_x else None
        return by_x, above.t() @ rows if need_weight else None, sums[0].to(weight.dtype), None
