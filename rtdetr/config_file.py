"""Turns YAML files into checked dataclasses: reads, merges, applies `-u` updates, and reports errors in a sentence.

This module knows no keys. rtdetr/config.py declares them, with their allowed values.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union

import yaml

PACKAGE = Path(__file__).resolve().parent
MAX_BYTES = 100_000  # of a file; ours have three thousand, and PyYAML needs a second for this many
MAX_VALUES, MAX_DEPTH = 10_000, 20  # of a file, its aliases written out

# Dotted path -> the file that set it last, "-u" or "train()"; what is missing has that of its section.
Origins = dict[str, str]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for its author."""

    exit_code = 2


@dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`. above: not `low` itself; below: not `high` itself."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    multiple_of: int | None = None

    def __contains__(self, number: float) -> bool:
        reached = number > self.low if self.above else number >= self.low
        within = number < self.high if self.below else number <= self.high
        return reached and within and (self.multiple_of is None or number % self.multiple_of == 0)

    def __str__(self) -> str:
        first = f"above {self.low:,} and up to" if self.above else f"from {self.low:,} to"
        text = f"{first} {'below ' if self.below else ''}{self.high:,}"
        return text if self.multiple_of is None else f"{text}, a multiple of {self.multiple_of}"


def shipped_configs() -> dict[str, Path]:
    """The name and file of each shipped config."""
    in_wheel = PACKAGE / "configs"
    folder = in_wheel if in_wheel.is_dir() else PACKAGE.parent / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.yml"))}


def find_config(text: str) -> Path:
    """The file that `-c` means: a bare name, without suffix and separator, is a shipped config; everything else is a
    path.

    Raises ConfigError for a bare name that is neither a shipped config nor a file.
    """
    path, shipped = Path(text), shipped_configs()
    if text in shipped:
        return shipped[text]
    if path.name == text and not path.suffix and not os.path.exists(path):  # which says no to a name too long
        near = difflib.get_close_matches(text, shipped, n=5) or list(shipped)
        raise ConfigError(f"{text}: no config of that name is shipped, the nearest are {', '.join(near)}")
    return path


def read_config_file(path: Path, asked_by: tuple[Path, ...] = ()) -> list[tuple[dict[str, Any], str]]:
    """The content and name of each base of a file and of the file itself, to be merged in this order. asked_by: the
    files that name this one as a base."""
    if any(os.path.realpath(path) == os.path.realpath(other) for other in asked_by):
        raise ConfigError(f"{path}: `base` goes round in a circle: {' -> '.join(map(str, (*asked_by, path)))}")
    own = parse_yaml(_read_text(path, f", a `base` of {asked_by[-1]}" if asked_by else ""), str(path))
    own = {} if own is None else own
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: expected `key: value` lines at the top, got {_shown(own)}")
    bases = own.pop("base", [])
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) and "\0" not in base for base in bases):
        raise ConfigError(f"{path}: base must be a file or a list of files, got {_shown(bases)}")
    files = [shipped_configs().get(base, path.parent / base) for base in bases]
    return [*(source for file in files for source in read_config_file(file, (*asked_by, path))), (own, str(path))]


def _read_text(path: Path, asker: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such config file{asker}") from error
    except IsADirectoryError as error:
        inside = sorted(path.glob("*.y*ml"))
        example = f", such as {inside[0]}" if inside else ""
        raise ConfigError(f"{path}: is a folder{asker}, expected a config file{example}") from error
    except OSError as error:
        raise ConfigError(f"{path}: the config file cannot be read{asker} ({error.strerror})") from error
    try:
        if len(content) > MAX_BYTES:
            raise ConfigError(f"{path}: more than {MAX_BYTES:,} bytes, which no config has; is it another file?")
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not text in UTF-8 (byte {error.start + 1} is 0x{content[error.start]:02x}); expected a YAML "
            "config, save it as UTF-8"
        ) from error


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises ConfigError, which begins with `where` and names line and column."""
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_nodes(node, where)
        return loader.construct_document(node)
    except ConfigError:
        raise
    except yaml.MarkedYAMLError as error:
        place = f" at {_place(error.problem_mark)}" if error.problem_mark else ""
        sentence = ", ".join(part for part in (error.context, error.problem) if part)
        raise ConfigError(f"{where}: not valid YAML{place}: {sentence}") from error
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        place = f"line {before.count(chr(10)) + 1}, column {error.position - before.rfind(chr(10))}"
        raise ConfigError(
            f"{where}: not valid YAML at {place}: the character U+{error.character:04X} is not allowed"
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{where}: nested more than {MAX_DEPTH} deep, which no config is") from error
    except (ValueError, LookupError, AttributeError) as error:  # from PyYAML: 2024-13-45, !!bool no-bool, !!int ""
        raise ConfigError(f"{where}: not valid YAML: a number or date that does not exist ({error})") from error


def _place(mark: yaml.Mark) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"


def _check_nodes(root: yaml.Node, where: str) -> None:
    """Refuses duplicate keys, of which PyYAML takes the last, values that are no plain text, number or list, and
    aliases that expand to an endless number of values."""
    waiting, seen = [(root, 1)], 0
    while waiting:
        node, depth = waiting.pop()
        seen += 1
        if depth > MAX_DEPTH or seen > MAX_VALUES:
            raise ConfigError(
                f"{where}: nested more than {MAX_DEPTH} deep or more than {MAX_VALUES:,} values, aliases written out, "
                "which no config has"
            )
        below = list(node.value) if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            first: dict[Any, yaml.Node] = {}
            for key, value in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise ConfigError(
                        f"{where}: {_place(key.start_mark)}: a key must be a word, got a list or a section"
                    )
                if first.setdefault(key.value, key) is not key:
                    places = f"{_place(first[key.value].start_mark)} and {_place(key.start_mark)}"
                    raise ConfigError(f"{where}: the key `{key.value}` is given twice, at {places}")
                below.append(value)
        waiting += [(each, depth + 1) for each in below]


def origin(origins: Origins, dotted: str) -> str:
    while dotted not in origins:
        dotted = dotted.rpartition(".")[0]
    return origins[dotted]


def merge(into: dict[str, Any], origins: Origins, new: dict[str, Any], where: str, prefix: str = "") -> None:
    """Merges new values over existing ones in place, key by key, and records `where`, their source."""
    for key, value in new.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict) and into.get(key, {}) is None:
            continue  # an empty section, which `build` refuses
        if isinstance(value, dict) and isinstance(into.setdefault(key, {}), dict):
            origins.setdefault(dotted, where)
            merge(into[key], origins, value, where, dotted)
        else:
            into[key] = value
            origins[dotted] = where


def parse_updates(updates: list[str], by: str) -> dict[str, Any]:
    """Parses `a.b=value` updates into one nested dict; values are YAML. by: their source, for messages."""
    tree: dict[str, Any] = {}
    for update in updates:
        dotted, separator, text = update.partition("=")
        keys, where = dotted.split("."), f"{by} {_shortened(update)}"
        if not separator or not all(keys):
            raise ConfigError(f"{where}: expected key=value, for example -u train.epochs=12")
        if " #" in text and text[0] not in "'\"[{":
            raise ConfigError(f"{where}: the value ends before ` #`, which begins a comment in YAML; put it in quotes")
        value = parse_yaml(text, where)
        for key in reversed(keys):
            value = {key: value}
        merge(tree, {}, value, by)
    return tree


def build(cls: Any, data: Any, origins: Origins, nearest: Callable[[str], str], prefix: str = "") -> Any:
    """Builds the dataclass `cls` from plain data. nearest: ends the message on an unknown dotted key. Raises
    ConfigError if a key is unknown or a value not allowed."""
    fields = {each.name: each for each in dataclasses.fields(cls)}
    if not isinstance(data, dict):
        example = f"{prefix}.{next(iter(fields))}".lstrip(".")
        section = f"{prefix} is a section" if prefix else "a config is a section"
        raise ConfigError(
            f"{origin(origins, prefix)}: {section}; set a key below it, such as {example}, got {_shown(data)}"
        )
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {}
    for key, value in data.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        where = origin(origins, dotted)
        if key not in fields:
            raise ConfigError(f"{where}: unknown key `{dotted}`{nearest(dotted)}")
        if dataclasses.is_dataclass(hints[key]):
            values[key] = build(hints[key], value, origins, nearest, dotted)
        else:
            values[key] = _check(hints[key], value, dotted, where, fields[key].default)
    return cls(**values)


def _check(hint: Any, value: Any, dotted: str, where: str, default: Any = None) -> Any:
    """Converts a value to its declared type: int to float, list to tuple. Raises ConfigError if it does not fit."""
    kind, allowed = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint, None)
    words: tuple[str, ...] = ()
    if typing.get_origin(kind) is Union:  # a number or one of some words, `auto` for most
        kind, literal = typing.get_args(kind)
        words = typing.get_args(literal)
        if isinstance(value, str) and value in words:
            return value
    container, arguments = typing.get_origin(kind), typing.get_args(kind)
    number = as_float(value) if kind is float else value
    if container is tuple and isinstance(value, (list, tuple)) and (value or allowed is not None):
        entries = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(entries) == len(value):
            return tuple(_check(h, v, f"{dotted}[{i}]", where) for i, (h, v) in enumerate(zip(entries, value)))
    elif container is Literal:
        if isinstance(value, bool) and {"on", "off"} <= set(arguments):  # YAML reads on and off as true and false
            value = "on" if value else "off"
        if any(value == each and type(value) is type(each) for each in arguments):
            return value
    elif kind is str:
        if isinstance(value, str) and "\0" not in value:
            return value
    elif type(number) is kind and (allowed is None or number in allowed):
        return number
    raise ConfigError(
        f"{where}: {dotted} must be {' or '.join((_expected(kind, allowed, default), *words))}, got {_shown(value)}"
    )


def as_float(value: Any) -> Any:
    """The value as a float if it is one; YAML reads 1e-4 (without a dot) as a string."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return value
    try:
        return float(value)
    except (ValueError, OverflowError):
        return value


def _expected(kind: Any, allowed: Range | None, default: Any) -> str:
    """The allowed values in words: "a whole number from 1 to 64", or an example for lists."""
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        entry = {int: "whole numbers", float: "numbers"}.get(getattr(arguments[0], "__origin__", str), "words")
        count = "" if arguments[-1] is Ellipsis else f"{len(arguments)} "
        example = default if count else default[:2]
        return f"a list of {count}{entry}, such as [{', '.join(map(str, example))}]"
    if arguments:
        return f"one of {', '.join(map(str, arguments))}"
    words = {
        bool: "true or false",
        str: "text (in quotes where it looks like a number or a date)",
        int: "a whole number",
    }
    return words.get(kind, "a number") + (f" {allowed}" if allowed else "")


def _shown(value: Any) -> str:
    return "nothing" if value is None else _shortened(repr(value))


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
