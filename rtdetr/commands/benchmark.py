"""`rtdetr benchmark`: in its own process, as each benchmark chooses what is imported, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Measures speed; see `rtdetr benchmark --help`."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a clone works without installation
    return subprocess.call([sys.executable, "-m", "rtdetr.benchmarks", *arguments], env=environment)
