"""Applies a recipe to the pixels of an image, by two backends whose results differ by rounding only.

Pixels stay uint8, so values are rounded and saturated after each step; the official reader changes to float after the
colour step and lets cubic and lanczos overshoot slightly. `plain` applies step after step, the colours with
torchvision.transforms.v2 on the whole image. `fused` changes the colours of the visible part alone, by matrices, and
resizes it in one go; of an expanded canvas it builds only the surroundings of the image. Both resize with OpenCV, as in
evaluation: v2 has neither "area" nor "lanczos4", and antialiases differently.
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

# Names as in the official reader, which also uses OpenCV. Only "area" antialiases.
INTERPOLATIONS = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
}
ADJUST: dict[Colour, Callable[[Image.Image, float], Image.Image]] = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": lambda image, shift: F.adjust_hue(image, shift / 255),  # v2 multiplies by 255 and rounds towards zero
}
REACH = 4  # pixels on each side that an interpolated value may depend on (lanczos4)
LUMA = np.array([0.299, 0.587, 0.114], np.float32)
CUT_OFF = -0.498  # turns OpenCV's rounding into truncation, and keeps whole numbers
OFF_GRID = 1 / 64  # pixels by which the samples of an expanded image may be off
SAMPLED = 20_000  # approximate number of pixels used to estimate an image's mean grey


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
    """Applies the recipe's colour steps to the image."""
    for colour, amount in recipe.colours:
        image = ADJUST[colour](image, amount)
    return image


def cut(image: Image.Image, window: Window) -> Image.Image:
    """The part of the image in the window, padded with FILL where the window extends beyond the image."""
    left, top, width, height = window
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, image.width), min(top + height, image.height)
    if (x2 - x1, y2 - y1) != image.size:
        image = F.crop(image, y1, x1, y2 - y1, x2 - x1)
    if (x2 - x1, y2 - y1) != (width, height):
        image = F.pad(image, [x1 - left, y1 - top, left + width - x2, top + height - y2], fill=list(FILL))
    return image


def fused(pixels: Pixels, recipe: Recipe, size: tuple[int, int], interpolation: str) -> Pixels:
    """Like `plain`, for the pixels (H, W, 3) of an image, in a fraction of the time."""
    left, top, width, height = recipe.window
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, pixels.shape[1]), min(top + height, pixels.shape[0])
    visible = recolour(pixels[y1:y2, x1:x2], recipe.colours, pixels)
    x, y = x1 - left, y1 - top  # position of the visible part in the window
    if recipe.flip:
        visible, x = cv2.flip(visible, 1), width - x - (x2 - x1)
    made = place(visible, (x, y), (width, height), before_turning(size, recipe.turns), interpolation)
    return np.rot90(made, recipe.turns)


def recolour(part: Pixels, colours: tuple[tuple[Colour, float], ...], whole: Pixels) -> Pixels:
    """Applies colour steps to a part of an image. Contrast uses the mean grey of the whole image after the steps before
    it, estimated from every n-th pixel."""
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
    """Applies one colour step. Truncates like PIL, but rounds the hue. grey: the centre of the contrast step."""
    if colour == "hue":
        hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV_FULL)
        hsv[..., 0] += np.uint8(int(amount) % 256)  # uint8 wraps around the colour circle
        return cv2.cvtColor(hsv, cv2.COLOR_HSV2RGB_FULL)
    mix = np.empty((3, 4), np.float32)  # coefficients of red, green, blue and 1
    mix[:, :3] = amount * np.eye(3) + ((1 - amount) * LUMA if colour == "saturation" else 0)
    mix[:, 3] = (1 - amount) * grey + CUT_OFF
    return cv2.transform(pixels, mix)


def place(
    visible: Pixels, at: tuple[int, int], extent: tuple[int, int], size: tuple[int, int], interpolation: str
) -> Pixels:
    """Pastes `visible` with its corner `at` (x, y) into a canvas of `extent` (w, h) in FILL, and resizes that to `size`
    (h, w). Only the part of the canvas around the image is built."""
    if interpolation == "lanczos":
        visible = visible.astype(np.float32)  # OpenCV is slow on uint8: converting twice takes half the time
    method = INTERPOLATIONS[interpolation]
    if visible.shape[1::-1] == extent:
        return _rounded(cv2.resize(visible, size[::-1], interpolation=method))
    scales = [target / whole for target, whole in zip(size[::-1], extent)]
    # In these two, tiny offsets change which pixel is taken, so the sample positions must be exact.
    exact = interpolation == "nearest" or (interpolation == "area" and max(scales) > 1)
    around, lines = [], []
    for start, length, whole, target, scale in zip(at, visible.shape[1::-1], extent, size[::-1], scales):
        first = 0 if exact else _first_line(start, scale)
        last = min(target, math.ceil((start + length + REACH) * scale) + 1)  # the rest is FILL
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
    """The first line (row or column) of the result to compute, if the image starts at line `start` of the canvas: all
    lines before it contain only FILL, and it starts at a whole line of the canvas, within OFF_GRID."""
    lines = np.arange(max(int((start - REACH) * scale), 1))[::-1]
    begins = lines / scale
    return int(lines[np.argmax(np.abs(begins - np.rint(begins)) <= OFF_GRID)])


def _rounded(values: Any) -> Pixels:
    zero: Any = 0
    return values if values.dtype == np.uint8 else cv2.convertScaleAbs(cv2.max(values, zero))  # saturates at 255
