"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from rtdetr.commands.foreign import OPTIONS


class Parser(argparse.ArgumentParser):
    """Answers a wrong argument with one line and exit code 2; one of another project with what it is here."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        own = self._option_string_actions
        for word in sys.argv[1:] if args is None else args:
            name = word.partition("=")[0]
            # --batch is short for --batch-size, where there is one; --conf is not meant for --config
            short = name != "--conf" and any(option.startswith(name) for option in own)
            if name in OPTIONS and name not in own and not short:
                self.error(f"{name} is not an option; did you mean {OPTIONS[name]}?")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; `{self.prog} --help` explains", file=sys.stderr)
        sys.exit(2)


def add_update(parser: argparse.ArgumentParser) -> None:
    text = "change a config value, e.g. -u train.epochs=12 data.num_workers=2"
    parser.add_argument("-u", "--update", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)


def add_weights(parser: argparse.ArgumentParser, text: str) -> None:
    """`WEIGHTS` or `-w WEIGHTS`, one of the two: `weights` or `named_weights` of what is parsed."""
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("weights", type=Path, nargs="?", metavar="WEIGHTS", help=text)
    which.add_argument("-w", "--weights", type=Path, dest="named_weights", metavar="WEIGHTS", help="the same")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda when there is one)")


def add_kernels(parser: argparse.ArgumentParser) -> None:
    text = "auto, or plain: PyTorch and SciPy alone (default: as the config says)"
    parser.add_argument("--kernels", choices=("auto", "plain"), help=text)


def add_overwrite(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there already")


def score_threshold(text: str) -> float:
    """A number in [0, 1]; for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:  # not a number, too
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 1, got {text}")
    return value


def count(text: str) -> int:
    """A whole number from 1; for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1, got {text}")
    return int(text)


def count_from_0(text: str) -> int:
    """A whole number from 0; for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text}")
    return int(text)


def overlap_share(text: str) -> float:
    """A number from 0, below 0.9; for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 0.9:
        raise argparse.ArgumentTypeError(f"expected a number from 0, below 0.9, got {text}")
    return value
