"""`rtdetr show-batch`"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from rtdetr.commands.arguments import Parser, count, count_from_0
from rtdetr.commands.train import DEFAULT_CONFIG

ABOUT = """Write a sheet of training images as the model sees them: augmented, with boxes and names of classes."""
SUFFIXES = (".jpg", ".jpeg", ".png")


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("show-batch", ABOUT)
    text = f"YAML file, or the name of a shipped config; default with DATA: {DEFAULT_CONFIG}"
    parser.add_argument("-c", "--config", help=text)
    parser.add_training_data()
    parser.add_update()
    parser.add_argument("-n", "--number", type=count, default=16, metavar="N", help="images (default: 16)")
    text = "show the augmentation of epoch E (default: 0)"
    parser.add_argument("--epoch", type=count_from_0, default=0, metavar="E", help=text)
    text = "a .jpg or .png file (default: train_batch.jpg)"
    parser.add_argument("-o", "--output", type=Path, default=Path("train_batch.jpg"), metavar="FILE", help=text)
    parser.add_overwrite()
    args = parser.parse_args(arguments)
    if args.config is None and args.data is None:
        parser.error("-c CONFIG or DATA is needed")

    import torch

    from rtdetr.config import load_config, settled
    from rtdetr.data.data_arguments import data_updates
    from rtdetr.data.loader import build_train_loader
    from rtdetr.data.sheet import sheet_of
    from rtdetr.engine.planning.auto_config import settle
    from rtdetr.outputs import OutputError, check_outputs, writing

    if args.output.suffix.lower() not in SUFFIXES:
        raise OutputError(f"{args.output}: expected the name of a file that ends in {', '.join(SUFFIXES)}")
    data = data_updates(args.data)
    one_by_one = ["data.train_batch_size=1", "data.num_workers=0"]  # unless -u differs; for data sets of any size
    cfg = load_config(args.config or DEFAULT_CONFIG, [*data, *one_by_one, *args.update])
    cfg, _ = settle(cfg, torch.device("cpu"))
    loader = build_train_loader(cfg, cfg.train.seed)
    check_outputs([args.output], loader.source.files(), args.overwrite)
    loader.set_epoch(args.epoch)
    batches = list(itertools.islice(loader, math.ceil(args.number / settled(cfg.data.train_batch_size))))
    number = min(args.number, sum(len(batch.images) for batch in batches))
    with writing(args.output):
        args.output.parent.mkdir(parents=True, exist_ok=True)
        sheet_of(batches, loader.classes.names, args.number).save(args.output)
    print(f"{number} training images as the model sees them in epoch {args.epoch}: {args.output}")
    return 0
