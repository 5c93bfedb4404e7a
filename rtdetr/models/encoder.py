"""Hybrid encoder: attention within the coarsest map, convolutions across maps.

Source: official repo: ppdet/modeling/transformers/hybrid_encoder.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.config import EncoderConfig
from rtdetr.models.layers import ConvNorm, LayerNorm, Linear, SelfAttention, position_code, tokens_of


class EncoderLayer(nn.Module):
    """Post-norm transformer layer; the position code is added to query and key, not to the value."""

    def __init__(self, dim: int, feedforward_dim: int, num_heads: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(dim, num_heads)
        self.norm1 = LayerNorm(dim)
        self.linear1 = Linear(dim, feedforward_dim)
        self.linear2 = Linear(feedforward_dim, dim)
        self.norm2 = LayerNorm(dim)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        tokens = self.norm1(tokens, plus=self.self_attn(tokens, position))
        return self.norm2(tokens, plus=self.linear2(F.gelu(self.linear1(tokens))))


class RepVGGBlock(nn.Module):
    """SiLU of the sum of a 3x3 and a 1x1 branch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv3x3 = ConvNorm(channels, channels, 3, activation=F.silu)
        self.conv1x1 = ConvNorm(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3x3(x, plus=self.conv1x1(x))


class CSPBlock(nn.Module):
    """Sum of two 1x1 branches, one of them followed by RepVGG blocks; projected if its channels must change."""

    def __init__(self, in_channels: int, out_channels: int, hidden_channels: int, num_blocks: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, hidden_channels, 1, activation=F.silu, init="uniform")
        self.conv2 = ConvNorm(in_channels, hidden_channels, 1, activation=F.silu, init="uniform")
        self.blocks = nn.Sequential(*(RepVGGBlock(hidden_channels) for _ in range(num_blocks)))
        self.conv3 = (
            ConvNorm(hidden_channels, out_channels, 1, activation=F.silu, init="uniform")
            if hidden_channels != out_channels
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.blocks(self.conv1(x)) + self.conv2(x))


class HybridEncoder(nn.Module):
    """Three maps of `dim` channels, stride 8, 16, 32, from the backbone's three."""

    def __init__(
        self,
        in_channels: tuple[int, ...],
        dim: int,
        feedforward_dim: int,
        num_heads: int,
        expansion: float,
        num_csp_blocks: int,
        official_rectangles: bool,
    ) -> None:
        super().__init__()
        self.official_rectangles = official_rectangles
        hidden, steps = int(dim * expansion), len(in_channels) - 1
        self.input_proj = nn.ModuleList(ConvNorm(c, dim, 1) for c in in_channels)
        self.aifi = EncoderLayer(dim, feedforward_dim, num_heads)
        self.lateral = nn.ModuleList(ConvNorm(dim, dim, 1, activation=F.silu, init="uniform") for _ in range(steps))
        self.top_down = nn.ModuleList(CSPBlock(2 * dim, dim, hidden, num_csp_blocks) for _ in range(steps))
        self.downsample = nn.ModuleList(
            ConvNorm(dim, dim, 3, stride=2, activation=F.silu, init="uniform") for _ in range(steps)
        )
        self.bottom_up = nn.ModuleList(CSPBlock(2 * dim, dim, hidden, num_csp_blocks) for _ in range(steps))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [proj(x) for proj, x in zip(self.input_proj, maps)]
        maps[-1] = attend_within(maps[-1], self.aifi, position_code, self.official_rectangles)
        for i, (lateral, block) in enumerate(zip(self.lateral, self.top_down)):
            coarse = len(maps) - 1 - i
            # the bottom-up path reads the lateral output in place of the coarse map
            maps[coarse] = lateral(maps[coarse])
            finer = maps[coarse - 1]
            with torch.autocast(finer.device.type, enabled=False):  # which would convert both maps to float32
                upsampled = F.interpolate(maps[coarse], size=finer.shape[-2:], mode="nearest")
            maps[coarse - 1] = block(torch.cat((upsampled, finer), dim=1))
        return bottom_up(maps, self.downsample, self.bottom_up)


def attend_within(x: Tensor, layer: nn.Module, code: Callable[..., Tensor], official_rectangles: bool) -> Tensor:
    """Attention among the cells of a map (B, dim, H, W). layer: an EncoderLayer; code: `position_code`."""
    height, width = x.shape[-2:]
    tokens = tokens_of(x)  # (B, H * W, dim)
    position = code(height, width, x.shape[1], tokens, official_rectangles)
    return layer(tokens, position).transpose(1, 2).unflatten(2, (height, width))


def bottom_up(maps: list[Tensor], downsample: Iterable[nn.Module], blocks: Iterable[nn.Module]) -> list[Tensor]:
    """The bottom-up path, from fine to coarse."""
    for i, (smaller, block) in enumerate(zip(downsample, blocks)):
        maps[i + 1] = block(torch.cat((smaller(maps[i]), maps[i + 1]), dim=1))
    return maps


def build_encoder(cfg: EncoderConfig, in_channels: tuple[int, ...], official_rectangles: bool) -> HybridEncoder:
    return HybridEncoder(
        in_channels,
        cfg.hidden_dim,
        cfg.feedforward_dim,
        cfg.num_heads,
        cfg.expansion,
        cfg.num_csp_blocks,
        official_rectangles,
    )
