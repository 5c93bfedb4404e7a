"""Pooling after the stem: the kernels choose what torch chooses, of equal values too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rtdetr.ops.fused.max_pool import halve, why_not


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 32, 17, 13), (1, 8, 1, 1), (3, 64, 32, 30), (2, 16, 5, 2)])
def test_values_and_gradients_are_torchs(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, device="cuda").mul(3).round().to(dtype).contiguous(memory_format=torch.channels_last)
    mine, theirs = x.clone().requires_grad_(), x.contiguous().requires_grad_()
    assert why_not(mine) is None
    y, wanted = halve(mine), F.max_pool2d(theirs, 3, stride=2, padding=1)
    grad = torch.randn_like(wanted).mul(4).round()  # whole numbers, so that no order of a sum matters
    y.backward(grad)
    wanted.backward(grad)
    assert torch.equal(y, wanted)
    assert mine.grad is not None and theirs.grad is not None and torch.equal(mine.grad, theirs.grad)


@pytest.mark.gpu
def test_without_gradient() -> None:
    x = torch.randn(2, 16, 9, 6, device="cuda").contiguous(memory_format=torch.channels_last)
    assert why_not(x) is None
    assert torch.equal(halve(x), F.max_pool2d(x, 3, stride=2, padding=1))


@pytest.mark.gpu
def test_not_a_number_stays_one() -> None:
    x = torch.randn(1, 8, 6, 6, device="cuda").contiguous(memory_format=torch.channels_last)
    x[0, 2, 3, 3] = torch.nan
    assert torch.equal(halve(x.requires_grad_()).isnan(), F.max_pool2d(x, 3, stride=2, padding=1).isnan())


def test_without_kernels_it_is_torchs() -> None:
    x = torch.randn(1, 8, 7, 6, requires_grad=True)
    assert why_not(x) is not None
    assert torch.equal(halve(x), F.max_pool2d(x, 3, stride=2, padding=1))
