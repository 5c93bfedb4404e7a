"""`python -m rtdetr ...` is `rtdetr ...`."""

import sys

from rtdetr.cli import main

if __name__ == "__main__":  # data workers that are spawned import this file
    sys.exit(main())
