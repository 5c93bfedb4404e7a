"""`rtdetr predict --manifest`: any number of images, in a run that can be interrupted and resumed at any time."""

from __future__ import annotations

import argparse
import sys
import time
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rtdetr.wording import counted, signal_name

if TYPE_CHECKING:
    from rtdetr.commands.detection import Search
    from rtdetr.inference.results import Done
    from rtdetr.inference.slicing import Slices


def run(args: argparse.Namespace, folder: Path, slices: Slices | None) -> int:
    """Detects in the images of args.manifest, and appends one line for each to results.jsonl."""
    from rtdetr.commands.detection import Search
    from rtdetr.engine import distributed
    from rtdetr.inference.files import manifest_paths
    from rtdetr.inference.results import Done, already_done, cut_partial_line
    from rtdetr.outputs import check_new_folder, check_outputs, writing

    results = folder / "results.jsonl"
    resumed = args.resume and results.is_file()
    number = sum(1 for _ in manifest_paths(args.manifest))
    check_outputs([results], [args.manifest, args.weights], args.overwrite or resumed)
    if args.crops:
        check_new_folder(folder / "crops", [args.manifest, args.weights], args.overwrite or resumed)
    done = already_done(results, args.manifest) if resumed else Done()
    if resumed:
        print(f"{results}: {done.images} of {number} images are done")
    with distributed.process_group(args.device) as device:
        wanted = bool(args.crops or args.slices)  # the images are needed here, so threads read them
        search = Search.of(args, device, slices, number - done.images, in_threads=wanted)
        with writing(folder):
            if resumed:
                cut_partial_line(results)
            return detect(search, args, folder, number, done)


def detect(search: Search, args: argparse.Namespace, folder: Path, number: int, done: Done) -> int:
    """Detects in the remaining images and prints a summary. Returns the exit code: 0, 1 if some could not be read, 128
    + n after signal n. number: of all images."""
    from rtdetr.commands.progress import progress, say_above_bar
    from rtdetr.engine.signals import StopSignal
    from rtdetr.inference.draw import save_crops
    from rtdetr.inference.files import manifest_paths
    from rtdetr.inference.results import Done, JsonLines, item_of

    signals, start, before = StopSignal(), time.perf_counter(), done.images
    rest = islice(manifest_paths(args.manifest), before, None)
    results = JsonLines(folder / "results.jsonl", append=args.resume)
    with signals.listening(), progress(number, done=before) as bar:
        for found in search.files(rest, with_images=bool(args.crops)):
            if args.crops and (image := found.as_pil) is not None:
                save_crops(image, found.detections, folder / "crops" / str(done.images + 1))
            results.add(item_of(found))
            done = Done(done.images + 1, done.errors + bool(found.error), done.objects + len(found.detections))
            if found.error:
                say_above_bar(f"error: {found.error}", file=sys.stderr)
            bar.update()
            if signals.received:
                break
    results.close()
    seconds = (time.perf_counter() - start) / max(1, done.images - before)
    print(
        f"{counted(done.images - done.errors, 'image')}, {counted(done.objects, 'object')}, {seconds:.3f} s per image; "
        f"all in {folder / 'results.jsonl'}"
    )
    if done.errors:
        print(f"{done.errors} of {done.images} files could not be read; results.jsonl says why", file=sys.stderr)
    if signals.received:
        how_far = f"{done.images} of {number} images are done; --resume continues"
        print(f"stopped by {signal_name(signals.received)}; {how_far}", file=sys.stderr)
        return 128 + signals.received
    return 1 if done.errors else 0
