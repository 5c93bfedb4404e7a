"""The certificate that an exported file agrees with its model.

A detection of the model has a counterpart in the file if the label is the same and score and box differ by no more than
the bounds. The order does not matter, as nearly equal scores may swap places.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from rtdetr.export.cases import GENERATED, Case, ExampleImages, cases
from rtdetr.export.onnx import changed_weights
from rtdetr.export.targets import certificate_path
from rtdetr.export.transformers import TransformersModel, changed_entries
from rtdetr.inference.export_metadata import Metadata, Precision
from rtdetr.inference.runtimes import ExportedModel, model_file, open_exported, runtime_of, why_not_run
from rtdetr.models.postprocess import postprocess
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Detections, as_floats
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.digest import file_sha256, num_bytes
from rtdetr.weights.huggingface import is_huggingface

SHOWN = 0.05  # detections with a higher score are compared
LEAST = 5  # minimum number of detections compared per image, whatever their scores, in float32
LOSSY_SIDE = 640
BROKEN = 0.8  # a batch of a lossy format with this share of missing detections fails, however well all others agree
TIE = 1e-4  # logits of two cells this close count as equal: either one may become a query
OTHER_WEIGHTS = "it was exported from other weights"
OTHER_CLASSES = "it was exported with other classes"
CLASSES = ("names", "category_ids")  # thresholds may be chosen later
PACKAGES = (
    *("rtdetr", "torch", "numpy", "onnx", "onnxscript", "onnxruntime", "openvino", "transformers"),
    *("executorch", "litert-torch", "ai-edge-litert", "coremltools", "pnnx", "ncnn"),
)


class Bounds(NamedTuple):
    """How far a file may differ from the model."""

    score: float
    box: float  # pixels of the original; in lossy formats at LOSSY_SIDE, scaled up for larger images
    missing: float  # share of a runtime's detections that may have no counterpart
    least: int  # minimum number of detections compared per image, whatever their scores
    noise: bool = True  # whether random images count for the verdict
    ap: float = 0.001  # tolerated change of AP, if it is measured


BOUNDS: dict[Precision, Bounds] = {
    "fp32": Bounds(1e-4, 0.05, 0.0, LEAST),
    # Rounding changes the logits that select queries: the last query is sometimes another cell, which at worst changed
    # every fourth detection of an image (nano, 40 queries), each counted twice.
    "fp16": Bounds(0.02, 2.0, 0.2, 0, ap=0.005),
    # These bounds only detect broken files; --ap measures the loss of AP. Noise is outside the calibrated ranges of
    # 8 bits: it is compared, but does not count for the verdict.
    "int8": Bounds(0.3, 30.0, 0.5, 0, noise=False, ap=0.01),
}


class AveragePrecisions(NamedTuple):
    model: float
    file: float
    on: str  # which images

    def text(self) -> str:
        return f"AP {self.model:.4f} in PyTorch, {self.file:.4f} in this file ({self.on})"


@dataclass(frozen=True)
class Comparison:
    """One batch in one runtime."""

    runtime: str
    kind: str
    batch: int
    height: int
    width: int
    detections: int  # compared detections of the model
    missing: int  # without counterpart, or only in the file
    score: float  # largest differences between counterparts
    box: float  # pixels
    undecided: int  # images that differ, and whose queries are undecided
    passed: bool


@dataclass
class Certificate:
    """The file, what was compared, and the results."""

    file: str
    sha256: str
    num_bytes: int
    format: str
    precision: Precision
    bounds: Bounds
    weights_sha256: str
    images: str
    comparisons: list[Comparison] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    certified_sha256: str = ""  # of the file when it last passed; equals sha256 unless the file changed
    fault: str = ""  # a fault that is not a failed comparison
    ap: AveragePrecisions | None = None  # of the certified file, if requested
    not_run: str = ""  # why nothing was compared, if this kind of machine cannot run the file

    @property
    def passed(self) -> bool:
        return not self.reason()

    def reason(self) -> str:
        """Why the file differs from the model, empty if it does not."""
        if self.fault:
            return self.fault
        failed = [each for each in self.comparisons if not each.passed]
        if failed:
            worst = max(failed, key=lambda each: each.missing)
            uncalibrated = self.precision == "int8" and self.images == GENERATED
            return (
                f"{len(failed)} of {len(self.comparisons)} comparisons with PyTorch fail; with {worst.runtime} on "
                f"{worst.kind} {worst.batch}x{worst.height}x{worst.width} {worst.missing} of {worst.detections} "
                "detections have no counterpart"
                + ("; 8 bits need --images like those of --calibrate" if uncalibrated else "")
            )
        if self.ap and abs(self.ap.file - self.ap.model) > self.bounds.ap:
            return f"its AP differs from PyTorch's by more than {self.bounds.ap:g}: {self.ap.text()}"
        if not any(each.detections for each in self.comparisons) and self.bounds.least and not self.not_run:
            return "no image could be compared, as cells of equal score compete for the last query; train the model"
        return ""

    def table(self) -> str:
        """The results as text for a terminal."""
        if self.not_run:
            return "\n".join([f"not run: {self.not_run}; --check compares there", *self.notes])
        bounds = self.bounds
        columns = ("runtime", "images", "batch x size", "compared", "missing", "score", "box px")
        lines = ["{:12s} {:9s} {:>14s} {:>9s} {:>8s} {:>9s} {:>8s}".format(*columns)]
        for each in self.comparisons:
            size = f"{each.batch}x{each.height}x{each.width}"
            within = each.missing <= bounds.missing * each.detections
            excuse = "by chance" if bounds.noise or each.kind != "random" else "not calibrated for it"
            verdict = "FAILED" if not each.passed else "ok" if within else excuse
            if each.undecided:
                verdict += f", {each.undecided} undecided"
            lines.append(
                f"{each.runtime:12s} {each.kind:9s} {size:>14s} {each.detections:9d} {each.missing:8d} "
                f"{each.score:9.1e} {each.box:8.4f} {verdict}"
            )
        lines.append(
            f"bounds ({self.precision}): labels equal, score {bounds.score:g}, box {bounds.box:g} px"
            + (f", {bounds.missing:.0%} may be missing" if bounds.missing else "")
        )
        measured = [self.ap.text()] if self.ap and not self.fault else []  # not of other bytes than the certified ones
        return "\n".join([*lines, *measured, *self.notes])

    def save(self, path: Path) -> None:
        content = {
            **asdict(self),
            "bounds": self.bounds._asdict(),
            "ap": self.ap and self.ap._asdict(),
            "passed": self.passed and not self.not_run,
            "reason": self.reason(),
            "machine": f"{platform.machine()} {platform.system()}",
        }
        path.write_text(json.dumps({"certificate": 1, **content}, indent=1), encoding="utf-8")


class StoredCertificate(NamedTuple):
    """The content of the certificate next to a file; empty if there is none."""

    sha256: str = ""  # of the file when it last passed, empty if it never did
    weights_sha256: str = ""  # of the model that it was compared with
    format: str = ""
    notes: Sequence[str] = ()
    ap: AveragePrecisions | None = None
    score: float | None = None  # largest differences from PyTorch, the box in pixels; None if nothing was compared
    box: float | None = None


def read_stored_certificate(file: Path) -> StoredCertificate:
    """Reads the certificate next to a file. Raises CheckpointError."""
    path = certificate_path(file)
    if not path.is_file():
        return StoredCertificate()
    try:
        content = json.loads(path.read_bytes())
        ap = content.get("ap")  # missing in older certificates
        score, box = (max((each[key] for each in content["comparisons"]), default=None) for key in ("score", "box"))
        sha256, weights_sha256 = content["certified_sha256"], content["weights_sha256"]
        ap = ap and AveragePrecisions(**ap)
        return StoredCertificate(sha256, weights_sha256, content["format"], list(content["notes"]), ap, score, box)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged; remove it, then --check writes a new one") from error


def certify(path: Path, format: str, model: Network, metadata: Metadata, images: ExampleImages) -> Certificate:
    """Compares a file with the model, on the CPU, in every installed runtime that reads it.

    metadata: of the model; precision and outputs are read from the file.
    """
    files: Sequence[ExportedModel | TransformersModel] = []
    fault, precision = "", metadata.precision
    try:
        if is_huggingface(path):
            files, fault = [TransformersModel(path)], changed_entries(path, model)
        else:
            files, precision, fault = _opened(path, metadata)
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{path}: ")  # the caller names the file
    certificate = Certificate(
        path.name,
        file_sha256(path),
        num_bytes(path),
        format,
        precision,
        BOUNDS[precision],
        metadata.weights_sha256,
        images.says,
        versions=_versions(),
        fault=fault,
        not_run=why_not_run(path),
    )
    cfg, fixed = metadata.config, False
    if files and isinstance(first := files[0], ExportedModel):
        cfg, fixed = first.metadata.config, first.metadata.fixed  # of the file, with more queries in 8 bits
    size, num_queries, most = metadata.config.data.image_size, cfg.model.decoder.num_queries, cfg.eval.max_detections
    if is_huggingface(path):  # transformers returns one detection a query
        most = min(most, num_queries)
    try:
        for case in cases(images, size, num_queries, fixed) if files and not certificate.not_run else ():
            expected, gaps = reference(model, case, most)
            certificate.comparisons += [compare(file, case, expected, gaps, certificate.bounds) for file in files]
    except CheckpointError as error:
        certificate.fault = fault or str(error).removeprefix(f"{path}: ")
    certificate.comparisons = together(certificate.comparisons, certificate.bounds)
    certificate.certified_sha256 = certificate.sha256 if certificate.passed else ""
    return certificate


def _opened(path: Path, metadata: Metadata) -> tuple[list[ExportedModel], Precision, str]:
    """The file in every runtime, its precision, and the fault of its weights, if any. Raises CheckpointError."""
    files = [open_exported(path, runtime=runtime) for runtime in runtimes_for(path)]
    fault = changed_weights(file) if (file := model_file(path)).suffix == ".onnx" else ""
    if files[0].metadata.weights_sha256 != metadata.weights_sha256:
        fault = OTHER_WEIGHTS
    elif any(getattr(files[0].metadata.classes, key) != getattr(metadata.classes, key) for key in CLASSES):
        fault = OTHER_CLASSES
    return files, files[0].metadata.precision, fault


def runtimes_for(path: Path) -> list[str]:
    """The installed runtimes that read a file; its own in any case."""
    own = runtime_of(path) or ""
    others = ["openvino"] if own == "onnxruntime" and importlib.util.find_spec("openvino") else []
    return [own, *others]


def reference(model: Network, case: Case, max_detections: int) -> tuple[Detections, Tensor]:
    """PyTorch's detections, and the difference (B,) in logits between the last selected cell and the best one that was
    not."""
    logits: list[Tensor] = []
    hook = model.decoder.selector.score_head.register_forward_hook(lambda *call: logits.append(call[2]))
    try:
        with torch.inference_mode():
            predictions = model(as_floats(case.pixels))
    finally:
        hook.remove()
    best = logits[0].amax(dim=2).sort(dim=1, descending=True).values
    border = model.decoder.selector.num_queries
    gaps = best[:, border - 1] - best[:, border] if border < best.shape[1] else best.new_full((len(best),), torch.inf)
    return postprocess(predictions, case.sizes, max_detections), gaps


def compare(
    file: ExportedModel | TransformersModel, case: Case, expected: Detections, gaps: Tensor, bounds: Bounds
) -> Comparison:
    with torch.inference_mode():
        found = file(as_floats(case.pixels), case.sizes)
    counts, missing, undecided = 0, 0, 0
    score = box = 0.0
    for i, gap in enumerate(gaps.tolist()):
        allowed = bounds
        if bounds.missing:
            allowed = bounds._replace(box=bounds.box * max(1.0, float(case.sizes[i].max()) / LOSSY_SIDE))
        one = difference(arrays(expected, i), arrays(found, i), allowed)
        if one.missing and gap < TIE:
            undecided += 1
            continue
        counts, missing = counts + one.detections, missing + one.missing
        score, box = max(score, one.score), max(box, one.box)
    batch, _, height, width = case.pixels.shape
    decides = bounds.noise or case.kind != "random" or not np.isfinite(box)
    passed = missing <= bounds.missing * counts or not decides
    return Comparison(file.runtime, case.kind, batch, height, width, counts, missing, score, box, undecided, passed)


def together(comparisons: list[Comparison], bounds: Bounds) -> list[Comparison]:
    """The comparisons with the verdict on all batches of a runtime: a single image may differ by chance, and a broken
    file differs in all of them, or in nearly all detections of one kind."""
    judged = []
    for each in comparisons:
        same = [other for other in comparisons if other.runtime == each.runtime]
        same = [other for other in same if bounds.noise or other.kind != "random"]
        excused = sum(other.missing for other in same) <= bounds.missing * sum(other.detections for other in same)
        if bounds.missing and excused and np.isfinite(each.box) and each.missing <= BROKEN * each.detections:
            each = replace(each, passed=True)
        judged.append(each)
    return judged


class Arrays(NamedTuple):
    """The detections of one image, as arrays."""

    scores: NDArray[np.float32]  # (T,)
    labels: NDArray[np.int64]  # (T,)
    boxes: NDArray[np.float32]  # (T, 4) xyxy, pixels


def arrays(detections: Detections, i: int) -> Arrays:
    return Arrays(*(each[i].numpy() for each in detections))


class Difference(NamedTuple):
    """The difference of two lists of detections of one image; the fields are those of Comparison."""

    detections: int
    missing: int
    score: float
    box: float


def difference(expected: Arrays, found: Arrays, bounds: Bounds) -> Difference:
    """Compares the detections of the model and of the file in an image."""
    count = max(int((expected.scores > SHOWN).sum()), min(bounds.least, len(expected.scores)))
    if not all(np.isfinite(each).all() for each in (found.scores, found.boxes)):
        return Difference(count, max(count, 1), float("inf"), float("inf"))
    if not count:  # no counterpart at all: compare the scores of equal ranks
        best = min(len(expected.scores), len(found.scores))  # files in 8 bits have more queries
        ranked = [np.sort(each.scores)[::-1][:best] for each in (expected, found)]
        score = float(np.abs(ranked[0] - ranked[1]).max(initial=0))
        return Difference(0, int(score > bounds.score), score, 0.0)
    same = expected.labels[:count, None] == found.labels
    scores = np.abs(expected.scores[:count, None] - found.scores)
    boxes = np.abs(expected.boxes[:count, None] - found.boxes).max(axis=2)
    cost = np.where(same, np.minimum(scores / bounds.score + boxes / bounds.box, 1e6), 2e6)
    rows, columns = linear_sum_assignment(cost)
    paired = same[rows, columns]
    scores, boxes = scores[rows, columns][paired], boxes[rows, columns][paired]
    good = (scores <= bounds.score) & (boxes <= bounds.box)
    surplus = found.scores > min(SHOWN, expected.scores[count - 1]) + bounds.score
    surplus[columns[paired]] = False
    missing = count - int(good.sum()) + int(surplus.sum())
    return Difference(count, missing, float(scores.max(initial=0)), float(boxes.max(initial=0)))


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
