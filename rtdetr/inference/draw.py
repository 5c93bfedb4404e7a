"""Detections as people see them: boxes with names and scores on a picture."""

from __future__ import annotations

import colorsys
from typing import Any, NamedTuple

from PIL import Image, ImageDraw, ImageFont


class Detection(NamedTuple):
    category_id: int  # as in the training annotations
    name: str
    score: float
    box: tuple[float, float, float, float]  # xyxy, pixels of the picture


def draw(picture: Image.Image, detections: list[Detection]) -> Image.Image:
    """A copy of the picture with boxes, names and scores on it; one colour per class."""
    drawn = picture.copy()
    pen = ImageDraw.Draw(drawn)
    unit = max(drawn.size) / 640
    font: Any = ImageFont.load_default(size=max(10.0, 14 * unit))
    for detection in reversed(detections):  # the best ones on top
        colour = _colour(detection.category_id)
        x1, y1, x2, y2 = detection.box
        left, right, top, bottom = min(x1, x2), max(x1, x2), min(y1, y2), max(y1, y2)
        pen.rectangle((left, top, right, bottom), outline=colour, width=max(2, round(2 * unit)))
        text = f"{detection.name} {detection.score:.2f}"
        area = pen.textbbox((0, 0), text, font=font)
        text_top = max(0.0, top - area[3] - 2)
        pen.rectangle((left, text_top, left + area[2] + 4, text_top + area[3] + 2), fill=colour)
        pen.text((left + 2, text_top), text, fill="black", font=font)
    return drawn


def _colour(category_id: int) -> tuple[int, int, int]:
    """Bright colours, far apart for neighbouring ids (golden-ratio steps around the hue circle)."""
    red, green, blue = colorsys.hsv_to_rgb(category_id * 0.618034 % 1.0, 0.65, 1.0)
    return round(red * 255), round(green * 255), round(blue * 255)
