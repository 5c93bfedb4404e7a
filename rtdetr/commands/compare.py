"""`rtdetr compare`"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rtdetr.commands.arguments import Parser, add_kernels, kernels_update

ABOUT = """Print a table of a checkpoint and its exports: AP on the validation set, size, speed on this machine, and the
largest differences in the certificate of each file.

    rtdetr compare best.pth                                    best.pth and every certified export in its folder
    rtdetr compare best.pth best.onnx best_openvino -o table.md -o table.json
"""
HEADS = {
    "file": "file", "runtime": "runtime", "AP": "AP", "AP50": "AP50", "megabytes": "MB", "latency_ms": "ms, one image",
    "images_per_second": "images/s", "score": "score differs", "box": "box differs, px",
}  # fmt: skip
DIGITS = {
    **{"AP": ".4f", "AP50": ".4f", "megabytes": ".1f", "latency_ms": ".1f", "images_per_second": ".1f"},
    **{"score": ".2g", "box": ".2g"},
}


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("compare", ABOUT)
    text = "a checkpoint of this project, unless -w names it; then exported files (default: those in its folder with a "
    text += "certificate of its weights)"
    parser.add_argument("files", nargs="*", type=Path, metavar="WEIGHTS FILE", help=text)
    parser.add_argument("-w", "--weights", type=Path, help="the checkpoint")
    parser.add_validation()
    text = "write the table: .json or .md; may be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], type=Path, metavar="FILE", help=text)
    parser.add_overwrite()
    parser.add_device()
    add_kernels(parser)
    args = parser.parse_args(arguments)
    if args.weights is None:
        if not args.files:
            parser.error("expected WEIGHTS, as in `rtdetr compare best.pth`, or -w, got none")
        args.weights = args.files.pop(0)

    from rtdetr.config import ConfigError, load_config
    from rtdetr.data.data_arguments import data_updates
    from rtdetr.engine import distributed
    from rtdetr.export.measure import measure
    from rtdetr.outputs import check_outputs, write_text

    for output in args.output:
        if output.suffix not in (".json", ".md"):
            raise ConfigError(f"--output: expected a name that ends in .json or .md, got {output}")
    files = args.files or exports_beside(args.weights)
    check_outputs(args.output, [args.weights, *files], args.overwrite)
    updates = [*data_updates(args.data, ("val",)), *args.update, *kernels_update(args)]
    replaced = load_config(args.config, updates) if args.config else None
    with distributed.process_group(args.device) as device:
        rows, on = measure(args.weights, files, device, updates, replaced, others=bool(args.files))
    print(table(rows))
    for output in args.output:
        content = json.dumps({"on": on, "rows": rows}, indent=1) if output.suffix == ".json" else table(rows)
        write_text(output, f"{content}\n")
    return 0


def exports_beside(weights: Path) -> list[Path]:
    """Returns the exports in the folder of a checkpoint that have a certificate; failed ones are left out, and those of
    other checkpoints by `measure`."""
    from rtdetr.export.targets import CERTIFICATE, FAILED, beside

    certificates = sorted(beside(weights).parent.glob(f"*{CERTIFICATE}"))
    files = [each.with_name(each.name.removesuffix(CERTIFICATE)) for each in certificates]
    return [each for each in files if each.suffix != FAILED and each != weights and each.exists()]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown; the keys are those of HEADS."""
    lines = ["| " + " | ".join(HEADS.values()) + " |", "|---" * len(HEADS) + "|"]
    for row in rows:
        cells = ("-" if row[key] is None else format(row[key], DIGITS.get(key, "")) for key in HEADS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
