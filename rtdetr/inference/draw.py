"""Drawing of boxes, names and scores on images."""

from __future__ import annotations

import colorsys
from collections.abc import Sequence
from functools import cache
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from PIL import Image, ImageDraw

from rtdetr.foreign_names import no_attribute
from rtdetr.inference.fonts import RenderedText, rendered
from rtdetr.outputs import atomic_write

VIEW = 640  # pixels of an image's longer side for which lines and fonts are sized
MARGIN = 2  # pixels around the text of a label

Area = tuple[float, float, float, float]  # xyxy, pixels


class Detection(NamedTuple):
    category_id: int  # as in the training annotations
    name: str
    score: float
    box: Area  # pixels of the image

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("Detection", name)


def draw(image: Image.Image, detections: Sequence[Detection], enlarge: bool = True) -> Image.Image:
    """Returns a copy of the image with boxes, names and scores; one colour per class. enlarge: scale a tiny image up by
    a whole number."""
    zoom = max(1, round(VIEW / max(image.size))) if enlarge else 1
    size = (image.width * zoom, image.height * zoom)
    drawn = image.resize(size, Image.Resampling.BICUBIC) if zoom > 1 else image.copy()
    pen = ImageDraw.Draw(drawn)
    unit = max(drawn.size) / VIEW
    boxes = [(x1 * zoom, y1 * zoom, x2 * zoom, y2 * zoom) for x1, y1, x2, y2 in (each.box for each in detections)]
    texts = [fitting_text(each, max(10.0, 14 * unit), drawn.width) for each in detections]
    labels = place_labels(boxes, [(each.right + 2 * MARGIN, each.bottom + MARGIN) for each in texts], drawn.size)
    colours = [_colour(each.category_id) for each in detections]
    for box, colour in reversed([*zip(boxes, colours)]):  # the best on top
        pen.rectangle(box, outline=colour, width=max(2, round(2 * unit)))
    for (x, y, right, bottom), text, colour in reversed([*zip(labels, texts, colours)]):
        pen.rectangle((x, y, right, bottom), fill=colour)
        pen.bitmap((round(x) + MARGIN + text.left, round(y) + text.top), text.ink, fill="black")
    return drawn


def place_labels(boxes: list[Area], sizes: list[tuple[float, float]], image: tuple[int, int]) -> list[Area]:
    """Returns the area of each label: inside the image, and off the earlier labels if a place next to or in a corner of
    its box allows that. sizes: (width, height) of the labels; image: (width, height)."""
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
        placed[i] = areas[np.argmin(_hidden(areas, placed[:i]))]  # of equal ones the first
    return [(x1, y1, x2, y2) for x1, y1, x2, y2 in placed.tolist()]


def _hidden(areas: np.ndarray[Any, Any], placed: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels (n,) of other labels that each of the areas (n, 4) would cover."""
    corners = np.minimum(areas[:, None, 2:], placed[None, :, 2:]) - np.maximum(areas[:, None, :2], placed[None, :, :2])
    widths, heights = np.maximum(corners, 0).transpose(2, 0, 1)
    return np.asarray((widths * heights).sum(axis=1))


def fitting_text(detection: Detection, size: float, width: int) -> RenderedText:
    """Renders name and score, and cuts the name if the image is too narrow for it. size: of the font."""
    name = detection.name
    text = rendered(f"{name} {detection.score:.2f}", detection.name, size)
    while len(name) > 1 and text.right > width - 1 - 2 * MARGIN:
        name = name[:-1]
        text = rendered(f"{name}... {detection.score:.2f}", detection.name, size)
    return text


@cache
def _colour(category_id: int) -> tuple[int, int, int]:
    """Bright colours, far apart for neighbouring ids (golden-ratio steps around the hue circle)."""
    red, green, blue = colorsys.hsv_to_rgb(category_id * 0.618034 % 1.0, 0.65, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)


def save_drawn(
    image: Image.Image | np.ndarray[Any, Any], detections: Sequence[Detection], target: Path, crops: Path | None = None
) -> None:
    """Writes the image with boxes and, if `crops` is given, the content of each box to that folder. Raises OSError."""
    image = image if isinstance(image, Image.Image) else Image.fromarray(image)
    save_jpeg(draw(image, detections), target)
    if crops is not None:
        save_crops(image, detections, crops)


def save_jpeg(image: Image.Image, target: Path) -> None:
    with atomic_write(target) as beside:
        image.save(beside, format="JPEG", quality=92)


def save_crops(image: Image.Image, detections: Sequence[Detection], folder: Path) -> None:
    """Writes the content of each detection's box as 1.jpg, 2.jpg, ..., in their order, and removes those of an earlier
    run beyond them. Raises OSError."""
    remove_crops(folder, len(detections))
    for number, (x1, y1, x2, y2) in enumerate((each.box for each in detections), start=1):
        save_jpeg(image.crop((floor(x1), floor(y1), ceil(x2), ceil(y2))), folder / f"{number}.jpg")


def remove_crops(folder: Path, beyond: int = 0) -> None:
    for earlier in folder.glob("*.jpg"):
        if earlier.stem.isdecimal() and int(earlier.stem) > beyond:
            earlier.unlink()
