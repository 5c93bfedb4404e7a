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
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rtdetr.benchmarks import assignment, data, infer, op, train
from rtdetr.benchmarks import eval as scoring
from rtdetr.commands.arguments import Parser, add_kernels, count, kernels_update
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


class CommandParser(Parser):
    """The parser of one benchmark; argparse gives it the whole name, before which `Parser` puts `rtdetr`."""

    def __init__(self, prog: str, about: str, **_: Any) -> None:
        super().__init__(prog.removeprefix("rtdetr "), about)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("benchmark", __doc__ or "")
    commands = parser.add_subparsers(dest="command", required=True, parser_class=CommandParser)

    def add(measure: Callable[..., int], name: str, says: str, profile: str = "", device: bool = True) -> Parser:
        """Adds a benchmark with the common options. profile: help of --profile; empty: without this option."""
        own: Parser = commands.add_parser(name, help=says, about=f"Measures {says}.")
        if device:
            own.add_device()
        if profile:
            own.add_argument("--profile", action="store_true", help=profile)
        own.add_argument("--json", type=file_to_write, metavar="FILE", help="write the numbers there too")
        own.set_defaults(measure=measure)
        return own

    own = add(measure_op, "op", "the deformable attention op")
    cases = [case.name for case in op.CASES]
    own.add_argument("--cases", nargs="+", choices=cases, help="default: all on a GPU, R1 on a CPU")
    own.add_argument("--dtypes", nargs="+", choices=list(DTYPES), help="default: all on a GPU, float32 on a CPU")
    own.add_argument("--backends", nargs="+", choices=("cuda", "cpu", "torch"), help="default: all that run there")
    text = "kernels, waits and how long the GPU is busy; one-to-one and one-to-many problems apart"
    own = add(measure_assignment, "assignment", "linear assignment at the size of a training step", text)
    own.add_argument("--cases", nargs="+", choices=list(assignment.COUNTS), help="default: all")
    own = add(measure_data, "data", "training images per second of one core", "milliseconds of each step too", False)
    own.add_argument("--images", type=Path, metavar="FOLDER", help="COCO layout (default: generated, 640 x 480)")
    own.add_argument("--pictures", dest="images", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    own.add_argument("--count", type=count, default=64, help="images of a turn (default: 64)")
    own.add_argument("--rounds", type=count, default=5, help="turns of each variant (default: 5)")
    own = add(measure_eval, "eval", "scoring the detections of a validation set", "seconds of each step too", False)
    own.add_argument("--images", type=count, default=5000, help="default: 5000")
    own.add_argument("--pictures", dest="images", type=count, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    own.add_argument("--detections", type=count, default=300, help="in each image (default: 300)")
    own.add_argument("--evaluators", nargs="+", choices=scoring.EVALUATORS, help="default: both")
    text = "kernels and waits of a call, and how long they keep the GPU busy"
    own = add(measure_infer, "infer", "detection through the public predictor", text)
    own.add_argument("-c", "--config", default="rtdetrv3_r18vd_6x_coco", help="default: %(default)s")
    own.add_update()
    own.add_argument("--batch", nargs="+", type=count, default=[1, 32], help="images at a time (default: 1 32)")
    add_kernels(own)
    rows = [*infer.ROWS, *infer.FILES, *infer.PUBLIC]
    text = "default: all that run there but the slowest to compile; the first one is what the others are compared with"
    own.add_argument("--rows", nargs="+", choices=rows, metavar="ROW", help=f"of {'; '.join(rows)} ({text})")
    own.add_argument("--num-files", type=count, default=4096, help="JPEGs of the rows of files (default: %(default)s)")
    text = "kernels, waits and the time the GPU was busy"
    own = add(measure_train, "train", "the optimiser step of `rtdetr train`", text)
    own.add_argument("-c", "--config", nargs="+", default=["rtdetrv3_r18vd_6x_coco"], help="files or shipped names")
    own.add_update()
    text = f"of {'; '.join(train.MODES)} (default: all that run there)"
    own.add_argument("--modes", nargs="+", choices=list(train.MODES), metavar="MODE", help=text)
    own.add_argument("--batch", type=count, default=16)
    own.add_argument("--size", type=count, default=640, help="side of the images, a multiple of 32 (default: 640)")
    own.add_argument("--boxes", type=count, help="in every image (default: COCO's numbers)")
    own.add_argument("--steps", type=count, default=40)
    own.add_argument("--gpus", type=count, default=1, help="of this machine, one process each (default: 1)")
    return parser.parse_args(arguments)


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


def written(file: Path | None, content: object, failed: bool = False) -> int:
    """Writes the content, unless there is no file. Returns the exit code."""
    if file:
        write_text(file, json.dumps(content, indent=1))
    return int(failed)


def measure_data(args: argparse.Namespace) -> int:
    environment = printed({"torch": torch.__version__, **data.versions()})
    with data.opened(args.images, min(args.count, 64)) as source:
        rows = data.measure(source, args.count, args.rounds)
        print(data.table(rows))
        steps = data.profile(source, args.count) if args.profile else {}
    for backend, spent in steps.items():
        print(f"{backend}, ms: " + ", ".join(f"{step} {taken:.2f}" for step, taken in spent.items()))
    return written(args.json, {**environment, "measurements": rows, "milliseconds": steps})


def measure_train(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    possible = train.modes_for(device)
    modes = args.modes or possible
    if unknown := {*modes} - {*possible}:
        raise ConfigError(f"--modes: expected {'; '.join(possible)} on a {device.type}, got {min(unknown)!r}")
    for config, mode in itertools.product(args.config, modes):
        train.check_size(args.size, load_config(config, [*train.MODES[mode], *args.update]))
    if device.type == "cuda":
        let_memory_grow()  # before torch first uses the GPU, when it reads this setting
    record: dict[str, object] = {**printed(op.environment(device))}
    for config in args.config:
        print(f"{config}, batch {args.batch}, {args.size} x {args.size}\n{train.HEADER}", flush=True)
        rows = []
        for mode in modes:
            workload = (args.batch, args.size, device, args.steps, args.boxes, args.profile, args.update)
            rows.append(train.measure_on(args.gpus, partial(train.measure, config, mode, *workload)))
            print(train.ROW.format(**rows[-1]), flush=True)
            for name, calls, ms in rows[-1]["top"]:
                print(f"    {ms:7.3f} ms {calls:6.1f} x {name}")
            torch._dynamo.reset()
        record[config] = rows
    return written(args.json, record)


def measure_eval(args: argparse.Namespace) -> int:
    rows = scoring.measure(args.images, args.detections, args.profile, args.evaluators or scoring.EVALUATORS)
    print(scoring.table(rows))
    return written(args.json, rows, failed=any(scoring.difference(row, rows[0]) > 1e-12 for row in rows))


def measure_assignment(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    environment = printed(op.environment(device))
    backends = assignment.backends_for(device)
    rows = []
    for case, trained in itertools.product(args.cases or assignment.COUNTS, (False, True)):
        rows += assignment.measure(case, trained, backends, device, args.profile)
    print(assignment.table(rows, args.profile))
    return written(args.json, {**environment, "measurements": rows})


def measure_infer(args: argparse.Namespace) -> int:
    """Prints each row once measured, and rewrites the JSON file, as a row may take minutes."""
    device = choose_device(args.device)
    updates = [*args.update, *kernels_update(args)]
    load_config(args.config, updates)  # raises before anything is printed
    environment = printed(op.environment(device))
    print(infer.header())
    rows = []
    order = {"device": str(device), "batches": args.batch, "num_files": args.num_files, "profile": args.profile}
    for row in infer.measure_rows(args.config, updates, args.rows or infer.rows_for(device), **order):
        rows.append(row)
        print(infer.line(row), flush=True)
        written(args.json, {**environment, "measurements": rows})
    return int(any("error" in row for row in rows))


def measure_op(args: argparse.Namespace) -> int:
    device = choose_device(args.device)
    on_gpu = device.type == "cuda"
    wanted = args.cases or ([case.name for case in op.CASES] if on_gpu else ["R1"])
    dtypes = args.dtypes or (list(DTYPES) if on_gpu else ["float32"])
    possible = op.backends_for(device)
    backends = args.backends or possible
    if unknown := {*backends} - {*possible}:
        raise ConfigError(f"backends: expected {', '.join(possible)}, got {min(unknown)}")
    environment = printed(op.environment(device))
    copy_rate = op.copy_speed(device)
    if copy_rate:
        print(f"device copy, read and written: {copy_rate / 1e12:.2f} TB/s")
    rows = []
    cases = [case for case in op.CASES if case.name in wanted]
    for case, dtype, backend in itertools.product(cases, dtypes, backends):
        rows.append(op.measure(case, backend, DTYPES[dtype], device, copy_rate))
        lines = op.table(rows).splitlines()
        print("\n".join(lines if len(rows) == 1 else lines[-1:]), flush=True)
        if on_gpu:
            torch.cuda.empty_cache()
    return written(args.json, {**environment, "copy_bytes_per_second": copy_rate, "measurements": rows})


if __name__ == "__main__":
    sys.exit(main())
