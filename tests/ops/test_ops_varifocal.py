"""The kernel of the varifocal loss against torch's twin on the processor."""

from __future__ import annotations

import pytest
import torch

from rtdetr.losses.functional import varifocal_loss
from rtdetr.ops.fused.varifocal import why_not


def test_where_the_kernel_cannot_run_torch_does() -> None:
    assert "needs a GPU" in str(why_not(torch.zeros(2, 3), 2.0))


@pytest.mark.gpu
@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("shape", [(1, 2, 9, 5), (3, 2, 4, 6, 80), (2, 1, 3, 7, 33), (1, 0, 3), (4, 1)])
def test_losses_and_gradients_are_those_of_torch(shape: tuple[int, ...], bounded: bool) -> None:
    torch.manual_seed(1)
    *rows, classes = shape
    logits = (3 * torch.randn(*rows, 3, classes)).clamp(-8, 8)  # 1 - sigmoid has few digits beyond
    logits[0] += 50 * logits[0].sign()  # where logarithms end
    logits = logits.select(-2, 1)  # rows do not lie side by side
    labels, matched = torch.randint(classes, tuple(rows)), torch.rand(*rows) < 0.4
    scores = torch.rand(*rows) * matched
    weight, found = torch.rand(*rows), []
    for device in ("cpu", "cuda"):
        x = logits.to(device).detach().requires_grad_()
        if device == "cuda":
            x = torch.stack([x] * 3, dim=-2).select(-2, 1).detach().requires_grad_()
            if why_not(x, 2.0) is not None:
                pytest.skip("no kernel")
        losses = varifocal_loss(x, labels.to(device), scores.to(device), matched.to(device), bounded)
        (gradient,) = torch.autograd.grad((losses * weight.to(device)).sum(), x)
        found.append((losses.detach().cpu(), gradient.cpu()))
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=3e-4 if bounded else 2e-5, atol=2e-6)
