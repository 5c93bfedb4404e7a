"""`rtdetr benchmark` hands over to tools/benchmark.py, which only a clone has."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

TOOL = Path(__file__).resolve().parents[2] / "tools" / "benchmark.py"


def run(arguments: Sequence[str]) -> int:
    """Measures speed; see `rtdetr benchmark --help`."""
    if not TOOL.is_file():
        print("error: benchmark runs in a clone of the repository, which this installation is not", file=sys.stderr)
        return 2
    return subprocess.call([sys.executable, str(TOOL), *arguments])
