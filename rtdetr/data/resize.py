"""Converts images to RGB arrays and resizes them, with NumPy and OpenCV alone: reader processes need no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.depth import as_8_bits

if TYPE_CHECKING:
    from rtdetr.config import Resize


def as_rgb_array(image: Image.Image | NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB pixels (H, W, 3) uint8. Transparency is dropped; higher bit depths are scaled to 8. Raises ValueError for an
    array of another form, and for integers and floats of unknown range.

    EXIF orientation is ignored; `images.read_image`, which opens files, applies it.
    """
    if isinstance(image, Image.Image):
        return np.asarray(as_8_bits(image).convert("RGB"))
    if not isinstance(image, np.ndarray):
        raise ValueError(f"image: expected a PIL image or a uint8 array (H, W, 3), got {type(image).__name__}")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"image: expected a uint8 RGB array (H, W, 3), got dtype {image.dtype} and shape {tuple(image.shape)}"
        )
    return image


def resize(
    pixels: NDArray[np.uint8], size: tuple[int, int], interpolation: Resize, out: NDArray[Any] | None = None
) -> NDArray[Any]:
    """Resizes by `resize_cubic`, or by torchvision's antialiased resize of uint8 (bilinear, bicubic), which
    transformers uses on CPUs."""
    if interpolation == "cubic" or pixels.shape[:2] == size:
        return resize_cubic(pixels, size, out)
    import torch  # imported here: reader processes do without it
    from torchvision.transforms.v2 import InterpolationMode, functional  # as slow to import

    planes = torch.from_numpy(planes_of(pixels))
    planes = functional.resize(planes, list(size), InterpolationMode(interpolation), antialias=True)
    return resize_cubic(planes.permute(1, 2, 0).numpy(), size, out)


def resize_cubic(pixels: NDArray[np.uint8], size: tuple[int, int], out: NDArray[Any] | None = None) -> NDArray[Any]:
    """Resizes an RGB array (H, W, 3) uint8 to (h, w, 3). out: an array of that shape to write to."""
    height, width = size
    if height <= 0 or width <= 0:
        raise ValueError(f"size: expected (height, width) in positive pixels, got {size}")
    if pixels.shape[:2] != (height, width):
        return cv2.resize(np.ascontiguousarray(pixels), (width, height), dst=out, interpolation=cv2.INTER_CUBIC)
    if out is None:
        return pixels
    out[:] = pixels
    return out


def planes_of(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Converts RGB pixels (h, w, 3) uint8 to planes (3, h, w) uint8."""
    planes = np.empty((3, *pixels.shape[:2]), np.uint8)
    cv2.split(np.ascontiguousarray(pixels), list(planes))
    return planes
