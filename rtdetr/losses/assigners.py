"""Assignment of ground-truth boxes to the cells of the auxiliary dense head.

Letters: B images, M boxes of the fullest image, A cells of all levels, C classes. All boxes are xyxy in pixels of
the network input.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.boxes import iou
from rtdetr.types import Targets

CELL_SCALE = 5.0  # side of the square that represents a cell in ATSS, in strides
CANDIDATES_PER_LEVEL = 9  # ATSS
CANDIDATES_PER_BOX = 13  # task-aligned
CLASS_POWER, IOU_POWER = 1.0, 6.0  # task-aligned
EPS = 1e-9  # pixels by which a centre must be inside a box; also the guard of the task-aligned division


class Assignment(NamedTuple):
    """Targets of every cell. Labels, boxes and scores of cells that are not positive are undefined."""

    positive: Tensor  # (B, A) bool
    labels: Tensor  # (B, A) int64
    boxes: Tensor  # (B, A, 4) xyxy, pixels
    scores: Tensor  # (B, A) in [0, 1], 0 where not positive


@torch.no_grad()
def assign_atss(
    points: Tensor, strides: Tensor, level_cells: tuple[int, ...], predicted: Tensor, targets: Targets
) -> Assignment:
    """ATSS: of each level's nearest cells, selects those whose square overlaps the box by more than mean + deviation.

    points (A, 2) x, y pixels; strides (A, 1) pixels; predicted (B, A, 4) xyxy pixels, whose IoU is the score
    (official repo: ppdet/modeling/assigners/atss_assigner.py).
    """
    boxes = targets.boxes_pixel.to(predicted.dtype)
    half = 0.5 * CELL_SCALE * strides
    overlap = iou(boxes[:, :, None], torch.cat((points - half, points + half), dim=-1))  # (B, M, A)
    distance = (0.5 * (boxes[..., :2] + boxes[..., 2:])[:, :, None] - points).norm(dim=-1)  # (B, M, A)

    nearest, first = [], 0
    for each in distance.split(level_cells, dim=-1):
        count = min(CANDIDATES_PER_LEVEL, each.shape[-1])
        nearest.append(each.topk(count, dim=-1, largest=False).indices + first)
        first += each.shape[-1]
    candidates = torch.cat(nearest, dim=-1)  # (B, M, up to 9 per level)
    candidate_overlap = overlap.gather(-1, candidates)
    threshold = candidate_overlap.mean(-1, keepdim=True) + candidate_overlap.std(-1, keepdim=True, correction=1)

    chosen = torch.zeros_like(overlap, dtype=torch.bool).scatter_(-1, candidates, candidate_overlap > threshold)
    claims = chosen & _inside(points, boxes) & targets.mask[..., None]
    positive, index = _one_box_per_cell(claims, overlap)
    labels, assigned = _gather(targets.labels, index), _gather(boxes, index)
    return Assignment(positive, labels, assigned, torch.where(positive, iou(assigned, predicted), 0))


@torch.no_grad()
def assign_task_aligned(points: Tensor, probabilities: Tensor, predicted: Tensor, targets: Targets) -> Assignment:
    """Task-aligned: selects the cells inside a box that predict its class and position best.

    points (A, 2) x, y pixels; probabilities (B, A, C); predicted (B, A, 4) xyxy pixels
    (official repo: ppdet/modeling/assigners/task_aligned_assigner.py).
    """
    boxes = targets.boxes_pixel.to(predicted.dtype)
    overlap = iou(boxes[:, :, None], predicted[:, None])  # (B, M, A)
    image = torch.arange(len(boxes), device=boxes.device)[:, None]
    class_score = probabilities.transpose(1, 2)[image, targets.labels]  # (B, M, A)
    metric = class_score.pow(CLASS_POWER) * overlap.pow(IOU_POWER)

    inside = _inside(points, boxes) & targets.mask[..., None]
    best = torch.where(inside, metric, 0).topk(min(CANDIDATES_PER_BOX, metric.shape[-1]), dim=-1).indices
    claims = torch.zeros_like(inside).scatter_(-1, best, True) & inside
    positive, index = _one_box_per_cell(claims, overlap)

    own = positive[:, None] & (index[:, None] == torch.arange(boxes.shape[1], device=boxes.device)[:, None])
    metric, overlap = torch.where(own, metric, 0), torch.where(own, overlap, 0)
    scaled = metric / (metric.amax(-1, keepdim=True) + EPS) * overlap.amax(-1, keepdim=True)
    return Assignment(positive, _gather(targets.labels, index), _gather(boxes, index), scaled.amax(1))


def _inside(points: Tensor, boxes: Tensor) -> Tensor:
    """(B, M, A) bool: whether each point (A, 2) is inside each box (B, M, 4)."""
    x, y = points.unbind(-1)
    left, top, right, bottom = boxes[:, :, None].unbind(-1)  # (B, M, 1); stacked distances would be the largest tensor
    return (x - left > EPS) & (y - top > EPS) & (right - x > EPS) & (bottom - y > EPS)


def _one_box_per_cell(claims: Tensor, overlap: Tensor) -> tuple[Tensor, Tensor]:
    """Positive cells (B, A) bool and the index (B, A) of their box, from claims and overlap (B, M, A).

    A cell claimed by several boxes is assigned to the image's box with the largest overlap, even if that box did not
    claim it, as in the official code, whose results depend on it.
    """
    number = claims.sum(1)
    index = torch.where(number > 1, overlap.argmax(1), claims.byte().argmax(1))
    return number > 0, index


def _gather(values: Tensor, index: Tensor) -> Tensor:
    """Gathers values (B, M, ...) at index (B, A) of boxes: (B, A, ...)."""
    return values[torch.arange(len(values), device=values.device)[:, None], index]
