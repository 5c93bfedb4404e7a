"""From feature maps to boxes: memory, anchors, query selection, decoder layers and their heads.

Letters: B images, S cells of all levels, Q queries, C classes. Boxes are cxcywh, normalised.
Source: official repo: ppdet/modeling/transformers/rtdetr_transformerv3.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rtdetr.boxes import inverse_sigmoid
from rtdetr.config import STRIDES, DecoderConfig
from rtdetr.models.deformable_attention import MSDeformAttn
from rtdetr.models.layers import (
    ConvNorm,
    Group,
    LayerNorm,
    SelfAttention,
    box_head,
    in_weight_type,
    mlp,
    score_head,
    tokens_of,
    xavier_linear,
)
from rtdetr.ops.fused.top_k import top_k

Shapes = tuple[tuple[int, int], ...]

# Logit of an anchor too close to the border. The official code uses +inf; this gives the same boxes, (1, 1, 1, 1), and
# the same zero gradients in every float type, and never computes inf - inf.
BORDER_LOGIT = 1e4


class Memory(NamedTuple):
    """The encoder's output as the decoder uses it."""

    tokens: Tensor  # (B, S, dim) levels fine to coarse, each row-major
    shapes: Shapes  # height, width of each level
    anchors: Tensor  # (S, 4) logits of a box around each cell
    valid: Tensor  # (S, 1) bool: the anchor is inside the image
    valid_tokens: Tensor  # (B, S, dim) the tokens, zero if the anchor is invalid; the selection scores them


class Selection(NamedTuple):
    """The cells that one group of queries starts from, best first."""

    cells: Tensor  # (B, Q) index into the memory
    content: Tensor  # (B, Q, dim)
    logits: Tensor  # (B, Q, C)
    box_logits: Tensor  # (B, Q, 4), before the sigmoid


class Decoded(NamedTuple):
    """Predictions of the decoder layers: all of them in train mode, the last one in eval mode."""

    logits: Tensor  # (layers, B, Q, C)
    boxes: Tensor  # (layers, B, Q, 4)


def make_anchors(shapes: Shapes, like: Tensor, official_rectangles: bool = False) -> tuple[Tensor, Tensor]:
    """Box logits (S, 4) of a square of 5 % * 2^level around each cell, and which of them (S, 1) are valid.

    The official code divides x by the height and y by the width (rtdetr_transformerv3.py:575), which makes no
    difference for squares.
    """
    dtype = torch.promote_types(like.dtype, torch.float32)
    levels = []
    for level, (height, width) in enumerate(shapes):
        x = torch.arange(width, device=like.device, dtype=dtype) + 0.5
        y = torch.arange(height, device=like.device, dtype=dtype) + 0.5
        x, y = (x / height, y / width) if official_rectangles else (x / width, y / height)
        size = torch.full((height, width), 0.05 * 2.0**level, device=like.device, dtype=dtype)
        grid = torch.stack((x.expand(height, width), y[:, None].expand(height, width), size, size), dim=-1)
        levels.append(grid.flatten(0, 1))
    boxes = torch.cat(levels)
    valid = ((boxes > 0.01) & (boxes < 0.99)).all(dim=-1, keepdim=True)
    # logits at the border may be infinite, so they are replaced, not added to
    logits = torch.log(boxes / (1 - boxes)).masked_fill(~valid, BORDER_LOGIT)
    return logits, valid


def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows (B, Q, dim) of x (B, S, dim) at index (B, Q)."""
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


class QuerySelector(nn.Module):
    """Scores every cell and takes the best as queries."""

    def __init__(self, dim: int, num_classes: int, num_queries: int) -> None:
        super().__init__()
        self.num_queries = num_queries
        self.proj = xavier_linear(dim, dim)
        self.norm = LayerNorm(dim)
        self.score_head = score_head(dim, num_classes)
        self.box_head = box_head(dim)

    def forward(self, memory: Memory) -> Selection:
        features, logits = self.describe(memory.valid_tokens)
        cells = best_cells(logits, self.num_queries)
        return self.selection(memory, cells, gather_rows(features, cells), gather_rows(logits, cells))

    def selection(self, memory: Memory, cells: Tensor, content: Tensor, logits: Tensor) -> Selection:
        box_logits = in_weight_type(self.box_head, content).to(memory.anchors.dtype) + memory.anchors[cells]
        return Selection(cells, content, logits, box_logits)

    def describe(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features (B, n, dim) and class logits (B, n, C) of tokens (B, n, dim)."""
        features = self.norm(self.proj(tokens))
        return features, in_weight_type(self.score_head, features)


def best_cells(logits: Tensor, number: int) -> Tensor:
    """The cells (B, number) with the best logits (B, S, C), best first. Raises ValueError if there are fewer."""
    if (cells := logits.shape[1]) < number:
        raise ValueError(f"images: expected a cell for each of {number} queries, got {cells}; enlarge them")
    return top_k(logits.amax(dim=-1), number)[1]


def select(selectors: Sequence[QuerySelector], memory: Memory) -> tuple[list[Selection], list[Tensor]]:
    """Returns each selector's selection in train mode, and the tokens (B, Q, dim) of its cells.

    Cells are chosen without gradient; only the chosen ones are recomputed with gradient. One gather serves all
    selectors, because every gather allocates a gradient of the whole memory.
    """
    with torch.no_grad():
        cells = [best_cells(each.describe(memory.valid_tokens)[1], each.num_queries) for each in selectors]
    sizes, together = [each.num_queries for each in selectors], torch.cat(cells, dim=1)
    tokens = gather_rows(memory.tokens, together) * memory.valid[together].to(memory.tokens.dtype)
    rows = list(tokens.split(sizes, dim=1))
    return [each.selection(memory, own, *each.describe(row)) for each, own, row in zip(selectors, cells, rows)], rows


class DecoderLayer(nn.Module):
    """Post-norm: self-attention among queries, deformable attention to the memory, feed-forward.

    self_attn, cross_attn: a SelfAttention and an MSDeformAttn, or equivalents; linear1: includes its ReLU.
    """

    def __init__(
        self,
        self_attn: nn.Module,
        norm1: LayerNorm,
        cross_attn: nn.Module,
        norm2: LayerNorm,
        linear1: nn.Module,
        linear2: nn.Module,
        norm3: LayerNorm,
    ) -> None:
        super().__init__()
        self.self_attn, self.norm1 = self_attn, norm1
        self.cross_attn, self.norm2 = cross_attn, norm2
        self.linear1, self.linear2, self.norm3 = linear1, linear2, norm3

    def forward(
        self, x: Tensor, position: Tensor, reference: Tensor, memory: Memory, groups: Sequence[Group]
    ) -> Tensor:
        """x, position: (B, Q, dim); reference: (B, Q, 4); groups: queries that attend to one another; empty: all."""
        x = self.norm1(x, plus=self.self_attn(x, position, groups))
        x = self.norm2(x, plus=self.cross_attn(x + position, reference, memory.tokens, memory.shapes))
        return self.norm3(x, plus=self.linear2(self.linear1(x)))


def decoder_layer(dim: int, feedforward_dim: int, num_heads: int, num_points: int) -> DecoderLayer:
    """Builds a DecoderLayer with newly initialised weights."""
    return DecoderLayer(
        SelfAttention(dim, num_heads),
        LayerNorm(dim),
        MSDeformAttn(dim, num_heads, len(STRIDES), num_points),
        LayerNorm(dim),
        xavier_linear(dim, feedforward_dim, relu=True),
        xavier_linear(feedforward_dim, dim),
        LayerNorm(dim),
    )


def decoder_step(
    layer: Callable[..., Tensor],
    query_pos: nn.Module,
    head: nn.Module,
    content: Tensor,
    reference: Tensor,
    memory: Memory,
    groups: Sequence[Group],
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs queries with content (B, Q, dim) and reference boxes (B, Q, 4) through a DecoderLayer and its box head.

    Returns the new content, the same in the type of the head's weights, and the offsets (B, Q, 4) to add to the logits
    of `reference`. Shared by trained and deployed networks.
    """
    content = layer(content, query_pos(reference.to(content.dtype)), reference, memory, groups)
    exact = content.to(next(head.parameters()).dtype)
    return content, exact, in_weight_type(head, exact).to(reference.dtype)


class Decoder(nn.Module):
    """Builds the memory from the encoder's maps, and predicts boxes from queries."""

    def __init__(
        self,
        in_channels: int,
        dim: int,
        feedforward_dim: int,
        num_heads: int,
        num_points: int,
        num_layers: int,
        num_queries: int,
        num_classes: int,
        official_rectangles: bool,
    ) -> None:
        super().__init__()
        self.official_rectangles = official_rectangles
        self.recompute = False  # checkpoint activations: recompute layers in backward
        self.input_proj = nn.ModuleList(ConvNorm(in_channels, dim, 1, init="xavier") for _ in STRIDES)
        self.selector = QuerySelector(dim, num_classes, num_queries)
        self.query_pos = mlp(4, 2 * dim, dim, 2)
        for linear in self.query_pos.linears():
            nn.init.xavier_uniform_(linear.weight)
        self.layers = nn.ModuleList(
            decoder_layer(dim, feedforward_dim, num_heads, num_points) for _ in range(num_layers)
        )
        self.score_heads = nn.ModuleList(score_head(dim, num_classes) for _ in range(num_layers))
        self.box_heads = nn.ModuleList(box_head(dim) for _ in range(num_layers))

    def remember(self, maps: list[Tensor]) -> Memory:
        """Flattens maps (B, channels, height, width), fine to coarse, into the decoder's memory."""
        maps = [proj(x) for proj, x in zip(self.input_proj, maps)]
        shapes = tuple((x.shape[2], x.shape[3]) for x in maps)
        tokens = torch.cat([tokens_of(x) for x in maps], dim=1)
        anchors, valid = make_anchors(shapes, tokens, self.official_rectangles)
        return Memory(tokens, shapes, anchors, valid, tokens * valid.to(tokens.dtype))

    def forward(self, content: Tensor, box_logits: Tensor, memory: Memory, groups: Sequence[Group] = ()) -> Decoded:
        """Refines the boxes of queries, layer by layer.

        content: (B, Q, dim); box_logits: (B, Q, 4) initial boxes; groups: queries that attend to one another.
        """
        logits, boxes = [], []
        content = content.to(memory.tokens.dtype)  # 16 bits under autocast, in all layers
        reference = box_logits.sigmoid()
        previous = reference  # the previous layer's box, not detached
        for i, (layer, head) in enumerate(zip(self.layers, self.box_heads)):
            run: Callable[..., Tensor] = layer
            if self.training and self.recompute:
                run = partial(checkpoint, layer, use_reentrant=False, preserve_rng_state=False)
            content, exact, delta = decoder_step(run, self.query_pos, head, content, reference, memory, groups)
            refined = (delta + inverse_sigmoid(reference)).sigmoid()
            if self.training:
                logits.append(in_weight_type(self.score_heads[i], exact))
                # Look forward twice: the reported box has the same value as `refined`, but its gradient also
                # reaches the previous layer and head.
                boxes.append(refined if i == 0 else (delta + inverse_sigmoid(previous)).sigmoid())
            previous, reference = refined, refined.detach()
        if not self.training:
            logits, boxes = [in_weight_type(self.score_heads[-1], content)], [reference]
        return Decoded(torch.stack(logits), torch.stack(boxes))


def build_decoder(cfg: DecoderConfig, in_channels: int, num_classes: int, official_rectangles: bool) -> Decoder:
    return Decoder(
        in_channels,
        cfg.hidden_dim,
        cfg.feedforward_dim,
        cfg.num_heads,
        cfg.num_points,
        cfg.num_layers,
        cfg.num_queries,
        num_classes,
        official_rectangles,
    )
