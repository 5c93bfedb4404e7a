"""Auxiliary dense head (training only): a box and class scores for every cell of the encoder's maps.

Source: official repo: ppdet/modeling/heads/ppyoloe_head.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.models.layers import PRIOR_LOGIT, ConvNorm
from rtdetr.ops.fused import prefer_gpu_form
from rtdetr.ops.fused.batch_norm import norm_activation
from rtdetr.types import DenseOutputs

NUM_BINS = 17  # distances to a side of 0 to 16 strides


class EffectiveSqueezeExcite(nn.Module):
    """SiLU of a 1x1 convolution of the map, its channels weighted by their global average."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.fc = nn.Conv2d(channels, channels, 1)
        nn.init.normal_(self.fc.weight, std=0.001)
        if self.fc.bias is not None:
            nn.init.zeros_(self.fc.bias)
        self.conv = ConvNorm(channels, channels, 1, activation=F.silu)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.fc(x.mean(dim=(2, 3), keepdim=True)).sigmoid()
        if prefer_gpu_form(x) and self.training:
            return norm_activation(self.conv.norm, project_scaled(x, scale, self.conv.conv.weight), F.silu)
        return self.conv(x * scale)


def project_scaled(x: Tensor, scale: Tensor, weight: Tensor) -> Tensor:
    """(B, O, H, W), channels last: the 1x1 projection by weight (O, C, 1, 1) of maps (B, C, H, W) times scale
    (B, C, 1, 1). Separate weights for each image save two passes over its map, and two over its gradient."""
    own = weight.flatten(1) * scale.flatten(1)[:, None]  # (B, O, C)
    rows = x.permute(0, 2, 3, 1).flatten(1, 2) @ own.transpose(1, 2)
    return rows.unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)


class DenseHead(nn.Module):
    """Class logits and distance bins for every cell of maps (B, channels, height, width), fine to coarse."""

    bins: Tensor

    def __init__(self, channels: int, num_classes: int, strides: tuple[int, ...]) -> None:
        super().__init__()
        self.strides = strides
        self.class_stems = nn.ModuleList(EffectiveSqueezeExcite(channels) for _ in strides)
        self.box_stems = nn.ModuleList(EffectiveSqueezeExcite(channels) for _ in strides)
        self.class_heads = nn.ModuleList(constant_conv(channels, num_classes, PRIOR_LOGIT) for _ in strides)
        self.box_heads = nn.ModuleList(constant_conv(channels, 4 * NUM_BINS, 1.0) for _ in strides)
        # Constant, but part of the official weight files and therefore of ours.
        self.register_buffer("bins", torch.arange(NUM_BINS, dtype=torch.float32).view(1, NUM_BINS, 1, 1))

    def forward(self, maps: list[Tensor]) -> DenseOutputs:
        logits, distances, points, strides = [], [], [], []
        for i, (x, stride) in enumerate(zip(maps, self.strides)):
            class_map = self.class_heads[i](self.class_stems[i](x) + x)
            box_map = self.box_heads[i](self.box_stems[i](x))  # no skip connection here
            logits.append(class_map.flatten(2).transpose(1, 2))
            distances.append(box_map.flatten(2).transpose(1, 2).unflatten(2, (4, NUM_BINS)))
            points.append(cell_centres(x.shape[2], x.shape[3], stride, x))
            strides.append(torch.full_like(points[-1][:, :1], float(stride)))
        return DenseOutputs(
            torch.cat(logits, dim=1),
            torch.cat(distances, dim=1),
            torch.cat(points),
            torch.cat(strides),
            tuple(len(p) for p in points),
        )


def constant_conv(in_channels: int, out_channels: int, value: float) -> nn.Conv2d:
    """3x3 convolution whose output is initialised to `value` everywhere."""
    conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
    nn.init.zeros_(conv.weight)
    if conv.bias is not None:
        nn.init.constant_(conv.bias, value)
    return conv


def cell_centres(height: int, width: int, stride: int, like: Tensor) -> Tensor:
    """Centres (height * width, 2) x, y of row-major cells, in pixels of the network input."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    x = (torch.arange(width, device=like.device, dtype=dtype) + 0.5) * stride
    y = (torch.arange(height, device=like.device, dtype=dtype) + 0.5) * stride
    return torch.stack((x.expand(height, width), y[:, None].expand(height, width)), dim=-1).flatten(0, 1)
