"""Multi-scale deformable attention in plain PyTorch: differentiable, any device, exportable to ONNX as GridSample.

Letters: B batch, S cells of all levels, H heads, D channels per head, Q queries, L levels, P points per level.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Shapes = Sequence[tuple[int, int]]


def compute_dtype(value: Tensor) -> torch.dtype:
    """Type of locations, weights and accumulation: float64 for float64 values, float32 for every other type."""
    return torch.float64 if value.dtype == torch.float64 else torch.float32


def ms_deform_attn_reference(value: Tensor, shapes: Shapes, locations: Tensor, weights: Tensor) -> Tensor:
    """Return (B, Q, H * D): the weighted sum of bilinear samples of every level, zero outside the maps.

    value:     (B, S, H, D) flattened feature pyramid, level after level, rows before columns
    shapes:    L pairs (height, width) of integers
    locations: (B, Q, H, L, P, 2) x before y, normalised: 0 and 1 are the outer edges of the map
    weights:   (B, Q, H, L, P)

    A cell is floor(location * size - 0.5), which also decides the one-sided location gradient at exact cell centres.
    """
    batch, _, heads, channels = value.shape
    queries = locations.shape[1]
    dtype = compute_dtype(value)
    if not torch.jit.is_tracing():  # while tracing, sizes are tensors
        check_sizes(shapes)
        if (cells := sum(h * w for h, w in shapes)) != value.shape[1]:
            raise ValueError(f"spatial_shapes: the levels hold {cells} cells, but value has {value.shape[1]}")
    maps = value.to(dtype).permute(0, 2, 3, 1).flatten(0, 1).split([h * w for h, w in shapes], dim=2)  # (B*H, D, h*w)
    # -1 and 2 are out of reach of any cell, so clamping changes no result; it only makes infinite locations finite.
    grid = (2 * locations.to(dtype).clamp(-1, 2) - 1).transpose(1, 2).flatten(0, 1)  # (B*H, Q, L, P, 2)
    samples = [
        F.grid_sample(
            level.unflatten(2, (h, w)), grid[:, :, i], mode="bilinear", padding_mode="zeros", align_corners=False
        )
        for i, (level, (h, w)) in enumerate(zip(maps, shapes, strict=True))
    ]  # L times (B*H, D, Q, P)
    weights = weights.to(dtype)
    if grid.is_cuda:  # on CUDA grid_sample treats NaN as outside
        weights = weights + (grid * 0).sum(-1).unflatten(0, (batch, heads)).transpose(1, 2)
    scale = weights.transpose(1, 2).flatten(0, 1).flatten(2).unsqueeze(1)  # (B*H, 1, Q, L*P)
    output = (torch.cat(samples, dim=3) * scale).sum(3)  # (B*H, D, Q)
    # contiguous, as from the other backends: a product of a transposed matrix sums in another order
    return output.reshape(batch, heads * channels, queries).transpose(1, 2).to(value.dtype).contiguous()


def check_sizes(shapes: Iterable[tuple[int, int]]) -> None:
    """Raises ValueError for heights and widths that are not positive."""
    for level, (h, w) in enumerate(shapes):
        if h <= 0 or w <= 0:
            raise ValueError(f"spatial_shapes: expected positive sizes, got ({h}, {w}) at level {level}")


def locations_from_offsets(reference: Tensor, offsets: Tensor, shapes: Shapes | Tensor, offset_scale: float) -> Tensor:
    """Return the normalised sampling locations (B, Q, H, L, P, 2) of raw offsets around boxes or points.

    reference: (B, Q, 1 or L, 4) boxes cxcywh normalised: location = xy + offset / P * wh * offset_scale
               (B, Q, 1 or L, 2) points xy normalised: location = xy + offset / (width, height) of the level
    offsets:   (B, Q, H, L, P, 2)
    shapes:    L pairs (height, width), or a tensor (L, 2)
    """
    dtype = compute_dtype(offsets)
    xy = reference[:, :, None, :, None, :2].to(dtype)  # (B, Q, 1, 1 or L, 1, 2)
    if reference.shape[-1] == 4:
        step = reference[:, :, None, :, None, 2:].to(dtype) * (offset_scale / max(offsets.shape[4], 1))
    elif isinstance(shapes, Tensor):
        step = 1 / shapes.to(offsets.device, dtype, non_blocking=True).flip(-1)[:, None]
    else:
        if not torch.jit.is_tracing():
            check_sizes(shapes)
        # Filled number by number: a tensor built from a list would be copied to the device and synchronise with it.
        sizes = [offsets.new_full((1,), 1 / size, dtype=dtype) for h, w in shapes for size in (w, h)]
        step = torch.cat(sizes).view(-1, 1, 2)
    return xy + offsets.to(dtype) * step


def softmax_weights(logits: Tensor, levels: int, points: int) -> Tensor:
    """Return (B, Q, H, L, P): the softmax of the logits (B, Q, H, L * P or L, P) over all points of a head, float32
    (float64 for float64 logits)."""
    flat = logits.reshape(*logits.shape[:3], levels * points)
    return flat.softmax(-1, dtype=compute_dtype(logits)).unflatten(-1, (levels, points))
