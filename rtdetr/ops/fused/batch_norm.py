"""Batch norm of a training step with the sum and the activation that follow it, in two passes over the map forwards and
two backwards, by kernels for maps with channels last. The map before the activation is not kept. In a deployed model,
one of the kernels adds a bias and applies SiLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rtdetr.ops.fused import why_not_fused

Activation = Callable[[Tensor], Tensor] | None
KINDS: dict[Activation, int] = {None: 0, F.relu: 1, F.silu: 2}  # enum Activation of csrc/batch_norm.h
ALIGNMENT, MAX_ELEMENT = 8, 4  # channels; bytes
TAIL = 4  # kStatisticsTail of csrc/batch_norm.h


def norm_activation(norm: nn.Module, x: Tensor, activation: Activation, plus: Tensor | None = None) -> Tensor:
    """activation(norm(x) + plus), (B, C, H, W), for x and plus (B, C, H, W); norm is any module."""
    if why_not(norm, x, activation) is None:
        assert isinstance(norm, nn.BatchNorm2d | nn.SyncBatchNorm)
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
        numbers = (norm.running_mean, norm.running_var, norm.momentum, norm.eps, KINDS[activation], _is_shared(norm))
        return NormActivation.apply(x, norm.weight, norm.bias, plus, *numbers)
    y = norm(x)
    y = y if plus is None else y + plus
    return y if activation is None else activation(y)


def why_not(norm: nn.Module, x: Tensor, activation: Activation) -> str | None:
    """None if the kernels can run, else a sentence with the reason."""
    if not isinstance(norm, nn.BatchNorm2d | nn.SyncBatchNorm) or not norm.training or norm.momentum is None:
        return "the kernels are for batch norm that trains"
    if (reason := _why_not_map(x)) is not None:
        return reason
    if activation not in KINDS:
        return "the kernels need ReLU, SiLU or nothing"
    if x.numel() == x.shape[1] and not _is_shared(norm):
        return "one value to a channel has no variance, which the module says"
    return None


def _is_shared(norm: nn.Module) -> bool:
    """Whether its statistics are those of several processes."""
    return isinstance(norm, nn.SyncBatchNorm) and dist.is_initialized() and dist.get_world_size() > 1


def _why_not_map(x: Tensor) -> str | None:
    if (reason := why_not_fused(x)) is not None:
        return reason
    if x.shape[1] % ALIGNMENT or x.element_size() > MAX_ELEMENT:
        return f"the kernels need channels by {ALIGNMENT}, and 16 or 32 bits"
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "the kernels need channels last"
    return None


class BiasSilu(nn.Module):
    """silu(x + bias), (B, C, H, W), for x (B, C, H, W). The kernel, for which it is a norm with mean 0 and variance 1,
    computes in float32. bias: (C,)."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        channels = len(bias)
        self.bias = nn.Parameter(bias.detach(), requires_grad=False)
        self.exact = nn.Buffer(bias.detach().float().clone(), persistent=False)  # stays float32 when parameters do not
        self.ones = nn.Buffer(torch.ones(channels), persistent=False)
        statistics = torch.cat((torch.zeros(channels), torch.ones(channels + TAIL)))
        self.statistics = nn.Buffer(statistics[None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if _why_not_map(x) is not None:
            return F.silu(x + self.bias.view(-1, 1, 1))
        numbers = (None, None, 0.0, 0.0, KINDS[F.silu])
        y = torch.ops.rtdetr.channel_norm(_rows(x), None, self.statistics, self.ones, self.exact, *numbers)
        return _maps(y, x)


def _rows(x: Tensor) -> Tensor:
    """(B * H * W, C) for maps (B, C, H, W), copied unless they are channels last."""
    return x.contiguous(memory_format=torch.channels_last).permute(0, 2, 3, 1).flatten(0, 2)


def _maps(rows: Tensor, like: Tensor) -> Tensor:
    return rows.view(like.shape[0], *like.shape[2:], -1).permute(0, 3, 1, 2)


class NormActivation(torch.autograd.Function):
    """activation(norm(x) + plus) with statistics of the batch, or of all processes' batches if there are `several`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, plus: Tensor | None, running_mean: Tensor | None,
        running_var: Tensor | None, momentum: float, eps: float, kind: int, several: bool,
    ) -> Tensor:  # fmt: skip
        rows = _rows(x)
        statistics = torch.ops.rtdetr.channel_statistics(rows)
        if several:
            own, statistics = statistics, statistics.new_empty(dist.get_world_size(), statistics.shape[1])
            dist.all_gather_into_tensor(statistics, own)
        added = None if plus is None else _rows(plus.to(x.dtype))
        numbers = (running_mean, running_var, momentum, eps, kind)
        y = torch.ops.rtdetr.channel_norm(rows, added, statistics, weight, bias, *numbers)
        ctx.numbers, ctx.several = (eps, kind), several
        other = y if plus is not None and kind == KINDS[F.relu] else added if kind else None
        ctx.save_for_backward(x, weight, bias, statistics, other)
        return _maps(y, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, other = ctx.saved_tensors
        rows, above, learnt = _rows(x), _rows(grad), (statistics, weight, bias)
        eps, kind = ctx.numbers
        sums, g = torch.ops.rtdetr.channel_norm_sums(rows, above, other, *learnt, eps, kind)
        if other is not None:
            above, kind = g, KINDS[None]
        if ctx.several:  # gradients of weight and bias are averaged later
            dist.all_reduce(sums, op=dist.ReduceOp.AVG)
        by_x = torch.ops.rtdetr.channel_norm_backward(rows, above, sums, *learnt, eps, kind)
        by_plus = _maps(above, x) if ctx.needs_input_grad[3] else None
        by_affine = (each if needed else None for each, needed in zip((sums[1], sums[0]), ctx.needs_input_grad[1:3]))
        return _maps(by_x, x), *by_affine, by_plus, *[None] * 6
