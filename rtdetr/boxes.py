"""Box arithmetic as pure functions. `cxcywh`: centre and size; `xyxy`: corners; results have the unit of the input."""

from __future__ import annotations

import torch
from torch import Tensor


def cxcywh_to_xyxy(boxes: Tensor) -> Tensor:
    """Corners of boxes (..., 4) given by centre and size; same unit."""
    cx, cy, w, h = boxes.unbind(-1)
    return torch.stack((cx - 0.5 * w, cy - 0.5 * h, cx + 0.5 * w, cy + 0.5 * h), dim=-1)


def xyxy_to_cxcywh(boxes: Tensor) -> Tensor:
    """Centre and size of boxes (..., 4) given by corners; same unit."""
    x1, y1, x2, y2 = boxes.unbind(-1)
    return torch.stack(((x1 + x2) * 0.5, (y1 + y2) * 0.5, x2 - x1, y2 - y1), dim=-1)


def inverse_sigmoid(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Logit of x, with x clipped to [0, 1] and both terms to at least eps
    (official repo: ppdet/modeling/transformers/utils.py:66-68)."""
    x = x.clamp(0.0, 1.0)
    return torch.log(x.clamp(min=eps) / (1.0 - x).clamp(min=eps))


def box_area(boxes: Tensor) -> Tensor:
    """Areas (...) of xyxy boxes (..., 4); an inverted box counts as empty."""
    return (boxes[..., 2] - boxes[..., 0]).clamp(min=0) * (boxes[..., 3] - boxes[..., 1]).clamp(min=0)


def _intersection(a: Tensor, b: Tensor) -> Tensor:
    # Coordinate by coordinate: two sets broadcast against each other as (..., 4) would be the largest tensor of all.
    width = torch.minimum(a[..., 2], b[..., 2]) - torch.maximum(a[..., 0], b[..., 0])
    height = torch.minimum(a[..., 3], b[..., 3]) - torch.maximum(a[..., 1], b[..., 1])
    return width.clamp(min=0) * height.clamp(min=0)


def iou(a: Tensor, b: Tensor, eps: float = 1e-9) -> Tensor:
    """IoU (...) of xyxy boxes a and b (..., 4), broadcast against each other. `eps` is added to the union."""
    overlap = _intersection(a, b)
    return overlap / (box_area(a) + box_area(b) - overlap + eps)


def giou(a: Tensor, b: Tensor, eps: float = 1e-10) -> Tensor:
    """Generalised IoU (...) of xyxy boxes a and b (..., 4), broadcast against each other. `eps` is added to the union
    and to the area of the smallest enclosing box (official repo: ppdet/modeling/losses/iou_loss.py:67-139)."""
    overlap = _intersection(a, b)
    union = box_area(a) + box_area(b) - overlap + eps
    hull_width = torch.maximum(a[..., 2], b[..., 2]) - torch.minimum(a[..., 0], b[..., 0])
    hull_height = torch.maximum(a[..., 3], b[..., 3]) - torch.minimum(a[..., 1], b[..., 1])
    hull_area = hull_width * hull_height + eps
    return overlap / union - (hull_area - union) / hull_area
