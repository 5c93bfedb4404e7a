"""What the tests of the op share: inputs, a naive loop that shares no code with the package, tolerances, devices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rtdetr.ops import Backend, why_not_compiled

Target = tuple[Backend, str]  # and a device
Shapes = tuple[tuple[int, int], ...]
PYRAMID: Shapes = ((80, 80), (40, 40), (20, 20))  # of a 640 x 640 image
LOW = (torch.float16, torch.bfloat16)

# Relative by norm: |difference| / |expected|, against float64 of the same rounded inputs. Worst seen on the cpu backend
# with D of 1, 5, 8, 32, 37 and 64: float64 3.1e-16, float32 2.5e-7, float16 2.3e-4, bfloat16 1.8e-3 (the last two are
# the rounding of the results). The limits are those the project asks for.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 5e-4, torch.bfloat16: 4e-3}
NAMES = ("output", "grad_value", "grad_locations", "grad_weights")

BACKENDS = [
    pytest.param(("torch", "cpu"), id="torch-cpu"),
    pytest.param(("cpu", "cpu"), id="cpu"),
    pytest.param(("torch", "cuda"), id="torch-cuda", marks=pytest.mark.gpu),
    pytest.param(("cuda", "cuda"), id="cuda", marks=pytest.mark.gpu),
]


def require(backend: str, device: str) -> None:
    """Skip, with the reason, what cannot run on this machine."""
    if backend != "torch" and (reason := why_not_compiled(torch.empty(0, device=device))):
        pytest.skip(reason)


@dataclass(frozen=True)
class Inputs:
    """value (B, S, H, D), locations (B, Q, H, L, P, 2), weights (B, Q, H, L, P), grad (B, Q, H * D), and the maps."""

    value: Tensor
    locations: Tensor
    weights: Tensor
    grad: Tensor
    shapes: Shapes

    def to(self, device: str) -> Inputs:
        tensors = (t.to(device) for t in (self.value, self.locations, self.weights, self.grad))
        return Inputs(*tensors, self.shapes)

    def double(self) -> Inputs:
        return Inputs(*(t.double() for t in (self.value, self.locations, self.weights, self.grad)), self.shapes)

    def leaves(self) -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in (self.value, self.locations, self.weights)]


def make_inputs(
    shapes: Shapes, batch: int, queries: int, heads: int, channels: int, points: int, *,
    dtype: torch.dtype = torch.float32, spread: float = 1.5, seed: int = 0,
) -> Inputs:  # fmt: skip
    """Random inputs; locations fill [0.5 - spread / 2, 0.5 + spread / 2], so part of them lies outside the maps, and
    none on the border of a cell."""
    generator = torch.Generator().manual_seed(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    cells, levels = sum(h * w for h, w in shapes), len(shapes)
    value = torch.randn(batch, cells, heads, channels, generator=generator, dtype=torch.float64).to(dtype)
    unit = torch.rand(batch, queries, heads, levels, points, 2, generator=generator, dtype=torch.float64)
    logits = torch.randn(batch, queries, heads, levels * points, generator=generator, dtype=torch.float64)
    weights = logits.softmax(-1).unflatten(-1, (levels, points)).to(compute)
    grad = torch.randn(batch, queries, heads * channels, generator=generator, dtype=torch.float64).to(dtype)
    return Inputs(value, off_borders((unit - 0.5) * spread + 0.5, shapes).to(compute), weights, grad, shapes)


def off_borders(locations: Tensor, shapes: Shapes) -> Tensor:
    """Move points away from the borders of cells, where the location gradient jumps and rounding decides."""
    size = torch.tensor([[w, h] for h, w in shapes], device=locations.device, dtype=locations.dtype).view(-1, 1, 2)
    pixel = locations * size - 0.5
    nearest = pixel.round()
    return torch.where((pixel - nearest).abs() < 1e-3, nearest + 0.01, pixel).add(0.5).div(size)


def misaligned(tensor: Tensor) -> Tensor:
    """A contiguous copy that begins one element after an aligned address."""
    room = tensor.new_empty(tensor.numel() + 1)
    return room[1:].view(tensor.shape).copy_(tensor.detach())


def naive(x: Inputs) -> tuple[Tensor, ...]:
    """Output and gradients of value, locations and weights in float64: every point against every cell of its map, with
    the tent function max(0, 1 - |distance|) in both directions."""
    value, locations, weights, grad = (t.double().numpy() for t in (x.value, x.locations, x.weights, x.grad))
    batch, _, heads, channels = value.shape
    queries, levels, points = locations.shape[1], locations.shape[3], locations.shape[4]
    output = np.zeros((batch, queries, heads, channels))
    grad = grad.reshape(output.shape)
    grads = [np.zeros_like(a) for a in (value, locations, weights)]
    starts = np.cumsum([0] + [h * w for h, w in x.shapes])
    for b, q, h, lev, p in np.ndindex(batch, queries, heads, levels, points):
        height, width = x.shapes[lev]
        cells = value[b, starts[lev] : starts[lev + 1], h].reshape(height, width, channels)
        px = locations[b, q, h, lev, p, 0] * width - 0.5
        py = locations[b, q, h, lev, p, 1] * height - 0.5
        columns, rows = np.arange(width), np.arange(height)
        tent_x, tent_y = np.maximum(0, 1 - abs(columns - px)), np.maximum(0, 1 - abs(rows - py))
        slope_x = (columns == np.floor(px) + 1) * 1.0 - (columns == np.floor(px))
        slope_y = (rows == np.floor(py) + 1) * 1.0 - (rows == np.floor(py))
        weight, g = weights[b, q, h, lev, p], grad[b, q, h]
        output[b, q, h] += weight * np.einsum("i,j,ijc->c", tent_y, tent_x, cells)
        patch = weight * np.einsum("i,j,c->ijc", tent_y, tent_x, g).reshape(-1, channels)
        grads[0][b, starts[lev] : starts[lev + 1], h] += patch
        grads[1][b, q, h, lev, p, 0] = weight * width * np.einsum("i,j,ijc,c->", tent_y, slope_x, cells, g)
        grads[1][b, q, h, lev, p, 1] = weight * height * np.einsum("i,j,ijc,c->", slope_y, tent_x, cells, g)
        grads[2][b, q, h, lev, p] = np.einsum("i,j,ijc,c->", tent_y, tent_x, cells, g)
    return tuple(torch.from_numpy(a) for a in (output.reshape(batch, queries, -1), *grads))


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| by the Euclidean norm."""
    expected = expected.double().cpu()
    return ((actual.detach().double().cpu() - expected).norm() / expected.norm().clamp_min(1e-300)).item()
