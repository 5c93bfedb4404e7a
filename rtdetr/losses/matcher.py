"""Hungarian matching of predicted queries to ground-truth boxes, for every layer, group and picture at once.

Letters: K layers, G groups, B pictures, Q queries, C classes, M boxes of the fullest picture, T boxes of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rtdetr.boxes import cxcywh_to_xyxy, giou
from rtdetr.config import LossConfig
from rtdetr.losses.functional import at_least_float32, focal_class_cost
from rtdetr.types import QueryOutputs, Targets


@torch.no_grad()
def match(outputs: QueryOutputs, targets: Targets, cfg: LossConfig, repeats: int = 1, threads: int = 1) -> Tensor:
    """Index (K, G, B, Q) int64 of the box each query is matched to, counted within its picture, or -1.

    With `repeats` > 1 every box is offered that many times (one-to-many). See `match_together`.
    """
    return match_together([(outputs, repeats)], targets, cfg, threads)[0]


@torch.no_grad()
def match_together(
    problems: Sequence[tuple[QueryOutputs, int]], targets: Targets, cfg: LossConfig, threads: int = 1
) -> list[Tensor]:
    """`match` for several (outputs, repeats) with a single copy of their costs to the host.

    `threads` > 1 solves the pictures side by side, 1 in a plain loop; the result is the same. Raises
    FloatingPointError when a cost is NaN or infinite.
    """
    shapes = [outputs.logits.shape[:4] for outputs, _ in problems]
    device = targets.labels.device
    if sum(targets.counts) == 0:
        return [torch.full(shape, -1, dtype=torch.int64, device=device) for shape in shapes]
    costs = [matching_cost(outputs, targets, cfg) for outputs, _ in problems]
    on_host = torch.cat([cost.flatten() for cost in costs]).cpu().numpy()  # the only wait for the device
    matched = []
    for (_, repeats), cost, shape in zip(problems, costs, shapes):
        own, on_host = on_host[: cost.numel()], on_host[cost.numel() :]
        index = _solve_all(own.reshape(cost.shape), targets.counts, shape, repeats, threads)
        matched.append(torch.from_numpy(index).to(device, non_blocking=True))
    return matched


def matching_cost(outputs: QueryOutputs, targets: Targets, cfg: LossConfig) -> Tensor:
    """Cost (K, G, T, Q) of every box of the batch, picture after picture, against the queries of its picture only:
    class, L1 on cxcywh and GIoU terms weighted by `cfg` (official repo: ppdet/modeling/transformers/matchers.py)."""
    device = targets.labels.device
    # Both indices come from counts known on the host; asking targets.mask would wait for the device.
    pictures = [b for b, count in enumerate(targets.counts) for _ in range(count)]
    slots = [slot for count in targets.counts for slot in range(count)]
    picture, slot = torch.tensor([pictures, slots]).to(device, non_blocking=True).unbind(0)  # (T,) each
    logits, boxes = at_least_float32(outputs.logits), at_least_float32(outputs.boxes)

    box_logits = logits[:, :, picture, :, targets.labels[picture, slot]]  # (T, K, G, Q), the indexed axes come first
    class_cost = focal_class_cost(box_logits).permute(1, 2, 0, 3)  # (K, G, T, Q)
    predicted = boxes[:, :, picture]  # (K, G, T, Q, 4)
    wanted = targets.boxes[picture, slot].to(boxes.dtype)[:, None]  # (T, 1, 4)
    l1_cost = (predicted - wanted).abs().sum(-1)
    giou_cost = -giou(cxcywh_to_xyxy(predicted), cxcywh_to_xyxy(wanted))
    return cfg.match_class_cost * class_cost + cfg.match_l1_cost * l1_cost + cfg.match_giou_cost * giou_cost


def _solve_all(
    cost: np.ndarray, counts: tuple[int, ...], shape: tuple[int, ...], repeats: int, threads: int
) -> np.ndarray:
    """Solves cost (K, G, T, Q) picture by picture into an index of `shape` (K, G, B, Q)."""
    matched = np.full(shape, -1, dtype=np.int64)
    ends = np.cumsum(counts)
    problems = [
        (k, g, b, cost[k, g, ends[b] - count : ends[b]], matched[k, g, b])
        for k, g in np.ndindex(*shape[:2])
        for b, count in enumerate(counts)
        if count
    ]
    if threads > 1:
        list(_pool(threads).map(partial(_solve, repeats), problems))  # the list raises what a thread raised
    else:
        for problem in problems:
            _solve(repeats, problem)
    return matched


def _solve(repeats: int, problem: tuple[int, int, int, np.ndarray, np.ndarray]) -> None:
    """Writes the index of the matched box into `matched` (Q,), from cost (n, Q)."""
    layer, group, picture, cost, matched = problem
    if not np.isfinite(cost).all():
        raise FloatingPointError(
            f"The matching cost of layer {layer}, group {group}, picture {picture} of the batch is NaN or infinite: "
            "the predicted logits or boxes, or the picture's ground-truth boxes, are not finite; check these boxes, "
            "then lower optimizer.lr or set train.precision to fp32."
        )
    rows, queries = linear_sum_assignment(np.tile(cost, (repeats, 1)))
    matched[queries] = rows % len(cost)  # row r of the tiled cost is a copy of box r % n


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="match")
