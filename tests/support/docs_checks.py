"""Commands and Python of the documentation, checked without being run."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import io
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import pytest
from docs_blocks import ROOT, Command

from rtdetr import cli
from rtdetr.config import ConfigError, find_config, load_config

OF_THE_SYSTEM = ("curl", "docker", "find", "cd", "git")
PLACEHOLDER = re.compile(r"[A-Z]+|my\.yml")


class Wrong(ValueError):
    """A command or block that would not do what the page says."""


class Asked(Exception):
    """Arguments came to a parser."""

    def __init__(self, parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
        self.parser, self.arguments = parser, arguments


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """Parsers raise Asked instead of answering."""

    def ask(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, *_: Any) -> NoReturn:
        raise Asked(parser, sys.argv[1:] if arguments is None else arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", ask)
        yield


def parser_of(arguments: list[str]) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of `rtdetr ARGUMENTS`, and what it gets to see. Raises Wrong for an unknown command."""
    if arguments[0] not in cli.COMMANDS:
        raise Wrong(f"rtdetr has no command `{arguments[0]}`")
    try:
        with _asking():
            if arguments[0] == "benchmark":
                importlib.import_module("rtdetr.benchmarks.__main__").main(arguments[1:])
            else:
                cli.run(arguments[0], arguments[1:])
    except Asked as asked:
        return asked.parser, list(asked.arguments)
    raise AssertionError(f"rtdetr {arguments[0]} asks no parser")


def _parsed(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return parser.parse_args(arguments)
    except SystemExit as error:
        raise Wrong(said.getvalue().strip().splitlines()[-1]) from error


def check_command(command: Command) -> None:
    """Raises Wrong."""
    program, *rest = command.words
    if program == "rtdetr":
        check_rtdetr(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        args = _parsed(get_args_parser(), rest)
        if args.training_script != "tools/train.py":
            raise Wrong(f"{args.training_script}: expected tools/train.py")
        check_rtdetr(["train", *args.training_script_args])
    elif program == "python":
        check_python_command(rest, command.here)
    elif program == "pip":
        check_extras(rest)
    elif program == "make":
        check_targets([each for each in rest if "=" not in each])
    elif program not in OF_THE_SYSTEM:
        raise Wrong(f"{program}: a program that this test does not know")


def check_rtdetr(arguments: list[str]) -> None:
    """Options, the config that is named, and the keys and values of -u. Raises Wrong."""
    parser, arguments = parser_of(arguments)
    args = vars(_parsed(parser, arguments))
    config = args.get("config") or "rtdetrv3_r18vd_6x_coco"
    for each in [config] if isinstance(config, str) else config:
        check_updates(each, args.get("update") or [])


def check_updates(config: str, updates: list[str]) -> None:
    if PLACEHOLDER.fullmatch(config):
        config = "rtdetrv3_r18vd_6x_coco"
    try:
        load_config(find_config(config), updates)
    except ConfigError as error:
        raise Wrong(str(error)) from error


def check_mention(text: str) -> None:
    """A command in running text, which may leave out what a whole one needs. Raises Wrong."""
    words = [each for each in re.sub(r"\[[^\]]*\]", "", text).split() if each != "..."]
    words = [each.split("|")[0].strip("'\"") for each in words]
    if words[0] == "make":
        check_targets([each for each in words[1:] if "=" not in each])
    elif words[0] == "pip":
        check_extras(re.findall(r"\S+\[\S+\]", text))
    elif words[0] == "rtdetr" and not words[1].isupper() and not words[1].startswith("-"):
        arguments = words[1:]
        parser, given = parser_of(arguments)
        known = set(_options(parser))
        unknown = [each for each in given if re.match(r"--?[a-zA-Z]", each) and each not in known]
        if unknown:
            raise Wrong(f"rtdetr {arguments[0]} has no option {unknown[0]}")
        for option, value in itertools.pairwise(given):
            if option in ("-c", "--config") and not (value.startswith("-") or PLACEHOLDER.fullmatch(value)):
                check_updates(value, [])
        updates = [each for each in given if re.fullmatch(r"[a-z_]+(\.[a-z_0-9]+)+=.+", each)]
        check_updates("rtdetrv3_r18vd_6x_coco", updates)


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield from parser._option_string_actions
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _options(each)


def check_python_command(arguments: list[str], here: str) -> None:
    if arguments[0] == "-":
        check_python(here)
    elif arguments[0] == "-m":
        if importlib.util.find_spec(arguments[1]) is None:
            raise Wrong(f"python -m {arguments[1]}: no such module")
    elif not (ROOT / arguments[0]).is_file():
        raise Wrong(f"python {arguments[0]}: no such file")


def check_extras(arguments: list[str]) -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(
        r"^(\w+) = \[", project.split("[project.optional-dependencies]")[1].split("\n[")[0], re.MULTILINE
    )
    for each in arguments:
        for name in re.findall(r"(?:rtdetr|\.)\[([\w,-]+)\]", each):
            if unknown := set(name.split(",")) - set(extras):
                raise Wrong(f"pip install {each}: pyproject.toml has no extra {', '.join(sorted(unknown))}")


def check_targets(names: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    if unknown := set(names) - set(targets):
        raise Wrong(f"make {' '.join(sorted(unknown))}: the Makefile has no such target")


def check_python(text: str) -> None:
    """Compiles; what it imports is there, and so are the attributes it asks of that. Packages that are not installed
    are left alone. Raises Wrong."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Wrong(f"not Python: {error}") from error
    known: dict[str, object] = {}
    for node in ast.walk(tree):
        try:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    module = importlib.import_module(alias.name)
                    known[alias.asname or alias.name.split(".")[0]] = (
                        module if alias.asname else sys.modules[alias.name.split(".")[0]]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                for alias in node.names:
                    known[alias.asname or alias.name] = _attribute(module, alias.name)
        except ModuleNotFoundError as error:
            if str(error.name).startswith("rtdetr"):
                raise Wrong(str(error)) from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            _resolve(node, known)


def _attribute(owner: object, name: str) -> object:
    if isinstance(owner, ModuleType) and not hasattr(owner, name):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(f"{owner.__name__}.{name}")
    if not hasattr(owner, name):
        raise Wrong(f"{getattr(owner, '__name__', owner)} has no attribute {name}")
    return getattr(owner, name)


def _resolve(node: ast.expr, known: dict[str, object]) -> object | None:
    """What a chain of names means, as far as it leads through modules and classes."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _resolve(node.value, known)
        return _attribute(owner, node.attr) if isinstance(owner, (ModuleType, type)) else None
    return None
