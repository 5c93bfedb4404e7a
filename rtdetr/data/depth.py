"""Converts images with more than 8 bits per channel to 8, by the range of their type or the range stated in the file.

The values of a single image are not used, as images of one set would be scaled differently. PIL converts colour images
the same way, except JPEG 2000, whose white overflows; it clips grey at 255 and has no range for floats.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

BITS_PER_SAMPLE, PHOTOMETRIC, SAMPLE_FORMAT = 258, 262, 339  # TIFF tags
SLACK = 0.5 / 255  # by which floats may exceed 0 to 1: half a level
ZERO_IS_WHITE = 0  # a PhotometricInterpretation that PIL applies up to 8 bits only
SIGNED = 2  # a SampleFormat
CODESTREAM, DEPTH_AT = b"\xff\x4f\xff\x51", 38  # of JPEG 2000: its beginning, and how far behind that the depth is


def as_8_bits(image: Image.Image) -> Image.Image:
    """The image itself, or 8-bit grey if it has more bits. Raises ValueError if the range of the values is unknown."""
    if 0 in image.size:
        return image
    if image.mode == "F":
        grey = _of_floats(np.asarray(image))
    elif image.mode.startswith("I;16"):
        grey = (np.asarray(image) >> (_tag(image, BITS_PER_SAMPLE, 16) - 8)).astype(np.uint8)
    elif image.mode == "I" and image.format == "PPM":  # PIL has scaled the file's largest value to 65535
        grey = (np.asarray(image) >> 8).astype(np.uint8)
    elif image.mode == "I" or _tag(image, SAMPLE_FORMAT, 1) == SIGNED:
        raise ValueError("32-bit or signed integers, where nothing says which is white; save it in 8 or 16 bits")
    elif image.mode in ("RGB", "RGBA", "LA") and _jpeg_2000_bits(image) > 8:
        return _of_jpeg_2000(image)
    else:
        return image
    return Image.fromarray(255 - grey if _tag(image, PHOTOMETRIC, 1) == ZERO_IS_WHITE else grey)


def _of_floats(values: NDArray[Any]) -> NDArray[np.uint8]:
    low, high = values.min(), values.max()
    if not (low >= -SLACK and high <= 1 + SLACK):  # also true for NaN
        raise ValueError(f"floats from {low:g} to {high:g}, expected 0 to 1; scale them, or save it in 8 or 16 bits")
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def _of_jpeg_2000(opened: Image.Image) -> Image.Image:
    """The colours of a file that PIL has opened but not decoded."""
    pixels = cv2.imdecode(np.frombuffer(_content(opened), np.uint8), cv2.IMREAD_COLOR_RGB)
    if pixels is None:
        raise ValueError("a JPEG 2000 that is damaged, or that OpenCV cannot decode; save it again with 8 or 16 bits")
    return Image.fromarray(pixels)


def _jpeg_2000_bits(opened: Image.Image) -> int:
    """The bits per channel of a JPEG 2000 file that PIL has opened but not decoded; 0 for all other images."""
    if opened.format != "JPEG2000" or getattr(opened, "fp", None) is None:
        return 0
    depth = _content(opened).partition(CODESTREAM)[2][DEPTH_AT : DEPTH_AT + 1]
    return (depth[0] & 0x7F) + 1 if depth else 0


def _content(opened: Any) -> bytes:
    """All bytes of a file that PIL has opened."""
    before = opened.fp.tell()
    opened.fp.seek(0)
    content: bytes = opened.fp.read()
    opened.fp.seek(before)
    return content


def scaled_from(opened: Image.Image) -> int:
    """The value that is scaled to 255 in a file that PIL has opened but not decoded; 0 if it has at most 8 bits."""
    if opened.mode == "F":
        return 1
    bits = max(_tag(opened, BITS_PER_SAMPLE, 8), _jpeg_2000_bits(opened))
    arguments = [each for tile in getattr(opened, "tile", ()) for each in np.ravel(np.array(tile[-1], object))]
    if bits > 8:
        return 2**bits - 1
    if opened.mode.startswith("I;16") or any(";16" in str(each) for each in arguments):
        return 65535
    largest = max((each for each in arguments if isinstance(each, int)), default=0)
    return largest if opened.format == "PPM" and largest > 255 else 0


def _tag(image: Image.Image, tag: int, default: int) -> int:
    """The number, or the first of several, of a TIFF tag; the default for all other files."""
    value = getattr(image, "tag_v2", {}).get(tag, default) if image.format == "TIFF" else default
    return int(value[0] if isinstance(value, tuple) else value)
