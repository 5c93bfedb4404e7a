"""FLOPs of the compiled operators: importing this module registers them with `torch.utils.flop_counter`, which the rest
of the package does not import, as it imports Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from rtdetr.ops import compiled


def _flops(per_channel: int) -> Any:
    """FLOP formula: `per_channel` operations for each channel of each sampled point."""

    def formula(value_shape: Any, hw: Any, shapes: Any, starts: Any, points_shape: Any, *_: Any, **__: Any) -> int:
        batch, queries, heads, levels, points = points_shape[:5]
        return batch * queries * heads * levels * points * value_shape[3] * per_channel

    return formula


def _backward_flops(grad_shape: Any, *args: Any, **kwargs: Any) -> int:
    # Per channel: four corners times (dot product 2, its two slopes and blend 6, scatter 2).
    return int(_flops(40)(*args))


def _fused_flops(
    value_shape: Any, hw: Any, shapes: Any, starts: Any, reference_shape: Any, *rest: Any, **kw: Any
) -> int:
    return int(_flops(8)(value_shape, hw, shapes, starts, *rest))


def _fused_backward_flops(
    grad_shape: Any, value_shape: Any, hw: Any, shapes: Any, starts: Any, reference_shape: Any, *rest: Any, **kw: Any
) -> int:
    return int(_flops(40)(value_shape, hw, shapes, starts, *rest))


def _aggregation_flops(per_channel: int) -> Any:
    def formula(features_shape: Any, hw: Any, shapes: Any, starts: Any, *points: Any, **__: Any) -> int:
        batch, anchors, number, cameras, levels, _ = points[1]
        return batch * anchors * number * cameras * levels * features_shape[2] * per_channel

    return formula


def _aggregation_backward_flops(grad_shape: Any, *args: Any, **kwargs: Any) -> int:
    return int(_aggregation_flops(40)(*args))


if compiled.WHY_NOT["cpu"] is None:
    _ops = torch.ops.rtdetr
    register_flop_formula(_ops.ms_deform_attn)(_flops(8))  # four corners of multiply and add
    register_flop_formula(_ops.ms_deform_attn_backward)(_backward_flops)
    register_flop_formula(_ops.ms_deform_attn_fused)(_fused_flops)
    register_flop_formula(_ops.ms_deform_attn_fused_backward)(_fused_backward_flops)
    register_flop_formula(_ops.deformable_aggregation)(_aggregation_flops(8))
    register_flop_formula(_ops.deformable_aggregation_backward)(_aggregation_backward_flops)
