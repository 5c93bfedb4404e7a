"""Arguments that several commands share."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise, takewhile
from math import inf, nan
from pathlib import Path
from typing import Any, NoReturn

from rtdetr.commands.foreign import KEYWORDS, OF_COMMAND, OPTIONS
from rtdetr.wording import meant, name_here

WEIGHT_ENDINGS = (
    *(".pth", ".pt", ".pdparams", ".pdema", ".safetensors"),
    *(".onnx", ".pt2", ".xml", ".pte", ".tflite", ".mlpackage"),  # of exports
)
# Of folders: a model of save_pretrained or transformers, a run, exports for ncnn and Triton. Literals, as the modules
# that define these names import torch.
WEIGHT_FILES = ("config.json", "best.pth", "model.ncnn.param", "rtdetr/1/model.onnx")


class Parser(argparse.ArgumentParser):
    """Reports a wrong argument in one line, with exit code 2, and translates the names of other projects.

    command: its name after `rtdetr`; about, epilog: texts of its help, printed as they are."""

    def __init__(self, command: str, about: str, epilog: str | None = None) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=f"rtdetr {command}", description=about, epilog=epilog, formatter_class=layout)
        self.register("type", Path, named_path)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        own = self._option_string_actions
        words = list(sys.argv[1:] if args is None else args)
        before_options = takewhile(lambda word: not word.startswith("-"), words)
        if foreign := next(filter(self._is_keyword, before_options), None):
            self.error(self._no_keyword(foreign))
        for word in words if self._subparsers is None else ():  # else each of them looks at its own
            name = word.partition("=")[0]
            # --batch abbreviates --batch-size, if there is one; --conf does not mean --config
            short = name != "--conf" and any(option.startswith(name) for option in own)
            if name.startswith("--") and not short and self._foreign(name):
                self.error(self._no_option(name))
        for place, (word, following) in enumerate(pairwise([*words, ""])):
            action = own.get(word)  # `--half best.pth` is --half, and no value for it
            if action is not None and action.nargs == "?" and action.choices and following not in action.choices:
                words[place] = f"{word}={action.const}"
        known, rest = super().parse_known_args(words, namespace)
        for action in self._get_positional_actions():  # argparse takes words of one place, between two options
            if action.nargs == "*":
                more = [word for word in rest if not (word.startswith("-") or self._is_keyword(word))]
                values = [self._get_value(action, word) for word in more]
                setattr(known, action.dest, [*getattr(known, action.dest), *values])
                rest = [word for word in rest if word not in more]
        if rest:
            no_word = self._no_keyword if "=" in rest[0] else self._too_many
            self.error((self._no_option if rest[0].startswith("-") else no_word)(rest[0]))
        for name in ("weights", "data"):  # by position, or by an option
            if (named := getattr(known, f"named_{name}", None)) is not None:
                setattr(known, name, named)
        return known, rest

    def _is_keyword(self, word: str) -> bool:
        """Whether a word is an argument in the form of other projects, conf=0.25, and not an existing file."""
        key, equals, _ = word.partition("=")
        option = f"--{key.replace('_', '-')}"
        if not equals or os.path.exists(word):
            return False
        foreign = name_here(KEYWORDS, key) or name_here(OPTIONS, option)
        return foreign is not None or option in self._option_string_actions

    def _foreign(self, name: str) -> str | None:
        """Returns the name used here for an option of another project, None if it is not one."""
        plain = name.replace("_", "-") if name.startswith("--") else name
        return self._of_command(plain) or name_here(OPTIONS, plain)

    def _of_command(self, option: str) -> str | None:
        return name_here(OF_COMMAND.get(self.prog.removeprefix("rtdetr "), {}), option)

    def _no_option(self, word: str) -> str:
        """Returns the error message for an unknown option."""
        own, name = self._option_string_actions, word.partition("=")[0]
        plain = name.replace("_", "-")
        words = self._foreign(name) or (plain if plain in own else None) or self._setting(name)
        if words is None:
            words = next(iter(difflib.get_close_matches(plain, own, n=1, cutoff=0.7)), None)
        return f"{name} is not an option{self._ending(words)}"

    def _no_keyword(self, word: str) -> str:
        """Returns the error message for word=value."""
        key, _, value = word.partition("=")
        option = f"--{key.replace('_', '-')}"
        own = self._option_string_actions.get(option)
        known = None if own is None else option if own.nargs == 0 else f"{option} {value}"
        words = self._of_command(option) or name_here(KEYWORDS, key) or name_here(OPTIONS, option) or known
        return f"{word} is not an argument{self._ending(words or self._setting(key))}"

    def _too_many(self, word: str) -> str:
        """Returns the error message for a surplus word."""
        choices = [each for each in self._actions if each.option_strings and word in (each.choices or ())]
        words = f"{choices[0].option_strings[-1]} {word}" if choices else None
        if "--data" in self._option_string_actions and os.path.exists(word):
            words = f"--data {word}"
        return f"{word} is one argument too many{self._ending(words)}"

    def _ending(self, words: str | None) -> str:
        """Returns the end of a message: what was meant, or that other commands have it."""
        if words is None:
            return ""
        option = words.split()[0].rstrip(",")
        if option.startswith("-") and option not in self._option_string_actions:
            return f" here; other commands take {words}"
        return meant(words)

    def _setting(self, name: str) -> str | None:
        """Returns the value of -u that a word stands for, if the command has -u."""
        if "-u" not in self._option_string_actions:
            return None
        from rtdetr.config import setting  # here, as --help does not need it

        return setting(name.lstrip("-").replace("-", "_"))

    def error(self, message: str) -> NoReturn:
        print(f"error: {message}; `{self.prog} --help` explains", file=sys.stderr)
        sys.exit(2)

    def add_weights(self, text: str) -> None:
        """Adds `WEIGHTS` and `-w WEIGHTS`, of which one is required."""
        which = self.add_mutually_exclusive_group(required=True)
        which.add_argument("weights", type=Path, nargs="?", metavar="WEIGHTS", help=text)
        which.add_argument("-w", "--weights", type=Path, dest="named_weights", metavar="WEIGHTS", help="the same")

    def add_training_data(self) -> None:
        """Adds DATA, also as --data."""
        which = self.add_mutually_exclusive_group()
        text = "a folder or file with training and validation images, in any known format"
        which.add_argument("data", nargs="?", metavar="DATA", help=text)
        which.add_argument("--data", dest="named_data", metavar="DATA", help="the same")

    def add_validation(self) -> None:
        """Adds `-c`, `--data` and `-u`, which change the config of a checkpoint for an evaluation."""
        text = "YAML file, or the name of a shipped config, in place of the config in the checkpoint"
        self.add_argument("-c", "--config", help=text)
        text = "a folder or file with validation images, in any known format (default: that of the config)"
        self.add_argument("--data", metavar="DATA", help=text)
        self.add_update()

    def add_update(self) -> None:
        text = "change config values, e.g. -u train.epochs=12 data.num_workers=2"
        self.add_argument("-u", "--update", nargs="+", action="extend", default=[], metavar="KEY=VALUE", help=text)

    def add_device(self) -> None:
        self.add_argument("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if available)")

    def add_overwrite(self) -> None:
        self.add_argument("--overwrite", action="store_true", help="replace existing files")

    def add_threshold(self, text: str) -> None:
        """Adds `--threshold 0.5`, for all classes, and `--threshold CLASS=0.4`, both repeatable; see `thresholds`."""
        text += "; CLASS=X sets it for one class; may be repeated"
        self.add_argument("--threshold", type=_threshold, action="append", default=[], metavar="X|CLASS=X", help=text)


def is_weights(text: str) -> bool:
    """Whether an argument can only mean weights: by its suffix, as the folder of a model, or as a name here or of the
    Hub."""
    path = Path(text)
    if path.suffix in WEIGHT_ENDINGS:
        return True
    if os.path.isdir(path):  # best.pth: the folder of a run; reading it names its checkpoints
        if any((path / name).is_file() for name in WEIGHT_FILES):
            return True
        return any(each.with_suffix(".bin").exists() for each in path.glob("*.xml"))
    if path.suffix or text.isdecimal() or os.path.exists(path):
        return False
    from rtdetr.weights.catalogue import NAMED, is_hub_name  # here, because it imports torch

    return text in NAMED or is_hub_name(text)


def add_kernels(parser: argparse.ArgumentParser, default: str = "from the config") -> None:
    text = f"auto, or plain: PyTorch and SciPy only (default: {default})"
    parser.add_argument("--kernels", choices=("auto", "plain"), help=text)


def kernels_update(args: argparse.Namespace) -> list[str]:
    """The config update that --kernels stands for, if it was given."""
    return [f"kernels={args.kernels}"] if args.kernels else []


def number(says: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Returns a type for argparse; NaN does not fit."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not fits(value):
            raise argparse.ArgumentTypeError(f"expected a number {says}, got {text}")
        return value

    return parse


def integer(least: int, most: float = inf) -> Callable[[str], int]:
    """Returns a type for argparse."""
    says = f"from {least} to {most}" if most < inf else f"from {least}"

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"expected a whole number {says}, got {text}")
        return int(text)

    return parse


def named_path(text: str) -> Path:
    """The type of arguments that are paths. Path("") is the working folder, for which nobody asks by an empty name."""
    if not text:
        raise argparse.ArgumentTypeError("expected a path, got an empty name; is a variable of the shell unset?")
    return Path(text)


score_threshold = number("from 0 to 1", lambda value: 0 <= value <= 1)
overlap_share = number("from 0, below 0.9", lambda value: 0 <= value < 0.9)
count, count_from_0 = integer(1), integer(0)


def _threshold(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    return name, score_threshold(value)


def thresholds(given: Sequence[tuple[str, float]]) -> tuple[float | None, dict[str, float]]:
    """Splits the arguments of `add_threshold` into the number for all classes and those by class name."""
    by_name = dict(given)
    return by_name.pop("", None), by_name
