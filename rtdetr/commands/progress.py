"""A bar on stderr: alive on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

LOG_LINE = "{n_fmt}/{total_fmt} {unit}s [{elapsed}<{remaining}, {rate_fmt}]\n"


def progress(number: int | None, shown: bool = True, unit: str = "image", done: int = 0) -> tqdm[Any]:
    """number: of all, None if unknown; done: before this run."""
    style: dict[str, Any] = {"dynamic_ncols": True}
    if not sys.stderr.isatty():
        style = {"mininterval": 30.0, "bar_format": LOG_LINE}
    return tqdm(total=number, unit=unit, initial=done, disable=not shown, **style)


def say_above_bar(text: str, file: TextIO) -> None:
    """A line above the bar. A log file does not want the bar again after it."""
    if sys.stderr.isatty():
        tqdm.write(text, file=file)
    else:
        print(text, file=file)
