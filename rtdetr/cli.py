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

import rtdetr
from rtdetr.openmp_threads import yielding_cpu
from rtdetr.wording import command_running, name_here

# Each is a module of rtdetr.commands, with _ for -, which is imported when the command runs.
COMMANDS = {
    "train": "train a model, resume a run, or fine-tune from weights",
    "eval": "print the COCO figures of a checkpoint",
    "predict": "detect objects in images and videos, draw and list them",
    "serve": "detect over HTTP, with a page to try it",
    "doctor": "list everything that is wrong with a data set",
    "show-batch": "draw training images as the model sees them",
    "learning-curve": "estimate whether labelling more images would pay",
    "export": "write a model as ONNX, .pt2, OpenVINO and others, and compare it with PyTorch",
    "compare": "print a table of a checkpoint and its exports: AP, size, speed, difference",
    "weights": "list the weights that can be used by name",
    "convert": "convert official RT-DETRv3 weights to a checkpoint",
    "convert-data": "convert a data set to COCO, Pascal VOC or YOLO",
    "benchmark": "measure speed: op, assignment, train, infer, data, eval",
}


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs one of COMMANDS; returns its exit code. Errors that the user can fix have an `exit_code`, too."""
    return importlib.import_module(f"rtdetr.commands.{name.replace('-', '_')}").run(arguments)


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
            done = run(name, rest)
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
        code: int | None = getattr(error, "exit_code", None)
        if code is None:
            raise
        print(f"error: {error}", file=sys.stderr)
        return code


def _help() -> str:
    lines = ["usage: rtdetr COMMAND ...", "", "commands:"]
    lines += [f"  {name:15s}{says}" for name, says in COMMANDS.items()]
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
