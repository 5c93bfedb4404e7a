"""Costs of matching every box with every query of its image, by one kernel, while torch needs ninety small ones."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtdetr.ops.fused import why_not_fused

MAX_IMAGES, MAX_SETS = 512, 65535  # kMaxCostImages and kMaxCostSets of csrc/matching_cost.h


def fused_matching_cost(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Sequence[int], weights: Sequence[float]
) -> Tensor:
    """Cost (K, G, T, Q) of every box of the batch, image after image, against the queries of its image.

    logits:  (K, G, B, Q, C); boxes: (K, G, B, Q, 4) cxcywh; both with any strides
    labels:  (B, M) int64; targets: (B, M, 4) cxcywh; each image's boxes first, then padding
    counts:  boxes of each image, T their sum; empty if the host does not know them: then T is B * M
    weights: of the class, L1 and GIoU terms

    Computed in float32, or in float64 if logits or boxes are float64. A label that is not a class costs NaN. No
    gradient. The twin is losses.matcher.plain_matching_cost.
    """
    wide = torch.float64 if torch.float64 in (logits.dtype, boxes.dtype) else torch.float32
    values = logits.double() if wide == torch.float64 else logits
    dense = labels.contiguous(), targets.to(wide).contiguous()
    return torch.ops.rtdetr.matching_cost(values, boxes.to(wide), *dense, list(counts), *weights)


def why_not(logits: Tensor, counts: Sequence[int]) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    reason = why_not_fused(logits, compiler_too=True)
    if reason is None and (len(counts) > MAX_IMAGES or logits.shape[0] * logits.shape[1] > MAX_SETS):
        return f"the kernel takes {MAX_IMAGES} images, and {MAX_SETS} layers and groups"
    return reason
