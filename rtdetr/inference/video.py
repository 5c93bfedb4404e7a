"""Frames of video files, streams and cameras, as RGB pictures. What cannot be opened is said at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from PIL import Image

from rtdetr.data.classes import DataError
from rtdetr.extras import optional

ENDINGS = {
    ".3gp", ".avi", ".flv", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
}  # fmt: skip
PATIENCE = (10.0, 10.0)  # seconds to open a stream and to wait for its next packet


def video_frames(source: str) -> Iterator[Image.Image]:
    """The frames of a file or stream that FFmpeg knows, one after the other, upright. Raises DataError and, where PyAV
    is not installed, MissingPackage."""
    av = optional("av", "video", f"{source}: reading videos")
    try:
        container = av.open(source, timeout=PATIENCE)
    except (av.error.FFmpegError, OSError, ValueError) as error:
        raise DataError(f"{source}: cannot be opened as a video ({_reason(error)}); is it one?") from error
    if not container.streams.video:
        container.close()
        raise DataError(f"{source}: has no pictures, only sound or text; expected a video")
    return _decoded(av, container, source)


def _decoded(av: Any, container: Any, source: str) -> Iterator[Image.Image]:
    number = 0
    with container:
        container.streams.video[0].thread_type = "AUTO"
        try:
            for frame in container.decode(video=0):
                picture = frame.to_image()
                turned = getattr(frame, "rotation", 0)  # phones write down how they were held
                yield picture.rotate(turned, expand=True) if turned else picture
                number += 1
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise DataError(f"{source}: cannot be read after frame {number} ({_reason(error)})") from error
    if not number:
        raise DataError(f"{source}: a video without a single frame")


def camera_frames(index: int) -> Iterator[Image.Image]:
    """The frames of a camera of this machine, 0 for the first, as long as it delivers. Raises DataError."""
    import cv2

    logging = cv2.utils.logging
    level = logging.setLogLevel(logging.LOG_LEVEL_SILENT)  # its lines say less than ours
    try:
        camera = cv2.VideoCapture(index)
    finally:
        logging.setLogLevel(level)
    if not camera.isOpened():
        camera.release()
        raise DataError(f"camera {index}: cannot be opened; is it plugged in, free, and allowed for this program?")
    return _filmed(camera, index)


def _filmed(camera: Any, index: int) -> Iterator[Image.Image]:
    try:
        while True:
            delivered, pixels = camera.read()
            if not delivered:
                raise DataError(f"camera {index}: delivers no more pictures; it was closed or unplugged")
            yield Image.fromarray(pixels[..., ::-1].copy())  # OpenCV has blue first
    finally:
        camera.release()


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
