"""Checks of boxes against their images, vectorised over all boxes of a set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.defects import Action, Defect

ROUNDING = 1.0  # pixels that a box may extend beyond its image without a defect
LOOKS_XYXY = (10, 0.3)  # minimum number of boxes, and minimum share out of bounds, to suspect xyxy boxes
NEARLY_ALL = 0.98  # share of boxes that must look like another format


def judge_boxes(
    file: str,
    called: Callable[[int], tuple[int | str, str]],
    corners: NDArray[np.float64],
    sizes: NDArray[np.int32],
    has_area: NDArray[np.bool_],
    centred: bool = False,
) -> list[Defect]:
    """Defects of boxes (n, 4) xyxy in pixels, before clipping, in images of `sizes` (n, 2) h and w: boxes without area
    in their image, which are dropped, and those that are clipped. called: name of the i-th box, alone and for
    messages. centred: the file gives the centre and the size of a box."""
    found: list[Defect] = []
    wanted = "cx, cy, width, height" if centred else "x, y, width, height"

    def add(i: int, kind: str, what: str, action: Action) -> None:
        record, text = called(i)
        x1, y1, x2, y2 = corners[i].tolist()
        box = ", ".join(f"{value:g}" for value in (x1, y1, x2 - x1, y2 - y1))
        size = f"{sizes[i, 1]} x {sizes[i, 0]}"
        found.append(Defect(file, record, kind, f"{text}: box [{box}] {what} ({size} pixels)", action))

    sides = corners[:, 2:] - corners[:, :2]
    for i in np.flatnonzero(~has_area).tolist():
        beyond = bool(np.any(corners[i, :2] > sizes[i, ::-1]) or np.any(corners[i, 2:] < 0))
        if (sides[i] < 0).any():
            add(i, "box_negative", "has a negative width or height", "dropped")
        elif (sides[i] == 0).any() and not beyond:
            add(i, "box_zero", "has no width or no height", "dropped")
        else:
            add(i, "box_outside", "has no area in its image", "dropped")
    limits = sizes[:, [1, 0]]
    out = np.maximum(-corners[:, :2], corners[:, 2:] - limits).max(axis=1, initial=0)
    first = corners[:, :2] + sides / 2 if centred else corners[:, :2]
    # Read as x1, y1, x2, y2, these boxes would be inside the image.
    corner_like = np.all((sides > first) & (sides <= limits + ROUNDING) & (first >= 0), axis=1)
    sticks_out = has_area & (out > ROUNDING)
    far = out > 0.05 * limits.max(axis=1)  # less: a box of nearly the whole image, whose centre is a little off
    for i in np.flatnonzero(sticks_out).tolist():
        alike = corner_like[i] and far[i]
        what = f"sticks out of its image by {out[i]:.4g} pixels and is cut off there"
        if alike:
            what += f"; it looks like x1, y1, x2, y2, and must be {wanted}"
        add(i, "box_xyxy" if alike else "box_clipped", what, "clipped")
    least, share = LOOKS_XYXY
    if len(corners) >= least and corner_like.mean() > NEARLY_ALL and (sticks_out & far).mean() >= share:
        what = f"{corner_like.sum()} of {len(corners)} boxes look like x1, y1, x2, y2; expected {wanted}"
        found.insert(0, Defect(file, None, "boxes_xyxy", what, "refused"))
    relative = np.all((corners[:, :2] >= 0) & (corners[:, :2] <= 1) & (sides > 0) & (sides <= 1), axis=1)
    if len(corners) >= least and relative.mean() > NEARLY_ALL:
        what = f"{relative.sum()} of {len(corners)} boxes lie between 0 and 1, relative to the image; expected pixels"
        found.insert(0, Defect(file, None, "boxes_relative", what, "refused"))
    return found


def judge_copies(
    file: str,
    called: Callable[[int], tuple[int | str, str]],
    rows: NDArray[np.int64],
    owners: NDArray[np.int64],
    labels: NDArray[np.int32],
    boxes: NDArray[np.float32],
) -> list[Defect]:
    """Defects of boxes (n, 4) that equal an earlier one of the same class (n,) in the same image (n,). They are kept,
    as they may be two objects. rows: the indices that `called` takes, see `judge_boxes`."""
    mixed = owners.astype(np.uint64)  # a hash, equal for equal boxes; sorting one number is faster than six
    for part in (labels, *boxes.view(np.uint32).T):
        mixed = (mixed * np.uint64(0x9E3779B97F4A7C15)) ^ (mixed >> np.uint64(29)) ^ part.astype(np.uint64)
    order = np.argsort(mixed, kind="stable")
    first, second = order[:-1], order[1:]
    alike = mixed[first] == mixed[second]
    first, second = first[alike], second[alike]
    same = (owners[first] == owners[second]) & (labels[first] == labels[second])
    same &= (boxes[first] == boxes[second]).all(axis=1)
    what = "the same box of the same class is there already"
    return [
        Defect(file, record, "box_copy", f"{text}: {what}", "kept")
        for record, text in map(called, np.sort(rows[second[same]]).tolist())
    ]
