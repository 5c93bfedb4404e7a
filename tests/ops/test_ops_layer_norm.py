"""Layer norm with the sum before it by the kernels, against torch in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from rtdetr.ops.fused.layer_norm import sum_norm, why_not

# Of the largest number, as in test_ops_batch_norm.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def test_without_kernels_it_is_sum_and_norm() -> None:
    x, plus, weight, bias = torch.randn(2, 5, 16), torch.randn(2, 5, 16), torch.randn(16), torch.randn(16)
    assert why_not(x, weight) is not None
    assert torch.equal(sum_norm(x, plus, weight, bias, 1e-5), F.layer_norm(x + plus, (16,), weight, bias, 1e-5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for (number, dim), with_plus in itertools.product(
        ((7, 256), (9800, 256), (1000, 8), (333, 512), (50, 120)), (0, 1)
    ):
        x = (torch.randn(2, number, dim, device="cuda") * 2 + 1).to(dtype).requires_grad_()
        plus = torch.randn_like(x).requires_grad_() if with_plus else None
        weight, bias = (torch.randn(dim, device="cuda").requires_grad_() for _ in range(2))
        assert why_not(x, weight) is None
        y = sum_norm(x, plus, weight, bias, 1e-5)
        grad = torch.randn_like(y)
        y.backward(grad)
        total = (x if plus is None else x + plus).detach().double().requires_grad_()  # rounded as the kernel does
        exact = [each.detach().double().requires_grad_() for each in (weight, bias)]
        wanted = F.layer_norm(total, (dim,), *exact, 1e-5)
        wanted.backward(grad.double())
        pairs = [(y, wanted), (x.grad, total.grad), (weight.grad, exact[0].grad), (bias.grad, exact[1].grad)]
        if plus is not None:
            pairs.append((plus.grad, total.grad))
        for found, want in pairs:
            assert found is not None and want is not None
            assert (found.double() - want).abs().max() < TOLERANCE[dtype] * want.abs().max(), (number, dim, with_plus)
