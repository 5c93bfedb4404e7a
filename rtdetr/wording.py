"""How a sentence names an option: as the command line writes it while a command runs, else as Python does."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_command_runs = False


@contextmanager
def command_running() -> Iterator[None]:
    """In here, whoever reads a sentence has typed a command."""
    global _command_runs
    before, _command_runs = _command_runs, True
    try:
        yield
    finally:
        _command_runs = before


def option(command: str, python: str) -> str:
    """The one of both names that the reader can use."""
    return command if _command_runs else python


def signal_name(number: int) -> str:
    """What a person calls a signal that ended a command."""
    return "Ctrl-C" if number == signal.SIGINT else f"signal {number}"
