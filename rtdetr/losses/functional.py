"""Loss terms as pure functions. They do not reduce: the caller masks, sums and normalises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import varifocal

ALPHA, GAMMA = 0.75, 2.0  # of the varifocal loss: weight of the background, and its power


def at_least_float32(x: Tensor) -> Tensor:
    """Returns x unchanged if it is float32 or float64, else converted to float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class VarifocalOfMatches(torch.autograd.Function):
    """Varifocal loss (K, ...), summed over classes, of logits (K, ..., C). Where matched (K, ...), the class labels
    (K, ...) int64 has the target scores (K, ...); all other classes are background.

    The loss of a class is the binary cross entropy of its logit and score, times the score if matched, else times ALPHA
    * sigmoid(logit) ** GAMMA, whose gradient counts (official repo: ppdet/modeling/transformers/utils.py:496-508).
    bounded: logarithms end at -100, as of probabilities (official repo: ppdet/modeling/heads/ppyoloe_head.py:299-306).

    The forward pass also computes the gradient and saves nothing else: a tenth of what autograd would save for the
    largest tensors of a step. Computed by one kernel, or by torch for one entry of the first axis at a time.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, labels: Tensor, scores: Tensor, matched: Tensor, bounded: bool = False
    ) -> Tensor:
        if varifocal.why_not(logits, GAMMA) is None:
            sums, gradient = varifocal.varifocal(logits, labels, scores, matched, bounded, ALPHA)
            ctx.save_for_backward(gradient)
            return sums
        gradient, losses = torch.empty_like(logits), []
        for x, slope, *match in zip(logits, gradient, labels, scores, matched):
            label, score, hit = (each[..., None] for each in match)
            p = x.sigmoid()
            rest = 1 - p
            miss, miss_slope = _entropy(x, p, rest, bounded)
            weight = p.pow(GAMMA).mul_(ALPHA)
            slope.copy_(rest.mul_(miss).mul_(GAMMA).add_(miss_slope).mul_(weight))
            x_hit, p_hit, miss_hit, miss_slope_hit = (t.gather(-1, label) for t in (x, p, miss, miss_slope))
            found, found_slope = _entropy(-x_hit, 1 - p_hit, p_hit, bounded)
            wanted = score * (score * found + (1 - score) * miss_hit)
            wanted_slope = score * ((1 - score) * miss_slope_hit - score * found_slope)
            slope.scatter_(-1, label, torch.where(hit, wanted_slope, slope.gather(-1, label)))
            loss = miss.mul_(weight)
            losses.append(loss.scatter_(-1, label, torch.where(hit, wanted, loss.gather(-1, label))).sum(-1))
        ctx.save_for_backward(gradient)
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_output[..., None], *[None] * 4)


def _entropy(x: Tensor, p: Tensor, rest: Tensor, bounded: bool) -> tuple[Tensor, Tensor]:
    """-log(rest), with p = sigmoid(x) and rest = 1 - p, and its derivative by x. bounded: -log is at most 100."""
    if not bounded:
        return F.softplus(x, threshold=40.0), p
    value = rest.log().neg_().clamp_(max=100.0)
    return value, p * (value < 100.0)


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
