"""Detection with a checkpoint alone: it knows its model, classes and preprocessing."""

from __future__ import annotations

import colorsys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont, UnidentifiedImageError

from rtdetr.data.coco import DataError
from rtdetr.data.preprocess import as_rgb_array, preprocess
from rtdetr.engine.checkpoint import model_from_checkpoint
from rtdetr.models.postprocess import postprocess


class Detection(NamedTuple):
    category_id: int  # as in the training annotations
    name: str
    score: float
    box: tuple[float, float, float, float]  # xyxy, pixels of the picture


class Detector:
    """Finds objects in pictures.

    device: "cpu", "cuda" or a torch.device. threshold: lowest score that is reported. Raises CheckpointError.
    """

    def __init__(self, checkpoint: str | Path, device: torch.device | str = "cpu", threshold: float = 0.5) -> None:
        self.device = torch.device(device)
        self.threshold = threshold
        model, self.cfg, self.classes = model_from_checkpoint(checkpoint)
        self.model = model.to(self.device)

    @torch.inference_mode()
    def predict(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each picture of one batch, best first."""
        images = torch.stack([preprocess(picture, self.cfg.data.image_size) for picture in pictures])
        sizes = torch.tensor([(picture.height, picture.width) for picture in pictures], dtype=torch.float32)
        predictions = self.model(images.to(self.device))
        found = postprocess(predictions, sizes.to(self.device), self.cfg.eval.max_detections)
        return [
            [
                Detection(self.classes.category_ids[label], self.classes.names[label], score, tuple(box))
                for score, label, box in zip(*picture)
                if score >= self.threshold
            ]
            for picture in zip(found.scores.tolist(), found.labels.tolist(), found.boxes.tolist())
        ]

    def predict_files(
        self, files: Iterable[Path], batch_size: int = 8
    ) -> Iterator[tuple[Path, Image.Image, list[Detection]]]:
        """File, picture and detections, one after the other. Raises DataError for a file that is no picture."""
        remaining = iter(files)
        while batch := list(islice(remaining, batch_size)):
            pictures = [read_picture(file) for file in batch]
            yield from zip(batch, pictures, self.predict(pictures))


def read_picture(file: Path) -> Image.Image:
    """The picture as RGB, as evaluation sees it."""
    try:
        with Image.open(file) as opened:
            return Image.fromarray(as_rgb_array(opened))
    except (UnidentifiedImageError, OSError) as error:
        raise DataError(f"{file}: cannot be read as a picture ({str(error).splitlines()[0]})") from error


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
