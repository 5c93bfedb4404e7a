"""Frames of video files, streams and cameras as RGB images. Errors on opening are raised immediately."""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from rtdetr.data.classes import DataError
from rtdetr.extras import optional
from rtdetr.wording import counted, reason_of

ENDINGS = {
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
}  # fmt: skip
PATIENCE = (10.0, 10.0)  # seconds to open a stream and to wait for its next packet
MISSING = 0.5  # seconds that a file may end before its stated duration; codecs and cutting tools are not exact
NO_RATE = Fraction(25)  # frames per second, if unknown


class Frame(NamedTuple):
    image: Image.Image  # RGB, upright
    seconds: float  # since the first frame


class Video(NamedTuple):
    """A series of frames, and its properties that are known in advance."""

    frames: Iterator[Frame]
    rate: Fraction  # frames per second, on average
    tick: Fraction  # seconds; the times of all frames are multiples of it
    num_frames: int = 0  # 0: unknown
    live: bool = False  # the next frame does not exist yet


def open_video(source: str, name: str = "") -> Video:
    """Opens a file or stream that FFmpeg supports; its frames are upright. name: for messages; default: the source.

    Raises DataError, for a truncated file after its last frame, and MissingPackage if PyAV is not installed.
    """
    name = name or source
    av = reader(name)
    try:
        container = av.open(source, timeout=PATIENCE)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{name}: cannot be opened as a video ({reason_of(error)}); is it one?") from error
    if not container.streams.video:
        container.close()
        raise DataError(f"{name}: has no images, only sound or text; expected a video")
    stream = container.streams.video[0]
    stream.thread_type = "AUTO"
    rate = stream.average_rate or stream.guessed_rate or NO_RATE
    return Video(_decoded(av, container, name, rate), rate, stream.time_base or 1 / rate, stream.frames)


def reader(name: str) -> Any:
    """Imports PyAV for the video of that name. Raises MissingPackage."""
    return optional("av", "video", f"{name}: reading videos")


def _decoded(av: Any, container: Any, name: str, rate: Fraction) -> Iterator[Frame]:
    number, first, seconds, whole = 0, 0.0, 0.0, True
    with container:
        try:
            for frame in container.decode(video=0):
                at = frame.time if frame.time is not None else first + float(number / rate)
                first = first if number else at
                seconds, whole = at - first, not frame.is_corrupt
                image = frame.to_image()
                turned = getattr(frame, "rotation", 0)  # phones store their orientation
                yield Frame(image.rotate(turned, expand=True) if turned else image, seconds)
                number += 1
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise DataError(f"{name}: cannot be read after frame {number} ({reason_of(error)})") from error
        if not number:
            raise DataError(f"{name}: a video without a single frame")
        if not whole or _is_cut(container, seconds):
            raise DataError(
                f"{name}: cut off, it ends at {seconds:.2f} s, after {counted(number, 'frame')}, before its own end"
            )


def _is_cut(container: Any, seconds: float) -> bool:
    """Whether the end of a file is missing, which FFmpeg does not report. seconds: the time of its last frame."""
    stream, file = container.streams.video[0], Path(container.name)
    if not file.is_file():
        return False
    kind, size = container.format.name, file.stat().st_size
    if "matroska" in kind:  # its index is incomplete while it is read, its duration is that of the longest stream
        missing = container.duration / 1e6 - seconds if container.duration and len(container.streams) == 1 else 0
        return bool(missing > MISSING + 1 / float(stream.average_rate or NO_RATE))
    if kind == "avi":
        with open(file, "rb") as opened:
            return int.from_bytes(opened.read(8)[4:], "little") + 8 > size  # "RIFF" and the number of bytes that follow
    index: Any = getattr(stream, "index_entries", None)  # PyAV has it from version 15
    return bool(index) and index[-1].pos + index[-1].size > size


def open_camera(index: int) -> Video:
    """Opens a camera of this machine, 0 for the first. Raises DataError, also when it stops."""
    import cv2

    if not 0 <= index < 2**31:  # OpenCV crashes for negative numbers, and takes 32 bits
        raise DataError(f"camera {index}: there is no such number; the first camera is 0")

    logging = cv2.utils.logging
    level = logging.setLogLevel(logging.LOG_LEVEL_SILENT)  # the error below is clearer than its log
    try:
        camera = cv2.VideoCapture(index)
    finally:
        logging.setLogLevel(level)
    if not camera.isOpened():
        camera.release()
        raise DataError(f"camera {index}: cannot be opened; is it plugged in, free, and allowed for this program?")
    return Video(_camera_frames(camera, index), NO_RATE, Fraction(1, 1000), live=True)


def _camera_frames(camera: Any, index: int) -> Iterator[Frame]:
    start = None
    try:
        while True:
            delivered, pixels = camera.read()
            if not delivered:
                raise DataError(f"camera {index}: delivers no more images; it was closed or unplugged")
            image = Image.fromarray(pixels[..., ::-1].copy())  # OpenCV's order is BGR
            now = time.monotonic()
            start = now if start is None else start
            yield Frame(image, now - start)
    finally:
        camera.release()
