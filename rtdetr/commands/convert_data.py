"""`rtdetr convert-data`"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rtdetr.commands.arguments import Parser

ABOUT = """Turns annotations and images into a folder of another format.

    rtdetr convert-data datasets/my_yolo datasets/my_coco --to coco

IN is a COCO or LVIS JSON, a Pascal VOC folder, a YOLO data.yaml, or the folder of a whole set; what it is gets
recognised. Nothing of IN is changed. What VOC and YOLO cannot hold, as COCO's ids, is kept in OUT/rtdetr.json.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    """Converts a set; see `rtdetr convert-data --help`."""
    parser = Parser(prog="rtdetr convert-data", description=ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, metavar="IN", help="annotations, or the folder of a whole set")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write; must be empty or not exist")
    parser.add_argument("--to", choices=("coco", "voc", "yolo"), required=True, help="the format of OUT")
    parser.add_argument(
        "--split", choices=("train", "val", "trainval", "test"), default="", help="only that set (default: all)"
    )
    parser.add_argument("--images", default="", metavar="DIR", help="images of a JSON (default: looked for beside it)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--copy", action="store_true", help="copy the images (default)")
    how.add_argument("--link", action="store_true", help="make symbolic links to the images instead")
    parser.add_argument("--overwrite", action="store_true", help="move what is in OUT aside, to OUT-old")
    args = parser.parse_args(arguments)

    from rtdetr.commands.progress import progress
    from rtdetr.data.formats.convert import load, write
    from rtdetr.data.formats.sources import not_read, not_read_line
    from rtdetr.outputs import writing

    _check(args.source, args.output, args.overwrite)
    parts = load(args.source, args.split, args.images)
    passed_over = not_read(args.source)
    total = sum(len(part.files) for part in parts)
    with writing(args.output), _beside(args.output) as folder, progress(total) as bar:
        for _ in write(parts, folder, args.to, args.link):
            bar.update()
    for part in parts:
        crowds = part.document.num_boxless_crowds
        left_out = f"; left out {crowds} crowds without a box" if crowds else ""
        print(f"{args.output}: {part.split}: {len(part.files)} images, {part.num_boxes} boxes{left_out}")
    if passed_over:
        print(not_read_line(passed_over))
    return 0


def _check(source: Path, output: Path, overwrite: bool) -> None:
    """Raises OutputError for an OUT that is in use, or cannot be written to."""
    from rtdetr.outputs import OutputError, check_folder

    if source.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output}: holds what would be converted; choose another folder for the results")
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output}: is a file, expected the name of a folder to write")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise OutputError(f"{output}: is not empty; choose another folder, or move it aside with --overwrite")
    check_folder(output.absolute().parent)


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """A folder that takes the place of `output` when all went well, and else vanishes. What was there moves aside."""
    from rtdetr.outputs import unused_folder

    output = output.absolute()
    folder = unused_folder(output.with_name(f".{output.name}-{os.getpid()}"))
    folder.mkdir(parents=True)
    try:
        yield folder
        if output.is_dir() and any(output.iterdir()):
            old = unused_folder(output.with_name(f"{output.name}-old"))
            output.rename(old)
            print(f"{output}: what was there is in {old} now")
        elif output.is_dir():
            output.rmdir()
        folder.rename(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
