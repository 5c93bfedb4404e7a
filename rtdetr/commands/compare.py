"""`rtdetr compare`"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtdetr.commands.arguments import Parser, add_device, add_overwrite, add_validation, add_weights

if TYPE_CHECKING:
    import torch

    from rtdetr.config import Config
    from rtdetr.inference.predictor import Predictor

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
CALLS = 9  # timed calls, after two that are not timed
BATCH = 8  # batch size for images/s

Row = dict[str, Any]  # by the keys of HEADS


def run(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; see `rtdetr compare --help`."""
    parser = Parser(prog="rtdetr compare", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_weights(parser, "a checkpoint of this project")
    text = "exported files (default: those in the checkpoint's folder that have a certificate and its name)"
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help=text)
    add_validation(parser)
    text = "write the table: .json or .md; may be repeated"
    parser.add_argument("-o", "--output", action="append", default=[], type=Path, metavar="FILE", help=text)
    add_overwrite(parser)
    add_device(parser)
    args = parser.parse_args(arguments)
    weights = args.weights or args.named_weights

    from rtdetr.config import ConfigError
    from rtdetr.outputs import check_outputs, writing

    for output in args.output:
        if output.suffix not in (".json", ".md"):
            raise ConfigError(f"--output: expected a name that ends in .json or .md, got {output}")
    files = args.files or exports_beside(weights)
    check_outputs(args.output, [weights, *files], args.overwrite)
    rows, on = _rows(weights, files, args)
    print(table(rows))
    for output in args.output:
        with writing(output):
            content = json.dumps({"on": on, "rows": rows}, indent=1) if output.suffix == ".json" else table(rows)
            output.write_text(content + "\n", encoding="utf-8")
    return 0


def exports_beside(weights: Path) -> list[Path]:
    """Returns the other exports of a checkpoint, by their name, that have a certificate; failed ones are left out."""
    from rtdetr.export.targets import CERTIFICATE, FAILED, beside

    begin = beside(weights)
    certificates = sorted(begin.parent.glob(f"*{CERTIFICATE}"))
    files = [each.with_name(each.name.removesuffix(CERTIFICATE)) for each in certificates]
    beginnings = tuple(f"{begin.name}{mark}" for mark in ".-_")
    return [
        each
        for each in files
        if each.name.startswith(beginnings) and each.suffix != FAILED and each != weights and each.exists()
    ]


def _rows(weights: Path, files: list[Path], args: argparse.Namespace) -> tuple[list[Row], str]:
    """Returns the rows, the checkpoint's first, and what they were measured on. Raises CheckpointError, ConfigError."""
    import torch

    from rtdetr.config import find_config, load_config
    from rtdetr.data.data_arguments import data_updates
    from rtdetr.data.loader import build_val_loader
    from rtdetr.engine import distributed
    from rtdetr.export.average_precision import result
    from rtdetr.export.certificate import num_bytes
    from rtdetr.inference.predictor import Predictor
    from rtdetr.inference.runtimes import load_model
    from rtdetr.models.rtdetrv3 import Network
    from rtdetr.weights.catalogue import located
    from rtdetr.weights.checkpoint import CheckpointError
    from rtdetr.weights.digest import weights_sha256

    updates = [*data_updates(args.data, ("val",)), *args.update]
    replaced = load_config(find_config(args.config), updates) if args.config else None
    rows = []
    with distributed.process_group(args.device) as device:
        first, cfg, classes = load_model(weights, device, updates, replaced)
        digest = weights_sha256(first.state_dict()) if isinstance(first, Network) else first.metadata.weights_sha256
        if not args.files:
            files = [each for each in files if not about_others(each, digest)]
        names = [each.name for each in (weights, *files)]
        loader = build_val_loader(cfg, classes)
        for file in (weights, *files):
            model, _, own = load_model(file, device, cfg=cfg)
            if (own.names, own.category_ids) != (classes.names, classes.category_ids):
                raise CheckpointError(f"{file}: detects {own.listed()}, not {classes.listed()} as {weights}")
            predictor = Predictor.of(model, cfg, classes, device)
            figures = result(predictor, cfg, loader, device).figures
            rows.append(
                {
                    "file": file.name if names.count(file.name) == 1 else str(file),
                    "runtime": getattr(model, "runtime", "PyTorch"),
                    "AP": figures["AP"],
                    "AP50": figures["AP50"],
                    "megabytes": num_bytes(located(file)) / 1e6,
                    **speed(predictor, cfg, device),
                    **certified(file, digest if isinstance(first, Network) else None),
                }
            )
        on = f"{loader.source.summary()}; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return rows, on


def about_others(file: Path, digest: str) -> bool:
    """Whether the certificate of a file that nobody named is about other weights, which is printed: `last-1.onnx` is
    not of last.pth. Raises CheckpointError if the certificate is damaged."""
    from rtdetr.export.certificate import OTHER_WEIGHTS, read_stored_certificate

    stored = read_stored_certificate(file)
    if stored is None or stored.weights_sha256 == digest:
        return False
    print(f"{file}: left out, as {OTHER_WEIGHTS}, by its certificate")
    return True


def speed(predictor: Predictor, cfg: Config, device: torch.device) -> Row:
    """Returns the median time of an image of the network's size, from tensor to detections, and images per second."""
    import statistics  # here, as it is slow to import

    import torch

    seconds = {}
    for batch in (1, BATCH):
        images = torch.randint(0, 256, (batch, 3, *cfg.data.image_size), dtype=torch.uint8, device=device)
        times = []
        for _ in range(CALLS + 2):
            start = time.perf_counter()
            predictor.predict_tensors(images)[0].cpu()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds[batch] = statistics.median(times[2:])
    return {"latency_ms": seconds[1] * 1e3, "images_per_second": BATCH / seconds[BATCH]}


def certified(file: Path, digest: str | None) -> Row:
    """Returns the largest differences from PyTorch in the certificate of a file, None without one. digest: of the
    weights, if known. Raises CheckpointError if the file has changed, was not certified or has other weights, or if
    the certificate is damaged."""
    from rtdetr.export.certificate import OTHER_WEIGHTS, read_stored_certificate
    from rtdetr.export.targets import certificate_path
    from rtdetr.weights.checkpoint import CheckpointError
    from rtdetr.weights.digest import file_sha256

    stored = read_stored_certificate(file)
    if stored is None:
        return {"score": None, "box": None}
    if stored.sha256 != file_sha256(file):
        name = certificate_path(file).name
        raise CheckpointError(f"{file}: is not the file of {name}; `rtdetr export --check` compares it again")
    if digest is not None and stored.weights_sha256 != digest:
        raise CheckpointError(f"{file}: {OTHER_WEIGHTS}, by its certificate; export it again, or leave it out")
    return {"score": stored.score, "box": stored.box}


def table(rows: list[Row]) -> str:
    """Returns the rows as Markdown."""
    lines = ["| " + " | ".join(HEADS.values()) + " |", "|---" * len(HEADS) + "|"]
    for row in rows:
        cells = ("-" if row[key] is None else format(row[key], DIGITS.get(key, "")) for key in HEADS)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
