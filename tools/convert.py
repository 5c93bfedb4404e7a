"""`python tools/convert.py ...` is `rtdetr convert ...`: see rtdetr/commands, or --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from rtdetr.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
