"""Noised ground truth as extra queries (training only), and all random numbers of the model.

Letters: G groups, B images, M boxes of the fullest image, S of them that are noised (all M, except in crowds),
N = num_copies * 2 * S slots of a group, laid out as [copy][positives, negatives][box]. Source: official repo:
ppdet/modeling/transformers/utils.py:309-420.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rtdetr.boxes import cxcywh_to_xyxy, inverse_sigmoid, xyxy_to_cxcywh
from rtdetr.types import CROWD_LIMIT, Targets

NEW_LABELS = 0.25  # probability that a label is redrawn


class Draws:
    """The random numbers of one training step. A test that replays stored ones overrides these methods."""

    def crowd(self, mask: Tensor, number: int) -> Tensor:
        """(B, number) int64: boxes sampled from those that `mask` (B, M) marks, followed by padding."""
        return torch.where(mask, torch.rand(mask.shape, device=mask.device), -1.0).topk(number).indices

    def label_flip(self, like: Tensor) -> Tensor:
        """Uniform [0, 1) numbers shaped like `like` (G, B, N); a small one redraws the label."""
        return torch.rand(like.shape, device=like.device)

    def new_labels(self, flipped: Tensor, num_classes: int) -> Tensor:
        """Random classes (G, B, N) int64 for the slots that `flipped` (G, B, N) marks; others are ignored."""
        return torch.randint(num_classes, flipped.shape, device=flipped.device)

    def box_sign(self, like: Tensor) -> Tensor:
        """0 or 1, shaped like `like` (G, B, N, 4): the direction in which each corner coordinate moves."""
        return torch.randint(2, like.shape, device=like.device)

    def box_part(self, like: Tensor) -> Tensor:
        """Uniform [0, 1) numbers shaped like `like` (G, B, N, 4): how far each corner coordinate moves."""
        return torch.rand(like.shape, device=like.device, dtype=like.dtype)

    def attention_keep(self, group: int, num_queries: int, mask_ratio: float, device: torch.device) -> Tensor:
        """Bool (Q, Q): the pairs of matching queries of a noise group (1, 2, ...) that may attend to each other."""
        return torch.rand(num_queries, num_queries, device=device) > mask_ratio


class NoisedTargets(NamedTuple):
    """Denoising queries of all groups."""

    labels: Tensor  # (G, B, N) int64, num_classes in padding
    box_logits: Tensor  # (G, B, N, 4) cxcywh normalised, before the sigmoid
    num_copies: int
    mask: Tensor  # (B, S) bool, True for a real box
    crowd: Tensor | None  # (B, S) int64, indices of the noised boxes; None: all


def noise_targets(
    targets: Targets,
    draws: Draws,
    *,
    num_groups: int,
    num_classes: int,
    num_denoising: int,
    crowd_limit: int = CROWD_LIMIT,
) -> NoisedTargets:
    """Copies every box with noisy labels and corners: positives move less than half a side, negatives more. If an image
    has more than `crowd_limit` boxes, that many boxes of each image are sampled."""
    crowd = None
    if targets.labels.shape[1] > crowd_limit:
        crowd = draws.crowd(targets.mask, crowd_limit)
        targets = targets.of(crowd)
    boxes = targets.boxes.to(torch.promote_types(targets.boxes.dtype, torch.float32))
    size = targets.labels.shape[1]
    num_copies = max(1, num_denoising // size)
    repeats = num_copies * 2

    real = targets.mask.repeat(1, repeats).expand(num_groups, -1, -1)  # (G, B, N)
    labels = targets.labels.repeat(1, repeats).expand(num_groups, -1, -1)
    flipped = (draws.label_flip(labels) < NEW_LABELS) & real
    labels = torch.where(flipped, draws.new_labels(flipped, num_classes), labels)
    labels = labels.masked_fill(~real, num_classes)

    boxes = boxes.repeat(1, repeats, 1).expand(num_groups, -1, -1, -1)  # (G, B, N, 4)
    negative = torch.zeros(num_copies, 2, size, 1, dtype=boxes.dtype, device=boxes.device)
    negative[:, 1] = 1
    reach = (draws.box_part(boxes) + negative.flatten(0, 2)) * (draws.box_sign(boxes) * 2 - 1)
    half_size = boxes[..., 2:].repeat(1, 1, 1, 2) * 0.5
    noised = (cxcywh_to_xyxy(boxes) + reach * half_size).clamp(0.0, 1.0)
    return NoisedTargets(labels, inverse_sigmoid(xyxy_to_cxcywh(noised)), num_copies, targets.mask, crowd)


class LabelEmbedding(nn.Module):
    """Content vector of each class; zeros for padding (label num_classes)."""

    def __init__(self, num_classes: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_classes, dim).normal_())

    def forward(self, labels: Tensor) -> Tensor:
        """(..., dim) for labels (...)."""
        table = torch.cat((self.weight, self.weight.new_zeros(1, self.weight.shape[1])))
        return nn.functional.embedding(labels, table)
