"""`python tools/convert.py ...` is `rtdetr convert ...`: see rtdetr/commands, or --help."""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from rtdetr import cli


def main(arguments: Sequence[str] | None = None) -> int:
    return cli.main(["convert", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
