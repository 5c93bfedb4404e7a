"""`rtdetr predict`"""

from __future__ import annotations

import argparse
import itertools
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rtdetr.commands.arguments import Parser, add_kernels, count, count_from_0, is_weights, overlap_share
from rtdetr.garbage_collection import collection_paused
from rtdetr.gpu_startup import wake_gpu

File = Path | str  # str: a URL
FORMATS = {"coco": "coco.json", "yolo": "classes.txt", "csv": "detections.csv"}  # and labels/*.txt of yolo
CHECKPOINTS = (".pth", ".safetensors")  # which run on a GPU if there is one
ABOUT = """Detect objects in images and videos. Draws the boxes, and writes results.json for images, NAME.jsonl for
videos."""
EXIT_CODES = "Exit codes: 0 done, 1 some sources could not be read, 2 nothing was started, 130 stopped by Ctrl-C."
SOURCES = "image, video, folder of images, glob, URL of those, RTSP stream, or number of a camera"


def run(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    if args.verbose:
        logging.getLogger("rtdetr").setLevel(logging.DEBUG)
    if args.weights.suffix in CHECKPOINTS:
        wake_gpu(args.device)

    with collection_paused():
        from rtdetr.commands.detection import Search, check_videos, detect_images, detect_listed, detect_video
        from rtdetr.engine import distributed
        from rtdetr.inference.results import ResultsFolder, image_ids
        from rtdetr.inference.slicing import OVERLAP, Slices
        from rtdetr.inference.sources import is_video
        from rtdetr.outputs import OutputError, check_new_folder, check_outputs, unused_path, writing

    overlap = OVERLAP if args.overlap is None else args.overlap
    slices = Slices.of(args.slices, overlap) if args.slices else None
    folder = args.output_dir or unused_path(Path("output/predict"))
    if args.manifest is not None:
        return detect_listed(args, folder, slices)
    videos = [each for each in args.sources if is_video(each)]
    images, left_out = _listed([each for each in args.sources if each not in videos], args.recursive, folder)
    names, video_names = _names(images, videos)
    ids = image_ids(names, args.annotations) if "coco" in args.formats else {}
    check_videos(args, videos, [*names])
    targets = [*_targets(folder, args.formats, names.values())]
    targets += [folder / f"{name}{ending}" for name in video_names.values() for ending in (".mp4", ".jsonl")]
    sources = [*map(Path, images), *(Path(each) for each in videos), args.weights]
    check_outputs(targets, sources, args.overwrite)
    if args.crops:
        check_new_folder(folder / "crops", sources, args.overwrite)
        if inside := [each for each, name in names.items() if "crops" in name.parent.parts[:1]]:
            raise OutputError(f"{inside[0]}: its result would be among the crops; rename its folder, or omit --crops")
    if left_out:
        print(left_out, file=sys.stderr)
    code = 0
    with distributed.process_group(args.device) as device:
        search = Search.of(args, device, slices, len(names), in_threads=any(map(_is_address, args.sources)))
        with writing(folder):
            if names:
                with ResultsFolder(folder, args.formats, search.predictor.classes, args.crops, ids) as results:
                    code = detect_images(search, names, results)
            for source, name in video_names.items():
                if code < 128:
                    code = max(code, detect_video(search, source, name, folder, args))
    return code


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("predict", ABOUT, EXIT_CODES)
    text = f"without -w the weights first; then {SOURCES}"
    parser.add_argument("sources", nargs="*", metavar="WEIGHTS SOURCE", help=text)
    parser.add_argument("-w", "--weights", type=Path, help="a checkpoint, or an exported file")
    parser.add_argument("--output-dir", type=Path, help="default: output/predict, or output/predict-2, ...")
    parser.add_overwrite()
    parser.add_argument("--recursive", action="store_true", help="include sub-folders")
    parser.add_threshold("lowest score to report, from 0 to 1 (default: those in the weights, else 0.5)")
    text = "also write coco.json, labels/*.txt (yolo) or detections.csv; several as coco,csv"
    parser.add_argument(
        "--format", type=_formats, action="extend", default=[], dest="formats", metavar="coco,yolo,csv", help=text
    )
    text = "take the image ids of coco.json from these annotations (default: the numbers in the file names)"
    parser.add_argument("--annotations", type=Path, metavar="FILE", help=text)
    parser.add_argument("--crops", action="store_true", help="write what is in each box, as crops/NAME/1.jpg, ...")
    text = "also search large images in overlapping tiles: side of a tile in pixels, or ROWSxCOLUMNS"
    parser.add_argument("--slices", metavar="640|2x2", help=text)
    parser.add_argument("--overlap", type=overlap_share, help="of neighbouring tiles, as a share (default: 0.2)")
    parser.add_device()
    add_kernels(parser)
    parser.add_argument("--batch-size", type=count, default=8, help="images per batch (default: 8)")
    text = "float16 (default: on a GPU)"
    parser.add_argument("--half", nargs="?", const="on", choices=["auto", "on", "off"], default="auto", help=text)
    parser.add_argument("--compile", action="store_true", help="use torch.compile: takes minutes at first, then faster")
    parser.add_argument("--verbose", action="store_true", help="also print how files are read")
    videos = parser.add_argument_group("videos, cameras and streams")
    videos.add_argument("--every", type=count, default=1, metavar="N", help="search every Nth frame (default: 1)")
    videos.add_argument("--track", action="store_true", help="number the objects across frames (ByteTrack)")
    lists = parser.add_argument_group("long lists")
    text = "a text file with one image path per line; writes results.jsonl, one line per image, and no images"
    lists.add_argument("--manifest", type=Path, metavar="FILE", help=text)
    text = "read and draw images in N processes, 0: in threads (default: processes for long lists on a GPU); not for "
    text += "addresses, with --slices, or with --manifest and --crops"
    parser.add_argument("--processes", type=count_from_0, metavar="N", help=text)
    lists.add_argument("--resume", action="store_true", help="resume the run in --output-dir")
    return _checked(parser, parser.parse_args(arguments))


def _checked(parser: Parser, args: argparse.Namespace) -> argparse.Namespace:
    """Separates the weights from the sources. Exits with an error if arguments cannot be combined."""
    if args.weights is None:
        if not args.sources or not is_weights(args.sources[0]):
            got = f", got {args.sources[0]}" if args.sources else ""
            parser.error(f"expected weights first, as in `rtdetr predict best.pth images`, or with -w{got}")
        args.weights = Path(args.sources.pop(0))
    if bool(args.sources) == (args.manifest is not None):
        parser.error(f"expected a SOURCE ({SOURCES}) or a --manifest, {'not both' if args.sources else 'got none'}")
    if args.manifest is not None and (args.formats or args.track or args.every > 1 or args.recursive):
        parser.error("--format, --track, --every and --recursive do not go with --manifest, a list of images")
    if args.annotations is not None and "coco" not in args.formats:
        parser.error("--annotations needs --format coco")
    in_threads = args.slices or (args.manifest and args.crops) or any(map(_is_address, args.sources))
    if args.processes and in_threads:
        parser.error("--processes cannot be used with URLs, with --slices, or with --manifest and --crops")
    if args.overlap is not None and not args.slices:
        parser.error("--overlap needs --slices")
    if args.resume and (args.manifest is None or args.output_dir is None or args.overwrite):
        parser.error("--resume needs --manifest and --output-dir, those of the run to resume, and no --overwrite")
    return args


def _listed(sources: Iterable[str], recursive: bool, except_in: Path) -> tuple[dict[File, Path], str]:
    """Returns the images and URLs in the order of the sources, with names of their results, and what was left out."""
    from rtdetr.inference.files import Listing, find_images  # here, as above

    images: dict[File, Path] = {}
    listing = Listing()
    for is_address, some in itertools.groupby(sources, _is_address):
        if is_address:
            images.update((each, Path(_name_of(each))) for each in some)
        else:
            listing.add(found := find_images([*some], recursive, except_in))
            images.update(found.images.items())
    return images, listing.left_out()


def _is_address(source: str) -> bool:
    return "://" in source


def _names(images: Mapping[File, Path], videos: Sequence[str]) -> tuple[dict[File, Path], dict[str, Path]]:
    """Returns the names of the results of images and of videos, each name once."""
    names = dict(images) | {each: Path(_name_of(each)) for each in videos}
    unique = dict(zip(names, result_names(names.values())))
    return {each: name for each, name in unique.items() if each not in videos}, {each: unique[each] for each in videos}


def _formats(text: str) -> list[str]:
    """Splits one or several of FORMATS, separated by commas; for argparse."""
    names = text.split(",")
    if not {*names} <= {*FORMATS}:
        expected = f"expected {', '.join(FORMATS)}, or several as coco,csv"
        raise argparse.ArgumentTypeError(f"{expected}; results.json is always written; got {text}")
    return names


def _name_of(source: str) -> str:
    """Returns the name of the results of a video, stream or URL, with a suffix as in file names."""
    if _is_address(source):
        try:
            address = urlsplit(source)
        except ValueError:  # malformed: it is reported, and nothing is written
            return "address.stream"
        return Path(address.path).name or f"{address.hostname}.stream"
    return f"camera-{source}.stream" if source.isdecimal() else Path(source).name


def _targets(folder: Path, formats: Sequence[str], names: Iterable[Path]) -> Iterator[Path]:
    """Yields the files that are written for images with results of these names."""
    for number, name in enumerate(names):
        if not number:
            yield folder / "results.json"
            yield from (folder / FORMATS[each] for each in formats)
        yield folder / f"{name}.jpg"
        if "yolo" in formats:
            yield folder / "labels" / f"{name}.txt"


def result_names(names: Iterable[Path]) -> Iterator[Path]:
    """Yields unique names without suffix: a.png and a.jpg become a and a_1, also if names differ only in case."""
    taken: set[str] = set()
    for name in names:
        stem = free = name.with_suffix("")
        number = 0
        while str(free).casefold() in taken:
            number += 1
            free = stem.with_name(f"{stem.name}_{number}")
        taken.add(str(free).casefold())
        yield free
