"""The command line: `rtdetr COMMAND ...`. The files in tools/ call the same functions.

Exit codes: 0 done; 1 the run failed, or some images could not be read; 2 the command, a config, data, a weight file
or an output path cannot be used; 128 + n stopped by signal n (130 is Ctrl-C, 141 a closed pipe).

Help is quick because this file imports no command, and files in rtdetr/commands import slow modules inside functions.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import rtdetr
from rtdetr.openmp_threads import yielding_cpu
from rtdetr.wording import command_running, name_here


class Command(NamedTuple):
    module: str  # of rtdetr.commands; it is imported when the command runs
    says: str

    def run(self, arguments: Sequence[str]) -> int:
        return importlib.import_module(f"rtdetr.commands.{self.module}").run(arguments)


COMMANDS = {
    "train": Command("train", "train a model, resume a run, or fine-tune from weights"),
    "eval": Command("evaluate", "print the COCO figures of a checkpoint"),
    "predict": Command("predict", "detect objects in images and videos, draw and list them"),
    "serve": Command("serve", "detect over HTTP, with a page to try it"),
    "doctor": Command("doctor", "list everything that is wrong with a data set"),
    "show-batch": Command("show_batch", "draw training images as the model sees them"),
    "learning-curve": Command("learning_curve", "estimate whether labelling more images would pay"),
    "export": Command("export", "write a model as ONNX, .pt2, OpenVINO and others, and compare it with PyTorch"),
    "compare": Command("compare", "print a table of a checkpoint and its exports: AP, size, speed, difference"),
    "weights": Command("weights", "list the weights that can be used by name"),
    "convert": Command("convert", "convert official RT-DETRv3 weights to a checkpoint"),
    "convert-data": Command("convert_data", "convert a data set to COCO, Pascal VOC or YOLO"),
    "benchmark": Command("benchmark", "measure speed: op, assignment, train, infer, data, eval"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `rtdetr COMMAND ...` and returns its exit code."""
    for stream in ("stdin", "stdout", "stderr"):  # if closed, as by `2>&-`, files opened later would get its number
        if getattr(sys, stream) is None:
            setattr(sys, stream, os.fdopen(os.open(os.devnull, os.O_RDWR), "r+"))
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or [""]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"rtdetr {rtdetr.__version__}")
        return 0
    if name not in COMMANDS:
        print(_unknown(name, rest) if name else _help(), file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # file names need not be Unicode
    logging.basicConfig(format="%(message)s")
    logging.getLogger("rtdetr").setLevel(logging.INFO)
    try:
        with yielding_cpu(), command_running():
            done = COMMANDS[name].run(rest)
        sys.stdout.flush()
        return done
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except OSError as error:
        from rtdetr.outputs import nobody_reads

        unread = isinstance(error, BrokenPipeError) and nobody_reads()
        if not unread and error.errno != errno.ENOSPC:
            raise
        with contextlib.suppress(OSError):  # the error may be of another file
            sys.stdout.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # its buffer is dropped
        if unread:
            return 141
        print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    except (ValueError, RuntimeError) as error:
        code = _exit_code(error)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code


def _exit_code(error: Exception) -> int | None:
    """1 or 2 for errors that the user can fix, shown as one line; None for all others, which keep their tracebacks."""
    from rtdetr.engine.peer_watchdog import ProcessLost

    if isinstance(error, ProcessLost):  # which leaves little time: the imports below take seconds on a busy machine
        return 1

    from rtdetr.config import ConfigError
    from rtdetr.data.classes import DataError
    from rtdetr.engine.distributed import DeviceError
    from rtdetr.engine.failures import TrainingFailed
    from rtdetr.export import ExportFailed
    from rtdetr.outputs import OutputError, RunFailed
    from rtdetr.weights.checkpoint import CheckpointError

    if isinstance(error, (ConfigError, DataError, CheckpointError, DeviceError, OutputError)):
        return 2
    return 1 if isinstance(error, (TrainingFailed, RunFailed, ExportFailed)) else None


def _help() -> str:
    lines = ["usage: rtdetr COMMAND ...", "", "commands:"]
    lines += [f"  {name:15s}{command.says}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, "", "`rtdetr COMMAND --help` explains each; `rtdetr --version` prints the version."])


def _unknown(name: str, rest: Sequence[str]) -> str:
    import difflib

    from rtdetr.commands import foreign

    task = rest[0] if name == "detect" and rest else name  # Ultralytics: `detect train`
    known = task if task in COMMANDS else name_here(foreign.COMMANDS, task) or name_here(foreign.COMMANDS, name)
    near = [known] if known else difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.5)
    nearest = f"did you mean `rtdetr {near[0]}`?" if near else f"there are {', '.join(COMMANDS)}"
    return f"error: `{name}` is not a command; {nearest}"


if __name__ == "__main__":
    sys.exit(main())
