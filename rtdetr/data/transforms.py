"""Training augmentation: what the official reader does, in its order and with its probabilities.

Pixels stay uint8 to the end, so values are rounded and saturated after each step; the official reader turns to float
after the colour step and lets cubic and lanczos overshoot a little. The pixel work is torchvision.transforms.v2's, on
PIL pictures; the decisions are ours, because they come from an explicit generator and follow rules that v2 lacks. The
resize is OpenCV's, as in evaluation: v2 has neither "area" nor "lanczos4", and smooths differently when it shrinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from rtdetr.data.preprocess import to_tensor

Boxes = NDArray[np.float32]  # (n, 4) xyxy, pixels
Labels = NDArray[np.int64]  # (n,)

FILL = (124, 116, 104)  # the ImageNet mean (123.675, 116.28, 103.53), rounded
HUE_SHIFT = 18.0  # of 256 steps round the colour circle
COLOUR_RANGE = (0.5, 1.5)
CROP_THRESHOLDS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, None)  # None: no crop
CROP_TRIES = 50
MIN_SIDE = 0.01  # pixels; a box thinner than this is no box

# The names of the official reader, which calls OpenCV too. Only "area" smooths when it shrinks a picture.
INTERPOLATIONS = {
    "nearest": cv2.INTER_NEAREST,
    "linear": cv2.INTER_LINEAR,
    "area": cv2.INTER_AREA,
    "cubic": cv2.INTER_CUBIC,
    "lanczos": cv2.INTER_LANCZOS4,
}


class Window(NamedTuple):
    """A rectangle in pixels of the picture; it may reach beyond its borders."""

    left: int
    top: int
    width: int
    height: int


class Augmentation:
    """Colour, expand, crop and flip for one picture. The arguments are the probabilities of the four steps and the
    largest ratio of an expanded side to the old one."""

    def __init__(
        self, distort_prob: float, expand_prob: float, expand_max_ratio: float, crop_prob: float, flip_prob: float
    ) -> None:
        self.distort_prob = distort_prob
        self.expand_prob = expand_prob
        self.expand_max_ratio = expand_max_ratio
        self.crop_prob = crop_prob
        self.flip_prob = flip_prob

    def __call__(
        self, image: Image.Image, boxes: Boxes, labels: Labels, rng: Generator
    ) -> tuple[Image.Image, Boxes, Labels]:
        """The changed RGB picture and what is left of its boxes, in pixels of the new picture."""
        if rng.random() < self.distort_prob:
            image = distort(image, rng)
        window = Window(0, 0, image.width, image.height)
        if rng.random() < self.expand_prob:
            window = expand(window, self.expand_max_ratio, rng)
        if rng.random() < self.crop_prob:
            window = crop(window, boxes, rng)
        keep = inside(window, boxes)
        image, boxes = cut(image, boxes[keep], window)
        if rng.random() < self.flip_prob:
            image, boxes = flip(image, boxes)
        return image, boxes, labels[keep]


def distort(image: Image.Image, rng: Generator) -> Image.Image:
    """Brightness, contrast, saturation and hue in random order, each with probability one half."""

    def shift_hue(picture: Image.Image, shift: float) -> Image.Image:
        return F.adjust_hue(picture, shift / 255)  # v2 multiplies by 255 again and rounds towards zero

    steps: tuple[tuple[Callable[[Image.Image, float], Image.Image], tuple[float, float]], ...] = (
        (F.adjust_brightness, COLOUR_RANGE),
        (F.adjust_contrast, COLOUR_RANGE),
        (F.adjust_saturation, COLOUR_RANGE),
        (shift_hue, (-HUE_SHIFT, HUE_SHIFT)),
    )
    for i in rng.permutation(len(steps)):
        adjust, (low, high) = steps[i]
        if rng.random() < 0.5:
            image = adjust(image, rng.uniform(low, high))
    return image


def expand(window: Window, max_ratio: float, rng: Generator) -> Window:
    """A window up to `max_ratio` times as wide and high that holds the old one somewhere."""
    ratio = rng.uniform(1.0, max_ratio)
    width, height = int(window.width * ratio), int(window.height * ratio)
    left = window.left - int(rng.integers(width - window.width, endpoint=True))
    top = window.top - int(rng.integers(height - window.height, endpoint=True))
    return Window(left, top, width, height)


def crop(window: Window, boxes: Boxes, rng: Generator) -> Window:
    """A window inside `window` that overlaps some box by a randomly chosen IoU and holds the centre of some box.

    The IoU thresholds are tried in random order, "no crop" among them, with up to 50 tries each; without boxes, or when
    all tries fail, the window stays. (v2.RandomIoUCrop draws a new threshold each time, and width and height apart.)
    """
    if len(boxes) == 0:
        return window
    for i in rng.permutation(len(CROP_THRESHOLDS)):
        threshold = CROP_THRESHOLDS[i]
        if threshold is None:
            return window
        for _ in range(CROP_TRIES):
            scale = rng.uniform(0.3, 1.0)
            aspect = rng.uniform(max(0.5, scale**2), min(2.0, scale**-2))
            width = max(1, int(window.width * scale * aspect**0.5))
            height = max(1, int(window.height * scale * aspect**-0.5))
            left = window.left + int(rng.integers(window.width - width, endpoint=True))
            top = window.top + int(rng.integers(window.height - height, endpoint=True))
            tried = Window(left, top, width, height)
            if _best_iou(tried, boxes) >= threshold and inside(tried, boxes).any():
                return tried
    return window


def inside(window: Window, boxes: Boxes) -> NDArray[np.bool_]:
    """Which boxes have their centre in the window: (n,)."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - (window.left, window.top)
    within: NDArray[np.bool_] = np.all((centres >= 0) & (centres < (window.width, window.height)), axis=1)
    return within


def cut(image: Image.Image, boxes: Boxes, window: Window) -> tuple[Image.Image, Boxes]:
    """The part of the picture under the window, filled up where the window reaches beyond, and its boxes, clipped."""
    left, top, width, height = window
    x1, y1 = max(left, 0), max(top, 0)
    x2, y2 = min(left + width, image.width), min(top + height, image.height)
    if (x2 - x1, y2 - y1) != image.size:
        image = F.crop(image, y1, x1, y2 - y1, x2 - x1)
    if (x2 - x1, y2 - y1) != (width, height):
        image = F.pad(image, [x1 - left, y1 - top, left + width - x2, top + height - y2], fill=list(FILL))
    moved = boxes - np.array([left, top, left, top], np.float32)
    return image, np.clip(moved, 0, np.array([width, height, width, height], np.float32))


def flip(image: Image.Image, boxes: Boxes) -> tuple[Image.Image, Boxes]:
    """Left and right exchanged."""
    mirrored = boxes.copy()
    mirrored[:, [0, 2]] = image.width - boxes[:, [2, 0]]
    return F.horizontal_flip(image), mirrored


def resize(
    image: Image.Image, boxes: Boxes, labels: Labels, size: tuple[int, int], interpolation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Network input (3, h, w) float32 in [0, 1], boxes (n, 4) float32 xyxy in its pixels, labels (n,) int64.

    size: (h, w); the aspect ratio is not kept. interpolation: a key of INTERPOLATIONS.
    """
    height, width = size
    pixels: NDArray[Any] = cv2.resize(np.asarray(image), (width, height), interpolation=INTERPOLATIONS[interpolation])
    limits = np.array([width, height, width, height], np.float32)
    scaled = np.clip(boxes * (limits / np.array(image.size * 2, np.float32)), 0, limits)
    keep = (scaled[:, 2:] - scaled[:, :2] >= MIN_SIDE).all(axis=1)
    return to_tensor(pixels), torch.from_numpy(scaled[keep]), torch.from_numpy(labels[keep])


def _best_iou(window: Window, boxes: Boxes) -> float:
    corner = np.array([window.left, window.top])
    size = np.array([window.width, window.height])
    overlap = np.minimum(boxes[:, 2:], corner + size) - np.maximum(boxes[:, :2], corner)
    shared = overlap.clip(min=0).prod(axis=1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + size.prod() - shared
    return float((shared / union).max())
