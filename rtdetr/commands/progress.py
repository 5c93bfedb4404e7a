"""A progress bar on stderr, which in a log file becomes an occasional line."""

from __future__ import annotations

import sys
from typing import Any, TextIO

from tqdm import tqdm

LOG_LINE = "{n_fmt}/{total_fmt} {unit}s [{elapsed}<{remaining}, {rate_fmt}]\n"


def progress(number: int | None, shown: bool = True, unit: str = "image", done: int = 0) -> tqdm[Any]:
    """Returns a progress bar. number: of all, None if unknown; done: before this run."""
    style: dict[str, Any] = {"dynamic_ncols": True}
    if not sys.stderr.isatty():
        style = {"mininterval": 30.0, "bar_format": LOG_LINE}
    return tqdm(total=number, unit=unit, initial=done, disable=not shown, **style)


def say_above_bar(text: str, file: TextIO | None = None) -> None:
    """Prints a line above the bar; None: on stdout. In a log file, the bar is not repeated after it."""
    try:
        if sys.stderr.isatty():
            tqdm.write(text, file=file)
        else:
            print(text, file=file)
    except OSError as error:
        # `writing` would else take it for an error of the results.
        error.filename = "standard error" if file is sys.stderr else "standard output"
        raise
