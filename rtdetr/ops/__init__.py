"""Multi-scale deformable attention: one call, backends `torch`, `cpu` and `cuda`, and `auto`, which selects one.

Letters: B batch, S cells of all levels, H heads, D channels per head, Q queries, L levels, P points per level.
"""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor

from rtdetr.ops.assignment import linear_assignment
from rtdetr.ops.backend import (
    BACKENDS,
    Backend,
    SpatialShapes,
    as_autocast,
    check_readable,
    check_tensors,
    is_pair,
    operator_levels,
    resolve_backend,
    run,
    why_not_compiled,
    without_autocast,
)
from rtdetr.ops.deformable_aggregation import DeformableFeatureAggregation, deformable_aggregation
from rtdetr.ops.reference import compute_dtype, locations_from_offsets, ms_deform_attn_reference, softmax_weights

__all__ = [
    "BACKENDS",
    "Backend",
    "DeformableFeatureAggregation",
    "MSDeformAttnFunction",
    "deformable_aggregation",
    "linear_assignment",
    "ms_deform_attn",
    "ms_deform_attn_fused",
    "resolve_backend",
    "why_not_compiled",
]


def ms_deform_attn(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    level_start_index: Tensor | None,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return (B, Q, H * D), of the type of `value`: weighted bilinear samples around every query.

    value:              (B, S, H, D) flattened feature pyramid: float32, float64, float16 or bfloat16
    spatial_shapes:     ((height, width), ...) of the L levels, or a tensor (L, 2)
    level_start_index:  (L,) first cell of each level, or None; the levels follow one another in any case
    sampling_locations: (B, Q, H, L, P, 2) x before y, normalised to [0, 1]; points outside sample zeros
    attention_weights:  (B, Q, H, L, P)
    backend:            auto, cuda, cpu or torch

    Locations, weights and accumulation are float32 (float64 for float64 values). Does not wait for the device, with one
    exception: the torch backend must read a `spatial_shapes` tensor on a device; pairs of integers avoid this.
    Raises ValueError if sizes do not match, RuntimeError if a named backend cannot run.
    """
    check_tensors(value=value, sampling_locations=sampling_locations, attention_weights=attention_weights)
    value = as_autocast(value)
    _check(value, spatial_shapes, sampling_locations, attention_weights)
    dtype = compute_dtype(value)
    locations, weights = sampling_locations.to(dtype), attention_weights.to(dtype)
    if resolve_backend(backend, value, _host_levels(spatial_shapes)) == "torch":
        return ms_deform_attn_reference(value, _host_shapes(spatial_shapes, value), locations, weights)
    levels = operator_levels(spatial_shapes, level_start_index, value)
    return run(torch.ops.rtdetr.ms_deform_attn, value, *levels, locations, weights)


def ms_deform_attn_fused(
    value: Tensor,
    spatial_shapes: SpatialShapes,
    reference: Tensor,
    offsets: Tensor,
    logits: Tensor,
    *,
    offset_scale: float = 0.5,
    backend: Backend = "auto",
) -> Tensor:
    """Return (B, Q, H * D) from an attention module's raw projections; computes softmax and locations itself.

    value, spatial_shapes, backend: as in `ms_deform_attn`
    reference: (B or 1, Q, 1 or L, 4) boxes cxcywh normalised: location = xy + offset / P * wh * offset_scale, or
               (B or 1, Q, 1 or L, 2) points xy normalised: location = xy + offset / (width, height) of the level
    offsets:   (B, Q, H, L, P, 2) raw output of the offset projection
    logits:    (B, Q, H, L, P) or (B, Q, H, L * P); the weights are their softmax over the L * P points of a head
    """
    check_tensors(value=value, reference=reference, offsets=offsets, logits=logits)
    value = as_autocast(value)
    _check_fused(spatial_shapes, reference, offsets, logits)
    batch, _, _, levels, points, _ = offsets.shape
    if reference.shape[0] != batch:
        reference = reference.expand(batch, -1, -1, -1)
    one_type = value.dtype == offsets.dtype == logits.dtype
    if one_type and resolve_backend(backend, value, _host_levels(spatial_shapes)) == "cuda":
        logits = logits.reshape(offsets.shape[:-1])
        reference = reference.to(compute_dtype(value))
        args = (*operator_levels(spatial_shapes, None, value), reference, offsets, logits, offset_scale)
        return run(torch.ops.rtdetr.ms_deform_attn_fused, value, *args)
    weights = softmax_weights(logits, levels, points)
    locations = locations_from_offsets(reference, offsets, spatial_shapes, offset_scale)
    return ms_deform_attn(value, spatial_shapes, None, locations, weights, backend=backend)


class MSDeformAttnFunction:
    """`apply` of Deformable DETR's and mmcv's autograd.Function; differentiable once."""

    @staticmethod
    def apply(
        value: Tensor,
        value_spatial_shapes: SpatialShapes,
        value_level_start_index: Tensor | None,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int = 64,
    ) -> Tensor:
        """Return (B, Q, H * D) of the type of `value`, also under autocast, as the extensions do.

        `im2col_step` is ignored; the batch need not be a multiple of it.
        """
        check_tensors(value=value)
        with without_autocast(value):
            return ms_deform_attn(
                value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights
            )


def _host_levels(spatial_shapes: SpatialShapes) -> int:
    """Number of levels whose sizes are integers on the host."""
    return 0 if isinstance(spatial_shapes, Tensor) else len(spatial_shapes)


def _host_shapes(spatial_shapes: SpatialShapes, value: Tensor) -> list[tuple[int, int]]:
    if not isinstance(spatial_shapes, Tensor):
        return [(h, w) for h, w in spatial_shapes]
    if value.is_meta and spatial_shapes.is_meta:  # no data: any sizes that fill value give the same shapes
        return [(1, 1)] * (len(spatial_shapes) - 1) + [(1, value.shape[1] - len(spatial_shapes) + 1)]
    return [(h, w) for h, w in spatial_shapes.tolist()]


def _check(value: Tensor, spatial_shapes: SpatialShapes, locations: Tensor, weights: Tensor) -> None:
    if value.dim() != 4:
        raise ValueError(f"value: expected 4 dimensions (B, S, H, D), got {tuple(value.shape)}")
    if not value.is_floating_point():
        raise ValueError(f"value: expected floating-point numbers, got {value.dtype}")
    batch, _, heads, _ = value.shape
    levels = _check_shapes(spatial_shapes, value.is_meta)
    expected = (batch, heads, levels, 2)
    if locations.dim() != 6 or tuple(locations.shape[i] for i in (0, 2, 3, 5)) != expected:
        raise ValueError(
            f"sampling_locations: expected (B, Q, H, L, P, 2) with B={batch}, H={heads}, L={levels},"
            f" got {tuple(locations.shape)}"
        )
    if weights.shape != locations.shape[:-1]:
        raise ValueError(
            f"attention_weights: expected {tuple(locations.shape[:-1])} to go with sampling_locations"
            f" {tuple(locations.shape)}, got {tuple(weights.shape)}"
        )


def _check_shapes(spatial_shapes: SpatialShapes, on_meta: bool) -> int:
    """Return the number of levels. on_meta: the values are on the meta device."""
    if isinstance(spatial_shapes, Tensor):
        check_readable("spatial_shapes", spatial_shapes, on_meta)
        if spatial_shapes.dim() != 2 or spatial_shapes.shape[1] != 2 or spatial_shapes.is_floating_point():
            got = f"{tuple(spatial_shapes.shape)} of {spatial_shapes.dtype}"
            raise ValueError(f"spatial_shapes: expected integers (L, 2), got {got}")
    elif not isinstance(spatial_shapes, Sized) or not all(map(is_pair, spatial_shapes)):
        raise ValueError(f"spatial_shapes: expected pairs of whole numbers (height, width), got {spatial_shapes}")
    if len(spatial_shapes) == 0:
        raise ValueError("spatial_shapes: expected at least one level, got none")
    return len(spatial_shapes)


def _check_fused(spatial_shapes: SpatialShapes, reference: Tensor, offsets: Tensor, logits: Tensor) -> None:
    levels = _check_shapes(spatial_shapes, offsets.is_meta)
    if offsets.dim() != 6 or offsets.shape[3] != levels or offsets.shape[5] != 2:
        raise ValueError(f"offsets: expected (B, Q, H, L, P, 2) with L={levels}, got {tuple(offsets.shape)}")
    batch, queries, heads, _, points, _ = offsets.shape
    if (
        reference.dim() != 4
        or reference.shape[0] not in (1, batch)
        or reference.shape[1] != queries
        or reference.shape[2] not in (1, levels)
        or reference.shape[3] not in (2, 4)
    ):
        raise ValueError(
            f"reference: expected (B or 1, Q, 1 or L, 2 or 4) with B={batch}, Q={queries}, L={levels}, got"
            f" {tuple(reference.shape)}"
        )
    flat = (batch, queries, heads, levels * points)
    if logits.shape != flat and logits.shape != offsets.shape[:5]:
        raise ValueError(f"logits: expected {flat} or {tuple(offsets.shape[:5])}, got {tuple(logits.shape)}")
