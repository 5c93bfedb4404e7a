"""Opens everything a user may pass: paths, URLs, PIL images, arrays, tensors and streams, as RGB images."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rtdetr.data.classes import DataError
from rtdetr.data.images import MAX_MEGAPIXELS, UNREADABLE, read_bytes, read_image, read_pixels
from rtdetr.data.resize import as_rgb_array
from rtdetr.inference import video
from rtdetr.inference.fetch import IMAGE, VIDEO, fetch, host_of
from rtdetr.inference.files import find_images, look_at
from rtdetr.inference.images import AnyImage, pixels_of_array
from rtdetr.wording import first_line

EXPECTED = (
    "expected a path, URL, bytes of an image file, PIL image, array (H, W), (H, W, 3) or (H, W, 4), tensor (3, H, W), "
    "a list or generator of those, a folder, glob, video, stream, or the number of a camera"
)
STREAMS = ("rtsp", "rtsps", "rtmp", "rtmps", "srt", "udp", "tcp", "rtp")
PLAYLISTS = (".m3u8", ".mpd")
# Iterable, but not a series of images.
NO_SERIES = (np.ndarray, np.generic, Tensor, Image.Image, dict, bytes, bytearray, memoryview)


class Item(NamedTuple):
    """One image of a source, or the error that prevented it."""

    name: str  # file, URL, or kind and number: "array", "frame 12"
    image: AnyImage | None  # RGB, uint8
    error: str = ""
    file: Path | None = None  # where the image can be read again


class Source(NamedTuple):
    """one: a single image; list: a known number; stream: an unknown number; live: the next one does not exist yet."""

    kind: Literal["one", "list", "stream", "live"]
    items: Iterator[Item]
    files: tuple[Path, ...] = ()  # if all items of a list are files, which can be prefetched
    tolerant: bool = False  # a file that is no image is skipped and reported
    batch: Tensor | None = None  # (B, 3, H, W) uint8, if the source is a tensor


class Opener(NamedTuple):
    """Opens sources. max_megapixels: larger images are refused; allow_private: allow addresses of private networks;
    bgr: arrays have OpenCV's order of channels."""

    max_megapixels: float = MAX_MEGAPIXELS
    allow_private: bool = False
    bgr: bool = False

    def open(self, source: Any) -> Source:
        """Raises DataError or MissingPackage if a source cannot be opened; if an image cannot be read, when it is its
        turn. Images found in a folder or by a glob, and URLs in a list, are skipped and reported instead."""
        if isinstance(source, (str, os.PathLike)):
            return self._named(os.fspath(source))
        if isinstance(source, Integral) and not isinstance(source, bool):
            return Source("live", _numbered(video.open_camera(int(source))))
        if isinstance(source, Tensor):
            batch = _uint8_tensor(source, (3, 4)).reshape(-1, *source.shape[-3:])
            return Source("one" if source.ndim == 3 else "list", (Item("tensor", each) for each in batch), batch=batch)
        if isinstance(source, (list, tuple)):
            if not source:
                raise DataError(f"source: the list is empty; {EXPECTED}")
            are_paths = all(isinstance(each, (str, os.PathLike)) and "://" not in str(each) for each in source)
            return Source("list", map(self._listed, source), tuple(map(Path, source)) if are_paths else ())
        if isinstance(source, Iterable) and not isinstance(source, NO_SERIES) and not _is_open_file(source):
            return Source("stream", map(self._listed, source))
        return Source("one", iter([self._image(source)]))

    def pixels(self, source: Path | str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the RGB pixels (H, W, 3) of a file or URL. Raises DataError."""
        if "://" not in str(source):
            return read_pixels(Path(source), max_megapixels=self.max_megapixels)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "image"
            fetch(str(source), file, IMAGE, self.allow_private)
            try:
                return as_rgb_array(read_image(file, max_megapixels=self.max_megapixels))
            except DataError as error:
                raise DataError(str(error).replace(str(file), str(source))) from error

    def open_video(self, name: str, folder: Path) -> video.Video:
        """Opens a source for which `is_video` is true. folder: for the download of a video. Raises DataError or
        MissingPackage."""
        if name.isdecimal() and not Path(name).exists():
            return video.open_camera(int(name))
        if "://" not in name:
            return video.open_video(name)
        if _is_stream(name):
            if not self.allow_private:  # FFmpeg itself resolves its name and follows redirects
                raise DataError(
                    f"{name}: a stream or playlist may lead to any other address, on this machine and in private "
                    "networks, too; allow_private=True opens one that you trust"
                )
            return video.open_video(name)._replace(live=True)
        video.reader(name)  # raises MissingPackage before the download
        file = folder / f"video{_suffix(name)}"
        fetch(name, file, VIDEO, self.allow_private)
        return video.open_video(str(file), name)

    def _named(self, name: str) -> Source:
        if "\0" in name or not name:
            raise DataError(f"source: {name!r} names nothing; {EXPECTED}")
        scheme, separator, _ = name.lower().partition("://")
        if separator:
            if scheme not in ("http", "https", *STREAMS):
                raise DataError(f"{name}: expected http, https or a stream ({', '.join(STREAMS)}), got {scheme}")
            host_of(name)
            if _is_stream(name):
                return Source("live", _numbered(self.open_video(name, Path())))
            if _suffix(name) in video.ENDINGS:
                video.reader(name)  # raises MissingPackage now, not at the first frame
                return Source("stream", self._fetched_video(name))
            return Source("one", iter([self._image(name)]))
        path = Path(name)
        look_at(path)
        if path.is_file() and path.suffix.lower() in video.ENDINGS:
            return Source("stream", _numbered(video.open_video(name)))
        if path.is_file():
            return Source("one", iter([self._image(name)]))
        files = tuple(find_images([name]).images)
        return Source("list", (self._listed(file, found=True) for file in files), files, tolerant=True)

    def _image(self, source: Any) -> Item:
        if isinstance(source, (str, os.PathLike)):
            name = os.fspath(source)
            return Item(name, self.pixels(name), file=None if "://" in name else Path(name))
        if isinstance(source, np.ndarray):
            return Item("array", pixels_of_array(source, self.bgr))
        if isinstance(source, (bytes, bytearray, memoryview)) or _is_open_file(source):
            name = getattr(source, "name", None)  # of a file without a name its number, or None
            return Item(name if isinstance(name, str) else "bytes", read_bytes(_content(source), self.max_megapixels))
        if isinstance(source, Image.Image):
            return Item(getattr(source, "filename", "") or "image", _pixels_of_pil(source))
        if isinstance(source, Tensor):
            return Item("tensor", _uint8_tensor(source))
        got = type(source).__name__ if source is not None else "None, which is cv2.imread's for a file it cannot read"
        raise DataError(f"source: {EXPECTED}, got {got}")

    def _listed(self, source: Any, found: bool = False) -> Item:
        """Opens one of several images. A URL, or a file that was `found`, is skipped and reported if that fails."""
        try:
            return self._image(source)
        except DataError as error:
            if found or (isinstance(source, str) and "://" in source):
                return Item(str(source), None, str(error), source if found else None)
            raise

    def _fetched_video(self, url: str) -> Iterator[Item]:
        with tempfile.TemporaryDirectory() as folder:
            yield from _numbered(self.open_video(url, Path(folder)))


def is_video(source: str) -> bool:
    """Whether a source of a command is a video file, the number of a camera, or the URL of a video or stream. A
    malformed URL is not: like an image that cannot be read, it is reported when it is its turn."""
    if "://" in source:
        try:
            host_of(source)
        except DataError:
            return False
        return _is_stream(source) or _suffix(source) in video.ENDINGS
    path = Path(source)
    look_at(path)
    return (source.isdecimal() and not path.exists()) or (path.suffix.lower() in video.ENDINGS and path.is_file())


def _is_open_file(source: Any) -> bool:
    """Also those of `tempfile`, some of which are no io.IOBase."""
    return callable(getattr(source, "read", None))


def _suffix(url: str) -> str:
    return Path(urlsplit(url).path).suffix.lower()


def _is_stream(url: str) -> bool:
    return urlsplit(url).scheme.lower() in STREAMS or _suffix(url) in PLAYLISTS


def _numbered(opened: video.Video) -> Iterator[Item]:
    return (Item(f"frame {number}", frame.image) for number, frame in enumerate(opened.frames))


def _pixels_of_pil(image: Image.Image) -> np.ndarray[Any, Any]:
    try:
        pixels = as_rgb_array(image)
    except UNREADABLE as error:  # a file that PIL has opened and not yet decoded
        raise DataError(f"source: the PIL image cannot be decoded ({error})") from error
    if 0 in pixels.shape:
        raise DataError(f"source: the PIL image has no pixels, its size is {image.size}")
    return pixels


def _uint8_tensor(tensor: Tensor, ndims: tuple[int, ...] = (3,)) -> Tensor:
    """Returns a tensor (3, H, W) or (B, 3, H, W) as uint8 on its device; floats in [0, 1] are rounded to 8 bits."""
    layout = "nested" if tensor.is_nested else tensor.layout
    if tensor.is_meta or layout != torch.strided:
        raise DataError(f"tensor: expected pixels in memory, got a {tensor.device} tensor of layout {layout}")
    if tensor.ndim not in ndims or tensor.shape[-3] != 3 or 0 in tensor.shape:
        raise DataError(f"tensor: expected RGB of shape (3, H, W), outside a list (B, 3, H, W), got {(*tensor.shape,)}")
    if tensor.is_floating_point():
        tensor = tensor.detach().float()
        low, high = torch.stack(torch.aminmax(tensor)).tolist()
        if not 0 <= low <= high <= 1:  # NaN, too
            raise DataError(f"tensor: expected floats from 0 to 1, not yet normalised, got {low:.3g} to {high:.3g}")
        tensor = (tensor * 255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise DataError(f"tensor: expected uint8, or floats from 0 to 1, got {tensor.dtype}")
    return tensor


def _content(source: Any) -> bytes:
    """Returns the bytes of an image file: as given, or the rest of an open file, or all of one at its end, as after
    writing it. Raises DataError."""
    if not _is_open_file(source):
        return bytes(source)
    try:
        content = source.read()
        if not content and getattr(source, "seekable", lambda: False)():
            source.seek(0)
            content = source.read()
    except (OSError, ValueError) as error:  # closed, not for reading, text
        raise DataError(f"source: the open file cannot be read ({first_line(error)}); open it with 'rb'") from error
    if not isinstance(content, bytes):
        raise DataError("source: expected a file that was opened with 'rb', got one of text")
    return content
