"""Applies a recipe to the pixels of an image, in two ways that differ by rounding only.

Pixels stay uint8 to the end, so values are rounded and saturated after each step; the official reader converts to float
after the colour step and lets cubic and lanczos overshoot a little. `plain` runs step after step, the colours with
torchvision.transforms.v2 on the whole image. `fused` changes the colours of the visible part only, by matrices, and
resizes it at once; of the expanded canvas it creates only what surrounds the image. The resize is OpenCV's in both, as
in evaluation: v2 has neither "area" nor "lanczos4", and smooths differently when it shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torchvision.transforms.v2 import functional as F

from rtdetr.data.transforms import Colour, Recipe, Window, before_turning

Pixels = NDArray[Any]  # (h, w, 3) uint8 RGB

FILL = (124, 116, 104)  # the ImageNet mean (123.675, 116.28, 103.53), rounded

# The names of the official reader, which calls OpenCV too. Only "area" smooths when it shrinks an image.
INTERPOLATIONS = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
}
REACH = 4  # pixels to either side that an interpolated value may depend on (lanczos4)
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
CUT_OFF = -0.498  # makes OpenCV's rounding the cutting of fractions, and leaves whole numbers alone
OFF_GRID = 1 / 64  # of a pixel that the samples of an expanded image may lie beside their places
SAMPLED = 20_000  # pixels, about, from which the mean grey of an image is estimated


def plain(image: Image.Image, recipe: Recipe, size: tuple[int, int], interpolation: str) -> Pixels:
    """The pixels (h, w, 3) of the network input, one step after another. size: (h, w); interpolation: a key of
    INTERPOLATIONS."""
    image = cut(distort(image, recipe), recipe.window)
    if recipe.flip:
        image = F.horizontal_flip(image)
    height, width = before_turning(size, recipe.turns)
    made = cv2.resize(np.asarray(image), (width, height), interpolation=INTERPOLATIONS[interpolation])
    return np.rot90(made, recipe.turns)


def distort(image: Image.Image, recipe: Recipe) -> Image.Image:
    """The image in the recipe's colours."""

    def shift_hue(colourful: Image.Image, shift: float) -> Image.Image:
        return F.adjust_hue(colourful, shift / 255)  # v2 multiplies by 255 again and rounds towards zero

    adjust: dict[Colour, Callable[[Image.Image, float], Image.Image]] = {
        "brightness": F.adjust_brightness,
        "contrast": F.adjust_contrast,
        "saturation": F.adjust_saturation,
        "hue": shift_hue,
    }
    for colour, amount in recipe.colours:
        image = adjust[colour](image, amount)
    return image


def cut(image: Image.Image, window: Window) -> Image.Image:
    """The part of the image under the window, filled up where the window reaches beyond."""
    left, top, width, height = window
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, image.width), min(top + height, image.height)
    if (x2 - x1, y2 - y1) != image.size:
        image = F.crop(image, y1, x1, y2 - y1, x2 - x1)
    if (x2 - x1, y2 - y1) != (width, height):
        image = F.pad(image, [x1 - left, y1 - top, left + width - x2, top + height - y2], fill=list(FILL))
    return image


def fused(pixels: Pixels, recipe: Recipe, size: tuple[int, int], interpolation: str) -> Pixels:
    """As `plain`, of the pixels (H, W, 3) of an image, in a fraction of the time."""
    left, top, width, height = recipe.window
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0])
    visible = recolour(pixels[y1:y2, x1:x2], recipe.colours, pixels)
    x, y = x1 - left, y1 - top  # of the visible part in the window
    if recipe.flip:
        visible, x = cv2.flip(visible, 1), width - x - (x2 - x1)
    made = place(visible, (x, y), (width, height), before_turning(size, recipe.turns), interpolation)
    return np.rot90(made, recipe.turns)


def recolour(part: Pixels, colours: tuple[tuple[Colour, float], ...], whole: Pixels) -> Pixels:
    """A part of an image in other colours. Contrast uses the mean grey of the whole image at that moment, here that of
    every n-th pixel."""
    names = [colour for colour, _ in colours]
    before_contrast = names.index("contrast") if "contrast" in names else -1
    step = max(1, math.isqrt(whole.shape[0] * whole.shape[1] // SAMPLED))
    sample = np.ascontiguousarray(whole[::step, ::step]) if before_contrast >= 0 else whole
    for i, (colour, amount) in enumerate(colours):
        grey = round(cv2.cvtColor(sample, cv2.COLOR_RGB2GRAY).mean()) if colour == "contrast" else 0
        part = adjusted(part, colour, amount, grey)
        if i < before_contrast:
            sample = adjusted(sample, colour, amount, 0)
    return part


def adjusted(pixels: Pixels, colour: Colour, amount: float, grey: int) -> Pixels:
    """One colour step. PIL cuts fractions off, and so do these; the hue is rounded. grey: the contrast's centre."""
    if colour == "hue":
        hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL)
        hsv[..., 0] += np.uint8(int(amount) % 256)  # wraps round the circle
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    mix = np.empty((3, 4), np.float32)  # of red, green, blue and one
    mix[:, :3] = amount * np.eye(3) + ((1 - amount) * LUMA if colour == "saturation" else 0)
    mix[:, 3] = (1 - amount) * grey + CUT_OFF
    return cv2.transform(pixels, mix)


def place(
    visible: Pixels, at: tuple[int, int], extent: tuple[int, int], size: tuple[int, int], interpolation: str
) -> Pixels:
    """The pixels (h, w, 3) of a canvas of `extent` (w, h) in FILL that shows `visible` with its corner at `at` (x, y),
    resized to `size` (h, w). Only the part of the canvas that surrounds the image is created."""
    if interpolation == "lanczos":
        visible = visible.astype(np.float32)  # for bytes OpenCV's code is plain, and twice as slow as converting twice
    method = INTERPOLATIONS[interpolation]
    if visible.shape[1::-1] == extent:
        return _rounded(cv2.resize(visible, size[::-1], interpolation=method))
    scales = [target / whole for target, whole in zip(size[::-1], extent)]
    # In these two, a hair decides which pixel is taken, so the samples lie exactly where they should.
    exact = interpolation == "nearest" or (interpolation == "area" and max(scales) > 1)
    around, lines = [], []
    for start, length, whole, target, scale in zip(at, visible.shape[1::-1], extent, size[::-1], scales):
        first = 0 if exact else _first_line(start, scale)
        last = min(target, math.ceil((start + length + REACH) * scale) + 1)  # what follows shows nothing but FILL
        end = min(whole, math.ceil(last / scale) + REACH)
        around.append((start - round(first / scale), max(end - start - length, 0)))
        lines.append((first, last))
    (left, right), (top, bottom) = around
    canvas = cv2.copyMakeBorder(visible, top, bottom, left, right, cv2.BORDER_CONSTANT, value=FILL)
    shown = _rounded(cv2.resize(canvas, None, fx=scales[0], fy=scales[1], interpolation=method))
    (x1, x2), (y1, y2) = lines
    shown = shown[: y2 - y1, : x2 - x1]
    return cv2.copyMakeBorder(shown, y1, size[0] - y2, x1, size[1] - x2, cv2.BORDER_CONSTANT, value=FILL)


def _first_line(start: int, scale: float) -> int:
    """The line (row or column) of the result to begin with, where the image starts at line `start` of the canvas: all
    before it show nothing but FILL, and it begins at a line of the canvas, up to OFF_GRID."""
    lines = np.arange(max(int((start - REACH) * scale), 1))[::-1]
    begins = lines / scale
    return int(lines[np.argmax(np.abs(begins - np.rint(begins)) <= OFF_GRID)])


def _rounded(values: Any) -> Pixels:
    zero: Any = 0
    return values if values.dtype == np.uint8 else cv2.convertScaleAbs(cv2.max(values, zero))  # saturates at 255
