"""`rtdetr predict` on videos, cameras and streams."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from rtdetr.wording import counted, signal_name

if TYPE_CHECKING:
    from rtdetr.commands.detection import Search

AHEAD = 4  # frames beyond a batch that are decoded, and written, while the network runs


def check(args: argparse.Namespace, videos: Sequence[str], images: Sequence[Path | str]) -> None:
    """Raises DataError if there are options for videos, but no video, or for images, but none, and MissingPackage."""
    from rtdetr.data.classes import DataError
    from rtdetr.extras import optional

    if not videos:
        if args.track or args.every > 1:
            raise DataError(
                "--track and --every: expected a video, a stream or the number of a camera among the sources"
            )
        return
    if args.formats and not images:
        raise DataError("--format: expected an image among the sources; of a video NAME.jsonl is written")
    optional("av", "video", f"{videos[0]}: reading and writing videos")
    if args.track:
        optional("trackers", "track", "--track")


def targets(folder: Path, names: Iterable[Path]) -> Iterator[Path]:
    for name in names:
        yield folder / f"{name}.mp4"
        yield folder / f"{name}.jsonl"


def detect(search: Search, source: str, name: Path, folder: Path, args: argparse.Namespace) -> int:
    """Detects in one video, writes each result immediately and prints a summary. Returns the exit code: 0, 1 if it
    could not be read to its end, 128 + n after signal n."""
    import numpy as np

    from rtdetr.commands.progress import progress
    from rtdetr.data.classes import DataError
    from rtdetr.engine.signals import StopSignal
    from rtdetr.inference.prefetch import BackgroundCalls, ahead
    from rtdetr.inference.sources import Opener
    from rtdetr.inference.video_out import Tracker, VideoResultsWriter, search_frames

    signals, start = StopSignal(), time.perf_counter()
    num_frames = num_objects = 0
    lowest = float(np.min(search.predictor.threshold))  # of all classes, if each has its own
    target, error = folder / f"{name}.mp4", ""
    with tempfile.TemporaryDirectory() as temporary, signals.listening():
        try:
            video = Opener(allow_private=True).open_video(source, Path(temporary))
            track = Tracker(video.rate / args.every, lowest).update if args.track else None
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
        print(f"{source}: {counts}, {seconds:.3f} s per frame -> {target}")
    if error:
        print(f"error: {error}", file=sys.stderr)
    if signals.received:
        stopped = f"stopped by {signal_name(signals.received)}"
        print(f"{stopped}; {counted(num_frames, 'frame')} written to {target}", file=sys.stderr)
        return 128 + signals.received
    return 1 if error else 0
