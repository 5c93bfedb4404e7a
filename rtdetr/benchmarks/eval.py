"""Seconds that `score` takes for the detections of a whole validation set, with each evaluator.

The set is synthetic and as large as COCO's val2017: per image seven boxes of 80 classes and 300 detections, some of
them near a box. The twelve metrics are compared; the last of 16 digits may differ due to the order of summation.
"""

from __future__ import annotations

import cProfile
import heapq
import json
import pstats
import tempfile
import time
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from rtdetr.engine.evaluation.evaluator import Evaluator, score

CLASSES, BOXES = 80, 7
SIDE = 640.0
Row = dict[str, Any]
EVALUATORS: tuple[Evaluator, ...] = get_args(Evaluator)


def synthetic(number: int, detections: int) -> tuple[dict[str, list[Any]], list[dict[str, Any]]]:
    """Generates a COCO document and detections for it."""
    rng = np.random.default_rng(0)
    images = [{"id": i + 1, "file_name": f"{i}.jpg", "width": 640, "height": 640} for i in range(number)]
    corners = rng.uniform(0, SIDE * 0.8, (number, BOXES, 2))
    truth = np.concatenate((corners, rng.uniform(8, SIDE * 0.2, corners.shape)), axis=-1)
    labels = rng.integers(CLASSES, size=(number, BOXES))
    near = rng.integers(BOXES, size=(number, detections))  # the box that a detection starts from
    found = np.take_along_axis(truth, near[..., None], axis=1)
    found = found * rng.normal(1, rng.uniform(0.01, 0.4, (number, detections, 1)), found.shape)
    classes = np.take_along_axis(labels, near, axis=1)
    classes = np.where(rng.random(classes.shape) < 0.2, classes, rng.integers(CLASSES, size=classes.shape))
    scores = rng.random(classes.shape, dtype=np.float32)
    boxes = [
        {"id": i * BOXES + j + 1, "image_id": i + 1, "category_id": label + 1, "bbox": box}
        for i, each in enumerate(zip(labels.tolist(), truth.tolist()))
        for j, (label, box) in enumerate(zip(*each))
    ]
    results = [
        {"image_id": i + 1, "category_id": label + 1, "bbox": box, "score": confidence}
        for i, each in enumerate(zip(classes.tolist(), np.abs(found).tolist(), scores.tolist()))
        for label, box, confidence in zip(*each)
    ]
    categories = [{"id": i + 1, "name": f"class {i + 1}"} for i in range(CLASSES)]
    return {"images": images, "annotations": boxes, "categories": categories}, results


def measure(number: int, detections: int, profile: bool, evaluators: Sequence[Evaluator] = EVALUATORS) -> list[Row]:
    """One row per evaluator, the default one first."""
    document, results = synthetic(number, detections)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "truth.json"
        path.write_text(json.dumps(document), encoding="utf-8")
        for evaluator in evaluators:
            profiler = cProfile.Profile()
            started = time.perf_counter(), time.process_time()
            if profile:
                profiler.enable()
            figures = score(results, path, evaluator).figures
            profiler.disable()
            row: Row = {"evaluator": evaluator, "seconds": time.perf_counter() - started[0]}
            row["processor_seconds"] = time.process_time() - started[1]  # of all threads
            rows.append({**row, "figures": figures, "top": _top(profiler) if profile else []})
    return rows


def _top(profiler: cProfile.Profile) -> list[tuple[str, float]]:
    """The functions that take most, and their own seconds."""
    found: dict[Any, Any] = pstats.Stats(profiler).stats  # type: ignore[attr-defined]
    own = ((f"{Path(file).name}:{name}", numbers[2]) for (file, _, name), numbers in found.items())
    return heapq.nlargest(10, own, key=itemgetter(1))


def difference(row: Row, other: Row) -> float:
    """Largest difference between the metrics of two rows."""
    return max(abs(value - other["figures"][name]) for name, value in row["figures"].items())


ROW = "| {evaluator} | {seconds:.2f} | {processor_seconds:.2f} | {figures[AP]:.6f} | {difference:.1e} |"


def table(rows: list[Row]) -> str:
    lines = ["| evaluator | seconds | of the CPU | AP | largest difference |", "|---|---|---|---|---|"]
    for row in rows:
        lines.append(ROW.format(**row, difference=difference(row, rows[0])))
        lines += [f"  {own:7.2f} s {name}" for name, own in row["top"]]
    return "\n".join(lines)
