"""`python tools/train.py ...` is `rtdetr train ...`: see rtdetr/cli.py, or --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from rtdetr.cli import train

if __name__ == "__main__":
    sys.exit(train())
