"""`rtdetr predict`"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rtdetr.commands.arguments import Parser, add_device, add_overwrite, score_threshold

if TYPE_CHECKING:
    from rtdetr.inference.predictor import Predictor
    from rtdetr.inference.results import ResultsFolder

FORMATS = {"coco": "coco.json", "yolo": "classes.txt", "csv": "detections.csv"}  # and labels/*.txt of yolo


def run(arguments: Sequence[str] | None = None) -> int:
    """Detects in pictures; see `rtdetr predict --help`."""
    parser = Parser(
        prog="rtdetr predict",
        description="Detect objects in pictures. Writes each picture with its boxes, and results.json.",
        epilog="Exit codes: 0 done, 1 some pictures could not be read, 2 nothing was begun, 130 stopped by Ctrl-C.",
    )
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="picture, folder of pictures, or glob")
    parser.add_argument("-w", "--weights", type=Path, required=True, help="a checkpoint, or an exported file")
    parser.add_argument("--output-dir", type=Path, help="default: output/predict, or output/predict-2, ...")
    add_overwrite(parser)
    parser.add_argument("--recursive", action="store_true", help="look into sub-folders, too")
    text = "lowest score that is reported, from 0 to 1 (default: 0.5)"
    parser.add_argument("--threshold", type=score_threshold, default=0.5, help=text)
    text = "write coco.json, labels/*.txt (yolo) or detections.csv beside results.json; may be given several times"
    parser.add_argument("--format", choices=list(FORMATS), action="append", default=[], dest="formats", help=text)
    add_device(parser)
    args = parser.parse_args(arguments)

    from rtdetr.commands.outputs import check_outputs, unused_folder, writing
    from rtdetr.engine import distributed
    from rtdetr.inference.files import find_pictures
    from rtdetr.inference.results import ResultsFolder
    from rtdetr.inference.runtimes import load

    folder = args.output_dir or unused_folder(Path("output/predict"))
    listing = find_pictures(args.sources, args.recursive, folder)
    names = dict(zip(listing.pictures, result_names(listing.pictures.values())))
    targets = [folder / "results.json", *(folder / FORMATS[each] for each in args.formats)]
    targets += [folder / f"{name}.jpg" for name in names.values()]
    if "yolo" in args.formats:
        targets += [folder / "labels" / f"{name}.txt" for name in names.values()]
    check_outputs(targets, [*names, args.weights], args.overwrite)
    if left_out := listing.left_out():
        print(left_out, file=sys.stderr)
    with distributed.process_group(args.device) as device:
        predictor = load(args.weights, device, args.threshold)
        with writing(folder), ResultsFolder(folder, args.formats, predictor.classes) as results:
            return detect(predictor, names, results)


def result_names(names: Iterable[Path]) -> Iterator[Path]:
    """Names without suffix, each once: a.png and a.jpg become a and a_1, also where capitals make no difference."""
    taken: set[str] = set()
    for name in names:
        stem = free = name.with_suffix("")
        number = 0
        while str(free).casefold() in taken:
            number += 1
            free = stem.with_name(f"{stem.name}_{number}")
        taken.add(str(free).casefold())
        yield free


def detect(predictor: Predictor, names: dict[Path, Path], results: ResultsFolder) -> int:
    """Detects in the files, writes what is found as it comes and says how it went. Exit code: 0, 1 when some could not
    be read, 128 + n after signal n. names: of the results of each file."""
    from rtdetr.commands.progress import progress, say
    from rtdetr.engine.signals import StopSignal

    signals, start = StopSignal(), time.perf_counter()
    num_errors = num_objects = 0
    best_score = 0.0
    with signals.listening(), progress(len(names)) as bar:
        for found in predictor.predict_files(names):
            target = results.add(found, names[found.file])
            if found.error:
                num_errors += 1
                say(f"error: {found.error}", file=sys.stderr)
            else:
                num_objects += len(found.detections)
                best_score = max(best_score, found.best_score)
                say(f"{found.file}: {len(found.detections)} objects -> {target}", file=sys.stdout)
            bar.update()
            if signals.received:
                break
    done = results.num_pictures - num_errors
    if done:
        seconds = (time.perf_counter() - start) / done
        print(f"{done} pictures, {num_objects} objects, {seconds:.3f} s per picture; all in {results.file}")
    if done and not num_objects:
        print(
            f"nothing reached the threshold {predictor.threshold:g}, the best score is {best_score:.2f}; "
            "--threshold sets a lower one"
        )
    if num_errors:
        print(
            f"{num_errors} of {results.num_pictures} files could not be read; {results.file} says why", file=sys.stderr
        )
    if signals.received:
        print(
            f"stopped by signal {signals.received}; {results.num_pictures} of {len(names)} files are in {results.file}",
            file=sys.stderr,
        )
        return 128 + signals.received
    return 1 if num_errors else 0
