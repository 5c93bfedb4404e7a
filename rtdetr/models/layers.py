"""Layers that several parts of the model share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.ops.fused.batch_norm import norm_activation
from rtdetr.ops.fused.layer_norm import sum_norm
from rtdetr.ops.fused.linear import linear

PRIOR_LOGIT = -math.log(99.0)  # every class starts at a score of 0.01


def tokens_of(x: Tensor) -> Tensor:
    """A view of a map (B, C, H, W) as (B, H * W, C).

    Not `x.flatten(2).transpose(1, 2)`: in a batch of one its gradient reaches x with C as the stride of the batch, and
    torch's batch norm on CPUs misreads that as another layout: silently wrong gradients (2.11 to 2.15).
    """
    return x.permute(0, 2, 3, 1).flatten(1, 2)


class FrozenBatchNorm2d(nn.Module):
    """Batch norm with fixed statistics and affine values. Behaves and stores its state as torchvision's, whose import
    takes as long as torch's own, because it imports the compiler."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    eps = 1e-5

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        state_dict.pop(f"{prefix}num_batches_tracked", None)  # stored by trainable batch norms
        super()._load_from_state_dict(state_dict, prefix, *others)


class ConvNorm(nn.Module):
    """Convolution without bias, batch norm, optional sum with another map, activation. Stride 1 keeps the map size.

    norm: trainable, frozen, or with only its affine values frozen (see config.BackboneConfig).
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        stride: int = 1,
        activation: Callable[[Tensor], Tensor] | None = None,
        norm: str = "train",
        init: Literal["he", "xavier", "uniform"] = "he",
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(
            in_channels, out_channels, kernel_size, stride=stride, padding=kernel_size // 2, bias=False
        )
        self.norm = FrozenBatchNorm2d(out_channels) if norm == "frozen" else nn.BatchNorm2d(out_channels)
        if norm == "frozen_affine":
            self.norm.requires_grad_(False)
        self.activation = activation
        if init == "he":
            nn.init.kaiming_normal_(self.conv.weight, nonlinearity="relu")
        elif init == "xavier":
            nn.init.xavier_uniform_(self.conv.weight)
        # uniform: torch's default, U(1 / sqrt(fan_in))

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        return norm_activation(self.norm, self.conv(x), self.activation, plus)


class Linear(nn.Linear):
    """A linear layer with a bias, optionally with the ReLU after it."""

    bias: nn.Parameter

    def __init__(self, in_dim: int, out_dim: int, relu: bool = False) -> None:
        super().__init__(in_dim, out_dim)
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.relu)


class MLP(nn.Module):
    """Sequence of linear layers, all but the last one with a ReLU; see `mlp`."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def linears(self) -> list[nn.Linear]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def mlp(in_dim: int, hidden_dim: int, out_dim: int, num_layers: int) -> MLP:
    widths = [in_dim] + [hidden_dim] * (num_layers - 1)
    inner = [Linear(a, b, relu=True) for a, b in itertools.pairwise(widths)]
    return MLP([*inner, Linear(widths[-1], out_dim)])


def box_head(dim: int) -> MLP:
    """MLP to four box logits, which are zero (no change) until it is trained."""
    head = mlp(dim, dim, 4, 3)
    for parameter in head.linears()[-1].parameters():
        nn.init.zeros_(parameter)
    return head


def score_head(dim: int, num_classes: int) -> nn.Linear:
    head = Linear(dim, num_classes)
    nn.init.constant_(head.bias, PRIOR_LOGIT)
    return head


def in_weight_type(head: nn.Module, x: Tensor) -> Tensor:
    """head(x) in the type of the head's weights, also under autocast.

    Rounding to bfloat16 would give cells equal scores and move boxes by pixels.
    """
    with torch.autocast(x.device.type, enabled=False):
        return head(x.to(next(head.parameters()).dtype))


def xavier_linear(in_dim: int, out_dim: int, relu: bool = False) -> Linear:
    """Linear layer with Xavier uniform weight; the bias keeps torch's U(1 / sqrt(in_dim))."""
    layer = Linear(in_dim, out_dim, relu)
    nn.init.xavier_uniform_(layer.weight)
    return layer


class LayerNorm(nn.LayerNorm):
    """Layer norm in the type of its input, also under autocast, which would convert all following tokens to float32.
    Mean and deviation are computed in float32 nevertheless. plus: added to the input first."""

    def forward(self, x: Tensor, plus: Tensor | None = None) -> Tensor:
        return sum_norm(x, plus, self.weight, self.bias, self.eps)


class Group(NamedTuple):
    """Consecutive queries that attend only to one another."""

    size: int
    visible: Tensor | None  # (size, size) bool, True where a query may attend; None: everywhere


class SelfAttention(nn.MultiheadAttention):
    """Self-attention with the parameters of torch's module."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__(dim, num_heads, batch_first=True)
        nn.init.xavier_uniform_(self.in_proj_weight)
        nn.init.xavier_uniform_(self.out_proj.weight)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, position: Tensor, groups: Sequence[Group] = ()
    ) -> Tensor:
        """(B, T, dim) for tokens (B, T, dim); query and key have position (B, T, dim) added. Pairs of different groups
        are not computed; without groups all tokens attend to one another."""
        split = 2 * self.embed_dim
        query, key = linear(tokens + position, self.in_proj_weight[:split], self.in_proj_bias[:split]).chunk(2, -1)
        value = linear(tokens, self.in_proj_weight[split:], self.in_proj_bias[split:])
        heads = [x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in (query, key, value)]
        if not groups:
            together = F.scaled_dot_product_attention(*heads).transpose(1, 2)  # (B, T, heads, head_dim)
        else:
            parts = (x.split([group.size for group in groups], dim=2) for x in heads)
            masks = [group.visible for group in groups]
            seen = [
                F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2) for q, k, v, mask in zip(*parts, masks)
            ]
            together = torch.cat(seen, dim=1)
        return linear(together.flatten(2), self.out_proj.weight, self.out_proj.bias)


def position_code(height: int, width: int, dim: int, like: Tensor, official_rectangles: bool = False) -> Tensor:
    """Sine and cosine code (height * width, dim) of row-major cells: first half the row, second half the column.

    The official code swaps the axes of the grid: on a rectangle, token t gets the code of row t // height and column
    t % height (official repo: ppdet/modeling/transformers/hybrid_encoder.py:217-238). Squares do not differ.

    Computed in float64 and rounded once, as in transformers: errors of float32 angles, 5e-7, were the first difference.
    Exported files and MPS compute in float32, as not every runtime has float64.
    """
    exact = not torch.compiler.is_exporting() and like.device.type != "mps"
    dtype = torch.float64 if exact else torch.promote_types(like.dtype, torch.float32)
    token = torch.arange(height * width, device=like.device)
    columns = height if official_rectangles else width
    whole = token // columns
    row, column = whole.to(dtype), (token - whole * columns).to(dtype)  # ONNX export lacks `%` of a dynamic size
    quarter = dim // 4
    frequency = 10000.0 ** -(torch.arange(quarter, device=like.device, dtype=dtype) / quarter)
    row_angle, column_angle = row[:, None] * frequency, column[:, None] * frequency  # (cells, dim / 4)
    return torch.cat((row_angle.sin(), row_angle.cos(), column_angle.sin(), column_angle.cos()), dim=1).to(like.dtype)
