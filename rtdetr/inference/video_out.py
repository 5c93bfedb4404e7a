"""The search of a video, track ids of objects by ByteTrack of the package `trackers`, and the results: a video with
boxes, and a line of JSON per searched frame."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rtdetr.extras import optional
from rtdetr.inference.draw import Detection, draw, save_crops
from rtdetr.inference.prefetch import batches
from rtdetr.inference.results import as_json
from rtdetr.inference.video import Frame, Video

MEMORY = 1.0  # seconds that a tracked object may be hidden and keep its id
QUALITY = {"crf": "20", "preset": "veryfast"}  # of H.264: close to the source, and fast


class SearchedFrame(NamedTuple):
    """A frame, whether it was searched, and the detections in it, or else in the last searched frame."""

    number: int  # from 0
    frame: Frame
    searched: bool
    detections: list[Detection]
    tracks: Sequence[int | None] = ()  # the id of each detection, if tracked


def search_frames(
    frames: Iterator[Frame],
    detect: Callable[[list[Image.Image]], list[list[Detection]]],
    batch_size: int = 8,
    every: int = 1,
    track: Callable[[list[Detection]], list[int | None]] | None = None,
) -> Iterator[SearchedFrame]:
    """Yields all frames in order; every Nth is searched, beginning with the first. detect: for a batch of images;
    track: returns the ids of the detections of one frame."""
    detections: list[Detection] = []
    tracks: list[int | None] = []
    for batch in batches(enumerate(frames), batch_size):
        chosen = [frame.image for number, frame in batch if number % every == 0]
        found = iter(detect(chosen) if chosen else [])
        for number, frame in batch:
            searched = number % every == 0
            if searched:
                detections = next(found)
                tracks = track(detections) if track is not None else []
            yield SearchedFrame(number, frame, searched, detections, tracks)


def tracker(rate: Fraction, threshold: float) -> Callable[[list[Detection]], list[int | None]]:
    """Returns a function for the frames of one video, in order: the track id of each detection, None if it belongs to
    no track. rate: searched frames per second. threshold: lowest score that starts a track. Raises MissingPackage."""
    trackers = optional("trackers", "track", "--track")
    supervision: Any = optional("supervision", "track", "--track")
    byte_track = trackers.ByteTrackTracker(
        lost_track_buffer=round(MEMORY * 30),  # ByteTrack counts frames at 30 per second
        frame_rate=float(rate),
        track_activation_threshold=threshold,
        high_conf_det_threshold=threshold,
        minimum_consecutive_frames=1,
    )

    def track(detections: list[Detection]) -> list[int | None]:
        found = supervision.Detections(
            xyxy=np.array([each.box for each in detections], np.float32).reshape(-1, 4),
            confidence=np.array([each.score for each in detections], np.float32),
            class_id=np.array([each.category_id for each in detections], int),
            data={"place": np.arange(len(detections))},
        )
        tracked = byte_track.update(found)
        numbers: list[int | None] = [None] * len(detections)
        for place, number in zip(tracked.data.get("place", ()), tracked.tracker_id):
            numbers[place] = int(number) if number >= 0 else None
        return numbers

    return track


class VideoResultsWriter:
    """Writes NAME.mp4, in H.264, with every frame at its time and size, which gets its name once it is complete; and
    NAME.jsonl, with one object per searched frame: {"frame", "seconds", "detections": [{"category_id", "name", "score",
    "box": x1, y1, x2, y2 in pixels}]}, and the "track" of each detection if tracked. crops: also write
    crops/NAME/FRAME/1.jpg etc. Raises OSError."""

    def __init__(self, folder: Path, name: Path, video: Video, crops: bool = False) -> None:
        self.crops = folder / "crops" / name if crops else None
        self.target, self.listed = folder / f"{name}.mp4", folder / f"{name}.jsonl"
        self.beside = self.target.with_name(f".{self.target.name}.part")
        self.rate, self.tick = video.rate, video.tick
        self.target.parent.mkdir(parents=True, exist_ok=True)
        self.av = optional("av", "video", f"{self.target}: writing videos")
        self.container = self.av.open(str(self.beside), "w", format="mp4")
        self.stream: Any = None  # until the first frame
        self.last = -1  # ticks
        self.lines = open(self.listed, "w", buffering=1)  # noqa: SIM115 - until __exit__; each line is flushed

    def add(self, seen: SearchedFrame) -> None:
        image, tracks = seen.frame.image, seen.tracks or [None] * len(seen.detections)
        shown = [
            each if track is None else each._replace(name=f"#{track} {each.name}")
            for each, track in zip(seen.detections, tracks)
        ]
        self._encode(draw(image, shown, enlarge=False), seen.frame.seconds)
        if self.crops is not None:  # of a frame that is not searched, those of an earlier run are removed
            save_crops(image, seen.detections if seen.searched else [], self.crops / str(seen.number))
        if not seen.searched:
            return
        detections = as_json(seen.detections)
        if seen.tracks:
            detections = [{**each, "track": track} for each, track in zip(detections, tracks)]
        found = {"frame": seen.number, "seconds": round(seen.frame.seconds, 6), "detections": detections}
        print(json.dumps(found), file=self.lines)

    def _encode(self, image: Image.Image, seconds: float) -> None:
        if self.stream is None:
            self.stream = self.container.add_stream("libx264", rate=self.rate, options=QUALITY)
            self.stream.width, self.stream.height = image.size
            odd = image.width % 2 or image.height % 2
            self.stream.pix_fmt = "yuv444p" if odd else "yuv420p"  # yuv420p needs even sides
            self.stream.codec_context.time_base = self.tick
        size = self.stream.width, self.stream.height
        if image.size != size:  # it may change in a stream, but not in a file
            image = image.resize(size)
        frame = self.av.VideoFrame.from_image(image)
        self.last = max(round(seconds / self.tick), self.last + 1)  # two frames at the same time are refused
        frame.pts, frame.time_base = self.last, self.tick
        self.container.mux(self.stream.encode(frame))

    def __enter__(self) -> VideoResultsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            with self.lines:
                if self.stream is not None:
                    self.container.mux(self.stream.encode())
                self.container.close()
                if self.stream is not None:
                    os.replace(self.beside, self.target)
        finally:
            self.beside.unlink(missing_ok=True)
        if self.stream is None:  # no frame
            self.listed.unlink()
