"""COCO average precision of a model, in the data's own category ids; precision, recall and F1 of each class."""

from __future__ import annotations

import contextlib
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rtdetr.config import EvalConfig
from rtdetr.data.classes import NO_ID, Classes
from rtdetr.data.dataset import clip_to_image
from rtdetr.data.defects import MOST_DROPPED
from rtdetr.data.formats.document import CocoDocument, corners_of
from rtdetr.data.formats.lvis import FREQUENCIES, is_federated
from rtdetr.data.formats.records import DataSource
from rtdetr.data.formats.sources import read_document
from rtdetr.engine import distributed
from rtdetr.engine.evaluation.error_analysis import LOWEST, best_f1, matched
from rtdetr.garbage_collection import collection_paused
from rtdetr.models.postprocess import detections
from rtdetr.outputs import RunFailed
from rtdetr.types import Batch
from rtdetr.wording import counted

Evaluator = Literal["faster-coco-eval", "pycocotools"]

FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")
# LVIS' own; r, c and f are its rare, common and frequent classes.
LVIS_FIGURES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "APr", "APc", "APf", "AR300", "ARs", "ARm", "ARl")
FIGURE_NAMES = {
    "AP": "AP  IoU .50:.95", "AP50": "AP  IoU .50", "AP75": "AP  IoU .75", "APs": "AP  small", "APm": "AP  medium",
    "APl": "AP  large", "APr": "AP  rare", "APc": "AP  common", "APf": "AP  frequent", "AR1": "AR  1 detection",
    "AR10": "AR  10 detections", "AR100": "AR  100 detections", "AR300": "AR  300 detections", "ARs": "AR  small",
    "ARm": "AR  medium", "ARl": "AR  large",
}  # fmt: skip
LVIS_DETECTIONS = 300  # per image, over all classes


class EvaluationStopped(Exception):
    """The evaluation was stopped before its end. detections: COCO results of the finished images, of all processes."""

    def __init__(self, detections: list[dict[str, Any]], num_images: int) -> None:
        super().__init__(f"stopped after {num_images} images")
        self.detections, self.num_images = detections, num_images


class ClassAP(NamedTuple):
    name: str
    category_id: int
    num_boxes: int  # ground truth, crowds not counted
    ap: float  # NaN if the set has no box of this class
    ap50: float


class OperatingPoint(NamedTuple):
    """Metrics of a class above a score threshold, matched at an IoU of .5; NaN if undefined."""

    threshold: float
    precision: float
    recall: float
    f1: float


NOWHERE = OperatingPoint(math.nan, math.nan, math.nan, math.nan)


class EvalResult(NamedTuple):
    figures: dict[str, float]  # those of FIGURES, or of LVIS_FIGURES; -1 where there is nothing to measure, as in COCO
    classes: list[ClassAP]
    detections: list[dict[str, Any]]  # COCO results: image_id, category_id, bbox (x, y, w, h in pixels), score
    # (thresholds, recalls, classes, sizes, numbers of detections), -1 where there is nothing to measure; for reports
    precision: np.ndarray = np.zeros((10, 101, 0, 4, 3))
    sizes: Mapping[int, tuple[int, int]] = MappingProxyType({})  # (h, w) by id of the images that count; empty: all
    unreadable: tuple[str, ...] = ()  # a sentence for each image that was left out
    points: Mapping[int, OperatingPoint] = MappingProxyType({})  # by category id, if requested

    @property
    def thresholds(self) -> dict[str, float]:
        """Those of `points` by class name, as `predict` takes them; without classes that have none."""
        points = {each.name: self.points[each.category_id] for each in self.classes if each.category_id in self.points}
        return {name: point.threshold for name, point in points.items() if not math.isnan(point.threshold)}

    def with_points(self, origin: str | Path | DataSource, given: Mapping[int, float] | None = None) -> EvalResult:
        """The result with precision, recall and F1 of each class, see `operating_points`. origin: the annotations, of
        which only the evaluated images count; given: thresholds by category id."""
        return self._replace(points=operating_points(counted_truth(origin, self.sizes), self.detections, given))

    def table(self, most: int | None = None) -> str:
        """The figures and the AP of every class, or of the first `most`, for a terminal."""
        lines = [f"  {FIGURE_NAMES[key]:20s} {figure_text(value)}" for key, value in self.figures.items()]
        width = max([5, *(len(each.name) for each in self.classes)])
        more = " ".join(f"{name:>9s}" for name in OperatingPoint._fields) if self.points else ""
        lines.append(f"  {'class':{width}s} {'id':>6s} {'boxes':>7s} {'AP':>7s} {'AP50':>7s} {more}".rstrip())
        for each in self.classes[:most]:
            figures = [figure_text(each.ap), figure_text(each.ap50)]
            figures += [f"{figure_text(value):>9s}" for value in self.points.get(each.category_id, ())]
            lines.append(f"  {each.name:{width}s} {each.category_id:6d} {each.num_boxes:7d} {' '.join(figures)}")
        if most is not None and (left := len(self.classes) - most) > 0:
            lines.append(f"  ... and {counted(left, 'more class')}; `rtdetr eval` lists all")
        return "\n".join(lines)


def figure_text(figure: float) -> str:
    """Formats four digits, or a dash if the value is undefined: -1 or NaN."""
    return f"{figure:7.4f}" if figure >= 0 else "      -"


def evaluate(
    model: nn.Module,
    loader: Iterable[Batch],
    annotations: str | Path | DataSource,
    classes: Classes,
    cfg: EvalConfig,
    device: torch.device,
    should_stop: Callable[[], bool] = lambda: False,
    evaluator: Evaluator = "faster-coco-eval",
) -> EvalResult | None:
    """Detects on every batch of this process, in float32 without TF32, and scores all processes' detections on the
    first one; the others get None. classes: the loader's, whose ids are those of the annotations.
    Raises EvaluationStopped on every process if `should_stop()` returned true on one.
    """
    own: list[dict[str, Any]] = []
    sizes: dict[int, tuple[int, int]] = {}
    wrong: tuple[str, ...] = ()
    with _true_float32(device):
        for batch in loader:
            if should_stop():
                break
            own += detect(model, batch, classes, cfg.max_detections, device)
            sizes |= {info.image_id: (info.height, info.width) for info in batch.infos if info.height}
            wrong += batch.unreadable
    stopped = distributed.any_process(should_stop())
    gathered = distributed.gather_objects((own, sizes, wrong))
    detections = [each for part, _, _ in gathered for each in part]
    sizes = {image_id: size for _, part, _ in gathered for image_id, size in part.items()}
    if stopped:
        raise EvaluationStopped(detections, len(sizes))
    if not distributed.is_main():
        return None
    result = score(detections, annotations, evaluator, sizes)
    return result._replace(unreadable=tuple(each for _, _, part in gathered for each in part))


@contextlib.contextmanager
def _true_float32(device: torch.device) -> Iterator[None]:
    """Disables autocast, and TF32, which training allows and torch uses in convolutions: figures must not depend on the
    caller."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


@torch.inference_mode()
def detect(
    model: nn.Module, batch: Batch, classes: Classes, max_detections: int, device: torch.device
) -> list[dict[str, Any]]:
    """COCO results of one batch, without those of classes absent from the data."""
    sizes = torch.tensor([(info.height, info.width) for info in batch.infos], dtype=torch.float32)
    images, sizes = (each.to(device, non_blocking=True) for each in (batch.images, sizes))
    found = detections(model, images, sizes, max_detections)
    boxes = torch.cat((found.boxes[..., :2], found.boxes[..., 2:] - found.boxes[..., :2]), dim=-1)
    return [
        {"image_id": info.image_id, "category_id": classes.category_ids[label], "bbox": box, "score": confidence}
        for info, image in zip(batch.infos, zip(found.scores.tolist(), found.labels.tolist(), boxes.tolist()))
        for confidence, label, box in zip(*image)
        if classes.category_ids[label] != NO_ID and info.height
    ]


@collection_paused()  # with a dict per detection, garbage collection would search millions of objects again and again
def score(
    detections: list[dict[str, Any]],
    annotations: str | Path | DataSource,
    evaluator: Evaluator,
    sizes: Mapping[int, tuple[int, int]] | None = None,
) -> EvalResult:
    """COCO figures of detections against annotations of any format; of a folder given as a path, its val. Both
    evaluators give the same digits; pycocotools is the reference, faster-coco-eval is several times faster. sizes:
    (h, w) in pixels of images by id, for files that do not give them; when given, other images do not count: they
    were left out. Nor do boxes without area in their image, and records that cannot be used. LVIS' files get LVIS'
    figures, which only faster-coco-eval has. Raises DataError for unusable annotations, RunFailed for scores that are
    not finite.
    """
    if not all(math.isfinite(each["score"]) for each in detections):
        raise RunFailed("the scores of the detections are not finite (NaN); the weights are damaged, or have diverged")
    truth = counted_truth(annotations, sizes or {})
    # Ids mark matches, and 0 means "no match" there; files in the wild start at 0 or repeat themselves.
    boxes = [{**box, "id": number} for number, box in enumerate(truth.annotations, start=1)]
    results = [
        {**each, "id": number, "iscrowd": 0, "area": each["bbox"][2] * each["bbox"][3]}
        for number, each in enumerate(detections, start=1)
    ]
    with open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet):
        truth = truth._replace(annotations=boxes)
        figures, run = _run_lvis(truth, results) if is_federated(truth.images) else _run(truth, results, evaluator)
    precision = run.eval["precision"]
    names = {each["id"]: each["name"] for each in truth.categories}
    counts = Counter(box["category_id"] for box in boxes if not box["iscrowd"])
    per_class = []
    for k, category_id in enumerate(map(int, run.params.catIds)):
        values = precision[:, :, k, 0, -1]  # (thresholds, recalls): all areas, most detections
        ap, ap50 = mean_measured(values), mean_measured(values[0])
        per_class.append(ClassAP(names[category_id], category_id, counts[category_id], ap, ap50))
    return EvalResult(figures, per_class, detections, precision, sizes or {})


def mean_measured(values: np.ndarray, nothing: float = math.nan) -> float:
    """The mean of the values that are not -1; `nothing` if all are."""
    measured = values[values > -1]
    return float(measured.mean()) if measured.size else nothing


def counted_truth(annotations: str | Path | DataSource, sizes: Mapping[int, tuple[int, int]]) -> CocoDocument:
    """The images and annotations that count; see `score` and `countable`."""
    # A set that has been opened has passed data.max_defects.
    truth = read_document(annotations, limit=None if isinstance(annotations, DataSource) else MOST_DROPPED)
    if sizes:
        truth = truth._replace(images=[each for each in truth.images if each["id"] in sizes])
    return truth._replace(annotations=countable(truth, sizes))


def countable(truth: CocoDocument, sizes: Mapping[int, tuple[int, int]]) -> list[dict[str, Any]]:
    """The annotations that count, as in training: boxes without area in their image cannot be found and are left out.
    Boxes partly outside are kept unchanged, as in the official evaluation, and so are crowds. sizes: of all images that
    were not left out; empty: all count."""
    known = {each["id"]: (each["height"], each["width"]) for each in truth.images} | dict(sizes)
    annotations = [each for each in truth.annotations if not sizes or each["image_id"] in sizes]
    limits = np.array([known[each["image_id"]] for each in annotations], np.float64).reshape(-1, 2)
    limits[limits == 0] = np.inf  # unknown
    _, keep = clip_to_image(corners_of(annotations), limits)
    return [each for each, has_area in zip(annotations, keep) if has_area or each["iscrowd"]]


def _run(truth: CocoDocument, results: list[dict[str, Any]], evaluator: Evaluator) -> tuple[dict[str, float], Any]:
    """The figures, and the evaluator that has computed them."""
    if evaluator == "pycocotools":
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    elif evaluator == "faster-coco-eval":
        from faster_coco_eval import COCO
        from faster_coco_eval import COCOeval_faster as COCOeval
    else:
        raise ValueError(f"evaluator: expected faster-coco-eval or pycocotools, got {evaluator!r}")
    run = COCOeval(*_sets(COCO, truth, results), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    return {name: float(value) for name, value in zip(FIGURES, run.stats[:12], strict=True)}, run


def _run_lvis(truth: CocoDocument, results: list[dict[str, Any]]) -> tuple[dict[str, float], Any]:
    """The federated figures of the `lvis` package: classes that were not annotated in an image are no errors there."""
    from faster_coco_eval import COCO
    from faster_coco_eval import COCOeval_faster as COCOeval

    categories = [{"frequency": "f"} | each for each in truth.categories]
    by_image: dict[int, list[dict[str, Any]]] = {}
    for each in sorted(results, key=lambda each: -each["score"]):
        by_image.setdefault(each["image_id"], []).append(each)
    best = [each for found in by_image.values() for each in found[:LVIS_DETECTIONS]]
    run = COCOeval(*_sets(COCO, truth._replace(categories=categories), best), "bbox", lvis_style=True)
    run.params.maxDets = [LVIS_DETECTIONS]
    run.evaluate()
    run.accumulate()
    ap = run.eval["precision"][..., -1]  # (thresholds, recalls, classes, areas)
    recall = run.eval["recall"][..., -1]  # (thresholds, classes, areas)
    frequencies = np.array([each.get("frequency", "") for each in truth.categories])
    parts = [ap[..., 0], ap[0, ..., 0], ap[5, ..., 0], *(ap[..., area] for area in (1, 2, 3))]
    parts += [ap[..., frequencies == each, 0] for each in FREQUENCIES]
    parts += [recall[..., area] for area in (0, 1, 2, 3)]
    return {name: mean_measured(part, nothing=-1.0) for name, part in zip(LVIS_FIGURES, parts)}, run


def _sets(coco: Any, truth: CocoDocument, results: list[dict[str, Any]]) -> tuple[Any, Any]:
    """Truth and results as the evaluators want them. The truth has an index; that of a million results would take a
    second and is not used. loadRes() of either evaluator fails on annotation files without `info` or on empty
    results, in one version or another."""
    indexed = coco()
    boxes, images, categories = truth.annotations, truth.images, truth.categories
    indexed.dataset = {"info": {}, "images": images, "categories": categories, "annotations": boxes}
    indexed.createIndex()
    return indexed, SimpleNamespace(getAnnIds=lambda **_: [], loadAnns=lambda _: results)


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
    if given is None:  # half-way between the last one that should count and the next: other hardware rounds differently
        last, _ = best_f1(scores, right, num_objects)
        given = (last + float(max(scores[scores < last], default=LOWEST))) / 2
    chosen = scores >= given
    hits, found = int(right[chosen].sum()), int(chosen.sum())
    precision = hits / found if found else math.nan
    recall = hits / num_objects if num_objects else math.nan
    return OperatingPoint(given, precision, recall, 2 * hits / (found + num_objects) if num_objects else math.nan)
