"""Loss terms as pure functions. They do not reduce: the caller masks, sums and normalises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from rtdetr.ops.fused import varifocal

ALPHA, GAMMA = 0.75, 2.0  # of the varifocal loss: weight of the background, and its power


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x unchanged if it is float32 or float64, else converted to float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def varifocal_loss(logits: Tensor, labels: Tensor, scores: Tensor, matched: Tensor, bounded: bool = False) -> Tensor:
    """Varifocal loss (K, ...), summed over classes, of logits (K, ..., C). Where matched (K, ...), the class labels
    (K, ...) int64 has the target scores (K, ...); all other classes are background.

    The loss of a class is the binary cross entropy of its logit and score, times the score if matched, else times ALPHA
    * sigmoid(logit) ** GAMMA, whose gradient counts (official repo: ppdet/modeling/transformers/utils.py:496-508).
    bounded: logarithms end at -100, as of probabilities (official repo: ppdet/modeling/heads/ppyoloe_head.py:299-306).
    """
    if varifocal.why_not(logits, GAMMA) is None:
        return varifocal.Varifocal.apply(logits, labels, scores, matched, bounded, ALPHA)
    is_class = matched[..., None] & (torch.arange(logits.shape[-1], device=logits.device) == labels[..., None])
    score, p = is_class * scores[..., None], logits.sigmoid()
    weight = torch.where(is_class, score, ALPHA * p.pow(GAMMA))
    found, missed = _entropy(-logits, p, bounded), _entropy(logits, 1 - p, bounded)
    return (weight * (score * found + (1 - score) * missed)).sum(-1)


def _entropy(x: Tensor, rest: Tensor, bounded: bool) -> Tensor:
    """-log(rest), with rest = 1 - sigmoid(x). bounded: at most 100, with finite gradients."""
    return -rest.clamp(min=1e-44).log().clamp(min=-100.0) if bounded else F.softplus(x, threshold=40.0)


def focal_class_cost(logits: Tensor, alpha: float = 0.25, gamma: float = 2.0, eps: float = 1e-8) -> Tensor:
    """Matching cost of each class, shaped like logits: focal loss as a positive minus focal loss as a negative
    (official repo: ppdet/modeling/transformers/matchers.py)."""
    p = logits.sigmoid()
    negative = (1 - alpha) * p.pow(gamma) * -(1 - p + eps).log()
    positive = alpha * (1 - p).pow(gamma) * -(p + eps).log()
    return positive - negative


def distribution_focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy (...) of logits (..., bins) against the two bins around target (...), each weighted by its
    proximity to the target, which is in bins and must be in [0, bins - 1)."""
    log_probabilities = logits.log_softmax(dim=-1)
    lower = target.floor()
    upper_weight = target - lower
    bins = torch.stack((lower, lower + 1), dim=-1).long()
    at_lower, at_upper = log_probabilities.gather(-1, bins).unbind(-1)
    return -(1 - upper_weight) * at_lower - upper_weight * at_upper


_without_averaging = False


@contextmanager
def without_averaging() -> Iterator[None]:
    """Context manager: inside, losses do not use other processes, which may run out of memory in a memory estimate."""
    global _without_averaging
    _without_averaging = True
    try:
        yield
    finally:
        _without_averaging = False


def mean_over_processes(x: Tensor) -> Tensor:
    """Mean of x over all processes of torch.distributed; x itself if there is one process. No gradient."""
    x = x.detach()
    if _without_averaging or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return x
    total = x.clone()
    torch.distributed.all_reduce(total)
    return total / torch.distributed.get_world_size()
