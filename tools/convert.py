"""Turns official RT-DETRv3 weights (.pdparams, .pdema) into a checkpoint of this project, without Paddle.

    python tools/convert.py rtdetrv3_r18vd_6x_coco.pdparams -o rtdetrv3_r18vd_6x_coco.pth

The model is recognised from the names and shapes in the file. Nothing in the file is run; a file that names any Python
object a weight file does not need is refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a clone works without being installed

from rtdetr.config import ConfigError, load_config
from rtdetr.data.classes import DataError
from rtdetr.data.formats.coco import read_classes
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.compare import describe
from rtdetr.weights.official import OFFICIAL_LICENCE, convert, save_conversion


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights", type=Path, metavar="IN", help=".pdparams, .pdema, or a .pth with official names")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the checkpoint to write")
    parser.add_argument("-c", "--config", type=Path, help="YAML file of the model; default: recognised")
    parser.add_argument(
        "--annotations", type=Path, metavar="JSON", help="COCO annotations that name the classes; default: COCO's 80"
    )
    parser.add_argument(
        "--licence", default=OFFICIAL_LICENCE, help=f"licence of the weights, kept in OUT; default: {OFFICIAL_LICENCE}"
    )
    parser.add_argument("--all-names", action="store_true", help="list every entry that did not match")
    args = parser.parse_args(arguments)
    try:
        config = load_config(args.config) if args.config else None
        classes = read_classes(args.annotations) if args.annotations else None
        conversion = convert(args.weights, config, classes)
        print(f"{args.weights}: sha256 {conversion.sha256}")
        print(f"model: {conversion.config.name} ({'from ' + str(args.config) if args.config else 'recognised'})")
        print(conversion.report.text(shown=10**6 if args.all_names else 6))
        save_conversion(conversion, args.weights, args.output, args.licence)
    except (ConfigError, DataError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.output}: {describe(conversion.weights)}; licence {args.licence}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
