"""The extra query groups that supervise training: noise groups and the one-to-many group, with denoising in front.

All groups go through one decoder call. Their order is
    [group 0: denoising | queries] [noise group 1: denoising | queries] ... [one-to-many queries]
and groups do not see each other. Letters: G one-to-one groups, B images, Q queries of such a group, N denoising
queries of a group, T all. Source: official repo: ppdet/modeling/transformers/rtdetr_transformerv3.py:488-650.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rtdetr.config import SupervisionConfig
from rtdetr.models.decoder import Decoded, Memory, QuerySelector, Selection, select
from rtdetr.models.denoising import Draws, LabelEmbedding, NoisedTargets, noise_targets
from rtdetr.models.layers import Group, xavier_linear
from rtdetr.types import DenoisingOutputs, QueryOutputs, Targets

NOISE_MASK_RATIO = 0.1  # share of query pairs hidden from each other in a noise group


class GroupedQueries(NamedTuple):
    """Decoder input of all groups, and the data needed to split its output."""

    content: Tensor  # (B, T, dim)
    box_logits: Tensor  # (B, T, 4), detached
    groups: tuple[Group, ...]  # which queries attend to which
    selections: list[Selection]  # one-to-one groups first, then the one-to-many group if there is one
    noised: NoisedTargets | None


class QueryGroups(nn.Module):
    """Builds the queries of every group and splits the decoder's output by group."""

    def __init__(self, cfg: SupervisionConfig, dim: int, num_classes: int, num_queries: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.num_classes, self.num_queries = num_classes, num_queries
        self.num_groups = 1 + cfg.num_noise_groups
        sizes = [num_queries] * cfg.num_noise_groups
        if cfg.num_one_to_many_queries:
            sizes.append(cfg.num_one_to_many_queries)
        self.selectors = nn.ModuleList(QuerySelector(dim, num_classes, size) for size in sizes)
        # Without selectors it would be unused, and DDP requires a gradient for every parameter.
        self.memory_proj = nn.Sequential(xavier_linear(dim, dim), nn.LayerNorm(dim)) if sizes else None
        self.label_embedding = LabelEmbedding(num_classes, dim) if cfg.num_denoising else None

    def forward(self, memory: Memory, main: QuerySelector, targets: Targets, draws: Draws) -> GroupedQueries:
        """main: the selector of group 0, which is used for inference."""
        selections, tokens = select([main, *self.selectors], memory)
        contents = [selections[0].content.detach()]
        if self.memory_proj is not None:  # trains memory_proj, not the encoder
            contents += [self.memory_proj(each.detach()) for each in tokens[1:]]
        references = [s.box_logits.detach() for s in selections]
        num_copies = num_denoising = 0
        noised, used = None, targets.mask.any(0)
        if self.label_embedding is not None:
            noised = noise_targets(
                targets,
                draws,
                num_groups=self.num_groups,
                num_classes=self.num_classes,
                num_denoising=self.cfg.num_denoising,
            )
            num_copies, num_denoising = noised.num_copies, noised.labels.shape[2]
            used = noised.mask.any(0)
            embedded = self.label_embedding(noised.labels).to(contents[0].dtype)
            for g in range(self.num_groups):
                contents[g] = torch.cat((embedded[g], contents[g]), dim=1)
                references[g] = torch.cat((noised.box_logits[g].to(references[g].dtype), references[g]), dim=1)
        groups = self._groups(num_copies, num_denoising, used, draws)
        return GroupedQueries(torch.cat(contents, dim=1), torch.cat(references, dim=1), groups, selections, noised)

    def _groups(self, num_copies: int, num_denoising: int, used: Tensor, draws: Draws) -> tuple[Group, ...]:
        """used: (S,) bool, the slots that hold a box of some image."""
        device, size = used.device, self.num_queries
        copy = torch.arange(num_denoising, device=device) // (num_denoising // max(1, num_copies) or 1)
        # A copy attends to itself and the matching queries, but not the reverse. Slots that no image uses are hidden.
        own_copy = (copy[:, None] == copy) & used.repeat(2 * num_copies)
        groups = []
        for g in range(self.num_groups):
            visible = torch.ones(size, size, dtype=torch.bool, device=device)
            if g > 0:  # noise groups hide random pairs, including a query from itself
                visible = draws.attention_keep(g, size, NOISE_MASK_RATIO, device)
            if num_denoising:
                denoising = torch.cat((own_copy, visible.new_ones(num_denoising, size)), dim=1)
                queries = torch.cat((visible.new_zeros(size, num_denoising), visible), dim=1)
                visible = torch.cat((denoising, queries))
            groups.append(Group(num_denoising + size, visible if g or num_denoising else None))
        if self.cfg.num_one_to_many_queries:
            groups.append(Group(self.cfg.num_one_to_many_queries, None))
        return tuple(groups)

    def split(
        self, decoded: Decoded, queries: GroupedQueries
    ) -> tuple[QueryOutputs, QueryOutputs | None, DenoisingOutputs | None]:
        """Splits the decoder's (layers, B, T, ...) into one-to-one, one-to-many and denoising predictions."""
        noised = queries.noised
        n = 0 if noised is None else noised.labels.shape[2]
        many = self.num_groups * (n + self.num_queries)

        def taken_apart(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            """Splits x (layers, B, T, ...) into (layers, G, B, N, ...), (layers, G, B, Q, ...) and the rest."""
            one, rest = x.split((many, x.shape[2] - many), dim=2)
            front, own = one.unflatten(2, (self.num_groups, -1)).transpose(1, 2).split((n, self.num_queries), dim=3)
            return front, own, rest

        (noised_logits, logits, many_logits), (noised_boxes, boxes, many_boxes) = map(taken_apart, decoded)
        selected = queries.selections[: self.num_groups]
        first_logits = torch.stack([s.logits for s in selected])[None]  # (1, G, B, Q, C)
        first_boxes = torch.stack([s.box_logits.sigmoid() for s in selected])[None]
        one_to_one = QueryOutputs(torch.cat((first_logits, logits)), torch.cat((first_boxes, boxes)))
        denoising = one_to_many = None
        if noised is not None:
            denoising = DenoisingOutputs(noised_logits, noised_boxes, noised.num_copies, noised.crowd)
        if self.cfg.num_one_to_many_queries:
            last = queries.selections[-1]
            one_to_many = QueryOutputs(
                torch.cat((last.logits[None], many_logits))[:, None],
                torch.cat((last.box_logits.sigmoid()[None], many_boxes))[:, None],
            )
        return one_to_one, one_to_many, denoising
