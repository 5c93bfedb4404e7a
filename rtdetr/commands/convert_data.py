"""`rtdetr convert-data`"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rtdetr.commands.arguments import Parser
from rtdetr.commands.progress import progress, say_above_bar
from rtdetr.outputs import OutputError, check_folder, unused_path, writing
from rtdetr.wording import counted

ABOUT = """Convert annotations and images to a folder of another format.

    rtdetr convert-data datasets/my_yolo datasets/my_coco --to coco

IN is a COCO, LVIS or Label Studio JSON, a Pascal VOC folder, a YOLO data.yaml, a CVAT XML, or the folder of a
whole data set, also of LabelMe and Hugging Face. The format is detected, and IN is not changed. What VOC and YOLO
cannot hold, such as COCO's ids, is kept in OUT/rtdetr.json.
"""


def run(arguments: Sequence[str] | None = None) -> int:
    parser = Parser("convert-data", ABOUT)
    parser.add_argument("source", type=Path, metavar="IN", help="annotations, or the folder of a whole data set")
    parser.add_argument("output", type=Path, metavar="OUT", help="folder to write; must be empty or not exist")
    text = "the format of OUT; imagefolder: parquet or arrow files of Hugging Face, unpacked as they are"
    parser.add_argument("--to", choices=("coco", "voc", "yolo", "imagefolder"), required=True, help=text)
    splits = ("train", "val", "trainval", "test")
    parser.add_argument("--split", choices=splits, default="", help="only that set (default: all)")
    text = "image folder of a JSON (default: searched next to it)"
    parser.add_argument("--images", default="", metavar="DIR", help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--copy", action="store_true", help="copy the images (default)")
    how.add_argument("--link", action="store_true", help="make symbolic links to the images instead")
    parser.add_argument("--overwrite", action="store_true", help="move existing files of OUT to OUT-old")
    args = parser.parse_args(arguments)

    from rtdetr.data.formats.convert import load, write
    from rtdetr.data.formats.sources import not_read, not_read_line, unpacked

    _check(args.source, args.output, args.overwrite)
    if args.to == "imagefolder":
        if args.split or args.images or args.link:
            parser.error("--to imagefolder writes all that is in IN; leave out --split, --images, --link")
        return _unpack(args.source, args.output)
    with unpacked(args.source) as source:
        if args.link and source != args.source:
            raise OutputError(f"{args.source}: its images are inside of it, so nothing can be linked; leave out --link")
        parts = load(source, args.split, args.images)
        for file in (each for part in parts if args.link for each in part.files):
            if file.resolve().is_relative_to(args.output.resolve()):
                raise OutputError(f"{file}: is in {args.output}, which is replaced, and cannot be linked to")
        passed_over = not_read(source)
        total = sum(len(part.files) for part in parts)
        with writing(args.output), _beside(args.output) as folder, progress(total) as bar:
            for _ in write(parts, folder, args.to, args.link):
                bar.update()
    for part in parts:
        crowds = part.document.num_boxless_crowds
        left_out = f"; left out: {counted(crowds, 'crowd')} without a box" if crowds else ""
        counts = f"{counted(len(part.files), 'image')}, {counted(part.num_boxes, 'box')}"
        print(f"{args.output}: {part.split}: {counts}{left_out}")
    if passed_over:
        print(not_read_line(passed_over))
    return 0


def _unpack(source: Path, output: Path) -> int:
    from rtdetr.data.formats.huggingface import packed_files, unpack

    if not packed_files(source):
        raise OutputError(f"{source}: only parquet and arrow files become an imagefolder; choose another --to")
    with writing(output), _beside(output) as folder:
        unpack(source, folder)
    print(f"{output}: unpacked; `rtdetr doctor {output}` looks at it")
    return 0


def _check(source: Path, output: Path, overwrite: bool) -> None:
    """Raises OutputError if OUT is in use, or cannot be written to."""
    if source.resolve().is_relative_to(output.resolve()):
        raise OutputError(f"{output}: holds what would be converted; choose another folder for the results")
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output}: is a file, expected the name of a folder to write")
    if output.is_dir() and any(output.iterdir()) and not overwrite:
        raise OutputError(f"{output}: is not empty; choose another folder, or move it aside with --overwrite")
    check_folder(output.absolute().parent)


@contextmanager
def _beside(output: Path) -> Iterator[Path]:
    """Context manager: a folder that replaces `output` on success and is removed otherwise. Old files move aside."""
    output = output.resolve()
    folder = unused_path(output.with_name(f".{output.name}-{os.getpid()}"))
    folder.mkdir(parents=True)
    try:
        yield folder
        old = unused_path(output.with_name(f"{output.name}-old"))
        if was_there := output.is_dir() and any(output.iterdir()):
            output.rename(old)
        elif output.is_dir():
            output.rmdir()
        folder.rename(output)
        if was_there:
            say_above_bar(f"{output}: what was there is in {old} now")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
