"""Detections as people see them: boxes with names and scores on an image."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from rtdetr.inference.fonts import font_for

VIEW = 640  # pixels that a person likes the longer side of an image to have
MARGIN = 2  # pixels around the text of a label

Area = tuple[float, float, float, float]  # xyxy, pixels


class Detection(NamedTuple):
    category_id: int  # as in the training annotations
    name: str
    score: float
    box: Area  # pixels of the image


def draw(image: Image.Image, detections: Sequence[Detection], enlarge: bool = True) -> Image.Image:
    """A copy of the image with boxes, names and scores on it; one colour per class. A tiny image comes back
    enlarged by a whole number, if that is wanted."""
    zoom = max(1, round(VIEW / max(image.size))) if enlarge else 1
    size = (image.width * zoom, image.height * zoom)
    drawn = image.resize(size, Image.Resampling.BICUBIC) if zoom > 1 else image.copy()
    pen = ImageDraw.Draw(drawn)
    unit = max(drawn.size) / VIEW
    fonts = [font_for(each.name, max(10.0, 14 * unit)) for each in detections]
    boxes = [(x1 * zoom, y1 * zoom, x2 * zoom, y2 * zoom) for x1, y1, x2, y2 in (each.box for each in detections)]
    texts = [fitting_text(each, pen, font, drawn.width) for each, font in zip(detections, fonts)]
    extents = [pen.textbbox((0, 0), text, font=font) for text, font in zip(texts, fonts)]
    labels = place_labels(boxes, [(right + 2 * MARGIN, bottom + MARGIN) for _, _, right, bottom in extents], drawn.size)
    colours = [_colour(each.category_id) for each in detections]
    for box, colour in reversed([*zip(boxes, colours)]):  # the best ones on top
        pen.rectangle(box, outline=colour, width=max(2, round(2 * unit)))
    for label, text, font, colour in reversed([*zip(labels, texts, fonts, colours)]):
        pen.rectangle(label, fill=colour)
        pen.text((label[0] + MARGIN, label[1]), text, fill="black", font=font)
    return drawn


def place_labels(boxes: list[Area], sizes: list[tuple[float, float]], image: tuple[int, int]) -> list[Area]:
    """Where the label of each box goes: inside the image, and off the earlier labels where a place beside or in a
    corner of the box allows it. sizes: (width, height) of the labels; image: (width, height)."""
    placed = np.zeros((len(boxes), 4))
    for i, ((x1, y1, x2, y2), (width, height)) in enumerate(zip(boxes, sizes)):
        lefts = (x1, x2 - width)
        tops = (y1 - height, y1, y2 - height, y2)  # above, inside at the top, inside at the bottom, below
        places = [
            (min(max(left, 0.0), max(image[0] - 1 - width, 0.0)), top)
            for top in tops
            for left in lefts
            if 0 <= top <= image[1] - 1 - height
        ] or [(min(max(x1, 0.0), max(image[0] - 1 - width, 0.0)), max(0.0, min(y1, image[1] - 1 - height)))]
        areas = np.array([(left, top, left + width, top + height) for left, top in places])
        placed[i] = areas[np.argmin(_hidden(areas, placed[:i]))]  # the first of equal ones
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in placed.tolist()]


def _hidden(areas: np.ndarray[Any, Any], placed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Square pixels (n,) of other labels that each of the areas (n, 4) would cover."""
    corners = np.minimum(areas[:, None, 2:], placed[None, :, 2:]) - np.maximum(areas[:, None, :2], placed[None, :, :2])
    return np.asarray(corners.clip(min=0).prod(axis=2).sum(axis=1))


def fitting_text(detection: Detection, pen: ImageDraw.ImageDraw, font: Any, width: int) -> str:
    """Name and score, the name cut where the image is too narrow for it."""
    name = detection.name
    text = f"{name} {detection.score:.2f}"
    while len(name) > 1 and pen.textbbox((0, 0), text, font=font)[2] > width - 1 - 2 * MARGIN:
        name = name[:-1]
        text = f"{name}... {detection.score:.2f}"
    return text


def _colour(category_id: int) -> tuple[int, int, int]:
    """Bright colours, far apart for neighbouring ids (golden-ratio steps around the hue circle)."""
    red, green, blue = colorsys.hsv_to_rgb(category_id * 0.618034 % 1.0, 0.65, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)
