"""`rtdetr eval`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rtdetr.commands.arguments import Parser, add_device, add_kernels, add_overwrite, add_update, add_weights

if TYPE_CHECKING:
    from torch import nn

    from rtdetr.data.loader import DetectionLoader
    from rtdetr.engine.signals import StopSignal
    from rtdetr.types import Batch


def run(arguments: Sequence[str] | None = None) -> int:
    """Prints the AP of a checkpoint; see `rtdetr eval --help`."""
    parser = Parser(prog="rtdetr eval", description="COCO figures of a checkpoint.")
    add_weights(parser, "a checkpoint, or an exported file")
    parser.add_argument(
        "-c", "--config", help="YAML file, or the name of a shipped config, in place of the config in the checkpoint"
    )
    add_update(parser)
    parser.add_argument("--evaluator", choices=("faster-coco-eval", "pycocotools"), help="default: eval.evaluator")
    parser.add_argument(
        "--match-classes",
        choices=("id", "name"),
        default="id",
        help="which category of the annotations is which class of the model (default: id); results carry their ids",
    )
    text = "score the model as `rtdetr predict` runs it, in that type: docs/deploy.md (default: as it was trained)"
    parser.add_argument("--deployed", choices=("float32", "float16"), help=text)
    parser.add_argument("--save-json", type=Path, metavar="FILE", help="write the detections as COCO results")
    text = "write DIR/report.html: curves, confusions, mistakes with images, in one file that needs no network"
    parser.add_argument("--report", type=Path, metavar="DIR", help=text)
    add_overwrite(parser)
    add_device(parser)
    add_kernels(parser)
    args = parser.parse_args(arguments)
    args.weights = args.weights or args.named_weights

    from rtdetr.engine.signals import StopSignal

    signals = StopSignal()
    with signals.setting_up():
        return _evaluate(args, signals)


def _evaluate(args: argparse.Namespace, signals: StopSignal) -> int:
    from rtdetr.config import ConfigError, load_config
    from rtdetr.data.loader import build_val_loader
    from rtdetr.engine import distributed
    from rtdetr.engine.evaluation.evaluator import EvaluationStopped, evaluate
    from rtdetr.engine.evaluation.report import write_report
    from rtdetr.inference.deploy import AsModule
    from rtdetr.inference.predictor import Predictor
    from rtdetr.inference.runtimes import is_exported, load_model
    from rtdetr.ops.kernels import using
    from rtdetr.outputs import check_outputs, writing
    from rtdetr.shipped_configs import find_config

    if args.kernels and is_exported(args.weights):
        raise ConfigError(f"{args.weights}: runs as it was exported; --kernels is for checkpoints")
    chosen = {"eval.evaluator": args.evaluator, "kernels": args.kernels}
    updates = args.update + [f"{key}={value}" for key, value in chosen.items() if value]
    replaced = load_config(find_config(args.config), updates) if args.config else None
    with distributed.process_group(args.device) as device:
        model, cfg, classes = load_model(args.weights, device, updates, replaced)
        detector: nn.Module = model.to(device)
        if args.deployed:
            half = args.deployed == "float16"
            detector = AsModule(Predictor.of(model, cfg, classes, device, half=half).predict_tensors)
        annotations = cfg.data.val.annotations
        report = args.report and args.report / "report.html"
        outputs = [path for path in (args.save_json, report) if path]
        if distributed.is_main():
            check_outputs(outputs, [args.weights, Path(annotations)], args.overwrite)
        loader = build_val_loader(cfg, classes, distributed.rank(), distributed.world_size(), args.match_classes)
        with signals.listening(), using(cfg.kernels):
            batches = _counted(loader)
            detections, stopped = [], ""
            try:
                result = evaluate(
                    detector, batches, loader.source.origin, loader.classes, cfg.eval, device, signals.asked
                )
                if result is not None:
                    print(f"{args.weights} on {loader.source.summary()}\n{result.table()}")
                    detections = result.detections
                    if report:
                        with writing(report):
                            write_report(report, f"{args.weights} on {loader.source.origin}", result, loader.source)
                        print(f"report: {report}")
            except EvaluationStopped as stop:
                detections, stopped = stop.detections, f" after {stop.num_images} of {len(loader.source)} images"
            if args.save_json and distributed.is_main():
                with writing(args.save_json):
                    args.save_json.parent.mkdir(parents=True, exist_ok=True)
                    args.save_json.write_text(json.dumps(detections), encoding="utf-8")
                stopped += f"; {len(detections)} detections are in {args.save_json}"
            stopped_by = signals.agreed()
    if stopped_by is not None and distributed.is_main():
        print(f"stopped by signal {stopped_by}{stopped}", file=sys.stderr)
    return 0 if stopped_by is None else 128 + stopped_by


def _counted(loader: DetectionLoader) -> Iterator[Batch]:
    """The batches, with a bar on the first process's stderr, for its own share."""
    from rtdetr.commands.progress import progress
    from rtdetr.engine import distributed

    with progress(len([*loader.sampler]), shown=distributed.is_main()) as bar:
        for batch in loader:
            yield batch
            bar.update(len(batch.infos))
