"""A detector that only detects: fewer layers and kernels, the same answers.

What goes: batch norms into their convolutions, the 1x1 branch of RepVGG blocks into the 3x3 one, the two branches of a
CSP block into one convolution, the input projections of the finer maps into those that read them, the way from box to
logit and back between decoder layers, and whatever only training needs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.models.backbone import BasicBlock, Bottleneck, ResNetVd, Shortcut
from rtdetr.models.decoder import Decoded, Decoder, DecoderLayer, Memory, gather_rows
from rtdetr.models.encoder import CSPBlock, HybridEncoder, RepVGGBlock
from rtdetr.models.layers import MLP, ConvNorm, Group, SelfAttention, in_weight_type
from rtdetr.ops.conv_relu import conv_relu, linear_relu
from rtdetr.ops.fused.top_k import top_k
from rtdetr.types import Predictions, as_floats


class DeployedModel(nn.Module):
    """Predictions of pictures (B, 3, H, W), RGB, floats of any type in [0, 1] or uint8; made by `deploy`."""

    def __init__(
        self,
        backbone: ResNetVd,
        encoder: FoldedEncoder,
        decoder: FoldedDecoder,
        dtype: torch.dtype,
        channels_last: bool,
    ) -> None:
        super().__init__()
        self.backbone, self.encoder, self.decoder = backbone, encoder, decoder
        self.dtype = dtype  # that pictures are given
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Predictions:
        scaled = as_floats(images).to(self.dtype).contiguous(memory_format=self.memory_format)
        maps = self.encoder(self.backbone(scaled))
        memory = self.decoder.remember(maps)
        decoded = self.decoder(*self.decoder.select(memory), memory)
        return Predictions(decoded.logits[-1], decoded.boxes[-1])


def deploy(
    backbone: ResNetVd,
    encoder: HybridEncoder,
    decoder: Decoder,
    dtype: torch.dtype = torch.float32,
    channels_last: bool = True,
    remember_sizes: bool = False,
    fuse_linear: bool = False,
    fuse_relu: bool = False,
    for_compiler: bool = False,
    exact_ends: bool = False,
    in_place: bool = False,
) -> DeployedModel:
    """A folded copy of the parts; they stay as they are, unless in_place.

    dtype: of weights and features. Heads (see FoldedDecoder.heads), reference boxes, anchors and results are float32 at
    least.
    remember_sizes: anchors and position codes are computed once for each picture size, half a megabyte each, and kept;
    not for export. fuse_linear: a linear layer and its ReLU are one call of cuBLAS, and so are the three projections of
    the queries' self-attention. fuse_relu: convolution, bias, residual and ReLU are one call of cuDNN; on a GPU only.
    for_compiler: products with four columns or rows are written as sums, which torch.compile makes part of what stands
    around them. exact_ends: pictures, the first convolution (see FirstInFloat32), the selector and whole box heads
    stay in float32, too; not with fuse_relu.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype: expected a floating point type of torch, got {dtype!r}")
    if not in_place:
        backbone, encoder, decoder = copy.deepcopy((backbone, encoder, decoder))
    for part in (backbone, encoder, decoder):
        _fold(part)
    folded, detecting = FoldedEncoder(encoder), FoldedDecoder(decoder)
    model = DeployedModel(backbone, folded, detecting, dtype, channels_last).eval().requires_grad_(False)
    if fuse_linear:
        for module in model.modules():
            if isinstance(module, MLP | DecoderLayer):
                module.linear_relu = _linear_relu
            if isinstance(module, DecoderLayer):
                module.self_attn = MergedAttention(module.self_attn)
    if for_compiler:
        detecting.query_pos.linear_relu = _relu_of_sums
        for module in model.modules():
            if isinstance(module, InOwnType):
                module.product = _sums
    if fuse_relu:
        _fuse_relu(model)
    exact = detecting.heads(dtype)
    if exact_ends:
        exact += [backbone.stem[0], detecting.selector, *detecting.every_box_head()]
    islands = {id(parameter) for part in exact for parameter in part.parameters()}
    for parameter in model.parameters():
        kind = torch.promote_types(dtype, torch.float32) if id(parameter) in islands else dtype
        parameter.data = parameter.data.to(kind)
    if exact_ends:
        model.dtype = torch.promote_types(dtype, torch.float32)
        backbone.stem[0] = FirstInFloat32(backbone.stem[0], dtype)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    if remember_sizes:
        folded.position_code = Remembered(folded.position_code)
        detecting.make_anchors = Remembered(detecting.make_anchors)
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


def fold_norm(conv: nn.Conv2d, norm: nn.Module) -> nn.Conv2d:
    """`conv`, which had no bias and now does what it and a batch norm with stored statistics did."""
    weight, bias, mean, variance = (
        getattr(norm, name).double() for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = weight / (variance + norm.eps).sqrt()
    return _set(conv, conv.weight * scale.to(conv.weight)[:, None, None, None], bias - mean * scale)


def merge_repvgg(block: RepVGGBlock) -> ConvNorm:
    """The block, whose norms are folded, as one 3x3 convolution and SiLU."""
    merged, other = block.conv3x3, block.conv1x1.conv
    bias = _bias(merged.conv) + _bias(other)
    _set(merged.conv, merged.conv.weight + F.pad(other.weight, (1, 1, 1, 1)), bias)
    merged.activation = F.silu
    return merged


class MergedCSPBlock(nn.Module):
    """A CSPBlock, whose norms are folded, with its two 1x1 branches in one convolution."""

    def __init__(self, block: CSPBlock) -> None:
        super().__init__()
        convs = (block.conv1.conv, block.conv2.conv)
        bias = torch.cat([_bias(conv) for conv in convs])
        self.branches = _set(convs[0], torch.cat([conv.weight for conv in convs]), bias)
        self.rest = AfterBranches(block)

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(self.branches(x))


class AfterBranches(nn.Module):
    """What a CSP block does with its two branches, before their SiLU and one after the other in (B, 2 * C, H, W)."""

    def __init__(self, block: CSPBlock) -> None:
        super().__init__()
        self.blocks, self.conv3 = block.blocks, block.conv3

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        return self.conv3(self.blocks(F.silu(first)) + F.silu(second))


class TopDownBlock(nn.Module):
    """A CSP block of the way down with what comes before it: the projection of the fine map, and the concatenation with
    the coarse map after that was enlarged.

    A 1x1 convolution of an enlarged map is the enlarged 1x1 convolution, and that of a concatenation a sum of two.
    """

    def __init__(self, block: MergedCSPBlock, projection: nn.Conv2d) -> None:
        super().__init__()
        branches, dim = block.branches, projection.out_channels
        bias = _bias(branches)
        of_coarse, of_fine = branches.weight.split((branches.in_channels - dim, dim), dim=1)
        self.coarse = _set(branches, of_coarse, None)  # the fine map's bias is that of both
        bias = bias + of_fine[:, :, 0, 0] @ _bias(projection)
        self.fine = _set(projection, torch.einsum("oi..., ic... -> oc...", of_fine, projection.weight), bias)
        self.rest = block.rest

    def forward(self, coarse: Tensor, fine: Tensor) -> Tensor:
        """coarse: (B, dim, h, w); fine: (B, C, H, W) as the backbone gives it."""
        own = self.fine(fine)
        return self.rest(own + F.interpolate(self.coarse(coarse), size=own.shape[-2:], mode="nearest"))


class FoldedEncoder(HybridEncoder):
    """A HybridEncoder, its parts folded, that projects the coarsest map alone."""

    def __init__(self, encoder: HybridEncoder) -> None:
        nn.Module.__init__(self)  # the parts are there
        self.official_rectangles = encoder.official_rectangles
        *projections, self.coarsest_proj = (each.conv for each in encoder.input_proj if isinstance(each, ConvNorm))
        self.aifi, self.lateral = encoder.aifi, encoder.lateral
        self.downsample, self.bottom_up = encoder.downsample, encoder.bottom_up
        blocks = [each for each in encoder.top_down if isinstance(each, MergedCSPBlock)]
        self.top_down = nn.ModuleList(map(TopDownBlock, blocks, reversed(projections)))

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        maps = [*maps[:-1], self._attend(self.coarsest_proj(maps[-1]))]
        for i, (lateral, block) in enumerate(zip(self.lateral, self.top_down)):
            coarse = len(maps) - 1 - i
            maps[coarse] = lateral(maps[coarse])
            maps[coarse - 1] = block(maps[coarse], maps[coarse - 1])
        return self._up(maps)


class FirstInFloat32(nn.Module):
    """The first convolution, whose results are rounded and not its weights.

    In bright pictures its products and its bias are large and nearly cancel. Rounded to float16 they make most of the
    error of a whole model: the logits that rank cells were off by 0.14 with it, and by 0.02 without.
    """

    def __init__(self, first: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.dtype = first, dtype

    def forward(self, images: Tensor) -> Tensor:
        return self.first(images).to(self.dtype)


class InOwnType(nn.Linear):
    """A linear layer that takes features of any type and computes in that of its weights."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(F.linear)

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)  # the weights are there
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x.to(self.weight.dtype), self.weight, self.bias)


class MergedAttention(SelfAttention):
    """Self-attention whose query, key and value come of one product with tokens and position side by side."""

    def __init__(self, attention: SelfAttention) -> None:
        nn.Module.__init__(self)  # the parts are there
        self.num_heads, self.out_proj = attention.num_heads, attention.out_proj
        weight, dim = attention.in_proj_weight, attention.embed_dim
        of_position = torch.cat((weight[: 2 * dim], torch.zeros_like(weight[2 * dim :])))  # not for the value
        self.weight = nn.Parameter(torch.cat((weight, of_position), dim=1), requires_grad=False)
        self.bias = attention.in_proj_bias

    def forward(  # type: ignore[override]
        self, tokens: Tensor, position: Tensor, groups: Sequence[Group] = ()
    ) -> Tensor:
        """As SelfAttention; all tokens see one another."""
        projected = F.linear(torch.cat((tokens, position), dim=-1), self.weight, self.bias)
        query, key, value = (x.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for x in projected.chunk(3, -1))
        return self.out_proj(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class FoldedDecoder(Decoder):
    """A Decoder, its parts folded, that detects and hands boxes on as logits."""

    # Between layers the official code makes a box of the logits and logits of the box, which so far is their limit.
    LIMIT = math.log(1e5)

    def __init__(self, decoder: Decoder) -> None:
        nn.Module.__init__(self)  # the parts are there
        self.official_rectangles = decoder.official_rectangles
        self.input_proj, self.selector, self.query_pos = decoder.input_proj, decoder.selector, decoder.query_pos
        self.layers, self.box_heads, self.score_heads = decoder.layers, decoder.box_heads, decoder.score_heads[-1:]
        for head in self.every_box_head():
            head.layers[-1] = InOwnType(head.linears()[-1])

    def every_box_head(self) -> list[MLP]:
        return [head for head in (self.selector.box_head, *self.box_heads) if isinstance(head, MLP)]

    def heads(self, dtype: torch.dtype) -> list[nn.Module]:
        """Those that stay in float32 where all else is of this type. In float16 of the box heads only the last layer
        does, whose result would be rounded to pixels. The selector's scores only rank cells, of which the last ones
        matter little: float16 does, bfloat16 would make ties of whole neighbourhoods."""
        box_heads = self.every_box_head()
        if dtype == torch.float16:
            return [*(head.linears()[-1] for head in box_heads), *self.score_heads]
        return [self.selector.score_head, *box_heads, *self.score_heads]

    def remember(self, maps: list[Tensor]) -> Memory:
        """As Decoder.remember, but for `valid_tokens`, which are all tokens: see `select`."""
        maps = [proj(x) for proj, x in zip(self.input_proj, maps)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        tokens = torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1)
        anchors, valid = self.make_anchors(shapes, tokens, self.official_rectangles)
        return Memory(tokens, shapes, anchors, valid, tokens)

    def select(self, memory: Memory) -> tuple[Tensor, Tensor]:
        """Content (B, Q, dim) and box logits (B, Q, 4) of the queries, as QuerySelector makes them.

        The projection of a token of zeros is the bias: to put that in afterwards spares a second copy of the memory.
        """
        selector = self.selector
        projected = torch.where(memory.valid, in_weight_type(selector.proj, memory.tokens), selector.proj.bias)
        features = selector.norm(projected)
        _, cells = top_k(in_weight_type(selector.score_head, features).amax(dim=-1), selector.num_queries)
        content = gather_rows(features, cells)
        box_logits = in_weight_type(selector.box_head, content).to(memory.anchors.dtype) + memory.anchors[cells]
        return content, box_logits

    def forward(self, content: Tensor, box_logits: Tensor, memory: Memory, groups: Sequence[Group] = ()) -> Decoded:
        """As Decoder.forward in eval mode."""
        content = content.to(memory.tokens.dtype)
        for layer, box_head in zip(self.layers, self.box_heads):
            reference = box_logits.sigmoid()
            content = layer(content, self.query_pos(reference.to(content.dtype)), reference, memory, groups)
            delta = in_weight_type(box_head, content).to(box_logits.dtype)
            box_logits = delta + box_logits.clamp(-self.LIMIT, self.LIMIT)
        return Decoded(in_weight_type(self.score_heads[0], content)[None], box_logits.sigmoid()[None])


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None, "its norm is not folded yet"
    return conv.bias


def _set(conv: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """`conv` with other weights, in the type of the old ones, and as many channels as they have."""
    dtype = conv.weight.dtype
    conv.out_channels, conv.in_channels = weight.shape[:2]
    conv.weight = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=False)
    conv.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)
    return conv


def _fuse_relu(model: nn.Module) -> None:
    """Convolutions followed by a ReLU, with a residual before it or without, become one call each."""
    for name, child in model.named_children():
        if isinstance(child, BasicBlock | Bottleneck):
            child = FusedBlock(child)
        elif isinstance(child, ConvNorm) and child.activation is F.relu:
            child = ConvRelu(child.conv)
        setattr(model, name, child)
        _fuse_relu(child)


def _linear_relu(linear: nn.Linear, x: Tensor) -> Tensor:
    return linear_relu(x, linear.weight, linear.bias)


def _sums(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x @ weight.T + bias."""
    return (x.unsqueeze(-2) * weight).sum(dim=-1) + bias


def _relu_of_sums(linear: nn.Linear, x: Tensor) -> Tensor:
    return F.relu(_sums(x, linear.weight, linear.bias))


class ConvRelu(nn.Module):
    """ReLU of a convolution with bias, and of a residual if there is one."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        # 16-bit kernels take channels by eight. For a picture's three cuDNN would add the others itself, at every call.
        self.lacking = -conv.in_channels % 8
        self.conv = _set(conv, F.pad(conv.weight, (0, 0, 0, 0, 0, self.lacking)), conv.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        conv = self.conv
        assert conv.bias is not None
        if self.lacking:
            x = F.pad(x, (0, 0, 0, 0, 0, self.lacking))
        return conv_relu(x, conv.weight, conv.bias, residual, conv.stride[0], int(conv.padding[0]))


class FusedBlock(nn.Module):
    """A residual block of the backbone, its norms folded, whose last convolution adds the shortcut."""

    def __init__(self, block: BasicBlock | Bottleneck) -> None:
        super().__init__()
        convs = [block.conv1, block.conv2, *([block.conv3] if isinstance(block, Bottleneck) else [])]
        self.first = nn.Sequential(*convs[:-1])
        last, self.shortcut = convs[-1].conv, block.shortcut
        if isinstance(self.shortcut, Shortcut):  # one bias for the sum of both
            project = self.shortcut.project.conv
            _set(last, last.weight, _bias(last) + _bias(project))
            _set(project, project.weight, None)
        self.last = ConvRelu(last)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x), self.shortcut(x))
