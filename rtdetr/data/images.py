"""Reads image files as upright RGB pixels, or raises a one-line error: for training, evaluation and detection."""

from __future__ import annotations

import contextlib
import io
import math
import os
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image, UnidentifiedImageError

from rtdetr.data.classes import DataError
from rtdetr.data.resize import as_rgb_array

MAX_MEGAPIXELS = 179.0  # PIL's default limit, MAX_IMAGE_PIXELS
MOST_MEGAPIXELS = 10_000.0  # the largest limit, where the headers of images are read alone

# Formats that are opened, regardless of the file name. PIL supports more, but runs Ghostscript for PostScript and has
# rarely used code for others. The MPO files of phones count as JPEG. AVIF depends on the build of PIL.
Image.init()
FORMATS = tuple(
    name
    for name in ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "AVIF", "TGA")
    if name in Image.OPEN
)

# Exceptions that PIL raises for damaged files, found by fuzzing files of 34 kinds 240,000 times. PIL itself takes the
# last two for "not this format" while it opens a file.
UNREADABLE = (
    *(OSError, SyntaxError, ValueError, RuntimeError, TypeError, AttributeError, AssertionError),
    *(IndexError, struct.error),
)

# EXIF orientation -> transpose that makes the stored image upright. Orientations 5 to 8 exchange height and width.
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
SIDEWAYS_BACK = {5: UPRIGHT[5], 6: UPRIGHT[8], 7: UPRIGHT[7], 8: UPRIGHT[6]}  # undoes it

JPEG_START = b"\xff\xd8\xff"
# PIL may lack their type of pixels, such as 12 bits.
BEGINNINGS = {JPEG_START: "JPEG", b"II*\0": "TIFF", b"MM\0*": "TIFF", b"PF\n": "colour PFM"}

_lifting_the_limit = threading.RLock()


def read_image(
    path: Path, annotated: tuple[int, int] | None = None, max_megapixels: float = MAX_MEGAPIXELS
) -> Image.Image:
    """Reads a file as an RGB image, upright according to its EXIF orientation.

    annotated: (h, w) in pixels from the annotations, if they contain it. If it equals the size of the stored image but
    not of the upright one, the boxes were drawn on the stored image, which is then returned. If both sizes are equal
    (squares, 180 degrees, mirrored), the image is upright, as from cv2.imdecode in the official pipeline.
    max_megapixels: larger files are refused before they are decoded. Raises DataError if the file cannot be read.
    """
    with opened_image(path, max_megapixels) as opened:
        turns_itself = opened.format == "TIFF"  # PIL rotates it in load(), after which the orientation is gone
        orientation = orientation_of(opened)
        image = Image.fromarray(as_rgb_array(opened))
    if orientation in UPRIGHT and not turns_itself:
        image = image.transpose(UPRIGHT[orientation])
    stored = image.size  # (w, h) of the upright image is (h, w) of the stored one
    if orientation in SIDEWAYS_BACK and annotated == stored != image.size[::-1]:
        image = image.transpose(SIDEWAYS_BACK[orientation])
    return image


def read_bytes(data: bytes, max_megapixels: float = MAX_MEGAPIXELS) -> Image.Image:
    """Reads the bytes of an image file like `read_image`. Raises DataError, whose cause is PIL's exception."""
    with tempfile.TemporaryDirectory(prefix="rtdetr-") as folder:
        file = Path(folder) / "image"
        file.write_bytes(data)
        try:
            return read_image(file, max_megapixels=max_megapixels)
        except DataError as error:
            sentence = str(error).replace(f"{file}:", "the file").removesuffix("; replace it or remove it")
            raise DataError(sentence) from error.__cause__


def read_pixels(
    path: Path, annotated: tuple[int, int] | None = None, max_megapixels: float = MAX_MEGAPIXELS
) -> NDArray[np.uint8]:
    """The pixels (h, w, 3) of `read_image`, for training: most JPEGs are decoded by OpenCV, without PIL's copies."""
    jpeg = ordinary_jpeg(path, max_megapixels)
    pixels = None if jpeg is None else _decoded(jpeg)
    return np.asarray(read_image(path, annotated, max_megapixels)) if pixels is None else pixels


class Jpeg(NamedTuple):
    content: NDArray[np.uint8]  # the bytes of the file
    size: tuple[int, int]  # (w, h)


def ordinary_jpeg(path: Path, max_megapixels: float) -> Jpeg | None:
    """Reads a complete, upright colour JPEG. Returns None for all other files, which PIL must read: OpenCV fills
    missing parts of a truncated or damaged JPEG with grey."""
    content = _if_jpeg(path)
    if content is None:
        return None
    with opened_image(path, max_megapixels, io.BytesIO(content)) as opened:
        if opened.format != "JPEG" or opened.mode != "RGB" or orientation_of(opened) in UPRIGHT:
            return None
        size = opened.size
    stored = np.frombuffer(content, np.uint8)
    after_255 = stored[1:][stored[:-1] == 0xFF]
    markers = after_255[after_255 > 0]  # 255 followed by 0 is data, not a marker
    last_scan = np.flatnonzero(markers == 0xDA)[-1:]
    if len(last_scan) == 0 or markers[last_scan[0] + 1 :].tolist() != [0xD9]:  # only the end may follow it
        return None
    return Jpeg(stored, size)


def _decoded(jpeg: Jpeg) -> NDArray[np.uint8] | None:
    """RGB pixels, or None if OpenCV cannot decode the file."""
    try:
        pixels = cv2.imdecode(jpeg.content, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error:  # more pixels than OpenCV allows
        return None
    return np.asarray(pixels, np.uint8) if pixels is not None and pixels.shape[1::-1] == jpeg.size else None


def _if_jpeg(path: Path) -> bytes | None:
    """The content of a file that begins as a JPEG, else None. Reads once: system calls cost with many threads."""
    if not path.is_file():  # reading a pipe would block
        return None
    try:
        with open(path, "rb") as file:
            start = file.read(len(JPEG_START))
            return start + file.read() if start == JPEG_START else None
    except OSError:  # `read_image` reports it
        return None


def upright_size(path: Path, max_megapixels: float = MAX_MEGAPIXELS) -> tuple[int, int]:
    """(h, w) in pixels of the image that `read_image` returns, from the header if possible. Raises DataError."""
    with opened_image(path, max_megapixels) as opened:
        if opened.format == "TIFF":  # older versions of PIL exchange the sides only on load
            opened.load()
        elif orientation_of(opened, decoded=_may_tell_late(path, opened)) in SIDEWAYS_BACK:
            return opened.width, opened.height
        return opened.height, opened.width


def _may_tell_late(path: Path, opened: Image.Image) -> bool:
    """Whether EXIF may follow the pixels, as in a PNG. Skips over them; PIL would decode all of them to find out."""
    if opened.format != "PNG":
        return True
    with open(path, "rb") as file:
        file.seek(8)
        while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
            if head[4:] in (b"eXIf", b"tEXt", b"zTXt", b"iTXt"):
                return True
            file.seek(int.from_bytes(head[:4], "big") + 4, os.SEEK_CUR)
    return False


def orientation_of(opened: Image.Image, decoded: bool = True) -> int:
    """The EXIF orientation; 1 if there is none or it is damaged. decoded: a PNG may be decoded to find it."""
    if decoded and opened.format == "PNG" and "exif" not in opened.info:
        opened.load()  # as getexif() would, but not in the `try`: of damaged pixels a second load() returns a part
    try:
        value = Image.Image.getexif(opened).get(ExifTags.Base.Orientation)
    except UNREADABLE:
        return 1
    return value if isinstance(value, int) else 1


@contextlib.contextmanager
def opened_image(path: Path, max_megapixels: float, content: io.BytesIO | None = None) -> Iterator[Image.Image]:
    """Context manager: opens a file, or its content, with PIL. PIL's exceptions in the block become DataError."""
    if content is None and path.exists() and not path.is_file():  # reading a pipe would block
        what = "folder" if path.is_dir() else "device"
        raise DataError(f"{path}: cannot be read as an image (it is a {what}); replace it or remove it")
    try:
        with _pil_allows(max_megapixels), Image.open(content or path, formats=FORMATS) as opened:
            if opened.width * opened.height > max_megapixels * 1e6:
                raise Image.DecompressionBombError(f"{opened.width} x {opened.height} pixels")
            yield opened
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{path}: cannot be read as an image, it claims to be larger than data.max_megapixels={max_megapixels:g} "
            f"({str(error).rstrip('.')}); raise that if it really is, else replace it or remove it"
        ) from error
    except UNREADABLE as error:
        advice = "" if isinstance(error, PermissionError) else "; replace it or remove it"
        raise DataError(f"{path}: cannot be read as an image ({_reason(path, error)}){advice}") from error


@contextlib.contextmanager
def _pil_allows(max_megapixels: float) -> Iterator[None]:
    """Context manager: raises PIL's process-wide limit if `max_megapixels` exceeds it, and restores it at the end."""
    if max_megapixels <= MAX_MEGAPIXELS:
        yield
        return
    with _lifting_the_limit:
        before = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = math.ceil(max_megapixels * 1e6)
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = before


def _reason(path: Path, error: BaseException) -> str:
    if isinstance(error, UnidentifiedImageError):
        if path.stat().st_size == 0:
            return "the file is empty"
        with open(path, "rb") as file:
            start = file.read(4)
        for beginning, name in BEGINNINGS.items():
            if start.startswith(beginning):
                return f"a {name} that is damaged, or that Pillow cannot decode; save it again with 8 or 16 bits"
        return f"its bytes are of none of the formats {', '.join(FORMATS)}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]


def sideways(path: Path, annotated: tuple[int, int]) -> Image.Transpose | None:
    """The transpose that makes an image upright if `read_image` leaves it as stored because its boxes were drawn so, as
    `annotated`, (h, w) in pixels, shows. None for all others. Raises DataError if the file cannot be read, or has
    neither size."""
    with opened_image(path, MOST_MEGAPIXELS) as opened:
        orientation = orientation_of(opened)
    upright = upright_size(path, MOST_MEGAPIXELS)
    if annotated == upright:
        return None
    if orientation not in SIDEWAYS_BACK or annotated != upright[::-1]:
        raise DataError(
            f"{path}: the image is {upright[1]} x {upright[0]} but its annotations say {annotated[1]} x "
            f"{annotated[0]}, so its boxes cannot be trusted (resized later?)"
        )
    return UPRIGHT[orientation]


def suffix_of(path: Path) -> str:
    """The ending that fits the content of an image file, such as .png. Raises DataError if it cannot be read."""
    with opened_image(path, MOST_MEGAPIXELS) as opened:
        return ".jp2" if opened.format == "JPEG2000" else f".{str(opened.format).lower()}"
