"""Hungarian matching of predicted queries to ground-truth boxes, for every layer, group and image at once.

Letters: K layers, G groups, B images, Q queries, C classes, M boxes of the fullest image, T boxes of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtdetr.boxes import cxcywh_to_xyxy, giou
from rtdetr.config import LossConfig
from rtdetr.losses.functional import at_least_float32, focal_class_cost
from rtdetr.ops.assignment import linear_assignment_checked, linear_assignment_padded
from rtdetr.ops.fused import matching_cost as fused
from rtdetr.types import QueryOutputs, Targets


@torch.no_grad()
def match_together(
    problems: Sequence[tuple[QueryOutputs, int]], targets: Targets, cfg: LossConfig
) -> tuple[list[Tensor], Tensor | None]:
    """For each of several (outputs, repeats), the index (K, G, B, Q) int64 of the box each query is matched to, counted
    within its image, or -1. With `repeats` > 1 every box is matched up to that many times (one-to-many).

    And (B,) bool: images with a non-finite cost, whose queries are not matched. None on a CPU, where such a cost raises
    FloatingPointError immediately. Does not wait for a GPU, unless kernels are plain: SciPy matches on the host.
    """
    indices: list[Tensor] = []
    non_finite: list[Tensor] = []  # (layers and groups, B)
    counts = targets.counts or targets.mask.sum(1)
    for outputs, repeats in problems:
        layers = []
        for first, part in _parts(outputs, targets):
            cost = matching_cost(part, targets, cfg)
            index, bad = _assign(cost, counts, repeats)
            if 0 in targets.counts:
                bad = bad | _non_finite_without_boxes(part, targets)
            layers.append(index)
            if bad.device.type != "cpu":
                non_finite.append(bad.flatten(0, 1))
            elif bad.any():
                layer, group, image = bad.nonzero()[0].tolist()
                layer += first
                raise FloatingPointError(f"layer {layer}, group {group}, image {image} of the batch: {NON_FINITE}")
        indices.append(torch.cat(layers) if len(layers) > 1 else layers[0])
    return indices, torch.cat(non_finite).any(0) if non_finite else None


def _non_finite_without_boxes(outputs: QueryOutputs, targets: Targets) -> Tensor:
    """(K, G, B) bool: images without boxes, and therefore without costs, that have a non-finite prediction."""
    finite = outputs.logits.isfinite().flatten(3).all(3) & outputs.boxes.isfinite().flatten(3).all(3)
    return ~finite & ~targets.mask.any(1)


def _assign(cost: Tensor, counts: tuple[int, ...] | Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    if isinstance(counts, Tensor):  # padded costs
        return linear_assignment_padded(cost, counts, repeats)
    return linear_assignment_checked(cost, counts, repeats)


def _parts(outputs: QueryOutputs, targets: Targets) -> list[tuple[int, QueryOutputs]]:
    """Splits a crowded batch into single layers, else keeps all together; with the index of each part's first layer."""
    layers, groups, _, queries, _ = outputs.logits.shape
    if layers * groups * queries * targets.labels.numel() <= MOST_PAIRS:
        return [(0, outputs)]
    return [(k, QueryOutputs(outputs.logits[k : k + 1], outputs.boxes[k : k + 1])) for k in range(layers)]


MOST_PAIRS = 2**27  # pairs of boxes and queries in a cost tensor
NON_FINITE = (
    "the matching cost is NaN or infinite, because the predicted logits or boxes, or the image's ground-truth boxes, "
    "are not finite; check these boxes, then lower optimizer.lr or set train.precision to fp32."
)


def matching_cost(outputs: QueryOutputs, targets: Targets, cfg: LossConfig) -> Tensor:
    """Cost (K, G, T, Q) of every box of the batch, image after image, against the queries of its image only:
    class, L1 on cxcywh and GIoU terms weighted by `cfg` (official repo: ppdet/modeling/transformers/matchers.py).
    If the host does not know the counts, padding has rows too: T is B * M.

    Computed by one kernel on a GPU."""
    if fused.why_not(outputs.logits, targets.counts) is not None:
        return plain_matching_cost(outputs, targets, cfg)
    return fused.fused_matching_cost(*outputs, targets.labels, targets.boxes, targets.counts, cfg.match_costs)


def plain_matching_cost(outputs: QueryOutputs, targets: Targets, cfg: LossConfig) -> Tensor:
    """`matching_cost` in plain torch."""
    device = targets.labels.device
    if targets.counts:
        images = [b for b, count in enumerate(targets.counts) for _ in range(count)]
        slots = [slot for count in targets.counts for slot in range(count)]
        image, slot = (
            torch.tensor(each, dtype=torch.int64).to(device, non_blocking=True) for each in (images, slots)
        )  # (T,)
    else:
        size = targets.labels.shape[1]
        row = torch.arange(targets.labels.numel(), device=device)
        image, slot = row // size, row % size
    logits, boxes = at_least_float32(outputs.logits), at_least_float32(outputs.boxes)
    box_logits = logits[:, :, image, :, targets.labels[image, slot]]  # (T, K, G, Q), the indexed axes come first
    class_cost = focal_class_cost(box_logits).permute(1, 2, 0, 3)  # (K, G, T, Q)
    wanted = targets.boxes[image, slot].to(boxes.dtype)[:, None]  # (T, 1, 4)
    # Each coordinate is stored contiguously, so that kernels over (K, G, T, Q) read it without gaps.
    predicted, corners = (x.movedim(-1, 0)[:, :, :, image].movedim(0, -1) for x in (boxes, cxcywh_to_xyxy(boxes)))
    l1_cost = sum((predicted[..., i] - wanted[..., i]).abs() for i in range(4))
    giou_cost = -giou(corners, cxcywh_to_xyxy(wanted))
    of_class, of_l1, of_giou = cfg.match_costs
    return of_class * class_cost + of_l1 * l1_cost + of_giou * giou_cost
