"""Check the gradients of every backend at hand against numerical ones and against plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.ops import ms_deform_attn, why_not_compiled

SHAPES = ((6, 4), (3, 2))


def inputs(dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    value = torch.rand(1, 30, 2, 5, dtype=torch.float64)
    locations = torch.rand(1, 3, 2, 2, 2, 2, dtype=torch.float64)
    weights = torch.rand(1, 3, 2, 2, 2, dtype=torch.float64)
    points = torch.float64 if dtype == torch.float64 else torch.float32
    tensors = (value.to(device, dtype), locations.to(device, points), weights.to(device, points))
    return [t.requires_grad_() for t in tensors]


def main() -> None:
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        reason = why_not_compiled(torch.empty(0, device=device))
        if reason:
            print(f"{device}: {reason}")
            continue

        def attend(*t: Tensor, backend: str = device) -> Tensor:
            return ms_deform_attn(t[0], SHAPES, None, t[1], t[2], backend=backend)  # type: ignore[arg-type]

        torch.autograd.gradcheck(attend, inputs(torch.float64, device))
        print(f"{device}: numerical gradients agree")
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            low = inputs(dtype, device)
            exact = [t.detach().double().requires_grad_() for t in low]
            grads = torch.autograd.grad(attend(*low).sum(), low)
            expected = torch.autograd.grad(attend(*exact, backend="torch").sum(), exact)
            errors = [((a.double() - e).norm() / e.norm()).item() for a, e in zip(grads, expected)]
            print(f"{device}: {dtype!s:15} value, locations, weights off by", *(f"{e:.1e}" for e in errors))


if __name__ == "__main__":
    main()
