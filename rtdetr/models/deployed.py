"""An inference-only model, built from a trained one: fewer layers and kernels, the same results.

Merged are: batch norms into their convolutions, the 1x1 branch of RepVGG blocks into the 3x3 one, the two branches of a
CSP block into one convolution, the input projections of the finer maps into the convolutions that read them. Dropped
are the conversion from logits to boxes and back between decoder layers, and all training-only parts.

Letters: B images, S cells of all levels, Q queries. Boxes are cxcywh, normalised.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rtdetr.models.backbone import ResNetVd, feature_maps
from rtdetr.models.decoder import (
    Decoder,
    DecoderLayer,
    Memory,
    QuerySelector,
    best_cells,
    decoder_step,
    gather_rows,
    make_anchors,
)
from rtdetr.models.deformable_attention import MSDeformAttn
from rtdetr.models.deployed_layers import (
    DeployedLinearReLU,
    ExactLinear,
    FirstInFloat32,
    FoldedBlock,
    MergedAttention,
    Remembered,
    TopDownBlock,
    fold_norm,
    folded,
    merged_csp_block,
    summed_relu,
)
from rtdetr.models.encoder import HybridEncoder, attend_within, bottom_up
from rtdetr.models.layers import MLP, in_weight_type, position_code
from rtdetr.models.portable import Constant, Portable, PortableAttention, PortableSelector
from rtdetr.ops.conv_relu import linear_relu
from rtdetr.types import Predictions, as_floats


@dataclass(frozen=True, kw_only=True)
class DeployOptions:
    """How a deployed model computes.

    dtype: of weights and features. Heads (see DeployedDecoder.exact_parts), reference boxes, anchors and results are
    at least float32.
    remember_sizes: anchors and position codes are cached for each image size, half a megabyte each; not for export.
    fuse_linear: a linear layer and its ReLU are one cuBLAS call, and so are the three projections of the queries'
    self-attention. fuse_relu: convolution, bias, residual and ReLU are one cuDNN call, bias and SiLU one kernel; on a
    GPU only.
    for_compiler: products with four columns or rows are written as sums, which torch.compile fuses with neighbouring
    operators. exact_ends: images, the first convolution (see FirstInFloat32), the selector and whole box heads stay in
    float32, too; not with fuse_relu. in_place: reuses the trained model's weights, which makes that model unusable.
    portable: uses other operators, for one image size (rtdetr/models/portable.py); only float32, for export.
    """

    dtype: torch.dtype = torch.float32
    channels_last: bool = True
    remember_sizes: bool = False
    fuse_linear: bool = False
    fuse_relu: bool = False
    for_compiler: bool = False
    exact_ends: bool = False
    in_place: bool = False
    portable: Portable | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype) or not self.dtype.is_floating_point:
            raise ValueError(f"dtype: expected a floating point type of torch, got {self.dtype!r}")

    @property
    def exact_type(self) -> torch.dtype:
        """Type of the parts that are at least float32."""
        return torch.promote_types(self.dtype, torch.float32)


class DeployedModel(nn.Module):
    """Predictions of images (B, 3, H, W), RGB, floats of any type in [0, 1] or uint8; built by `deploy`."""

    def __init__(
        self, backbone: DeployedBackbone, encoder: DeployedEncoder, decoder: DeployedDecoder, options: DeployOptions
    ) -> None:
        super().__init__()
        self.backbone, self.encoder, self.decoder = backbone, encoder, decoder
        self.dtype = options.exact_type if options.exact_ends else options.dtype  # of the images
        self.memory_format = torch.channels_last if options.channels_last else torch.contiguous_format

    def forward(self, images: Tensor) -> Predictions:
        scaled = as_floats(images).to(self.dtype).contiguous(memory_format=self.memory_format)
        maps = self.encoder(self.backbone(scaled))
        memory = self.decoder.remember(maps)
        return self.decoder(*self.decoder.selector(memory), memory)


@torch.no_grad()
def deploy(backbone: ResNetVd, encoder: HybridEncoder, decoder: Decoder, options: DeployOptions) -> DeployedModel:
    """Builds a deployed model from these parts, which remain unchanged unless options.in_place."""
    if not options.in_place:
        backbone, encoder, decoder = copy.deepcopy((backbone, encoder, decoder))
    parts = DeployedBackbone(backbone, options), DeployedEncoder(encoder, options), DeployedDecoder(decoder, options)
    model = DeployedModel(*parts, options).eval().requires_grad_(False)
    exact = model.decoder.exact_parts(options)
    if options.exact_ends:
        exact.append(model.backbone.stem[0])
    kept = {id(parameter) for part in exact for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.exact_type if id(parameter) in kept else options.dtype)
    return model.to(memory_format=torch.channels_last) if options.channels_last else model


class DeployedBackbone(nn.Module):
    """Maps of stride 8, 16 and 32 from images (B, 3, H, W)."""

    def __init__(self, backbone: ResNetVd, options: DeployOptions) -> None:
        super().__init__()
        first, *others = (folded(each, options.fuse_relu) for each in backbone.stem)
        if options.exact_ends:
            first = FirstInFloat32(first, options.dtype)
        self.stem = nn.Sequential(first, *others)
        self.stages = nn.ModuleList()
        for stage in backbone.stages:
            assert isinstance(stage, nn.Sequential)
            self.stages.append(nn.Sequential(*(FoldedBlock(block, options.fuse_relu) for block in stage)))

    def forward(self, images: Tensor) -> list[Tensor]:
        return feature_maps(images, self.stem, self.stages)


class DeployedEncoder(nn.Module):
    """Three maps of `dim` channels, stride 8, 16, 32, from the backbone's three; it projects only the coarsest one."""

    def __init__(self, encoder: HybridEncoder, options: DeployOptions) -> None:
        super().__init__()
        self.official_rectangles = encoder.official_rectangles
        self.position_code = Remembered(position_code) if options.remember_sizes else position_code
        if options.portable:
            dim, coarsest = encoder.aifi.norm1.normalized_shape[0], options.portable.shapes[-1]
            self.position_code = Constant(position_code(*coarsest, dim, torch.empty(0), encoder.official_rectangles))
        *projections, self.coarsest_proj = map(fold_norm, encoder.input_proj)
        self.aifi = encoder.aifi
        fuse = options.fuse_relu
        self.lateral = nn.ModuleList(folded(each, fuse) for each in encoder.lateral)
        self.downsample = nn.ModuleList(folded(each, fuse) for each in encoder.downsample)
        self.bottom_up = nn.ModuleList(merged_csp_block(each, fuse) for each in encoder.bottom_up)
        pairs = zip(encoder.top_down, reversed(projections))
        self.top_down = nn.ModuleList(TopDownBlock(block, projection, fuse) for block, projection in pairs)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        coarsest = self.coarsest_proj(maps[-1])
        maps = [*maps[:-1], attend_within(coarsest, self.aifi, self.position_code, self.official_rectangles)]
        for i, (lateral, block) in enumerate(zip(self.lateral, self.top_down)):
            coarse = len(maps) - 1 - i
            maps[coarse] = lateral(maps[coarse])
            maps[coarse - 1] = block(maps[coarse], maps[coarse - 1])
        return bottom_up(maps, self.downsample, self.bottom_up)


class DeployedDecoder(nn.Module):
    """Predicts boxes from the encoder's maps; layers pass boxes on as logits."""

    # The official code converts logits to boxes and back between layers, which limits logits to this value.
    LIMIT = math.log(1e5)

    def __init__(self, decoder: Decoder, options: DeployOptions) -> None:
        super().__init__()
        self.official_rectangles = decoder.official_rectangles
        self.make_anchors = Remembered(make_anchors) if options.remember_sizes else make_anchors
        self.input_proj = nn.ModuleList(map(folded, decoder.input_proj))
        box_head = deployed_box_head(decoder.selector.box_head, options)
        self.selector: nn.Module = DeployedSelector(decoder.selector, box_head)
        if options.portable:
            anchors, valid = make_anchors(options.portable.shapes, torch.empty(0), decoder.official_rectangles)
            self.make_anchors = Constant(anchors, valid.to(anchors.dtype))  # not every runtime has boolean constants
            self.selector = PortableSelector(decoder.selector, box_head, options.portable.sampling)
        first, last = decoder.query_pos.linears()
        hidden = DeployedLinearReLU(first, summed_relu) if options.for_compiler else linear_with_relu(first, options)
        self.query_pos = MLP([hidden, last])
        self.layers = nn.ModuleList(deployed_layer(layer, options) for layer in decoder.layers)
        self.box_heads = nn.ModuleList(deployed_box_head(head, options) for head in decoder.box_heads)
        self.score_heads = decoder.score_heads[-1:]

    def exact_parts(self, options: DeployOptions) -> list[nn.Module]:
        """Returns the parts that stay in float32 if the rest has another type. Under float16, of the box heads only the
        last layers, whose results would be rounded to pixels. The selector's scores only rank cells, of which the last
        matter little: float16 suffices, while bfloat16 would give neighbouring cells equal scores."""
        box_heads = [self.selector.box_head, *self.box_heads]
        if options.exact_ends:
            return [self.selector, *box_heads, *self.score_heads]
        if options.dtype == torch.float16:
            return [*(head.layers[-1] for head in box_heads), *self.score_heads]
        return [self.selector.score_head, *box_heads, *self.score_heads]

    def remember(self, maps: list[Tensor]) -> Memory:
        """As Decoder.remember, except that `valid_tokens` are all tokens: see DeployedSelector."""
        maps = [proj(x) for proj, x in zip(self.input_proj, maps)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        tokens = torch.cat([x.flatten(2).transpose(1, 2) for x in maps], dim=1)
        anchors, valid = self.make_anchors(shapes, tokens, self.official_rectangles)
        return Memory(tokens, shapes, anchors, valid, tokens)

    def forward(self, content: Tensor, box_logits: Tensor, memory: Memory) -> Predictions:
        """As Decoder.forward in eval mode."""
        content = content.to(memory.tokens.dtype)
        for layer, box_head in zip(self.layers, self.box_heads):
            reference = box_logits.sigmoid()
            content, _, delta = decoder_step(layer, self.query_pos, box_head, content, reference, memory, ())
            box_logits = delta + box_logits.clamp(-self.LIMIT, self.LIMIT)
        return Predictions(in_weight_type(self.score_heads[0], content), box_logits.sigmoid())


class DeployedSelector(nn.Module):
    """Scores every cell and takes the best as queries: content (B, Q, dim) and box logits (B, Q, 4).

    A zero token projects to the bias; inserting the bias afterwards avoids a second copy of the memory.
    """

    def __init__(self, selector: QuerySelector, box_head: nn.Module) -> None:
        super().__init__()
        self.num_queries = selector.num_queries
        self.proj, self.norm, self.score_head = selector.proj, selector.norm, selector.score_head
        self.box_head = box_head

    def forward(self, memory: Memory) -> tuple[Tensor, Tensor]:
        projected = torch.where(memory.valid, in_weight_type(self.proj, memory.tokens), self.proj.bias)
        features = self.norm(projected)
        cells = best_cells(in_weight_type(self.score_head, features), self.num_queries)
        content = gather_rows(features, cells)
        box_logits = in_weight_type(self.box_head, content).to(memory.anchors.dtype) + memory.anchors[cells]
        return content, box_logits


def deployed_layer(layer: nn.Module, options: DeployOptions) -> DecoderLayer:
    assert isinstance(layer, DecoderLayer)
    attention = MergedAttention(layer.self_attn) if options.fuse_linear else layer.self_attn
    first = linear_with_relu(layer.linear1, options)
    sampler = layer.cross_attn
    if options.portable:
        assert isinstance(sampler, MSDeformAttn)
        sampler = PortableAttention(sampler, options.portable.sampling)
    return DecoderLayer(attention, layer.norm1, sampler, layer.norm2, first, layer.linear2, layer.norm3)


def deployed_box_head(head: nn.Module, options: DeployOptions) -> MLP:
    assert isinstance(head, MLP)
    *inner, last = head.linears()
    return MLP([*(linear_with_relu(each, options) for each in inner), ExactLinear(last, as_sums=options.for_compiler)])


def linear_with_relu(layer: nn.Module, options: DeployOptions) -> nn.Module:
    return DeployedLinearReLU(layer, linear_relu) if options.fuse_linear else layer
