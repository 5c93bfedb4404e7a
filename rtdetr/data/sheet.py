"""Draws a sheet of augmented training images, with their boxes and class names."""

from __future__ import annotations

import math
from collections.abc import Sequence

import cv2
import numpy as np
from PIL import Image, ImageDraw

from rtdetr.types import Batch

MOST_IMAGES, CELL, GAP = 16, 320, 4  # images per sheet; pixels of an image's longer side; pixels between images
COLOURS = ((230, 60, 60), (60, 200, 80), (80, 140, 255), (240, 190, 40), (200, 90, 230), (60, 210, 210))


def sheet_of(batches: Sequence[Batch], names: Sequence[str], most: int = MOST_IMAGES) -> Image.Image:
    """Draws the first images of training batches. names: class names by index."""
    places = [(batch, i) for batch in batches for i in range(len(batch.images))][:most]
    columns = math.ceil(math.sqrt(len(places)))
    cell = CELL + GAP
    sheet = Image.new("RGB", (columns * cell, math.ceil(len(places) / columns) * cell), "white")
    for number, (batch, i) in enumerate(places):
        pixels = np.ascontiguousarray(batch.images[i].permute(1, 2, 0).numpy())  # (h, w, 3) uint8
        count = batch.targets.counts[i]
        boxes = batch.targets.boxes_pixel[i, :count].tolist()
        labels = batch.targets.labels[i, :count].tolist()
        shown = _with_boxes(pixels, boxes, labels, names)
        sheet.paste(shown, (number % columns * cell, number // columns * cell))
    return sheet


def _with_boxes(
    pixels: np.ndarray, boxes: Sequence[Sequence[float]], labels: Sequence[int], names: Sequence[str]
) -> Image.Image:
    zoom = CELL / max(pixels.shape)
    height, width = (max(1, round(zoom * side)) for side in pixels.shape[:2])
    shown = Image.fromarray(cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA))
    pen = ImageDraw.Draw(shown)
    for box, label in zip(boxes, labels):
        colour = COLOURS[label % len(COLOURS)]
        pen.rectangle([zoom * each for each in box], outline=colour, width=2)
        text = names[label].encode("latin-1", "replace").decode("latin-1")  # Pillow's font has Latin-1 only
        left, top = zoom * box[0] + 2, zoom * box[1] + 2
        pen.rectangle(pen.textbbox((left, top), text), fill=colour)
        pen.text((left, top), text, fill="black")
    return shown
