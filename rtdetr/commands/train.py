"""`rtdetr train`"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rtdetr.commands.arguments import Parser, count
from rtdetr.engine.signals import StopSignal
from rtdetr.wording import signal_name

DEFAULT_CONFIG = "rtdetrv3_r18vd_small"  # if only DATA is given


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("train", "Train RT-DETRv3; on several GPUs with torchrun.")
    text = "YAML file, or the name of a shipped config; default: the checkpoint's with -r, else rtdetrv3_r18vd_small"
    parser.add_argument("-c", "--config", help=text)
    parser.add_training_data()
    start = parser.add_mutually_exclusive_group()
    text = "resume a run from its last.pth (or last-1.pth)"
    start.add_argument("-r", "--resume", type=Path, metavar="CHECKPOINT", help=text)
    text = "load all weights that match, and report the rest"
    start.add_argument("-t", "--tuning", type=Path, metavar="WEIGHTS", help=text)
    text = "repeat the failed step in a failed_batch.pth; exit code 1 if it fails again, else 0"
    start.add_argument("--replay", type=Path, metavar="FILE", help=text)
    parser.add_update()
    text = "default: output/NAME, NAME-2, ... if that exists, or the folder of the -r checkpoint"
    parser.add_argument("--output-dir", type=Path, help=text)
    text = "move an existing run to FOLDER-old"
    parser.add_argument("--overwrite", action="store_true", help=text)
    text = "sanity check: overfit N training images in at most 700 iterations; has its own folder (default: "
    text += "output/NAME-overfit); exit code 0: passed, 1: failed"
    parser.add_argument("--overfit", type=count, metavar="N", help=text)
    parser.add_device()
    args = parser.parse_args(arguments)
    if args.replay is not None and (args.data or args.config or args.update or args.output_dir or args.overfit):
        parser.error(
            "--replay FILE knows its config and writes nothing; leave out DATA, -c, -u, --output-dir, --overfit"
        )
    if args.config is None and args.resume is None and args.replay is None:
        if args.data is None:
            parser.error("-c CONFIG or DATA is needed (or -r CHECKPOINT, which knows its own)")
        args.config = DEFAULT_CONFIG
    if args.overfit is not None and args.resume is not None:
        parser.error("--overfit always starts a new run: leave out -r")

    signals = StopSignal()
    with signals.setting_up():
        from rtdetr.data.data_arguments import data_updates

        args.update = [*data_updates(args.data), *args.update]
        if args.replay is not None:
            from rtdetr.engine import distributed
            from rtdetr.engine.run_files.replay import replay

            return replay(args.replay, distributed.choose_device(args.device))
        return _train(args, signals) if args.overfit is None else _overfit(args, signals)


def _overfit(args: argparse.Namespace, signals: StopSignal) -> int:
    from rtdetr.config import check_data, load_config
    from rtdetr.engine import distributed
    from rtdetr.engine.evaluation.overfit import open_images, overfit
    from rtdetr.engine.run_files.run_folder import choose_folder, prepare_folder
    from rtdetr.weights.load import read_weights

    cfg = load_config(args.config, args.update)
    with distributed.process_group(args.device, training=True) as device:
        folder = choose_folder(args.output_dir, None, f"{cfg.name}-overfit", args.overwrite)
        check_data(cfg, args.update, ["train"])
        open_images(cfg)  # before the first file is written
        if args.tuning is not None:
            read_weights(args.tuning)
        prepare_folder(folder, None, args.overwrite)
        verdict = overfit(cfg, args.overfit, folder, device, args.tuning, signals)
    print(verdict.sentence, file=sys.stderr if verdict.stopped_by else sys.stdout)
    return 128 + verdict.stopped_by if verdict.stopped_by else int(not verdict.passed)


def _train(args: argparse.Namespace, signals: StopSignal) -> int:
    from rtdetr.config import check_data, config_from_dict, load_config
    from rtdetr.engine import distributed
    from rtdetr.engine.run_files.run_folder import choose_folder, prepare_folder
    from rtdetr.engine.trainer import Trainer
    from rtdetr.weights.checkpoint import load_checkpoint

    if args.config is None:
        cfg = config_from_dict(load_checkpoint(args.resume)["config"], str(args.resume), args.update)
    else:
        cfg = load_config(args.config, args.update)
    with distributed.process_group(args.device, training=True) as device:
        folder = distributed.from_main(lambda: choose_folder(args.output_dir, args.resume, cfg.name, args.overwrite))
        check_data(cfg, args.update)
        trainer = Trainer(cfg, folder, device, args.resume, args.tuning, signals=signals)
        stopped_by = trainer.run(lambda: prepare_folder(folder, args.resume, args.overwrite))
        if stopped_by is None and distributed.is_main():
            trained = folder if folder.exists() or args.resume is None else args.resume.parent  # nothing was left to do
            print(summary(trained, trainer.state.best_ap, trainer.state.total_iterations))
    if stopped_by is not None:
        last = shlex.quote(str(folder / "last.pth"))
        print(f"stopped by {signal_name(stopped_by)}; resume with -r {last}", file=sys.stderr)
        return 128 + stopped_by
    return 0


def summary(folder: Path, best_ap: float, total_iterations: int) -> str:
    """The result of a run in three lines: the best AP and its iteration, the weights, and the next command."""
    from rtdetr.engine.run_files.metrics import best_row

    best, weights = best_row(folder / "metrics.csv", best_ap), folder / "best.pth"
    if not weights.is_file():
        weights = folder / "last.pth"
    found = "no AP, as the validation images have no box" if best_ap == -1 else "nothing was evaluated"
    if best is not None:
        found = f"best AP {best_ap:.4f} at iteration {best['iteration']} of {total_iterations}"
    return f"{found}\nweights: {weights}\nnext: rtdetr predict {shlex.quote(str(weights))} IMAGES"
