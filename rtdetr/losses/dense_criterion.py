"""Loss of the auxiliary dense head (official repo: ppdet/modeling/heads/ppyoloe_head.py:409-530)."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.boxes import giou
from rtdetr.losses.assigners import Assignment, assign_atss, assign_task_aligned
from rtdetr.losses.functional import at_least_float32, distribution_focal_loss, mean_over_processes, varifocal_loss
from rtdetr.types import DenseOutputs, Targets

MOST_PAIRS = 2**27  # pairs of boxes and cells in a tensor; larger batches are assigned a few images at a time


def dense_losses(
    outputs: DenseOutputs,
    targets: Targets,
    task_aligned: bool,
    iou_weight: float,
    dfl_weight: float,
    share: Tensor | float = 1.0,
) -> dict[str, Tensor]:
    """Scalars: loss_cls_aux_o2m, loss_iou_aux_o2m, loss_dfl_aux_o2m without their weights, loss_l1_aux_o2m, which is
    only reported, and loss_aux_o2m, the weighted sum of the first three.

    share: boxes of this batch relative to the mean of the batches accumulated with it, each counted as at least one. It
    compensates for the smaller sum of scores by which the loss of a batch with fewer boxes is divided.

    Cells without a box are masked, not removed: shapes do not depend on values, so nothing waits for the device, and
    every prediction stays in the graph even if there are no boxes.
    """
    logits, distance_logits = at_least_float32(outputs.logits), at_least_float32(outputs.distances)
    points, strides = outputs.points.to(logits.dtype), outputs.strides.to(logits.dtype)
    num_bins = distance_logits.shape[-1]
    bins = torch.arange(num_bins, dtype=logits.dtype, device=logits.device)
    distances = (distance_logits.softmax(-1) * bins).sum(-1)  # (B, A, 4) left, top, right, bottom, in strides
    centres = points / strides
    boxes = torch.cat((centres - distances[..., :2], centres + distances[..., 2:]), dim=-1)  # xyxy, in strides

    positive, labels, wanted, scores = _assign(
        outputs, logits.detach(), boxes.detach() * strides, targets, task_aligned
    )
    wanted = torch.where(positive[..., None], wanted / strides, boxes.detach())
    total_score = (mean_over_processes(scores.sum()).clamp(min=1) / share).to(logits.dtype)

    class_loss = varifocal_loss(logits, labels, scores.to(logits.dtype), positive, bounded=True)
    overlap_loss = torch.where(positive, 1 - giou(boxes, wanted), 0)
    sides = torch.cat((centres - wanted[..., :2], wanted[..., 2:] - centres), dim=-1)
    # Masked before use as indices: a NaN prediction must result in a NaN loss, not in an index out of bounds.
    sides = torch.where(positive[..., None], sides, 0).clamp(0, num_bins - 1 - 0.01)
    dfl = torch.where(positive, distribution_focal_loss(distance_logits, sides).mean(-1), 0)
    l1 = torch.where(positive[..., None], (boxes - wanted).abs(), 0)

    losses = {
        "loss_cls_aux_o2m": class_loss.sum() / total_score,
        "loss_iou_aux_o2m": (overlap_loss * scores).sum() / total_score,
        "loss_dfl_aux_o2m": (dfl * scores).sum() / total_score,
        "loss_l1_aux_o2m": (l1.sum() / (4 * positive.sum()).clamp(min=1)).detach(),
    }
    losses["loss_aux_o2m"] = (
        losses["loss_cls_aux_o2m"] + iou_weight * losses["loss_iou_aux_o2m"] + dfl_weight * losses["loss_dfl_aux_o2m"]
    )
    return losses


def _assign(
    outputs: DenseOutputs, logits: Tensor, predicted: Tensor, targets: Targets, task_aligned: bool
) -> Assignment:
    """predicted: (B, A, 4) xyxy in pixels."""
    points, strides = outputs.points.to(logits.dtype), outputs.strides.to(logits.dtype)
    images = max(1, MOST_PAIRS // (targets.labels.shape[1] * len(points)))
    parts = []
    for start in range(0, len(predicted), images):
        part, some = slice(start, start + images), targets.part(start, start + images)
        if task_aligned:
            parts.append(assign_task_aligned(points, logits[part].sigmoid(), predicted[part], some))
        else:
            parts.append(assign_atss(points, strides, outputs.level_cells, predicted[part], some))
    return Assignment(*map(torch.cat, zip(*parts))) if len(parts) > 1 else parts[0]
