"""FLOPs of the compiled operators: importing this module registers them with `torch.utils.flop_counter`, which the rest
of the package does not import, as it imports Triton."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from rtdetr.ops import compiled

FORWARD = 8  # for each channel of each sampled point: four corners of multiply and add
BACKWARD = 40  # four corners times (dot product 2, its two slopes and blend 6, scatter 2)
# Operator: the argument whose first five sizes count the points, (B, Q, H, L, P, ...) or (B, A, P, N, L, ...).
POINTS = {"ms_deform_attn": 4, "ms_deform_attn_fused": 5, "deformable_aggregation": 5}


def _flops(per_channel: int, values: int, points: int, *shapes: Any, **_: Any) -> int:
    """FLOPs for the shapes of the arguments; values, points: which of them, values (..., channels)."""
    return prod(shapes[points][:5]) * shapes[values][-1] * per_channel


if compiled.WHY_NOT["cpu"] is None:
    for name, points in POINTS.items():
        operators = getattr(torch.ops.rtdetr, name), getattr(torch.ops.rtdetr, f"{name}_backward")
        register_flop_formula(operators[0])(partial(_flops, FORWARD, 0, points))
        register_flop_formula(operators[1])(partial(_flops, BACKWARD, 1, points + 1))  # the gradient comes first
