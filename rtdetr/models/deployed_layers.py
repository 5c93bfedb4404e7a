"""The layers of a deployed model, each built from layers of a trained one, whose weights it reuses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.models.backbone import BasicBlock, Bottleneck, Shortcut
from rtdetr.models.encoder import CSPBlock, RepVGGBlock
from rtdetr.models.layers import ConvNorm, Group, Linear, SelfAttention
from rtdetr.ops.conv_relu import conv_relu
from rtdetr.ops.fused.batch_norm import BiasSilu


class Remembered:
    """Caches a function whose result depends only on plain values and on the type and device of tensors."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.answers: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple((each.dtype, each.device) if isinstance(each, Tensor) else each for each in arguments)
        if key not in self.answers:
            self.answers[key] = self.function(*arguments)
        return self.answers[key]


class Conv(nn.Module):
    """A ConvNorm without its norm: convolution with a bias, optional sum with another map, activation."""

    def __init__(self, conv: nn.Conv2d, activation: Callable[[Tensor], Tensor] | None) -> None:
        super().__init__()
        self.conv, self.activation = conv, activation

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        y = y if plus is None else y + plus
        return y if self.activation is None else self.activation(y)


class ConvRelu(nn.Module):
    """ReLU of the sum of a convolution, a bias and an optional residual, in one cuDNN call."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        # 16-bit kernels need multiples of eight channels; cuDNN would pad an image's three channels at every call.
        self.lacking = pad_channels(conv, 8)
        self.conv = conv

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv = self.conv
        assert conv.bias is not None
        if self.lacking:
            x = F.pad(x, (0, 0, 0, 0, 0, self.lacking))
        return conv_relu(x, conv.weight, conv.bias, residual, conv.stride[0], int(conv.padding[0]))


def activated(conv: nn.Conv2d, activation: Callable[[Tensor], Tensor] | None, fuse: bool) -> nn.Module:
    """The convolution and what follows it. fuse: by the fewest kernels on a GPU."""
    if fuse and activation is F.silu:  # one kernel adds the bias and applies SiLU
        bias, conv.bias = bias_of(conv), None
        return nn.Sequential(OrderedDict(conv=conv, bias_silu=BiasSilu(bias)))
    return ConvRelu(conv) if fuse and activation is F.relu else Conv(conv, activation)


def folded(block: nn.Module, fuse: bool = False) -> nn.Module:
    """A ConvNorm without its norm."""
    assert isinstance(block, ConvNorm)
    return activated(fold_norm(block), block.activation, fuse)


class FirstInFloat32(nn.Module):
    """The first convolution, computed in float32; only its results are rounded.

    In bright images its products and its bias are large and nearly cancel. Rounding them to float16 causes most of the
    error of a whole model: the logits that rank cells had errors of 0.14 with this rounding, and of 0.02 without.
    """

    def __init__(self, first: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.dtype = first, dtype

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images).to(self.dtype)


class FoldedBlock(nn.Module):
    """A residual block of the backbone without its norms. fuse_relu: the last convolution adds the shortcut."""

    def __init__(self, block: nn.Module, fuse_relu: bool) -> None:
        super().__init__()
        assert isinstance(block, BasicBlock | Bottleneck)
        convs = [fold_norm(each) for each in block.children() if isinstance(each, ConvNorm)]
        self.shortcut = nn.Sequential()
        if isinstance(block.shortcut, Shortcut):
            stride, project = block.shortcut.stride, fold_norm(block.shortcut.project)
            if fuse_relu:
                move_bias(project, convs[-1])
            if stride > 1:
                self.shortcut.append(nn.AvgPool2d(stride, ceil_mode=True))
            self.shortcut.append(project)
        *inner, self.last = (activated(conv, F.relu, fuse_relu) for conv in convs)
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x), self.shortcut(x))


def merged_csp_block(block: nn.Module, fuse_silu: bool) -> nn.Sequential:
    """A CSP block without its norms, with its two 1x1 branches in one convolution."""
    assert isinstance(block, CSPBlock)
    return nn.Sequential(OrderedDict(branches=merge_branches(block), rest=AfterBranches(block, fuse_silu)))


class AfterBranches(nn.Module):
    """The part of a CSP block after its two 1x1 branches, which arrive concatenated, before SiLU: (B, 2 * C, H, W)."""

    def __init__(self, block: CSPBlock, fuse_silu: bool) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(activated(merge_repvgg(each), F.silu, fuse_silu) for each in block.blocks))
        self.conv3 = folded(block.conv3, fuse_silu) if isinstance(block.conv3, ConvNorm) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return self.conv3(self.blocks(F.silu(first)) + F.silu(second))


class TopDownBlock(nn.Module):
    """A CSP block of the top-down path with the steps before it: projecting the fine map, upsampling the coarse map and
    concatenating both.

    A 1x1 convolution commutes with nearest upsampling, and one of a concatenation is a sum of two convolutions.
    """

    def __init__(self, block: nn.Module, projection: nn.Conv2d, fuse_silu: bool) -> None:
        super().__init__()
        assert isinstance(block, CSPBlock)
        self.coarse, self.fine = split_branches(merge_branches(block), projection)
        self.rest = AfterBranches(block, fuse_silu)

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """coarse: (B, dim, h, w); fine: (B, C, H, W) from the backbone."""
        own = self.fine(fine)
        return self.rest(own + F.interpolate(self.coarse(coarse), size=own.shape[-2:], mode="nearest"))


class MergedAttention(nn.Module):
    """Self-attention that computes query, key and value by one product with concatenated tokens and position."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        assert isinstance(attention, SelfAttention)
        self.num_heads, self.out_proj = attention.num_heads, attention.out_proj
        weight, dim = attention.in_proj_weight, attention.embed_dim
        of_position = torch.cat((weight[: 2 * dim], torch.zeros_like(weight[2 * dim :])))  # not for the value
        self.weight = nn.Parameter(torch.cat((weight, of_position), dim=1), requires_grad=False)
        self.bias = attention.in_proj_bias

    def forward(self, tokens: Tensor, position: Tensor, groups: Sequence[Group] = ()) -> Tensor:
        """As SelfAttention, but all tokens attend to one another."""
        projected = F.linear(torch.cat((tokens, position), dim=-1), self.weight, self.bias)
        query, key, value = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in projected.chunk(3, -1))
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class DeployedLinearReLU(nn.Module):
    """A linear layer and its ReLU by `compute`: `linear_relu`, one cuBLAS call, or `summed_relu`, for torch.compile."""

    def __init__(self, linear: nn.Module, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        assert isinstance(linear, Linear) and linear.relu
        self.weight, self.bias, self.compute = linear.weight, linear.bias, compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x, self.weight, self.bias)


class ExactLinear(nn.Module):
    """A linear layer that accepts features of any type and computes in its weights' type. as_sums: see `sums`."""

    def __init__(self, linear: nn.Linear, as_sums: bool) -> None:
        super().__init__()
        self.weight, self.bias, self.as_sums = linear.weight, linear.bias, as_sums

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)
        return sums(x, self.weight, self.bias) if self.as_sums else F.linear(x, self.weight, self.bias)


def sums(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias as a sum of products, which torch.compile fuses with neighbouring operators."""
    return (x.unsqueeze(-2) * weight).sum(dim=-1) + bias


def summed_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """ReLU of `sums`."""
    return F.relu(sums(x, weight, bias))


# Convolutions that do the work of several layers. Each function changes the convolution that it is given and returns
# it: no weight is in memory twice, and the original network cannot be used any more.


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
