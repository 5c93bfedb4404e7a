"""Measures speed, prints a table and writes JSON.

`rtdetr benchmark op`: the deformable attention op, every backend, type and case.
`rtdetr benchmark assignment`: linear assignment at the size of a training step, every backend.
`rtdetr benchmark data`: training images per second of one core, compared with torchvision's transforms.
`rtdetr benchmark eval`: seconds that scoring the detections of COCO's val2017 takes, both evaluators.
`rtdetr benchmark infer`: detection through the public predictor, from files, and through `RTDETRv3.predict`.
`rtdetr benchmark train`: the optimiser step, plain and compiled, with all supervision and with one query group.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rtdetr.benchmarks import assignment as benchmark_assignment
from rtdetr.benchmarks import data as benchmark_data
from rtdetr.benchmarks import eval as benchmark_eval
from rtdetr.benchmarks import infer as benchmark_infer
from rtdetr.benchmarks import op as benchmark_op
from rtdetr.benchmarks import train as benchmark_train
from rtdetr.commands.arguments import Parser, add_kernels, count
from rtdetr.config import ConfigError, load_config
from rtdetr.data.classes import DataError
from rtdetr.engine.distributed import DeviceError, choose_device, let_memory_grow
from rtdetr.outputs import RunFailed, write_text

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def main(arguments: Sequence[str] | None = None) -> int:
    args = parsed(arguments)
    try:
        return int(args.measure(args))
    except (ConfigError, DataError, DeviceError, RunFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("benchmark", __doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)
    op = command(commands, "op", "the deformable attention op", measure_op)
    cases = [case.name for case in benchmark_op.CASES]
    op.add_argument("--cases", nargs="+", choices=cases, help="default: all on a GPU, R1 on a CPU")
    op.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="default: all on a GPU, float32 on a CPU")
    op.add_argument("--backends", nargs="+", choices=("cuda", "cpu", "torch"), help="default: all that run there")
    text = "kernels, waits and how long the GPU is busy; one-to-one and one-to-many problems apart"
    assignment = command(
        commands, "assignment", "linear assignment at the size of a training step", measure_assignment, profile=text
    )
    assignment.add_argument("--cases", nargs="+", choices=list(benchmark_assignment.COUNTS), help="default: all")
    text = "milliseconds of each step too"
    data = command(commands, "data", "training images per second of one core", measure_data, False, text)
    data.add_argument("--images", type=Path, metavar="FOLDER", help="COCO layout (default: generated, 640 x 480)")
    data.add_argument("--pictures", dest="images", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    data.add_argument("--count", type=count, default=64, help="images of a turn (default: 64)")
    data.add_argument("--rounds", type=count, default=5, help="turns of each variant (default: 5)")
    text = "seconds of each step too"
    scoring = command(commands, "eval", "scoring the detections of a validation set", measure_eval, False, text)
    scoring.add_argument("--images", type=count, default=5000, help="default: 5000")
    scoring.add_argument("--pictures", dest="images", type=count, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    scoring.add_argument("--detections", type=count, default=300, help="in each image (default: 300)")
    evaluators = benchmark_eval.EVALUATORS
    scoring.add_argument("--evaluators", nargs="+", choices=evaluators, default=evaluators, help="default: both")
    text = "kernels and waits of a call, and how long they keep the GPU busy"
    infer = command(commands, "infer", "detection through the public predictor", measure_infer, profile=text)
    infer.add_argument("-c", "--config", default="rtdetrv3_r18vd_6x_coco", help="default: %(default)s")
    infer.add_update()
    infer.add_argument("--batch", nargs="+", type=count, default=[1, 32], help="images at a time (default: 1 32)")
    add_kernels(infer)
    rows = [*benchmark_infer.ROWS, *benchmark_infer.FILES, *benchmark_infer.PUBLIC]
    text = "default: all that run there but the slowest to compile; the first one is what the others are compared with"
    infer.add_argument("--rows", nargs="+", choices=rows, metavar="ROW", help=f"of {'; '.join(rows)} ({text})")
    text = "JPEGs of the rows of files (default: %(default)s)"
    infer.add_argument("--num-files", type=count, default=4096, help=text)
    text = "kernels, waits and the time the GPU was busy"
    train = command(commands, "train", "the optimiser step of `rtdetr train`", measure_train, profile=text)
    train.add_argument("-c", "--config", nargs="+", default=["rtdetrv3_r18vd_6x_coco"], help="files or shipped names")
    train.add_update()
    modes = list(benchmark_train.MODES)
    text = f"of {'; '.join(modes)} (default: all that run there)"
    train.add_argument("--modes", nargs="+", choices=modes, metavar="MODE", help=text)
    train.add_argument("--batch", type=count, default=16)
    train.add_argument("--size", type=count, default=640, help="side of the images, a multiple of 32 (default: 640)")
    train.add_argument("--boxes", type=count, help="in every image (default: COCO's numbers)")
    train.add_argument("--steps", type=count, default=40)
    train.add_argument("--gpus", type=count, default=1, help="of this machine, one process each (default: 1)")
    return parser.parse_args(arguments)


class CommandParser(Parser):
    """The parser of one benchmark; argparse gives it the whole name, before which `Parser` puts `rtdetr`."""

    def __init__(self, prog: str, about: str, **_: Any) -> None:
        super().__init__(prog.removeprefix("rtdetr "), about)


def command(
    commands: Any, name: str, says: str, measure: Callable[[argparse.Namespace], int], device: bool = True,
    profile: str = "",
) -> Parser:  # fmt: skip
    """Adds one command's parser with the common options. profile: help of --profile; empty: without this option."""
    parser: Parser = commands.add_parser(name, help=says, about=f"Measures {says}.")
    if device:
        parser.add_device()
    if profile:
        parser.add_argument("--profile", action="store_true", help=profile)
    parser.add_argument("--json", type=file_to_write, metavar="FILE", help="write the numbers there too")
    parser.set_defaults(measure=measure)
    return parser


def file_to_write(text: str) -> Path:
    """Parses the path of a file whose folder exists, checked before measuring; for argparse."""
    file = Path(text)
    if file.is_dir() or not file.parent.is_dir():
        raise argparse.ArgumentTypeError(f"expected a file in a folder that exists, got {text}")
    return file


def printed(environment: dict[str, str]) -> dict[str, str]:
    """Prints device and versions, and returns them."""
    print(", ".join(f"{key} {value}" for key, value in environment.items()))
    return environment


def write_json(file: Path | None, content: object) -> None:
    """Writes the content, in which dataclasses become objects, unless there is no file."""
    if file:
        write_text(file, json.dumps(content, indent=1, default=asdict))


def measure_data(args: argparse.Namespace) -> int:
    """Prints the tables and writes the JSON file."""
    environment = printed({"torch": torch.__version__, **benchmark_data.versions()})
    with benchmark_data.opened(args.images, min(args.count, 64)) as source:
        rows = benchmark_data.measure(source, args.count, args.rounds)
        print(benchmark_data.table(rows))
        steps = benchmark_data.profile(source, args.count) if args.profile else {}
    for backend, spent in steps.items():
        print(f"{backend}, ms: " + ", ".join(f"{step} {taken:.2f}" for step, taken in spent.items()))
    write_json(args.json, {**environment, "measurements": rows, "milliseconds": steps})
    return 0


def measure_train(args: argparse.Namespace) -> int:
    """Prints the table, row by row as it grows, and writes the JSON file."""
    device = choose_device(args.device)
    possible = benchmark_train.modes_for(device)
    modes = args.modes or possible
    if unknown := {*modes} - {*possible}:
        raise ConfigError(f"--modes: expected {'; '.join(possible)} on a {device.type}, got {min(unknown)!r}")
    for config, mode in itertools.product(args.config, modes):
        benchmark_train.check_size(args.size, load_config(config, [*benchmark_train.MODES[mode], *args.update]))
    if device.type == "cuda":
        let_memory_grow()  # before torch first uses the GPU, when it reads this setting
    record: dict[str, object] = {**printed(benchmark_op.environment(device))}
    for config in args.config:
        print(f"{config}, batch {args.batch}, {args.size} x {args.size}\n{benchmark_train.HEADER}", flush=True)
        rows = []
        for mode in modes:
            workload = (args.batch, args.size, device, args.steps, args.boxes, args.profile, args.update)
            row = benchmark_train.measure_on(args.gpus, partial(benchmark_train.measure, config, mode, *workload))
            rows.append(row)
            print(benchmark_train.row(row), flush=True)
            for name, calls, ms in row.top:
                print(f"    {ms:7.3f} ms {calls:6.1f} x {name}")
            torch._dynamo.reset()
        record[config] = rows
    write_json(args.json, record)
    return 0


def measure_eval(args: argparse.Namespace) -> int:
    """Prints the table and writes the JSON file; returns 1 if the evaluators disagree."""
    rows = benchmark_eval.measure(args.images, args.detections, args.profile, args.evaluators)
    print(benchmark_eval.table(rows))
    write_json(args.json, rows)
    return int(any(benchmark_eval.difference(row, rows[0]) > 1e-12 for row in rows))


def measure_assignment(args: argparse.Namespace) -> int:
    """Prints the table and writes the JSON file."""
    device = choose_device(args.device)
    environment = printed(benchmark_op.environment(device))
    backends = benchmark_assignment.backends_for(device)
    rows = [
        row
        for case in args.cases or benchmark_assignment.COUNTS
        for trained in (False, True)
        for row in benchmark_assignment.measure(case, trained, backends, device, args.profile)
    ]
    print(benchmark_assignment.table(rows, args.profile))
    write_json(args.json, {**environment, "measurements": rows})
    return 0


def measure_infer(args: argparse.Namespace) -> int:
    """Prints each row of the table once measured, and rewrites the JSON file. Returns 1 if a row failed."""
    device = choose_device(args.device)
    updates = [*args.update, *([f"kernels={args.kernels}"] if args.kernels else [])]
    load_config(args.config, updates)  # raises before anything is printed
    environment = printed(benchmark_op.environment(device))
    print(benchmark_infer.header())
    rows = []
    names = args.rows or benchmark_infer.rows_for(device)
    order = {"device": str(device), "batches": args.batch, "num_files": args.num_files, "profile": args.profile}
    for row in benchmark_infer.measure_rows(args.config, updates, names, **order):
        rows.append(row)
        print(benchmark_infer.line(row), flush=True)
        write_json(args.json, {**environment, "measurements": rows})
    return int(any("error" in row for row in rows))


def measure_op(args: argparse.Namespace) -> int:
    """Prints the table, row by row as it grows, and writes the JSON file."""
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    wanted = args.cases or ([case.name for case in benchmark_op.CASES] if on_gpu else ["R1"])
    dtypes = args.dtypes or (list(DTYPES) if on_gpu else ["float32"])
    possible = benchmark_op.backends_for(device)
    backends = args.backends or possible
    if unknown := {*backends} - {*possible}:
        raise ConfigError(f"backends: expected {', '.join(possible)}, got {min(unknown)}")
    environment = printed(benchmark_op.environment(device))
    copy_rate = benchmark_op.copy_speed(device)
    if copy_rate:
        print(f"device copy, read and written: {copy_rate / 1e12:.2f} TB/s")
    measurements = []
    cases = [case for case in benchmark_op.CASES if case.name in wanted]
    for case, dtype, backend in itertools.product(cases, dtypes, backends):
        measurements.append(benchmark_op.measure(case, backend, DTYPES[dtype], device, copy_rate))
        rows = benchmark_op.table(measurements).splitlines()
        print("\n".join(rows if len(measurements) == 1 else rows[-1:]), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    write_json(args.json, {**environment, "copy_bytes_per_second": copy_rate, "measurements": measurements})
    return 0


if __name__ == "__main__":
    sys.exit(main())
