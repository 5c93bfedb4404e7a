"""Convolutions that do the work of several layers.

Each function changes the convolution that it is given and returns it: no weight is in memory twice, and the original
network cannot be used any more.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.models.encoder import CSPBlock, RepVGGBlock
from rtdetr.models.layers import ConvNorm


def fold_norm(block: nn.Module) -> nn.Conv2d:
    """Folds the stored statistics of a ConvNorm into its convolution, which gains a bias."""
    assert isinstance(block, ConvNorm)
    conv, norm = block.conv, block.norm
    weight, bias, mean, variance = (
        getattr(norm, name).double() for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / (variance + norm.eps).sqrt()
    return refit(conv, conv.weight * scale.to(conv.weight)[:, None, None, None], bias - mean * scale)


def merge_repvgg(block: nn.Module) -> nn.Conv2d:
    """Merges a RepVGGBlock, before its SiLU, into one 3x3 convolution."""
    assert isinstance(block, RepVGGBlock)
    merged, other = fold_norm(block.conv3x3), fold_norm(block.conv1x1)
    return refit(merged, merged.weight + F.pad(other.weight, (1, 1, 1, 1)), bias_of(merged) + bias_of(other))


def merge_branches(block: CSPBlock) -> nn.Conv2d:
    """Merges the two branches of a CSP block, before their SiLU, into one 1x1 convolution: (B, 2 * C, H, W)."""
    first, second = fold_norm(block.conv1), fold_norm(block.conv2)
    bias = torch.cat((bias_of(first), bias_of(second)))
    return refit(first, torch.cat((first.weight, second.weight)), bias)


def split_branches(branches: nn.Conv2d, projection: nn.Conv2d) -> tuple[nn.Conv2d, nn.Conv2d]:
    """Splits a 1x1 convolution of concatenated maps into one of the coarse and one of the fine map, to be summed.

    branches: of a coarse map and a projected fine one; projection: of the fine map, merged into the fine convolution.
    """
    dim, bias = projection.out_channels, bias_of(branches)
    of_coarse, of_fine = branches.weight.split((branches.in_channels - dim, dim), dim=1)
    coarse = refit(branches, of_coarse, None)  # the fine convolution has the bias of both
    bias = bias + of_fine[:, :, 0, 0] @ bias_of(projection)
    return coarse, refit(projection, torch.einsum("oi..., ic... -> oc...", of_fine, projection.weight), bias)


def move_bias(source: nn.Conv2d, target: nn.Conv2d) -> None:
    """Adds the bias of `source` to that of `target`, as their results are summed."""
    refit(target, target.weight, bias_of(target) + bias_of(source))
    refit(source, source.weight, None)


def pad_channels(conv: nn.Conv2d, multiple: int) -> int:
    """Adds input channels up to a multiple; returns their number."""
    lacking = -conv.in_channels % multiple
    refit(conv, F.pad(conv.weight, (0, 0, 0, 0, 0, lacking)), conv.bias)
    return lacking


def bias_of(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None, "its norm is not folded yet"
    return conv.bias


def refit(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """Gives `conv` new weights, in the type of the old ones, and adapts its numbers of channels."""
    dtype = conv.weight.dtype
    conv.out_channels, conv.in_channels = weight.shape[:2]
    conv.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    conv.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
    return conv
