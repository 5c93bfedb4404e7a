"""`rtdetr predict`"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rtdetr.commands.arguments import (
    Parser,
    add_device,
    add_kernels,
    add_overwrite,
    add_threshold,
    count,
    count_from_0,
    is_weights,
    overlap_share,
)
from rtdetr.garbage_collection import collection_paused
from rtdetr.gpu_startup import wake_gpu
from rtdetr.wording import counted, signal_name

if TYPE_CHECKING:
    from rtdetr.commands.detection import Search
    from rtdetr.inference.files import Listing
    from rtdetr.inference.predictor import File
    from rtdetr.inference.results import ResultsFolder

FORMATS = {"coco": "coco.json", "yolo": "classes.txt", "csv": "detections.csv"}  # and labels/*.txt of yolo
CHECKPOINTS = (".pth", ".safetensors")  # which run on a GPU if there is one
SOURCES = "image, video, folder of images, glob, URL of those, RTSP stream, or number of a camera"


def run(arguments: Sequence[str] | None = None) -> int:
    """Detects in images and videos; see `rtdetr predict --help`."""
    args = _arguments(arguments)
    if args.verbose:
        logging.getLogger("rtdetr").setLevel(logging.DEBUG)
    if args.weights.suffix in CHECKPOINTS:
        wake_gpu(args.device)

    with collection_paused():
        from rtdetr.commands import predict_manifest, predict_video
        from rtdetr.commands.detection import Search
        from rtdetr.engine import distributed
        from rtdetr.inference.files import Listing, find_images
        from rtdetr.inference.results import ResultsFolder, image_ids
        from rtdetr.inference.slicing import OVERLAP, Slices
        from rtdetr.inference.sources import is_video
        from rtdetr.outputs import check_new_folder, check_outputs, unused_folder, writing

    overlap = OVERLAP if args.overlap is None else args.overlap
    slices = Slices.of(args.slices, overlap) if args.slices else None
    folder = args.output_dir or unused_folder(Path("output/predict"))
    if args.manifest is not None:
        return predict_manifest.run(args, folder, slices)
    videos = [each for each in args.sources if is_video(each)]
    addresses = [each for each in args.sources if "://" in each and each not in videos]
    files = [each for each in args.sources if each not in videos and each not in addresses]
    listing = find_images(files, args.recursive, folder) if files else Listing()
    names, video_names = _names(listing, addresses, videos)
    ids = image_ids(names, args.annotations) if "coco" in args.formats else {}
    predict_video.check(args, videos, [*names])
    targets = [*_targets(folder, args.formats, names.values()), *predict_video.targets(folder, video_names.values())]
    sources = [*map(Path, listing.images), *(Path(each) for each in videos), args.weights]
    check_outputs(targets, sources, args.overwrite)
    if args.crops:
        check_new_folder(folder / "crops", sources, args.overwrite)
    if left_out := listing.left_out():
        print(left_out, file=sys.stderr)
    code = 0
    with distributed.process_group(args.device) as device:
        search = Search.of(args, device, slices, len(names), in_threads=bool(addresses))
        with writing(folder):
            if names:
                with ResultsFolder(folder, args.formats, search.predictor.classes, args.crops, ids) as results:
                    code = detect(search, names, results)
            for source, name in video_names.items():
                if code < 128:
                    code = max(code, predict_video.detect(search, source, name, folder, args))
    return code


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="rtdetr predict",
        description="Detect objects in images and videos. Draws the boxes, and writes results.json for images, "
        "NAME.jsonl for videos.",
        epilog="Exit codes: 0 done, 1 some sources could not be read, 2 nothing was started, 130 stopped by Ctrl-C.",
    )
    parser.add_argument(
        "sources", nargs="*", metavar="WEIGHTS SOURCE", help=f"without -w the weights first; then {SOURCES}"
    )
    parser.add_argument("-w", "--weights", type=Path, help="a checkpoint, or an exported file")
    parser.add_argument("--output-dir", type=Path, help="default: output/predict, or output/predict-2, ...")
    add_overwrite(parser)
    parser.add_argument("--recursive", action="store_true", help="include sub-folders")
    add_threshold(parser, "lowest score to report, from 0 to 1 (default: those in the weights, else 0.5)")
    text = "also write coco.json, labels/*.txt (yolo) or detections.csv; several as coco,csv"
    parser.add_argument(
        "--format", type=_formats, action="extend", default=[], dest="formats", metavar="coco,yolo,csv", help=text
    )
    text = "take the image ids of coco.json from these annotations (default: the numbers in the file names)"
    parser.add_argument("--annotations", type=Path, metavar="FILE", help=text)
    parser.add_argument("--crops", action="store_true", help="write what is in each box, as crops/NAME/1.jpg, ...")
    text = "also search large images in overlapping tiles: side of a tile in pixels, or ROWSxCOLUMNS"
    parser.add_argument("--slices", metavar="640|2x2", help=text)
    text = "overlap of neighbouring tiles, as a share of a tile (default: 0.2)"
    parser.add_argument("--overlap", type=overlap_share, help=text)
    add_device(parser)
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
    text = (
        "read and draw images in N processes, 0: in threads (default: processes for long lists on a GPU); not for "
        "addresses, with --slices, or with --manifest and --crops"
    )
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
    in_threads = args.slices or (args.manifest and args.crops) or any("://" in each for each in args.sources)
    if args.processes and in_threads:
        parser.error("--processes cannot be used with URLs, with --slices, or with --manifest and --crops")
    if args.overlap is not None and not args.slices:
        parser.error("--overlap needs --slices")
    if args.resume and (args.manifest is None or args.output_dir is None or args.overwrite):
        parser.error("--resume needs --manifest and --output-dir, those of the run to resume, and no --overwrite")
    return args


def _names(
    listing: Listing, addresses: Sequence[str], videos: Sequence[str]
) -> tuple[dict[File, Path], dict[str, Path]]:
    """Returns the names of the results of images and of videos, each name once."""
    names: dict[File, Path] = dict(listing.images.items())
    names |= {each: Path(_name_of(each)) for each in addresses}
    video_names = {each: Path(_name_of(each)) for each in videos}
    unique = result_names([*names.values(), *video_names.values()])
    return dict(zip(names, unique)), dict(zip(video_names, unique))


def _formats(text: str) -> list[str]:
    """Splits one or several of FORMATS, separated by commas; for argparse."""
    names = text.split(",")
    if not {*names} <= {*FORMATS}:
        expected = f"expected {', '.join(FORMATS)}, or several as coco,csv"
        raise argparse.ArgumentTypeError(f"{expected}; results.json is always written; got {text}")
    return names


def _name_of(source: str) -> str:
    """Returns the name of the results of a video, stream or URL, with a suffix as in file names."""
    if "://" in source:
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


def detect(search: Search, names: dict[File, Path], results: ResultsFolder) -> int:
    """Detects in the files, writes each result immediately and prints a summary. Returns the exit code: 0, 1 if some
    could not be read, 128 + n after signal n. names: name of the results of each file."""
    from rtdetr.commands.progress import progress, say_above_bar
    from rtdetr.engine.signals import StopSignal
    from rtdetr.inference.prefetch import in_order

    signals, start = StopSignal(), time.perf_counter()
    num_errors = num_objects = 0
    best_score = 0.0
    with signals.listening(), progress(len(names)) as bar:
        found_files = takewhile(lambda _: not signals.received, search.files(names))
        # Drawing and compressing take longer than detecting.
        begin, number = lambda found: results.begin_drawing(found, names[found.file]), 2 * max(search.readers)
        for found, _ in in_order(begin, found_files, number):
            target = results.list_found(found, names[found.file])
            if found.error:
                num_errors += 1
                say_above_bar(f"error: {found.error}", file=sys.stderr)
            else:
                num_objects += len(found.detections)
                best_score = max(best_score, found.best_score)
                say_above_bar(f"{found.file}: {counted(len(found.detections), 'object')} -> {target}", file=sys.stdout)
            bar.update()
    done = results.num_images - num_errors
    if done:
        seconds = (time.perf_counter() - start) / done
        counts = f"{counted(done, 'image')}, {counted(num_objects, 'object')}"
        print(f"{counts}, {seconds:.3f} s per image; all in {results.file}")
    if done and not num_objects:
        best = f", the best score is {best_score:.2f}" if search.slices is None else ""  # tiles report what reaches it
        lowest = search.predictor.threshold
        which = f"the threshold {lowest:g}" if isinstance(lowest, float) else "the threshold of its class"
        print(f"nothing reached {which}{best}; --threshold sets a lower one")
    if num_errors:
        print(f"{num_errors} of {results.num_images} files could not be read; {results.file} says why", file=sys.stderr)
    if signals.received:
        done_files = f"{results.num_images} of {len(names)} files are in {results.file}"
        print(f"stopped by {signal_name(signals.received)}; {done_files}", file=sys.stderr)
        return 128 + signals.received
    return 1 if num_errors else 0
