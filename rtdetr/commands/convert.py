"""`rtdetr convert`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rtdetr.commands.arguments import Parser

ABOUT = """Convert weights of RT-DETRv3, or of RT-DETR v1 or v2, to a checkpoint of this project, without Paddle.

    rtdetr convert rtdetrv3_r18vd_6x_coco.pdparams -o rtdetrv3_r18vd_6x_coco.pth

The model is recognised from the names and shapes in the file. No code in the file is run; a file that names
Python objects other than those of weights is refused.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("convert", ABOUT)
    parser.add_argument("weights", type=Path, metavar="IN", help=".pdparams, .pdema, or a .pth of the authors")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="OUT", help="the checkpoint to write")
    parser.add_argument("-c", "--config", help="YAML file, or the name of a shipped config; default: recognised")
    text = "COCO annotations that name the classes; default: COCO's 80"
    parser.add_argument("--annotations", type=Path, metavar="JSON", help=text)
    parser.add_argument("--licence", help="licence of the weights, kept in OUT; default: that of the official files")
    parser.add_argument("--all-names", action="store_true", help="list every entry that did not match")
    parser.add_overwrite()
    args = parser.parse_args(arguments)

    from rtdetr.config import ConfigError, load_config
    from rtdetr.data.formats.coco import read_classes
    from rtdetr.outputs import check_outputs, writing
    from rtdetr.weights.catalogue import as_detector, detects_alone
    from rtdetr.weights.checkpoint import save_checkpoint
    from rtdetr.weights.compare import describe
    from rtdetr.weights.official import OFFICIAL_LICENCE, convert, save_conversion

    if args.output.suffix not in (".pth", ".pt"):
        raise ConfigError(f"--output: expected a name that ends in .pth, got {args.output}")
    check_outputs([args.output], [args.weights], args.overwrite)
    licence = args.licence or OFFICIAL_LICENCE
    config = load_config(args.config) if args.config else None
    classes = read_classes(args.annotations) if args.annotations else None
    conversion = convert(args.weights, config, classes)
    print(f"{args.weights}: sha256 {conversion.sha256}")
    print(f"model: {conversion.config.name} ({f'from {args.config}' if args.config else 'recognised'})")
    print(conversion.report.text(shown=10**6 if args.all_names else 6))
    weights = conversion.weights
    with writing(args.output):
        if args.config is None and detects_alone(conversion):
            content = as_detector(conversion, args.weights, classes)
            content["source"]["licence"], weights = licence, content["model"]
            save_checkpoint(args.output, content)
        else:
            save_conversion(conversion, args.weights, args.output, licence)
    if weights is not conversion.weights:
        print(f"{args.weights}: has no training parts; {args.output} gets new ones")
    print(f"{args.output}: {describe(weights)}; licence {licence}")
    return 0
