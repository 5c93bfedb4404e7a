"""The largest values of every row, by a kernel for rows of thousands of values if it can run, else by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.ops.fused import why_not_fused

MAX_ROW, MAX_K = 32 * 1024, 1024  # kMaxTopKRow and kMaxTopK of csrc/top_k.h


def top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest values (B, k) of every row of (B, N), largest first, and their places (B, k). No gradient.

    NaN counts as the largest. Among equal values the kernel takes the first, torch any.
    """
    if why_not(values, k) is None:
        return torch.ops.rtdetr.top_k(values, k)
    best, index = values.topk(k, dim=1)
    return best, index


def why_not(values: Tensor, k: int) -> str | None:
    """None if the kernel can run, else a sentence with the reason."""
    if (reason := why_not_fused(values, compiler_too=True)) is not None:
        return reason
    if values.dtype not in (torch.float32, torch.float16) or values.shape[1] > MAX_ROW or k > MAX_K:
        return f"the kernel takes float32 and float16, rows of {MAX_ROW} and {MAX_K} results"
    return "the kernel has no gradient" if values.requires_grad else None
