"""A bar on stderr: alive on a terminal, a line now and then in a log file."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


def progress(pictures: int, shown: bool = True) -> tqdm[Any]:
    interval = 0.1 if sys.stderr.isatty() else 30.0
    return tqdm(total=pictures, unit="picture", mininterval=interval, dynamic_ncols=True, disable=not shown)
