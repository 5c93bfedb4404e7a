"""The command line: `rtdetr train|eval|demo`. The files in tools/ call the same functions.

Exit codes: 0 done, 1 the run failed, 2 the command, a config, data or a weight file cannot be used, 128 + n stopped by
signal n.
"""

from __future__ import annotations

import argparse
import glob
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from rtdetr.config import Config, ConfigError, config_from_dict, load_config
from rtdetr.data.classes import DataError
from rtdetr.data.loader import build_val_loader
from rtdetr.engine import distributed
from rtdetr.engine.evaluator import evaluate
from rtdetr.engine.trainer import Trainer, TrainingFailed
from rtdetr.inference.draw import draw
from rtdetr.inference.predictor import Detector
from rtdetr.threads import making_room
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint
from rtdetr.weights.load import model_from_checkpoint

Command = Callable[[Sequence[str] | None], int]


def train(arguments: Sequence[str] | None = None) -> int:
    """Trains a model; see `rtdetr train --help`."""
    parser = argparse.ArgumentParser(prog="rtdetr train", description="Train RT-DETRv3; on several GPUs with torchrun.")
    parser.add_argument("-c", "--config", type=Path, help="YAML file; with -r the default is the checkpoint's")
    start = parser.add_mutually_exclusive_group()
    start.add_argument("-r", "--resume", type=Path, metavar="CHECKPOINT", help="go on with a run, from its last.pth")
    start.add_argument("-t", "--tuning", type=Path, metavar="WEIGHTS", help="start from what fits of these weights")
    _add_update(parser)
    parser.add_argument("--output-dir", type=Path, help="default: output/NAME, or the folder of the -r checkpoint")
    _add_device(parser)
    args = parser.parse_args(arguments)
    if args.config is None and args.resume is None:
        parser.error("-c CONFIG is needed (or -r CHECKPOINT, which knows its own)")

    def work() -> int:
        cfg = _config(args.config, args.resume, args.update)
        folder = args.output_dir or (args.resume.parent if args.resume else Path("output") / cfg.name)
        with distributed.process_group(args.device) as device:
            stopped_by = Trainer(cfg, folder, device, resume=args.resume, tuning=args.tuning).run()
        if stopped_by is not None:
            print(f"stopped by signal {stopped_by}; go on with -r {folder / 'last.pth'}", file=sys.stderr)
            return 128 + stopped_by
        return 0

    return _guarded(work)


def evaluate_command(arguments: Sequence[str] | None = None) -> int:
    """Prints the AP of a checkpoint; see `rtdetr eval --help`."""
    parser = argparse.ArgumentParser(prog="rtdetr eval", description="COCO figures of a checkpoint.")
    parser.add_argument("-w", "--weights", type=Path, required=True, help="a checkpoint of this project")
    parser.add_argument("-c", "--config", type=Path, help="YAML file in place of the config in the checkpoint")
    _add_update(parser)
    parser.add_argument("--evaluator", choices=("faster-coco-eval", "pycocotools"), help="default: eval.evaluator")
    parser.add_argument("--save-json", type=Path, metavar="FILE", help="write the detections as COCO results")
    _add_device(parser)
    args = parser.parse_args(arguments)

    def work() -> int:
        updates = args.update + ([f"eval.evaluator={args.evaluator}"] if args.evaluator else [])
        replaced = load_config(args.config, updates) if args.config else None
        with distributed.process_group(args.device) as device:
            model, cfg, classes = model_from_checkpoint(args.weights, updates, replaced)
            loader = build_val_loader(cfg, classes, distributed.rank(), distributed.world_size())
            result = evaluate(model.to(device), loader, cfg.data.val.annotations, classes, cfg.eval, device)
        if result is not None:
            print(f"{args.weights} on {cfg.data.val.annotations}\n{result.table()}")
            if args.save_json:
                args.save_json.parent.mkdir(parents=True, exist_ok=True)
                args.save_json.write_text(json.dumps(result.detections), encoding="utf-8")
        return 0

    return _guarded(work)


def demo(arguments: Sequence[str] | None = None) -> int:
    """Detects in pictures; see `rtdetr demo --help`."""
    parser = argparse.ArgumentParser(prog="rtdetr demo", description="Detect objects in pictures.")
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="picture, folder of pictures, or glob")
    parser.add_argument("-w", "--weights", type=Path, required=True, help="a checkpoint of this project")
    parser.add_argument("--output-dir", type=Path, default=Path("output/demo"), help="default: output/demo")
    parser.add_argument("--threshold", type=float, default=0.5, help="lowest score that is reported (default: 0.5)")
    _add_device(parser)
    args = parser.parse_args(arguments)

    def work() -> int:
        files = find_pictures(args.sources)
        with distributed.process_group(args.device) as device:
            detector = Detector(args.weights, device, args.threshold)
            results: list[dict[str, Any]] = []
            for file, picture, detections in detector.predict_files(files):
                target = _free_name(args.output_dir, file, {each["annotated"] for each in results})
                target.parent.mkdir(parents=True, exist_ok=True)
                draw(picture, detections).save(target, quality=92)
                found = [{**each._asdict(), "box": [round(v, 2) for v in each.box]} for each in detections]
                size = {"width": picture.width, "height": picture.height}
                results.append({"file": str(file), **size, "annotated": str(target), "detections": found})
                print(f"{file}: {len(found)} objects -> {target}")
        (args.output_dir / "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
        return 0

    return _guarded(work)


COMMANDS: dict[str, Command] = {"train": train, "eval": evaluate_command, "demo": demo}


def main(arguments: Sequence[str] | None = None) -> int:
    """`rtdetr COMMAND ...`"""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] not in COMMANDS:
        asked = bool(given) and given[0] in ("-h", "--help")
        print(f"usage: rtdetr {{{','.join(COMMANDS)}}} ...", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    return COMMANDS[given[0]](given[1:])


def find_pictures(sources: Sequence[str]) -> list[Path]:
    """Picture files named by files, folders (their pictures, not deeper) and globs, sorted within each source.

    Raises DataError for a source that yields none.
    """
    suffixes = set(Image.registered_extensions())
    files: list[Path] = []
    for source in sources:
        path = Path(source)
        if path.is_dir():
            found = sorted(each for each in path.iterdir() if each.suffix.lower() in suffixes and each.is_file())
        else:
            found = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(source, recursive=True))
            found = [each for each in found if each.is_file()]
        if not found:
            raise DataError(f"{source}: no picture found; expected a picture, a folder of pictures or a glob")
        files += [each for each in found if each not in files]
    return files


def _free_name(folder: Path, file: Path, taken: set[str]) -> Path:
    """Where to write an annotated picture: pictures of the same name from two folders must not overwrite each other."""
    target, number = folder / f"{file.stem}.jpg", 1
    while str(target) in taken:
        target, number = folder / f"{file.stem}_{number}.jpg", number + 1
    return target


def _config(path: Path | None, checkpoint: Path | None, updates: list[str]) -> Config:
    if path is None:
        return config_from_dict(load_checkpoint(checkpoint or "")["config"], str(checkpoint), updates)
    return load_config(path, updates)


def _add_update(parser: argparse.ArgumentParser) -> None:
    text = "change a config value, e.g. -u train.epochs=12 data.num_workers=2"
    parser.add_argument("-u", "--update", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda when there is one)")


def _guarded(work: Callable[[], int]) -> int:
    """Runs a command; what its user can mend becomes one line and an exit code, everything else a traceback."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rtdetr").setLevel(logging.INFO)
    try:
        with making_room():
            return work()
    except (ConfigError, DataError, CheckpointError, distributed.DeviceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except TrainingFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
