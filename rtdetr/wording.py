"""Parts of sentences: names of options as the command line or as Python writes them, signals, counts."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

Words = TypeVar("Words")

_command_runs = False


@contextmanager
def command_running() -> Iterator[None]:
    """Context manager: inside, messages name options as the command line does."""
    global _command_runs
    before, _command_runs = _command_runs, True
    try:
        yield
    finally:
        _command_runs = before


def option(command: str, python: str) -> str:
    """Returns the command-line name while a command runs, else the Python name."""
    return command if _command_runs else python


def signal_name(number: int) -> str:
    """Readable name of a signal that ended a command."""
    return "Ctrl-C" if number == signal.SIGINT else f"signal {number}"


def counted(number: int, word: str, words: str | None = None) -> str:
    """The number with its noun: "1 box", "2 boxes". words: an irregular plural."""
    ending = "es" if word.endswith(("s", "x", "ch")) else "s"
    return f"{number} {word}" if number == 1 else f"{number} {words or word + ending}"


def first_line(error: BaseException) -> str:
    """The first line of an error, which may be pages long; the name of its type if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def reason_of(error: BaseException) -> str:
    """The system's reason for an error, or else its first line."""
    return getattr(error, "strerror", None) or first_line(error)


def name_here(table: Mapping[Words, str], name: str) -> Words | None:
    """The entry of a table that lists a name of another project. table: names here, or why there is none, see `meant`
    -> names elsewhere, with spaces between them."""
    return next((words for words, names in table.items() if name in names.split()), None)


def meant(words: str | None) -> str:
    """Ends a sentence about a name of another project: its name here, or why it has no equivalent. Empty for None."""
    if words is None:
        return ""
    return f"; {words.removeprefix('nothing: ')}" if words.startswith("nothing: ") else f"; did you mean {words}?"
