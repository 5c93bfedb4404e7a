"""`rtdetr eval`"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtdetr.commands.arguments import Parser, add_kernels, kernels_update, thresholds
from rtdetr.engine.signals import StopSignal
from rtdetr.outputs import check_folder, check_outputs, write_text, writing
from rtdetr.wording import counted, signal_name

if TYPE_CHECKING:
    from torch import nn

    from rtdetr.data.classes import Classes
    from rtdetr.data.loader import DetectionLoader
    from rtdetr.engine.evaluation.evaluator import EvalResult
    from rtdetr.types import Batch

EVALUATORS = ("faster-coco-eval", "pycocotools")


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("eval", "COCO figures of a checkpoint.")
    parser.add_weights("a checkpoint, or an exported file")
    parser.add_validation()
    text = "default: %(default)s, which LVIS always uses"
    parser.add_argument("--evaluator", choices=EVALUATORS, default=EVALUATORS[0], help=text)
    text = "match categories of the annotations with classes of the model by id or name (default: id)"
    parser.add_argument("--match-classes", choices=("id", "name"), default="id", help=text)
    text = "evaluate the model as `rtdetr predict` runs it, in that type (default: as it was trained)"
    parser.add_argument("--deployed", choices=("float32", "float16"), help=text)
    text = "score at which precision, recall and F1 are printed (default: that with the best F1 of each class)"
    parser.add_threshold(text)
    text = "store these thresholds in the checkpoint, for predict, serve, Python and exports"
    parser.add_argument("--save-thresholds", action="store_true", help=text)
    parser.add_argument("--save-json", type=Path, metavar="FILE", help="write the detections as COCO results")
    text = "write DIR/report.html: curves, confusions and mistakes with images, in one file"
    parser.add_argument("--report", type=Path, metavar="DIR", help=text)
    parser.add_overwrite()
    parser.add_device()
    add_kernels(parser)
    args = parser.parse_args(arguments)

    signals = StopSignal()
    with signals.setting_up():
        return _evaluate(args, signals)


def _evaluate(args: argparse.Namespace, signals: StopSignal) -> int:
    from rtdetr.config import ConfigError, check_data, load_config
    from rtdetr.data.data_arguments import data_updates
    from rtdetr.data.loader import build_val_loader
    from rtdetr.engine import distributed
    from rtdetr.engine.evaluation.evaluator import EvaluationStopped, evaluate
    from rtdetr.inference.deploy import DetectorModule
    from rtdetr.inference.predictor import Predictor
    from rtdetr.inference.runtimes import is_exported, load_model
    from rtdetr.ops.kernels import using
    from rtdetr.weights.thresholds import check_own

    if args.save_thresholds:
        check_own(args.weights)
        check_folder(args.weights if args.weights.is_dir() else args.weights.parent)
    if args.kernels and is_exported(args.weights):
        raise ConfigError(f"{args.weights}: runs as it was exported; --kernels is for checkpoints")
    updates = [*data_updates(args.data, ("val",)), *args.update, *kernels_update(args)]
    replaced = load_config(args.config, updates) if args.config else None
    with distributed.process_group(args.device) as device:
        model, cfg, classes = load_model(args.weights, device, updates, replaced)
        check_data(cfg, updates, ["val"])
        detector: nn.Module = model.to(device)
        if args.deployed:
            half = args.deployed == "float16"
            if half and (device.type, cfg.kernels) != ("cuda", "auto"):
                got = f"{device} and kernels={cfg.kernels}"
                raise ConfigError(f"--deployed float16: expected a GPU and kernels=auto, got {got}")
            detector = DetectorModule(Predictor.of(model, cfg, classes, device, half=half).predict_tensors)
        report = args.report and args.report / "report.html"
        outputs = [path for path in (args.save_json, report) if path]
        loader = build_val_loader(cfg, classes, distributed.rank(), distributed.world_size(), args.match_classes)
        if distributed.is_main():
            check_outputs(outputs, chain([args.weights], loader.source.files()), args.overwrite)
        with signals.listening(), using(cfg.kernels):
            batches, given = _counted(loader), _given(args, loader.classes)
            detections, stopped = [], ""
            try:
                origin, asked = loader.source.origin, signals.asked
                result = evaluate(detector, batches, origin, loader.classes, cfg.eval, device, asked, args.evaluator)
                if result is not None:
                    detections = result.detections
                    _report(args, result.with_points(loader.source.origin, given), loader, report)
            except EvaluationStopped as stop:
                detections, stopped = stop.detections, f" after {stop.num_images} of {len(loader.source)} images"
            if args.save_json and distributed.is_main():
                stopped += _save_json(args.save_json, detections)
            stopped_by = signals.agreed()
    if stopped_by is not None and distributed.is_main():
        print(f"stopped by {signal_name(stopped_by)}{stopped}", file=sys.stderr)
    return 0 if stopped_by is None else 128 + stopped_by


def _report(args: argparse.Namespace, result: EvalResult, loader: DetectionLoader, report: Path | None) -> None:
    """Prints and writes the result of a complete evaluation, in the first process. report: the file for --report."""
    from rtdetr.engine.evaluation.report import write_report

    print(f"{args.weights} on {loader.source.summary()}\n{result.table()}")
    if args.save_thresholds:
        _save_thresholds(args.weights, result, loader.classes)
    if report:
        write_report(report, f"{args.weights} on {loader.source.origin}", result, loader.source)
        print(f"report: {report}")


def _save_json(file: Path, detections: list[dict[str, Any]]) -> str:
    """Writes COCO results, and returns the end of a message about them."""
    write_text(file, json.dumps(detections))
    return f"; {counted(len(detections), 'detection')} written to {file}"


def _given(args: argparse.Namespace, classes: Classes) -> dict[int, float] | None:
    """Returns the thresholds of --threshold by category id; None: use those with the best F1. Raises DataError."""
    from rtdetr.inference.thresholds import lowest_scores

    if not args.threshold:
        return None
    number, by_name = thresholds(args.threshold)
    lowest = lowest_scores(classes, number, by_name)
    named = [number is not None or name in by_name for name in classes.names]
    each = [lowest] * len(classes) if isinstance(lowest, float) else lowest.tolist()
    return {i: score for i, score, given in zip(classes.category_ids, each, named) if given}


def _save_thresholds(weights: Path, result: EvalResult, classes: Classes) -> None:
    """Saves the thresholds of the result in the order of the model's classes; a class without one keeps its own."""
    from rtdetr.inference.thresholds import DEFAULT
    from rtdetr.weights.thresholds import save_thresholds

    before = classes.thresholds or [DEFAULT] * len(classes)
    points = {i: point.threshold for i, point in result.points.items() if not math.isnan(point.threshold)}
    if not points:
        print(f"{weights}: unchanged, as there is no correct detection from which a threshold could be chosen")
        return
    with writing(weights):
        save_thresholds(weights, [points.get(i, old) for i, old in zip(classes.category_ids, before)])
    print(f"{weights}: carries the thresholds of {counted(len(points), 'class')} now")


def _counted(loader: DetectionLoader) -> Iterator[Batch]:
    """Yields the batches, with a progress bar on the stderr of the first process, for its own share."""
    from rtdetr.commands.progress import progress
    from rtdetr.engine import distributed

    with progress(len([*loader.sampler]), shown=distributed.is_main()) as bar:
        for batch in loader:
            yield batch
            bar.update(len(batch.infos))
