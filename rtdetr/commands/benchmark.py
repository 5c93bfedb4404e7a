"""`rtdetr benchmark`: in its own process, as each benchmark chooses what is imported, and when."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

CODE = (
    "import os, sys; sys.path[:] = os.environ['PYTHONPATH'].split(os.pathsep)\n"  # without the working folder
    "from rtdetr.benchmarks.__main__ import main; sys.exit(main())"
)


def run(arguments: Sequence[str]) -> int:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a clone works without installation
    return subprocess.call([sys.executable, "-c", CODE, *arguments], env=environment)
