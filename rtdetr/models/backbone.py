"""ResNet-vd: three small stem convolutions, average pooling in the strided shortcuts.

Source: official repo: ppdet/modeling/backbones/resnet.py.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.config import BackboneConfig, Depth
from rtdetr.models.layers import ConvNorm
from rtdetr.ops.fused import prefer_gpu_form
from rtdetr.ops.fused.batch_norm import norm_activation
from rtdetr.ops.fused.max_pool import halve

STAGE_BLOCKS: dict[Depth, tuple[int, ...]] = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}
STAGE_CHANNELS = (64, 128, 256, 512)


class Shortcut(nn.Module):
    """1x1 projection; a strided one averages 2x2 cells first, so that no cell is dropped."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.stride = stride
        self.project = ConvNorm(in_channels, out_channels, 1, norm=norm)

    def forward(self, x: Tensor) -> Tensor:
        if prefer_gpu_form(x) and self.training and self.stride == 2 and x.shape[2] % 2 == x.shape[3] % 2 == 0:
            return norm_activation(self.project.norm, project_averages(x, self.project.conv.weight), None)
        if self.stride > 1:
            x = F.avg_pool2d(x, self.stride, self.stride, ceil_mode=True)
        return self.project(x)


def project_averages(x: Tensor, weight: Tensor) -> Tensor:
    """(B, O, H / 2, W / 2): the 1x1 projection of averages of 2x2 cells, for even maps (B, C, H, W) and weight
    (O, C, 1, 1). One convolution does both; on a GPU it is faster than the gradient of torch's average pooling."""
    return F.conv2d(x, weight.expand(-1, -1, 2, 2) / 4, stride=2)


class BasicBlock(nn.Module):
    expansion = 1
    last_norm = "conv2.norm.weight"

    def __init__(self, in_channels: int, channels: int, stride: int, project: bool, norm: str) -> None:
        super().__init__()
        self.conv1 = ConvNorm(in_channels, channels, 3, stride=stride, activation=F.relu, norm=norm)
        self.conv2 = ConvNorm(channels, channels, 3, activation=F.relu, norm=norm)
        self.shortcut = Shortcut(in_channels, channels, stride, norm) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.conv1(x), plus=self.shortcut(x))


class Bottleneck(nn.Module):
    expansion = 4
    last_norm = "conv3.norm.weight"

    def __init__(self, in_channels: int, channels: int, stride: int, project: bool, norm: str) -> None:
        super().__init__()
        out_channels = channels * self.expansion
        self.conv1 = ConvNorm(in_channels, channels, 1, activation=F.relu, norm=norm)
        self.conv2 = ConvNorm(channels, channels, 3, stride=stride, activation=F.relu, norm=norm)
        self.conv3 = ConvNorm(channels, out_channels, 1, activation=F.relu, norm=norm)
        self.shortcut = Shortcut(in_channels, out_channels, stride, norm) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.conv2(self.conv1(x)), plus=self.shortcut(x))


class ResNetVd(nn.Module):
    """Maps of stride 8, 16 and 32 from images (B, 3, H, W).

    freeze_stages: number of frozen parts from the input on, the stem first; trainable batch norms are frozen there.
    zero_init_residual: every block starts as its shortcut (arXiv 1706.02677) if its last norm is trainable.
    """

    def __init__(
        self, depth: Depth, width: float, norm: str, freeze_stages: int = 0, zero_init_residual: bool = False
    ) -> None:
        super().__init__()
        if depth not in STAGE_BLOCKS:
            raise ValueError(f"backbone depth: expected one of {sorted(STAGE_BLOCKS)}, got {depth}")
        block = BasicBlock if depth < 50 else Bottleneck
        stem = round(32 * width)
        channels = [round(c * width) for c in STAGE_CHANNELS]
        there = "frozen" if norm == "train" else norm
        norms = [there if part < freeze_stages else norm for part in range(1 + len(STAGE_CHANNELS))]
        self.stem = nn.Sequential(
            ConvNorm(3, stem, 3, stride=2, activation=F.relu, norm=norms[0]),
            ConvNorm(stem, stem, 3, activation=F.relu, norm=norms[0]),
            ConvNorm(stem, channels[0], 3, activation=F.relu, norm=norms[0]),
        )
        self.stages = nn.ModuleList()
        in_channels = channels[0]
        for i, num_blocks in enumerate(STAGE_BLOCKS[depth]):
            stage = nn.Sequential()
            for j in range(num_blocks):
                stride = 2 if j == 0 and i > 0 else 1
                # the first block of every stage projects, even if the channels already match
                stage.append(block(in_channels, channels[i], stride, project=j == 0, norm=norms[1 + i]))
                in_channels = channels[i] * block.expansion
            self.stages.append(stage)
        self.out_channels = tuple(c * block.expansion for c in channels[1:])
        for part in [self.stem, *self.stages][:freeze_stages]:
            part.requires_grad_(False)
        if zero_init_residual:
            for name, parameter in self.stages.named_parameters():
                if name.endswith(block.last_norm) and parameter.requires_grad:
                    nn.init.zeros_(parameter)

    def forward(self, images: Tensor) -> list[Tensor]:
        return feature_maps(images, self.stem, self.stages)


def feature_maps(images: Tensor, stem: nn.Module, stages: Iterable[nn.Module]) -> list[Tensor]:
    x = halve(stem(images))
    maps = []
    for stage in stages:
        x = stage(x)
        maps.append(x)
    return maps[1:]


def build_backbone(cfg: BackboneConfig) -> ResNetVd:
    freeze_stages = 0 if cfg.freeze_stages == "auto" else cfg.freeze_stages  # training resolves "auto" beforehand
    # From random weights R50 learns faster if its blocks start as their shortcuts; R18 does not. Not in the official
    # recipe, whose norms are frozen.
    return ResNetVd(cfg.depth, cfg.width, cfg.norm, freeze_stages, zero_init_residual=cfg.depth >= 50)
