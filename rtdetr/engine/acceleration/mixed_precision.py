"""Casts the weights that autocast would cast in one kernel instead of one each, and casts their gradients back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from rtdetr.config import Precision
from rtdetr.engine.step import BatchPosition, Losses, Step
from rtdetr.types import Targets

# Linear layers that stay in their own type, see models.layers.in_weight_type.
EXACT = re.compile(r"score_head|box_head")

SIXTEEN_BITS = {"bf16": torch.bfloat16, "fp16": torch.float16}


def precision_on(device: torch.device, precision: Precision) -> Precision:
    """The precision, with auto replaced by the device's default."""
    if precision != "auto":
        return precision
    return "bf16" if device.type == "cuda" else "fp32"


def autocast_type(device: torch.device, precision: Precision) -> torch.dtype | None:
    """The type to which autocast casts; None: float32 everywhere."""
    return SIXTEEN_BITS.get(precision_on(device, precision))


def cast_by_autocast(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of `model`, by name, that autocast casts to 16 bits."""
    return {
        f"{prefix}.{name}": parameter
        for prefix, module in model.named_modules()
        if isinstance(module, nn.Conv2d | nn.MultiheadAttention)
        or (isinstance(module, nn.Linear) and not EXACT.search(prefix))
        for name, parameter in module.named_parameters(recurse=False)
    }


@torch.no_grad()
def copies_in(dtype: torch.dtype, model: nn.Module) -> dict[nn.Parameter, Tensor]:
    """Copies of the parameters that autocast would cast. Each copy gathers its own gradient, so the backward pass can
    release it early instead of keeping all to its end."""
    parameters = [*dict.fromkeys(cast_by_autocast(model).values())]
    copies = _cast(parameters, [dtype] * len(parameters))
    return {each: copy.requires_grad_(each.requires_grad) for each, copy in zip(parameters, copies)}


def call_cast(model: nn.Module, copies: dict[nn.Parameter, Tensor], *arguments: Any) -> Any:
    """Calls model(*arguments) with `copies` in place of parameters."""
    weights = {name: copies[each] for name, each in cast_by_autocast(model).items()}
    return functional_call(model, weights, arguments)


def cast_together(
    step: Callable[..., Losses], model: nn.Module, dtype: torch.dtype, gather: Callable[[Sequence[Tensor]], None]
) -> Step:
    """Wraps `step(model, images, targets, position)` so that the weights of the model are cast beforehand.

    gather: moves the gradients of the copies, or of uncast parameters, to the parameters.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def cast(images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
        copies = copies_in(dtype, model)
        losses = step(partial(call_cast, model, copies), images, targets, position)
        gather([copies.get(each, each) for each in parameters])
        return losses

    return cast


def hand_over(parameters: Sequence[nn.Parameter], leaves: Sequence[Tensor]) -> None:
    """Adds the gradients of leaves (copies of parameters, or parameters) to those of the parameters."""
    pairs = [(each, leaf.grad) for each, leaf in zip(parameters, leaves) if leaf is not each and leaf.grad is not None]
    found = _cast([gradient for _, gradient in pairs], [each.dtype for each, _ in pairs])
    for (each, _), gradient in zip(pairs, found):
        each.grad = gradient if each.grad is None else each.grad + gradient


def _cast(tensors: Sequence[Tensor], dtypes: list[torch.dtype]) -> list[Tensor]:
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes)]
    if copies:
        torch._foreach_copy_(copies, [*tensors])
    return copies
