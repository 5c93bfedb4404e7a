"""Linear layers whose bias's gradient a kernel sums up, against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rtdetr.ops.fused.linear import linear, why_not

# Of the largest number, as in test_ops_batch_norm; float32 without TF32.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("relu", [False, True])
def test_without_the_kernel_it_is_torchs(relu: bool) -> None:
    x, weight, bias = torch.randn(2, 3, 8), torch.randn(16, 8), torch.randn(16, requires_grad=True)
    assert why_not(x, weight, bias) is not None
    y = F.linear(x, weight, bias)
    assert torch.equal(linear(x, weight, bias, relu), F.relu(y) if relu else y)


@pytest.mark.gpu
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_and_gradients(dtype: torch.dtype, relu: bool) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.manual_seed(0)
    for shape, out in (((2, 700, 256), 192), ((16, 30, 64), 1024), ((5, 8), 8), ((40000, 256), 80)):
        tensors = [torch.randn(size, device="cuda").to(dtype) for size in (shape, (out, shape[-1]), (out,))]
        tensors[1] /= shape[-1] ** 0.5
        mine = [each.clone().requires_grad_() for each in tensors]
        exact = [each.double().requires_grad_() for each in tensors]
        assert why_not(mine[0], mine[1], mine[2]) is None
        y, wanted = linear(mine[0], mine[1], mine[2], relu), F.linear(*exact)
        wanted = F.relu(wanted) if relu else wanted
        # A gradient that does not touch results near the ReLU's edge, where rounding decides.
        grad = torch.randn_like(y) * (wanted.abs() > 0.05)
        y.backward(grad)
        wanted.backward(grad.double())
        for found, want in ((y, wanted), *((a.grad, b.grad) for a, b in zip(mine, exact))):
            assert found is not None and want is not None
            assert (found.double() - want).abs().max() < TOLERANCE[dtype] * want.abs().max(), (shape, out)
