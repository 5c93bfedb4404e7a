"""How an image becomes network input in evaluation and detection, as in the official pipeline.

All of it is equal bit for bit, but the resize: OpenCV rounds its cubic weights on some CPUs and not on others, so
that up to 5 % of a photograph's values differ by one level of 255 from the official ones, and none by more.
"""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from rtdetr.config import Resize
from rtdetr.data.depth import as_8_bits

# The official pipeline multiplies by the rounded reciprocal; dividing by 255 differs in the last bit of some values.
SCALE = np.float32(1.0 / 255.0)


def preprocess(
    image: Image.Image | np.ndarray[Any, np.dtype[np.uint8]],
    size: tuple[int, int] = (640, 640),
    interpolation: Resize = "cubic",
) -> Tensor:
    """Network input (3, h, w) float32, RGB in [0, 1], of a PIL image of any mode or a uint8 RGB array (H, W, 3).

    size: (h, w) in pixels. The aspect ratio is not kept. The resize is OpenCV's cubic one on uint8 (rounded, saturated)
    without smoothing when it shrinks, as in the official eval pipeline; an image of that size is not touched.
    interpolation: as in `resize`.
    Raises ValueError when the array or the size has another form.
    """
    return to_tensor(resize(as_rgb_array(image), size, interpolation))


def as_rgb_array(image: Image.Image | np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """RGB pixels (H, W, 3) uint8. Transparency is dropped; more bits are scaled to 8. Raises ValueError for an array of
    another form, and for integers and floats whose range is not known.

    EXIF orientation is left alone; `images.read_image`, which opens files, turns them.
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
    pixels: np.ndarray[Any, np.dtype[np.uint8]],
    size: tuple[int, int],
    interpolation: Resize,
    out: np.ndarray[Any, Any] | None = None,
) -> np.ndarray[Any, Any]:
    """`resize_cubic`, or torchvision's resize of uint8 with smoothing (bilinear, bicubic), which transformers' own
    CPUs call."""
    if interpolation == "cubic" or pixels.shape[:2] == size:
        return resize_cubic(pixels, size, out)
    from torchvision.transforms.v2 import InterpolationMode, functional  # here: it takes as long as torch to import

    planes = functional.resize(to_planes(pixels), list(size), InterpolationMode(interpolation), antialias=True)
    return resize_cubic(planes.permute(1, 2, 0).numpy(), size, out)


def resize_cubic(
    pixels: np.ndarray[Any, np.dtype[np.uint8]], size: tuple[int, int], out: np.ndarray[Any, Any] | None = None
) -> np.ndarray[Any, Any]:
    """Pixels (h, w, 3) uint8 of an RGB array (H, W, 3) uint8; out: an array of that form that takes them."""
    height, width = size
    if height <= 0 or width <= 0:
        raise ValueError(f"size: expected (height, width) in positive pixels, got {size}")
    if pixels.shape[:2] != (height, width):
        return cv2.resize(np.ascontiguousarray(pixels), (width, height), dst=out, interpolation=cv2.INTER_CUBIC)
    if out is None:
        return pixels
    out[:] = pixels
    return out


def resize_there(pixels: Tensor, size: tuple[int, int], interpolation: Resize = "cubic") -> Tensor:
    """`resize` of a tensor (H, W, 3) uint8 where it lies, a GPU, say: within one level of 255 of the host's."""
    return resize_planes_there(pixels.permute(2, 0, 1)[None], size, interpolation)[0].permute(1, 2, 0)


def resize_planes_there(planes: Tensor, size: tuple[int, int], interpolation: Resize = "cubic") -> Tensor:
    """(B, 3, h, w) uint8 of tensors (B, 3, H, W) uint8; see `resize_there`. None of that size is touched."""
    if planes.shape[2:] == size:
        return planes
    mode, smooth = ("bilinear" if interpolation == "bilinear" else "bicubic"), interpolation != "cubic"
    resized = planes.to(torch.float32)
    # bicubic is cut to 0 ... 255 after either axis, as on the host
    for sides in ((planes.shape[2], size[1]), size) if interpolation == "bicubic" else (size,):
        resized = F.interpolate(resized, size=sides, mode=mode, align_corners=False, antialias=smooth)
        resized = resized.round().clamp(0, 255)
    return resized.to(torch.uint8)


def to_tensor(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Tensor (3, h, w) float32 in [0, 1] of RGB pixels (h, w, 3) uint8."""
    return torch.from_numpy(np.multiply(to_planes(pixels).numpy(), SCALE, dtype=np.float32))


def to_planes(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> Tensor:
    """Tensor (3, h, w) uint8 of RGB pixels (h, w, 3) uint8."""
    planes = np.empty((3, *pixels.shape[:2]), np.uint8)
    cv2.split(np.ascontiguousarray(pixels), list(planes))
    return torch.from_numpy(planes)
