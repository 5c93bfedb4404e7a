"""Muon: orthogonalised momentum (Newton-Schulz) for matrices and convolutions; AdamW for the rest.

From random weights it learns in fewer steps than AdamW (docs/finetuning.md has the figures). After Keller Jordan,
kellerjordan.github.io/posts/muon, with the step size of Moonlight (arXiv 2502.16982), which matches that of AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

MOMENTUM = 0.95
LENGTH = 0.2  # RMS of a step relative to the learning rate; about that of AdamW
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # five iterations bring singular values from 0.003 up to between 0.7 and 1.2


class MuonAdamW(torch.optim.AdamW):
    """AdamW that updates the groups marked `muon` with Muon. Parameters of one shape are updated together.

    A tensor `found_inf` other than 0 turns the step into a no-op, as with the fused AdamW.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        unsound = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if not group.get("muon"):
                continue
            alike: dict[torch.Size, list[Tensor]] = {}
            for parameter in group["params"]:
                if parameter.grad is not None:
                    alike.setdefault(parameter.shape, []).append(parameter)
            for parameters in alike.values():
                self._orthogonal_step(parameters, group["lr"], group["weight_decay"], unsound)
        super().step()

    def _orthogonal_step(
        self, parameters: list[Tensor], lr: float, weight_decay: float, unsound: Tensor | None
    ) -> None:
        """Updates parameters of one shape. A convolution counts as a matrix with one row per output channel."""
        gradients = torch.stack([parameter.grad for parameter in parameters])  # type: ignore[misc]
        for parameter in parameters:
            if not self.state[parameter]:  # AdamW needs its step count when it loads a state
                self.state[parameter] |= {"step": torch.zeros(()), "momentum": torch.zeros_like(parameter)}
        buffers = [self.state[parameter]["momentum"] for parameter in parameters]
        momentum = torch.stack(buffers).lerp(gradients, 1 - MOMENTUM)
        update = orthogonal(gradients.lerp(momentum, MOMENTUM).flatten(2)).reshape_as(gradients)
        rows, columns = gradients.flatten(2).shape[1:]
        update = update * (LENGTH * max(rows, columns) ** 0.5) + weight_decay * torch.stack(parameters)
        if unsound is not None:
            momentum = torch.where(unsound > 0, torch.stack(buffers), momentum)
            update = torch.where(unsound > 0, 0, update)
        torch._foreach_copy_(buffers, momentum.unbind())
        torch._foreach_add_(parameters, update.unbind(), alpha=-lr)
        for parameter in parameters:
            parameter.grad = None  # AdamW then skips it


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """Approximates the nearest orthogonal matrices (N, m, n) to matrices (N, m, n) by Newton-Schulz iterations; in
    bfloat16 on a GPU only, as few CPUs multiply it."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / x.float().norm(dim=(1, 2), keepdim=True).clamp(min=1e-7).to(x.dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
