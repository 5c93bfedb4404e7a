"""`rtdetr learning-curve`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rtdetr.commands.arguments import Parser
from rtdetr.commands.train import DEFAULT_CONFIG
from rtdetr.engine.signals import StopSignal
from rtdetr.wording import signal_name

ABOUT = """Train on half of the images, then on all, for as many iterations; print the AP of both, and whether labelling
more would pay. It takes twice the time of a training."""


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("learning-curve", ABOUT)
    parser.add_training_data()
    text = f"YAML file, or the name of a shipped config; default with DATA: {DEFAULT_CONFIG}"
    parser.add_argument("-c", "--config", help=text)
    text = "load all weights that match, and report the rest"
    parser.add_argument("-t", "--tuning", type=Path, metavar="WEIGHTS", help=text)
    parser.add_update()
    text = "folder of learning_curve.json and both runs, half/ and whole/; default: an unused "
    text += "output/NAME-learning-curve"
    parser.add_argument("--output-dir", type=Path, help=text)
    parser.add_device()
    args = parser.parse_args(arguments)
    if args.config is None and args.data is None:
        parser.error("-c CONFIG or DATA is needed")

    signals = StopSignal()
    with signals.setting_up():
        from rtdetr.config import load_config
        from rtdetr.data.data_arguments import data_updates
        from rtdetr.engine import distributed
        from rtdetr.engine.evaluation.learning_curve import learning_curve
        from rtdetr.outputs import OutputError, check_folder, unused_path

        cfg = load_config(args.config or DEFAULT_CONFIG, [*data_updates(args.data), *args.update])
        folder = args.output_dir or unused_path(Path("output") / f"{cfg.name}-learning-curve")
        check_folder(folder)
        taken = [name for name in ("half", "whole", "half.json", "learning_curve.json") if (folder / name).exists()]
        if taken:
            raise OutputError(f"{folder}: holds {', '.join(taken)} already; choose another --output-dir")
        with distributed.process_group(args.device, training=True) as device:
            stopped_by = learning_curve(cfg, folder, device, args.tuning, signals)
    if stopped_by is not None:
        print(f"stopped by {signal_name(stopped_by)}, without an estimate", file=sys.stderr)
        return 128 + stopped_by
    return 0
