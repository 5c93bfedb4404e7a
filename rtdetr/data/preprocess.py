"""Preprocessing of images into network input for evaluation and detection, as in the official pipeline.

All steps are bit-identical to it except the resize: OpenCV rounds its cubic weights on some CPUs and not on others, so
up to 5 % of a photograph's values differ from the official ones, each by at most one level of 255.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rtdetr.config import Resize
from rtdetr.data.resize import as_rgb_array, planes_of, resize

# The official pipeline multiplies by the rounded reciprocal; dividing by 255 differs in the last bit of some values.
SCALE = np.float32(1.0 / 255.0)


def preprocess(
    image: Image.Image | NDArray[np.uint8],
    size: tuple[int, int] = (640, 640),
    interpolation: Resize = "cubic",
) -> Tensor:
    """Converts a PIL image of any mode or a uint8 RGB array (H, W, 3) to network input (3, h, w) float32, RGB in [0,
    1].

    size: (h, w) in pixels. The aspect ratio is not kept. The resize is OpenCV's cubic one on uint8 (rounded, saturated)
    without antialiasing, as in the official eval pipeline; an image of the target size is left unchanged.
    interpolation: see `resize`. Raises ValueError if the array or the size has another form.
    """
    return to_tensor(resize(as_rgb_array(image), size, interpolation))


def resize_planes_there(planes: Tensor, size: tuple[int, int], interpolation: Resize = "cubic") -> Tensor:
    """Resizes (B, 3, H, W) uint8 to (B, 3, h, w) on its own device. Values are within one level of 255 of `resize`.
    Input of that size is returned unchanged."""
    if planes.shape[2:] == size:
        return planes
    mode, smooth = ("bilinear" if interpolation == "bilinear" else "bicubic"), interpolation != "cubic"
    resized = planes.to(torch.float32)
    # bicubic clamps to 0..255 after each axis, as on the CPU
    for sides in ((planes.shape[2], size[1]), size) if interpolation == "bicubic" else (size,):
        resized = F.interpolate(resized, size=sides, mode=mode, align_corners=False, antialias=smooth)
        resized = resized.round().clamp(0, 255)
    return resized.to(torch.uint8)


def to_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """Converts RGB pixels (h, w, 3) uint8 to a tensor (3, h, w) float32 in [0, 1]."""
    return torch.from_numpy(np.multiply(planes_of(pixels), SCALE, dtype=np.float32))


def to_planes(pixels: NDArray[np.uint8]) -> Tensor:
    """Converts RGB pixels (h, w, 3) uint8 to a tensor (3, h, w) uint8."""
    return torch.from_numpy(planes_of(pixels))
