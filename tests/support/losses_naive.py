"""The losses a second time, written from the spec with Python loops over single numbers, as slow and plain as possible.

It shares no code with the package. Scalars are torch float64 tensors, so that gradients can be compared as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rtdetr.types import DenoisingOutputs, DenseOutputs, QueryOutputs, Targets

Box = Sequence[Tensor]


def corners(box: Box) -> list[Tensor]:
    cx, cy, w, h = box
    return [cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2]


def _area(box: Box) -> Tensor:
    return (box[2] - box[0]).clamp(min=0) * (box[3] - box[1]).clamp(min=0)


def _overlap(a: Box, b: Box) -> Tensor:
    return _area([max(a[0], b[0]), max(a[1], b[1]), min(a[2], b[2]), min(a[3], b[3])])


def iou(a: Box, b: Box, eps: float = 1e-9) -> Tensor:
    overlap = _overlap(a, b)
    return overlap / (_area(a) + _area(b) - overlap + eps)


def giou(a: Box, b: Box) -> Tensor:
    overlap = _overlap(a, b)
    union = _area(a) + _area(b) - overlap + 1e-10
    hull = (max(a[2], b[2]) - min(a[0], b[0])) * (max(a[3], b[3]) - min(a[1], b[1])) + 1e-10
    return overlap / union - (hull - union) / hull


def varifocal(logit: Tensor, q: float | Tensor, positive: bool) -> Tensor:
    p = 1 / (1 + torch.exp(-logit))
    weight = q if positive else 0.75 * p * p
    return weight * -(q * torch.log(p) + (1 - q) * torch.log(1 - p))


def match_cost(logit: Tensor, predicted: Box, wanted: Box) -> float:
    p = 1 / (1 + math.exp(-float(logit)))
    positive = -0.25 * (1 - p) ** 2 * math.log(p + 1e-8)
    negative = -0.75 * p**2 * math.log(1 - p + 1e-8)
    l1 = sum(abs(float(x) - float(y)) for x, y in zip(predicted, wanted))
    return 2 * (positive - negative) + 5 * l1 - 2 * float(giou(corners(predicted), corners(wanted)))


def match(logits: Tensor, boxes: Tensor, labels: list[int], wanted: list[Tensor], repeats: int) -> dict[int, int]:
    """Query -> box of one image, from logits (Q, C) and boxes (Q, 4)."""
    if not labels:
        return {}
    logits, boxes = logits.detach(), boxes.detach()
    cost = [
        [match_cost(logits[q, labels[g]], boxes[q], wanted[g]) for _ in range(repeats) for g in range(len(labels))]
        for q in range(len(logits))
    ]
    queries, copies = linear_sum_assignment(cost)
    return {int(q): int(copy) % len(labels) for q, copy in zip(queries, copies)}


def image_losses(logits: Tensor, boxes: Tensor, pairs: dict[int, int], labels: list[int], wanted: list[Tensor]) -> list:
    """[class, l1, giou] sums of one image."""
    classes, l1, overlap = torch.zeros(3, dtype=torch.float64)
    for q in range(len(logits)):
        quality = iou(corners(boxes[q]), corners(wanted[pairs[q]])).detach() if q in pairs else 0.0
        for c in range(logits.shape[1]):
            hit = q in pairs and labels[pairs[q]] == c
            classes = classes + varifocal(logits[q, c], quality if hit else 0.0, hit)
        if q in pairs:
            l1 = l1 + sum((x - y).abs() for x, y in zip(boxes[q], wanted[pairs[q]]))
            overlap = overlap + 1 - giou(corners(boxes[q]), corners(wanted[pairs[q]]))
    return [classes, l1, overlap]


def _images(targets: Targets) -> list[tuple[list[int], list[Tensor]]]:
    return [(targets.labels[b, :n].tolist(), list(targets.boxes[b, :n])) for b, n in enumerate(targets.counts)]


def set_entries(
    outputs: QueryOutputs | DenoisingOutputs, targets: Targets, repeats: int, normaliser: float, suffix: str
) -> dict[str, Tensor]:
    """Entries of all layers and groups. `repeats` 0: denoising, whose pairs are known."""
    entries: dict[str, Tensor] = {}
    num_layers, num_groups = outputs.logits.shape[:2]
    for k in range(num_layers):
        place = suffix if k == num_layers - 1 else "_aux" + suffix
        for g in range(num_groups):
            for b, (labels, wanted) in enumerate(_images(targets)):
                logits, boxes = outputs.logits[k, g, b], outputs.boxes[k, g, b]
                if isinstance(outputs, DenoisingOutputs):
                    m = max(targets.counts)
                    pairs = {copy * 2 * m + i: i for copy in range(outputs.num_copies) for i in range(len(labels))}
                else:
                    pairs = match(logits, boxes, labels, wanted, repeats)
                values = image_losses(logits, boxes, pairs, labels, wanted)
                for name, weight, value in zip(("class", "bbox", "giou"), (1, 5, 2), values):
                    key = f"loss_{name}{place}"
                    entries[key] = entries.get(key, 0) + weight * value / normaliser
    return entries


# ---------------------------------------------------------------------------------------------------- dense head


def claims_atss(outputs: DenseOutputs, boxes: list[Tensor]) -> list[set[int]]:
    claims = []
    for box in boxes:
        centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        candidates, first = [], 0
        for cells in outputs.level_cells:
            distance = {
                a: math.hypot(*(float(outputs.points[a, i] - centre[i]) for i in (0, 1)))
                for a in range(first, first + cells)
            }
            candidates += sorted(distance, key=lambda a: distance[a])[:9]
            first += cells
        overlaps = {a: float(iou(box, square(outputs, a))) for a in candidates}
        mean = sum(overlaps.values()) / len(overlaps)
        deviation = math.sqrt(sum((x - mean) ** 2 for x in overlaps.values()) / (len(overlaps) - 1))
        claims.append({a for a in candidates if overlaps[a] > mean + deviation and inside(outputs, a, box)})
    return claims


def square(outputs: DenseOutputs, a: int) -> list[Tensor]:
    (x, y), half = outputs.points[a], 2.5 * outputs.strides[a, 0]
    return [x - half, y - half, x + half, y + half]


def inside(outputs: DenseOutputs, a: int, box: Box) -> bool:
    x, y = outputs.points[a]
    return min(float(x - box[0]), float(y - box[1]), float(box[2] - x), float(box[3] - y)) > 1e-9


def owners(claims: list[set[int]], overlap: Callable[[int, int], float]) -> dict[int, int]:
    """Cell -> box. A cell claimed twice goes to the largest overlap of all boxes."""
    owner = {}
    for a in sorted(set().union(*claims)):
        claimants = [g for g in range(len(claims)) if a in claims[g]]
        everyone = range(len(claims))
        owner[a] = claimants[0] if len(claimants) == 1 else max(everyone, key=lambda g: overlap(g, a))
    return owner


def assign(
    outputs: DenseOutputs, labels: list[int], boxes: list[Tensor], b: int, predicted: list[Box], task_aligned: bool
) -> dict[int, tuple[int, float]]:
    """Cell -> (box, score) of image b; predicted boxes are xyxy pixels."""
    if not boxes:
        return {}
    if not task_aligned:
        owner = owners(claims_atss(outputs, boxes), lambda g, a: float(iou(boxes[g], square(outputs, a))))
        return {a: (g, float(iou(boxes[g], predicted[a]))) for a, g in owner.items()}

    overlap = [[float(iou(box, each)) for each in predicted] for box in boxes]
    probability = outputs.logits[b].detach().sigmoid()
    metric = [
        [float(probability[a, labels[g]]) * overlap[g][a] ** 6 for a in range(len(predicted))]
        for g in range(len(boxes))
    ]
    claims = []
    for g, box in enumerate(boxes):
        candidates = [a for a in range(len(predicted)) if inside(outputs, a, box)]
        claims.append(set(sorted(candidates, key=lambda a: -metric[g][a])[:13]))
    owner = owners(claims, lambda g, a: overlap[g][a])
    assigned = {}
    for a, g in owner.items():
        own = [each for each in owner if owner[each] == g]
        best_metric, best_overlap = max(metric[g][each] for each in own), max(overlap[g][each] for each in own)
        assigned[a] = (g, metric[g][a] / (best_metric + 1e-9) * best_overlap)
    return assigned


def dense_entries(outputs: DenseOutputs, targets: Targets, task_aligned: bool) -> dict[str, Tensor]:
    num_images, num_cells, num_classes = outputs.logits.shape
    bins = outputs.distances.shape[-1]
    classes, overlap_loss, dfl, l1 = torch.zeros(4, dtype=torch.float64)
    total, positives = 0.0, 0
    for b in range(num_images):
        labels = targets.labels[b, : targets.counts[b]].tolist()
        wanted = list(targets.boxes_pixel[b, : targets.counts[b]].double())
        boxes = []
        for a in range(num_cells):
            d = [sum(i * p for i, p in enumerate(side.softmax(0))) for side in outputs.distances[b, a]]
            x, y = outputs.points[a] / outputs.strides[a]
            boxes.append([x - d[0], y - d[1], x + d[2], y + d[3]])
        pixel = [[x.detach() * outputs.strides[a, 0] for x in box] for a, box in enumerate(boxes)]
        assigned = assign(outputs, labels, wanted, b, pixel, task_aligned)
        for a in range(num_cells):
            g, score = assigned.get(a, (None, 0.0))
            for c in range(num_classes):
                hit = g is not None and labels[g] == c
                classes = classes + varifocal(outputs.logits[b, a, c], score if hit else 0.0, hit)
            if g is None:
                continue
            total, positives = total + score, positives + 1
            goal = [x / outputs.strides[a, 0] for x in wanted[g]]
            overlap_loss = overlap_loss + score * (1 - giou(boxes[a], goal))
            l1 = l1 + sum((u - v).abs() for u, v in zip(boxes[a], goal)) / 4
            x, y = outputs.points[a] / outputs.strides[a]
            for side, distance in enumerate((x - goal[0], y - goal[1], goal[2] - x, goal[3] - y)):
                distance = min(max(float(distance), 0.0), bins - 1.01)
                low = int(distance)
                log_p = outputs.distances[b, a, side].log_softmax(0)
                cross = -(low + 1 - distance) * log_p[low] - (distance - low) * log_p[low + 1]
                dfl = dfl + score * cross / 4
    scale = max(total, 1.0)
    entries = {"cls": classes / scale, "iou": overlap_loss / scale, "dfl": dfl / scale, "l1": l1 / max(positives, 1)}
    named = {f"loss_{key}_aux_o2m": value for key, value in entries.items()}
    named["loss_aux_o2m"] = entries["cls"] + 2.5 * entries["iou"] + 0.5 * entries["dfl"]
    return named
