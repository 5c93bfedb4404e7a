"""The work of `rtdetr predict`: detects in images of any source, whole or in slices, in long lists, and in videos."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image

from rtdetr.commands.arguments import thresholds
from rtdetr.commands.progress import progress, say_above_bar
from rtdetr.config import ConfigError
from rtdetr.data.classes import DataError
from rtdetr.engine import distributed
from rtdetr.engine.signals import StopSignal
from rtdetr.extras import optional
from rtdetr.inference.draw import Detection, save_crops
from rtdetr.inference.files import manifest_paths
from rtdetr.inference.predictor import File, FileResult, Predictor
from rtdetr.inference.prefetch import BackgroundCalls, ahead, in_order
from rtdetr.inference.processes import Readers, ReadingProcesses
from rtdetr.inference.results import Done, ResultsFolder, already_done, item_of
from rtdetr.inference.runtimes import is_exported, load
from rtdetr.inference.slicing import Slices, predict_files_sliced, predict_sliced
from rtdetr.inference.sources import Opener
from rtdetr.inference.thresholds import lowest_scores
from rtdetr.inference.video_out import VideoResultsWriter, search_frames, tracker
from rtdetr.outputs import check_new_folder, check_outputs, writing
from rtdetr.wording import counted, signal_name

logger = logging.getLogger(__name__)

HALF = {"auto": "auto", "on": True, "off": False}
AHEAD = 4  # frames beyond a batch that are decoded, and written, while the network runs


class Search(NamedTuple):
    predictor: Predictor
    batch_size: int
    slices: Slices | None
    readers: Readers = Readers.choose()

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        device: torch.device,
        slices: Slices | None,
        num_files: int = 0,
        in_threads: bool = False,
    ) -> Search:
        """Builds the search from the arguments of the command. num_files: that `files` will read; in_threads: not in
        processes. Raises CheckpointError or ConfigError."""
        processes = ReadingProcesses()  # they start while the model is loaded
        guess = Readers.choose(num_files, device.type == "cuda", started=True)
        number = args.processes if args.processes is not None else guess.processes
        processes.start(0 if in_threads or slices else number)
        if not is_exported(args.weights):
            options = {"half": HALF[args.half], "compile": args.compile}
            options |= {"kernels": args.kernels} if args.kernels else {}
            predictor = Predictor(args.weights, device, **options)
        elif args.half != "auto" or args.compile or args.kernels:
            what = "runs as it was exported; --half, --compile and --kernels are for checkpoints"
            raise ConfigError(f"{args.weights}: {what}")
        else:
            predictor = load(args.weights, device)
        predictor.threshold = lowest_scores(predictor.classes, *thresholds(args.threshold))
        predictor.processes = processes
        readers = Readers.choose()
        if processes.running:
            readers = readers._replace(processes=args.processes) if args.processes else predictor.readers(num_files)
        if readers.processes:
            predictor.warm_up(args.batch_size)  # while the processes start
        else:
            processes.end()
        return cls(predictor, args.batch_size, slices, readers)

    def files(self, files: Iterable[File], with_images: bool = True) -> Iterator[FileResult]:
        """Yields the result of each file or URL, in order."""
        limit = self.predictor.cfg.data.max_megapixels
        opener = Opener(limit, allow_private=True)  # the user entered the address, and so trusts it
        if self.slices is not None:
            return predict_files_sliced(self.predictor.predict, files, self.slices, self.batch_size, opener.pixels)
        logger.debug("files are read by %s", self.readers)
        return self.predictor.predict_files(
            files,
            self.batch_size,
            num_threads=self.readers.threads,
            read=None if self.readers.processes else opener.pixels,
            num_processes=self.readers.processes,
            with_images=with_images,
        )

    def images(self, images: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each image, best first."""
        if self.slices is None:
            return self.predictor.predict(images)
        predict, overlap = self.predictor.predict, self.slices.overlap
        tiles = [self.slices.tile(each.size) for each in images]
        return [predict_sliced(predict, each, tile, self.batch_size, overlap) for each, tile in zip(images, tiles)]


def detect_images(search: Search, names: dict[File, Path], results: ResultsFolder) -> int:
    """Detects in the files, writes each result immediately and prints a summary. Returns the exit code: 0, 1 if some
    could not be read, 128 + n after signal n. names: name of the results of each file."""
    signals, start = StopSignal(), time.perf_counter()
    num_errors = num_objects = 0
    best_score = 0.0
    with signals.listening(), progress(len(names)) as bar:
        found_files = takewhile(lambda _: not signals.received, search.files(names))
        # Drawing and compressing take longer than detecting.
        number = 2 * max(search.readers)
        for found in in_order(found_files, lambda found: results.begin_drawing(found, names[found.file]), number):
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
    how_far = f"{results.file} has {results.num_images} of {counted(len(names), 'file')}"
    return _exit_code(signals, how_far, _unread(Done(results.num_images, num_errors), results.file))


def detect_listed(args: argparse.Namespace, folder: Path, slices: Slices | None) -> int:
    """Detects in the images of args.manifest, appends one line for each to results.jsonl and prints a summary. Returns
    the exit code, as `detect_images` does."""
    file = folder / "results.jsonl"
    resumed = args.resume and file.is_file()
    number = sum(1 for _ in manifest_paths(args.manifest))
    check_outputs([file], [args.manifest, args.weights], args.overwrite or resumed)
    if args.crops:
        check_new_folder(folder / "crops", [args.manifest, args.weights], args.overwrite or resumed)
    done = already_done(file, args.manifest) if resumed else Done()
    if resumed:
        print(f"{file}: {done.images} of {counted(number, 'image')} done")
    signals, before = StopSignal(), done.images
    rest = islice(manifest_paths(args.manifest), before, None)
    with distributed.process_group(args.device) as device, writing(folder):
        wanted = bool(args.crops or args.slices)  # the images are needed here, so threads read them
        search = Search.of(args, device, slices, number - before, in_threads=wanted)
        start = time.perf_counter()
        if resumed:
            os.truncate(file, done.size)
        folder.mkdir(parents=True, exist_ok=True)
        mode = "a" if args.resume else "w"  # buffering=1: each line is flushed
        with open(file, mode, buffering=1) as lines, signals.listening(), progress(number, done=before) as bar:
            for found in search.files(rest, with_images=bool(args.crops)):
                if args.crops and (image := found.as_pil) is not None:
                    save_crops(image, found.detections, folder / "crops" / str(done.images + 1))
                print(json.dumps(item_of(found)), file=lines)
                done = Done(done.images + 1, done.errors + bool(found.error), done.objects + len(found.detections))
                if found.error:
                    say_above_bar(f"error: {found.error}", file=sys.stderr)
                bar.update()
                if signals.received:
                    break
    seconds = (time.perf_counter() - start) / max(1, done.images - before)
    print(
        f"{counted(done.images - done.errors, 'image')}, {counted(done.objects, 'object')}, {seconds:.3f} s per image; "
        f"all in {file}"
    )
    how_far = f"{done.images} of {counted(number, 'image')} done; --resume continues"
    return _exit_code(signals, how_far, _unread(done, file))


def _unread(done: Done, file: Path) -> bool:
    """Whether a file could not be read, which is printed."""
    if done.errors:
        print(f"{done.errors} of {counted(done.images, 'file')} could not be read; {file} says why", file=sys.stderr)
    return bool(done.errors)


def check_videos(args: argparse.Namespace, videos: Sequence[str], images: Sequence[Path | str]) -> None:
    """Raises DataError if there are options for videos, but no video, or for images, but none, and MissingPackage."""
    if not videos:
        if args.track or args.every > 1:
            raise DataError("--track and --every: expected a video, a stream or the number of a camera as a source")
        return
    if args.formats and not images:
        raise DataError("--format: expected an image among the sources; of a video NAME.jsonl is written")
    optional("av", "video", f"{videos[0]}: reading and writing videos")
    if args.track:
        optional("trackers", "track", "--track")


def detect_video(search: Search, source: str, name: Path, folder: Path, args: argparse.Namespace) -> int:
    """Detects in one video, writes each result immediately and prints a summary. Returns the exit code: 0, 1 if it
    could not be read to its end, 128 + n after signal n."""
    signals, start = StopSignal(), time.perf_counter()
    num_frames = num_objects = 0
    lowest = float(np.min(search.predictor.threshold))  # of all classes, if each has its own
    target, error = folder / f"{name}.mp4", ""
    with tempfile.TemporaryDirectory() as temporary, signals.listening():
        try:
            video = Opener(allow_private=True).open_video(source, Path(temporary))
            track = tracker(video.rate / args.every, lowest) if args.track else None
            batch_size = 1 if video.live else args.batch_size
            frames = ahead(video.frames, batch_size + AHEAD)
            with (
                closing(frames),
                progress(video.num_frames or None, unit="frame") as bar,
                VideoResultsWriter(folder, name, video, args.crops) as writer,
                BackgroundCalls(batch_size + AHEAD) as behind,
            ):
                for seen in search_frames(frames, search.images, batch_size, args.every, track):
                    behind.call(writer.add, seen)
                    num_frames += 1
                    num_objects += len(seen.detections) if seen.searched else 0
                    bar.update()
                    if signals.received:
                        break
        except DataError as problem:
            error = str(problem)
    if num_frames:
        seconds = (time.perf_counter() - start) / num_frames
        counts = f"{counted(num_frames, 'frame')}, {counted(num_objects, 'object')}"
        say_above_bar(f"{source}: {counts}, {seconds:.3f} s per frame -> {target}", file=sys.stdout)
    if error:
        print(f"error: {error}", file=sys.stderr)
    return _exit_code(signals, f"{counted(num_frames, 'frame')} written to {target}", bool(error))


def _exit_code(signals: StopSignal, how_far: str, failed: bool) -> int:
    """Returns 128 + n after signal n, about which it prints a line, else 1 if something could not be read. how_far: the
    results so far."""
    if signals.received:
        print(f"stopped by {signal_name(signals.received)}; {how_far}", file=sys.stderr)
        return 128 + signals.received
    return int(failed)
