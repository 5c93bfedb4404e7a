"""Kernels over rows of channels load 16 bytes at a time; a contiguous view may begin anywhere."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ops_cases import misaligned
from torch import Tensor

from rtdetr.ops.fused import why_not_fused
from rtdetr.ops.fused.batch_norm import KINDS, NormActivation
from rtdetr.ops.fused.layer_norm import sum_norm
from rtdetr.ops.fused.linear import linear
from rtdetr.ops.fused.max_pool import halve


def _batch_norm(x: Tensor, plus: Tensor, weight: Tensor, bias: Tensor, activation: Callable[..., Tensor]) -> Tensor:
    maps = (x.permute(0, 3, 1, 2), weight, bias, plus.permute(0, 3, 1, 2))
    return NormActivation.apply(*maps, None, None, 0.1, 1e-5, KINDS[activation], False).permute(0, 2, 3, 1)


CALLS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "max_pool": lambda x, *_: halve(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1),
    "batch_norm_relu": lambda *tensors: _batch_norm(*tensors, F.relu),
    "batch_norm_silu": lambda *tensors: _batch_norm(*tensors, F.silu),
    "layer_norm": lambda *tensors: sum_norm(*tensors, 1e-5),
    "linear": lambda x, _, weight, bias: linear(x, weight.diag().to(x.dtype), bias.clone().to(x.dtype), relu=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_views_that_begin_anywhere_give_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    x, plus = (torch.randn(3, 5, 7, 16, device="cuda").to(dtype) for _ in range(2))
    weight, bias = (torch.randn(16, device="cuda") for _ in range(2))
    assert why_not_fused(x) is None

    def results(change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        leaves = [change(each).requires_grad_() for each in (x, plus, weight, bias)]
        y = CALLS[name](*leaves)
        grad = change(torch.linspace(-1, 1, y.numel(), device="cuda").to(dtype).view(y.shape))
        return [y, *torch.autograd.grad(y, leaves, grad, allow_unused=True)]

    for found, wanted in zip(results(misaligned), results(torch.clone), strict=True):
        assert (found is None) == (wanted is None)
        assert found is None or torch.equal(found, wanted)
