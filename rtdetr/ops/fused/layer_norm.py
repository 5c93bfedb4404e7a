"""Layer norm of a sum of tokens, in one pass over memory forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

ALIGNMENT, MAX_BYTES = 8, 2048  # channels; of a token: kMaxTokenBytes of csrc/layer_norm.h


def sum_norm(x: Tensor, plus: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Layer norm (..., dim) of x + plus, (..., dim) both, in the type of x; weight, bias: (dim,). Mean and deviation
    are computed in float32."""
    with torch.autocast(x.device.type, enabled=False):
        if why_not(x, weight) is None:
            return SumNorm.apply(x, plus, weight, bias, eps)
        x = x if plus is None else x + plus
        return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def why_not(x: Tensor, weight: Tensor) -> str | None:
    """None if the kernels can run, else a sentence with the reason."""
    if (reason := why_not_fused(x)) is not None:
        return reason
    if x.dtype == torch.float64 or weight.dtype != torch.float32 or x.shape[-1] % ALIGNMENT:
        return f"the kernels need 16 or 32 bits, weights of 32, and channels by {ALIGNMENT}"
    if x.shape[-1] * x.element_size() > MAX_BYTES or not x.numel():
        return f"the kernels take tokens of up to {MAX_BYTES} bytes"
    return None


class SumNorm(torch.autograd.Function):
    """See `sum_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plus: Tensor | None, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        added = None if plus is None else plus.to(x.dtype).reshape(rows.shape).contiguous()
        y, total = torch.ops.rtdetr.token_norm(rows, added, weight, bias, eps)
        ctx.save_for_backward(rows if plus is None else total, weight, bias)
        ctx.eps = eps
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, bias = ctx.saved_tensors
        above = grad.reshape(rows.shape).contiguous()
        by_x, sums = torch.ops.rtdetr.token_norm_backward(rows, above, weight, bias, ctx.eps)
        by_x = by_x.view(grad.shape)
        return by_x, by_x if ctx.needs_input_grad[1] else None, sums[1], sums[0], None
