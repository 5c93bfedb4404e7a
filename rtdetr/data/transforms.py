"""Training augmentation: the steps of the official reader, in its order and with its probabilities.

All random values are drawn first, into a Recipe, from an explicit generator and by rules that torchvision's transforms
lack. The recipe is then applied to the boxes, in this file, and to the pixels, in rtdetr/data/pixels.py.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rtdetr.config import AugmentConfig, settled

Boxes = NDArray[np.float32]  # (n, 4) xyxy, pixels
Labels = NDArray[np.int64]  # (n,)
Colour = Literal["brightness", "contrast", "saturation", "hue"]

HUE_SHIFT = 18.0  # in steps of 1/255 of the colour circle
COLOUR_RANGE = (0.5, 1.5)
COLOURS: tuple[tuple[Colour, tuple[float, float]], ...] = (
    ("brightness", COLOUR_RANGE),
    ("contrast", COLOUR_RANGE),
    ("saturation", COLOUR_RANGE),
    ("hue", (-HUE_SHIFT, HUE_SHIFT)),
)
CROP_THRESHOLDS = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, None)  # None: no crop
CROP_TRIES = 50
MIN_SIDE = 0.01  # pixels; boxes with a shorter side are dropped


class Window(NamedTuple):
    """A rectangle in pixels of the image; it may extend beyond the image."""

    left: int
    top: int
    width: int
    height: int


class Recipe(NamedTuple):
    """The augmentation of one image, in order: change colours, cut out the window, flip horizontally, and, after the
    resize to the network input, rotate."""

    colours: tuple[tuple[Colour, float], ...]  # applied in this order; a factor, for hue a shift in steps of 1/255
    window: Window
    flip: bool
    turns: int = 0  # of 90 degrees, counterclockwise


def draw_recipe(cfg: AugmentConfig, size: tuple[int, int], boxes: Boxes, rng: Generator, epoch: int = 0) -> Recipe:
    """Draws a recipe for an image of `size` (h, w) with these boxes, in an epoch (from 0). The official reader does not
    rotate images, and applies all other steps from the first epoch."""
    height, width = size
    colours = draw_colours(rng) if rng.random() < cfg.distort_prob else ()
    window, ramp = Window(0, 0, width, height), settled(cfg.zoom_ramp)
    zoom = min(1.0, epoch / ramp) if ramp > 0 else 1.0
    if rng.random() < cfg.expand_prob * zoom:
        window = expand(window, cfg.expand_max_ratio, rng)
    if rng.random() < cfg.crop_prob * zoom:
        window = crop(window, boxes, rng)
    flip = rng.random() < cfg.flip_prob
    may_turn = cfg.turn_prob > 0 and epoch >= settled(cfg.turn_after)
    turned = may_turn and rng.random() < cfg.turn_prob  # no draw if rotations are off
    return Recipe(colours, window, flip, int(rng.integers(1, 4)) if turned else 0)


def draw_colours(rng: Generator) -> tuple[tuple[Colour, float], ...]:
    """Brightness, contrast, saturation and hue in random order, each with probability one half."""
    drawn = []
    for i in rng.permutation(len(COLOURS)):
        colour, (low, high) = COLOURS[i]
        if rng.random() < 0.5:
            drawn.append((colour, rng.uniform(low, high)))
    return tuple(drawn)


def expand(window: Window, max_ratio: float, rng: Generator) -> Window:
    """A window up to `max_ratio` times as wide and high, with the given one at a random place inside."""
    ratio = rng.uniform(1.0, max_ratio)
    width, height = int(window.width * ratio), int(window.height * ratio)
    left = window.left - int(rng.integers(width - window.width, endpoint=True))
    top = window.top - int(rng.integers(height - window.height, endpoint=True))
    return Window(left, top, width, height)


def crop(window: Window, boxes: Boxes, rng: Generator) -> Window:
    """A window inside `window` that overlaps some box by a randomly chosen IoU and contains the centre of some box.

    The IoU thresholds, including "no crop", are tried in random order, up to 50 times each; without boxes, or if all
    tries fail, returns `window`. (v2.RandomIoUCrop draws a new threshold each time, and width and height separately.)
    """
    if len(boxes) == 0:
        return window
    areas, centres = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1), (boxes[:, :2] + boxes[:, 2:]) / 2
    measured = np.column_stack((boxes, areas, centres)).tolist()  # lists, as a try takes ten times as long in numpy
    for i in rng.permutation(len(CROP_THRESHOLDS)):
        threshold = CROP_THRESHOLDS[i]
        if threshold is None:
            return window
        for _ in range(CROP_TRIES):
            tried = _part_of(window, rng)
            if _fits(tried, threshold, measured):
                return tried
    return window


def inside(window: Window, boxes: Boxes) -> NDArray[np.bool_]:
    """Mask (n,) of the boxes whose centre is in the window."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2 - (window.left, window.top)
    return np.all((centres >= 0) & (centres < (window.width, window.height)), axis=1)


def move_boxes(boxes: Boxes, labels: Labels, recipe: Recipe, size: tuple[int, int]) -> tuple[Boxes, Labels]:
    """Boxes and labels after a recipe and the resize to `size` (h, w), in pixels of the network input."""
    left, top, width, height = recipe.window
    keep = inside(recipe.window, boxes)
    extent = np.array([width, height, width, height], np.float32)
    moved = np.clip(boxes[keep] - np.array([left, top, left, top], np.float32), 0, extent)
    if recipe.flip:
        moved[:, [0, 2]] = width - moved[:, [2, 0]]
    height, width = before_turning(size, recipe.turns)
    limits = np.array([width, height, width, height], np.float32)
    scaled = np.clip(moved * (limits / extent), 0, limits)
    thick = (scaled[:, 2:] - scaled[:, :2] >= MIN_SIDE).all(axis=1)
    return turn(scaled[thick], recipe.turns, (height, width)), labels[keep][thick]


def before_turning(size: tuple[int, int], turns: int) -> tuple[int, int]:
    """The size (h, w) before `turns` quarter turns that result in `size`."""
    return size[::-1] if turns % 2 else size


def turn(boxes: Boxes, turns: int, size: tuple[int, int]) -> Boxes:
    """Rotates boxes (n, 4) xyxy in an image of `size` (h, w) by `turns` quarter turns counterclockwise."""
    for _ in range(turns):
        x1, y1, x2, y2 = boxes.T
        boxes, size = np.stack((y1, size[1] - x2, y2, size[1] - x1), axis=1), size[::-1]
    return boxes


def _part_of(window: Window, rng: Generator) -> Window:
    # low + (high - low) * random() equals uniform() and takes a fifth of the time
    scale = 0.3 + 0.7 * rng.random()
    narrowest, widest = max(0.5, scale**2), min(2.0, scale**-2)
    aspect = narrowest + (widest - narrowest) * rng.random()
    width = max(1, int(window.width * scale * aspect**0.5))
    height = max(1, int(window.height * scale * aspect**-0.5))
    left = window.left + int(rng.integers(window.width - width, endpoint=True))
    top = window.top + int(rng.integers(window.height - height, endpoint=True))
    return Window(left, top, width, height)


def _fits(window: Window, threshold: float, measured: list[list[float]]) -> bool:
    """Whether some box has at least this IoU with the window and some box has its centre in it. measured: x1, y1, x2,
    y2, area and centre x, y of each box."""
    left, top, width, height = window
    right, bottom = left + width, top + height
    overlaps = holds = False
    for x1, y1, x2, y2, area, x, y in measured:
        holds = holds or (left <= x < right and top <= y < bottom)
        if not overlaps:
            wide = (x2 if x2 < right else right) - (x1 if x1 > left else left)
            high = (y2 if y2 < bottom else bottom) - (y1 if y1 > top else top)
            shared = wide * high if wide > 0 and high > 0 else 0.0
            overlaps = shared / (area + width * height - shared) >= threshold
        if overlaps and holds:
            return True
    return False
