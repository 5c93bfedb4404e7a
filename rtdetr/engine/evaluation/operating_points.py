"""Precision, recall and F1 of each class, at the threshold with its best F1 or at a given one."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.formats.document import CocoDocument
from rtdetr.engine.evaluation.error_analysis import LOWEST, best_f1, matched
from rtdetr.garbage_collection import collection_paused


class OperatingPoint(NamedTuple):
    """Metrics of a class above a score threshold, matched at an IoU of .5; NaN if undefined."""

    threshold: float
    precision: float
    recall: float
    f1: float


NOWHERE = OperatingPoint(math.nan, math.nan, math.nan, math.nan)


@collection_paused()  # as in `score`
def operating_points(
    truth: CocoDocument, detections: Iterable[Mapping[str, Any]], given: Mapping[int, float] | None = None
) -> dict[int, OperatingPoint]:
    """Operating points by category id. truth: only annotations that count. given: thresholds by category id, instead of
    those with the best F1. Detections below a score of LOWEST are ignored."""
    scores: dict[int, list[float]] = defaultdict(list)
    right: dict[int, list[bool]] = defaultdict(list)
    objects: dict[int, int] = defaultdict(int)
    for image in matched(truth, detections):
        for each, owner in zip(image.detections, image.owner):
            scores[each["category_id"]].append(each["score"])
            right[each["category_id"]].append(owner >= 0)
        for each in image.objects:
            objects[each["category_id"]] += 1
    given, ids = given or {}, [each["id"] for each in truth.categories]
    return {i: _point(np.array(scores[i]), np.array(right[i], bool), objects[i], given.get(i)) for i in ids}


def _point(
    scores: NDArray[np.float64], right: NDArray[np.bool_], num_objects: int, given: float | None
) -> OperatingPoint:
    if given is None and not right.any():
        return NOWHERE
    threshold = _best_threshold(scores, right, num_objects) if given is None else given
    counted = scores >= threshold
    hits, found = int(right[counted].sum()), int(counted.sum())
    precision = hits / found if found else math.nan
    recall = hits / num_objects if num_objects else math.nan
    return OperatingPoint(threshold, precision, recall, 2 * hits / (found + num_objects) if num_objects else math.nan)


def _best_threshold(scores: NDArray[np.float64], right: NDArray[np.bool_], num_objects: int) -> float:
    """Half-way between the last detection that should count and the next one, as other hardware rounds differently."""
    last, _ = best_f1(scores, right, num_objects)
    return (last + float(max(scores[scores < last], default=LOWEST))) / 2
