"""Weights in the 16-bit type of autocast, all by one kernel where it takes one for each, and their gradients back."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

# Linear layers that stay in their own type, see models.layers.in_weight_type.
EXACT = re.compile(r"score_head|box_head")


class CastTogether(torch.autograd.Function):
    """Copies of tensors in another type."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return tuple(_cast(list(tensors), [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        found = [(gradient, dtype) for gradient, dtype in zip(gradients, ctx.dtypes) if gradient is not None]
        back = iter(_cast([gradient for gradient, _ in found], [dtype for _, dtype in found]))
        return None, *(None if gradient is None else next(back) for gradient in gradients)


def _cast(tensors: list[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes)]
    if copies:
        torch._foreach_copy_(copies, tensors)
    return copies


def cast_by_autocast(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters of `model` by name that autocast makes 16 bits of."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.MultiheadAttention)
        or (isinstance(module, nn.Linear) and not EXACT.search(prefix))
        for name, parameter in module.named_parameters(recurse=False)
    }


def call_cast(model: nn.Module, dtype: torch.dtype, *arguments: Any) -> Any:
    """model(*arguments) under autocast to `dtype`, in whose place the weights have been cast already."""
    weights = cast_by_autocast(model)
    return functional_call(model, dict(zip(weights, CastTogether.apply(dtype, *weights.values()))), arguments)
