"""A detector that only detects: fewer layers and kernels, the same answers.

What goes: batch norms into their convolutions, the 1x1 branch of RepVGG blocks into the 3x3 one, the two branches of a
CSP block into one convolution, query and key projections into one, and whatever only training needs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.models.backbone import BasicBlock, Bottleneck, ResNetVd
from rtdetr.models.decoder import Decoder
from rtdetr.models.encoder import CSPBlock, HybridEncoder, RepVGGBlock
from rtdetr.models.layers import ConvNorm
from rtdetr.ops.conv_relu import conv_relu
from rtdetr.types import Predictions


class DeployedModel(nn.Module):
    """Predictions of pictures (B, 3, H, W), RGB in [0, 1], of any float type; made by `deploy`."""

    def __init__(
        self, backbone: ResNetVd, encoder: HybridEncoder, decoder: Decoder, dtype: torch.dtype, channels_last: bool
    ) -> None:
        super().__init__()
        self.backbone, self.encoder, self.decoder = backbone, encoder, decoder
        self.dtype = dtype
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Predictions:
        maps = self.encoder(self.backbone(images.to(self.dtype).contiguous(memory_format=self.memory_format)))
        memory = self.decoder.remember(maps)
        selected = self.decoder.selector(memory)
        decoded = self.decoder(selected.content, selected.box_logits, memory)
        return Predictions(decoded.logits[-1], decoded.boxes[-1])


def deploy(
    backbone: ResNetVd,
    encoder: HybridEncoder,
    decoder: Decoder,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    remember_sizes: bool = False,
    fuse_relu: bool = False,
) -> DeployedModel:
    """A folded copy of the parts; they stay as they are.

    dtype: of weights and features. The score and box heads, reference boxes, anchors and results are float32 at least.
    remember_sizes: anchors and position codes are computed once for each picture size, half a megabyte each, and kept;
    not for export. fuse_relu: convolution, bias, residual and ReLU are one call of cuDNN; on a GPU only.
    """
    backbone, encoder, decoder = copy.deepcopy((backbone, encoder, decoder))
    decoder.score_heads = decoder.score_heads[-1:]
    model = DeployedModel(backbone, encoder, decoder, dtype, channels_last)
    model = model.eval().requires_grad_(False)
    _fold(model)
    if fuse_relu:
        _fuse_relu(model)
    heads = [decoder.selector.score_head, decoder.selector.box_head, *decoder.score_heads, *decoder.box_heads]
    islands = {id(parameter) for head in heads for parameter in head.parameters()}
    for parameter in model.parameters():
        kind = torch.promote_types(dtype, torch.float32) if id(parameter) in islands else dtype
        parameter.data = parameter.data.to(kind)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if remember_sizes:
        encoder.position_code = Remembered(encoder.position_code)
        decoder.make_anchors = Remembered(decoder.make_anchors)
    return model


class Remembered:
    """A function whose answer depends on plain values and on the type and device of tensors: each is computed once."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.answers: dict[Any, Any] = {}

    def __call__(self, *arguments: Any) -> Any:
        key = tuple((each.dtype, each.device) if isinstance(each, Tensor) else each for each in arguments)
        if key not in self.answers:
            self.answers[key] = self.function(*arguments)
        return self.answers[key]


def _fold(module: nn.Module) -> None:
    """Replaces what can be merged, from the leaves upward."""
    for name, child in module.named_children():
        _fold(child)
        if isinstance(child, ConvNorm):
            child.conv, child.norm = fold_norm(child.conv, child.norm), nn.Identity()
        elif isinstance(child, RepVGGBlock):
            setattr(module, name, merge_repvgg(child))
        elif isinstance(child, CSPBlock):
            setattr(module, name, MergedCSPBlock(child))
        elif isinstance(child, nn.MultiheadAttention):
            setattr(module, name, MergedAttention(child))


def fold_norm(conv: nn.Conv2d, norm: nn.Module) -> nn.Conv2d:
    """One convolution that does what `conv`, which has no bias, and a batch norm with stored statistics do."""
    weight, bias, mean, variance = (
        getattr(norm, name).double() for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / (variance + norm.eps).sqrt()
    return _with(conv, conv.weight.double() * scale[:, None, None, None], bias - mean * scale)


def merge_repvgg(block: RepVGGBlock) -> ConvNorm:
    """The block, whose norms are folded, as one 3x3 convolution and SiLU."""
    merged, other = block.conv3x3, block.conv1x1
    weight = merged.conv.weight.double() + F.pad(other.conv.weight.double(), (1, 1, 1, 1))
    merged.conv = _with(merged.conv, weight, _bias(merged.conv) + _bias(other.conv))
    merged.activation = F.silu
    return merged


class MergedCSPBlock(nn.Module):
    """A CSPBlock, whose norms are folded, with its two 1x1 branches in one convolution."""

    def __init__(self, block: CSPBlock) -> None:
        super().__init__()
        convs = (block.conv1.conv, block.conv2.conv)
        weight = torch.cat([conv.weight.double() for conv in convs])
        self.branches = _with(convs[0], weight, torch.cat([_bias(conv) for conv in convs]))
        self.blocks, self.conv3 = block.blocks, block.conv3

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.branches(x).chunk(2, dim=1)
        return self.conv3(self.blocks(F.silu(first)) + F.silu(second))


class MergedAttention(nn.Module):
    """An nn.MultiheadAttention whose query and key are the same tensor: two projections instead of three."""

    def __init__(self, attention: nn.MultiheadAttention) -> None:
        super().__init__()
        self.num_heads, dim = attention.num_heads, attention.embed_dim
        self.query_key = _linear(attention.in_proj_weight[: 2 * dim], attention.in_proj_bias[: 2 * dim])
        self.value = _linear(attention.in_proj_weight[2 * dim :], attention.in_proj_bias[2 * dim :])
        self.out_proj = attention.out_proj

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, need_weights: bool = False
    ) -> tuple[Tensor, None]:
        """query: (B, Q, dim), which also serves as the key; value: (B, Q, dim)."""
        parts = (*self.query_key(query).chunk(2, dim=-1), self.value(value))
        q, k, v = (part.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for part in parts)  # (B, heads, Q, head_dim)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=None if attn_mask is None else ~attn_mask)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), None


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None, "its norm is not folded yet"
    return conv.bias.double()


def _with(conv: nn.Conv2d, weight: Tensor, bias: Tensor) -> nn.Conv2d:
    """A convolution like `conv` with other weights and as many channels as they have, in the type of the old ones."""
    made = copy.deepcopy(conv)
    made.out_channels = len(weight)
    made.weight = nn.Parameter(weight.to(conv.weight.dtype), requires_grad=False)
    made.bias = nn.Parameter(bias.to(conv.weight.dtype), requires_grad=False)
    return made


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=False)
    made.bias = nn.Parameter(bias.detach().clone(), requires_grad=False)
    return made


def _fuse_relu(model: nn.Module) -> None:
    """Convolutions followed by a ReLU, with a residual before it or without, become one call each."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, BasicBlock | Bottleneck):
                setattr(module, name, FusedBlock(child))
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, ConvNorm) and child.activation is F.relu:
                setattr(module, name, ConvRelu(child.conv))


class ConvRelu(nn.Module):
    """ReLU of a convolution with bias, and of a residual if there is one."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv = self.conv
        assert conv.bias is not None
        return conv_relu(x, conv.weight, conv.bias, residual, conv.stride[0], int(conv.padding[0]))


class FusedBlock(nn.Module):
    """A residual block of the backbone, its norms folded, whose last convolution adds the shortcut."""

    def __init__(self, block: BasicBlock | Bottleneck) -> None:
        super().__init__()
        convs = [block.conv1, block.conv2, *([block.conv3] if isinstance(block, Bottleneck) else [])]
        self.first = nn.Sequential(*convs[:-1])
        self.last = ConvRelu(convs[-1].conv)
        self.shortcut = block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x), self.shortcut(x))
