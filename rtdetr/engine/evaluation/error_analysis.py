"""Classifies detection errors (class, place, duplicate, background, missed) and measures calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.formats.document import CocoDocument, corners_of
from rtdetr.data.formats.lvis import NEGATIVE, NOT_EXHAUSTIVE

KINDS = {
    "class": "on an object of another class (IoU of .5 or more)",
    "place": "of the right class, but beside its object (IoU of .1 to .5)",
    "double": "on an object that a better detection has found",
    "background": "on nothing, or hardly on anything",
    "missed": "objects that no detection found, not even with the wrong class",
}
FOUND, NEAR = 0.5, 0.1  # IoU
LOWEST = 0.05  # detections below this score are ignored
BINS = 10


class Mistake(NamedTuple):
    kind: str
    image_id: int
    category_id: int  # of the detection, or of a missed object
    box: tuple[float, float, float, float]  # x, y, w, h in pixels
    score: float  # 0 if there is no detection
    other: tuple[float, float, float, float] | None  # the object that it was taken for or is near


class Mistakes(NamedTuple):
    """The errors of K classes, in the order of their ids."""

    threshold: float  # the score with the best F1; only detections from it on count below
    f1: float
    found: int  # objects
    counts: dict[str, int]  # by kind
    confusion: NDArray[np.int64]  # (K + 1, K + 1): objects by row, detections by column; the last are background
    wrong: list[Mistake]  # detections, most certain first
    missed: list[Mistake]  # objects, largest first
    calibration: list[tuple[float, float, int]]  # mean score, share correct, count; by ascending score
    calibration_error: float  # mean distance of score and share, weighted by count


class _Image(NamedTuple):
    """Detections, most certain first, and objects of an image; n and m of them."""

    image_id: int
    detections: list[dict[str, Any]]
    objects: list[dict[str, Any]]
    overlaps: NDArray[np.float64]  # (n, m) IoU
    same: NDArray[np.bool_]  # (n, m) same class
    owner: list[int]  # (n,) which object a detection found, -1: none


def find_mistakes(truth: CocoDocument, detections: Iterable[Mapping[str, Any]]) -> Mistakes:
    """Matches as COCO does at an IoU of .5: the most certain detection first, each object once; crowds are ignored.
    LVIS: detections of classes that were not annotated in the image do not count."""
    images = list(matched(truth, detections))
    scores = np.array([each["score"] for image in images for each in image.detections])
    right = np.array([owner >= 0 for image in images for owner in image.owner], bool)
    num_objects = sum(len(image.objects) for image in images)
    threshold, f1 = best_f1(scores, right, num_objects)
    index = {each["id"]: i for i, each in enumerate(truth.categories)}
    confusion = np.zeros((len(index) + 1, len(index) + 1), np.int64)
    mistakes = [each for image in images for each in _mistakes_of(image, threshold, index, confusion)]
    kinds = [each.kind for each in mistakes]
    bins, error = _calibration(scores, right)
    return Mistakes(
        threshold,
        f1,
        int(np.trace(confusion)),
        {kind: kinds.count(kind) for kind in KINDS},
        confusion,
        sorted((each for each in mistakes if each.kind != "missed"), key=lambda each: -each.score),
        sorted((each for each in mistakes if each.kind == "missed"), key=lambda each: -each.box[2] * each.box[3]),
        bins,
        error,
    )


def matched(truth: CocoDocument, detections: Iterable[Mapping[str, Any]]) -> Iterable[_Image]:
    """Yields each image with the object that each of its detections matched."""
    objects: dict[int, list[Any]] = defaultdict(list)
    crowds: dict[int, list[Any]] = defaultdict(list)
    found: dict[int, list[Any]] = defaultdict(list)
    for box in truth.annotations:
        (crowds if box["iscrowd"] else objects)[box["image_id"]].append(box)
    listed = {each["id"] for each in truth.categories}  # the model may have more classes, which COCO leaves out, too
    for each in detections:
        if each["score"] >= LOWEST and each["category_id"] in listed:
            found[each["image_id"]].append(dict(each))
    for image in truth.images:
        own, image_id = objects[image["id"]], image["id"]
        ranked = sorted(found[image_id], key=lambda each: -each["score"])
        classes = [np.array([each["category_id"] for each in boxes]) for boxes in (ranked, own)]
        same = classes[0].reshape(-1, 1) == classes[1].reshape(1, -1)
        overlaps = _ious(ranked, own)
        owner = _owners(np.where(same, overlaps, 0.0))
        kept = [i for i, each in enumerate(ranked) if owner[i] >= 0 or _counts(each, image, own, crowds[image_id])]
        yield _Image(image_id, [ranked[i] for i in kept], own, overlaps[kept], same[kept], [owner[i] for i in kept])


def _counts(
    detection: Mapping[str, Any], image: Mapping[str, Any], objects: Sequence[Any], crowds: Sequence[Mapping[str, Any]]
) -> bool:
    """Whether a detection that found no object is an error: not in a crowd, nor, in LVIS, of an unannotated class."""
    category = detection["category_id"]
    looked_for = [*image.get(NEGATIVE, [category]), *(each["category_id"] for each in objects)]
    if category not in looked_for or category in image.get(NOT_EXHAUSTIVE, []):
        return False
    own = [each for each in crowds if each["category_id"] == category]
    return not own or float(_ious([detection], own, of_first=True).max()) < FOUND


def _ious(
    first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]], of_first: bool = False
) -> NDArray[np.float64]:
    """(n, m) intersections over unions, or over the area of the first boxes."""
    a, b = corners_of(first)[:, None], corners_of(second)[None]
    sides = np.clip(np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2]), 0, None)
    shared = sides.prod(-1)
    area_a, area_b = ((box[..., 2:] - box[..., :2]).prod(-1) for box in (a, b))
    union = area_a + 0 * area_b if of_first else area_a + area_b - shared
    return np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)


def _owners(overlaps: NDArray[np.float64]) -> list[int]:
    free = overlaps.copy()
    owners = []
    for row in range(len(free)):
        best = int(free[row].argmax()) if free.shape[1] else -1
        owners.append(best if best >= 0 and free[row, best] >= FOUND else -1)
        if owners[-1] >= 0:
            free[:, best] = 0
    return owners


def best_f1(scores: NDArray[Any], right: NDArray[np.bool_], num_objects: int) -> tuple[float, float]:
    """The threshold with the best F1, and that F1; 0.5 and 0 if nothing was found. Equal scores count as one."""
    if not right.any():
        return 0.5, 0.0
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], np.cumsum(right[order])
    last = np.append(ranked[1:] < ranked[:-1], True)  # of those with its score
    f1 = np.where(last, 2 * hits / (np.arange(1, len(hits) + 1) + num_objects), 0.0)
    best = int(f1.argmax())
    return float(ranked[best]), float(f1[best])


def _mistakes_of(
    image: _Image, threshold: float, index: Mapping[int, int], confusion: NDArray[np.int64]
) -> Iterator[Mistake]:
    """Yields the mistakes of an image, and counts its objects and detections in `confusion`."""
    nothing = len(index)
    counted = [i for i, each in enumerate(image.detections) if each["score"] >= threshold]
    taken = {image.owner[i] for i in counted} - {-1}
    for i in counted:
        each, overlaps, same = image.detections[i], image.overlaps[i], image.same[i]
        column = index[each["category_id"]]
        if image.owner[i] >= 0:
            confusion[column, column] += 1
            continue
        kind, which = _kind(overlaps, same)
        row = nothing
        if kind == "class" and which not in taken:
            taken.add(which)
            row = index[image.objects[which]["category_id"]]
        confusion[row, column] += 1
        other = tuple(image.objects[which]["bbox"]) if which >= 0 else None
        yield Mistake(kind, image.image_id, each["category_id"], tuple(each["bbox"]), each["score"], other)
    for i, box in enumerate(image.objects):
        if i not in taken:
            confusion[index[box["category_id"]], nothing] += 1
            yield Mistake("missed", image.image_id, box["category_id"], tuple(box["bbox"]), 0.0, None)


def _kind(overlaps: NDArray[np.float64], same: NDArray[np.bool_]) -> tuple[str, int]:
    """Kind of an unmatched detection, and the related object, -1 for none."""
    if not len(overlaps):
        return "background", -1
    right, other = np.where(same, overlaps, 0), np.where(same, 0, overlaps)
    if right.max() >= FOUND:
        return "double", int(right.argmax())
    if other.max() >= FOUND:
        return "class", int(other.argmax())
    if right.max() >= NEAR:
        return "place", int(right.argmax())
    return "background", -1


def _calibration(scores: NDArray[Any], right: NDArray[np.bool_]) -> tuple[list[tuple[float, float, int]], float]:
    bins = []
    place = np.minimum((scores * BINS).astype(int), BINS - 1)
    for number in range(BINS):
        inside = place == number
        if inside.any():
            bins.append((float(scores[inside].mean()), float(right[inside].mean()), int(inside.sum())))
    total = sum(count for _, _, count in bins)
    return bins, sum(abs(score - share) * count for score, share, count in bins) / max(1, total)
