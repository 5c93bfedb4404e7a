"""TensorBoard: the numbers of metrics.csv, and a few validation images with their detections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from torch.utils.tensorboard import SummaryWriter

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.dataset import DetectionSet

IMAGES, SIDE = 6, 480  # images of the validation set, and pixels of their longer side
SURE = 0.3  # score of the detections that are drawn
OBJECT, FOUND = (40, 200, 80), (230, 40, 40)


class TensorBoard:
    """torch's SummaryWriter, replaced after a full disk, which ends its thread, or when the folder was moved
    away. purge_step: TensorBoard ignores older events from that step on."""

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), purge_step=purge_step)

    @contextmanager
    def writing(self) -> Iterator[SummaryWriter]:
        """Context manager: on exit, everything added inside is in the file. Raises OSError if writing fails."""
        try:
            if self._writer is None or not self._folder.is_dir():
                self._writer = SummaryWriter(str(self._folder))
            yield self._writer
            self._writer.flush()
        except OSError:
            self._writer = None
            raise

    def close(self) -> None:
        """Stops the writer thread. Raises OSError if writing fails."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()


def album(source: DetectionSet, classes: Classes, detections: Sequence[dict[str, Any]]) -> Iterator[Image.Image]:
    """A few images, always the same ones: objects green, detections red, with class and score. classes: of the
    detections, which are COCO results."""
    names = dict(zip(classes.category_ids, classes.names))
    for index in np.linspace(0, len(source) - 1, min(IMAGES, len(source))).astype(int).tolist():
        image_id = source.info(index).image_id
        try:
            image = source.image(index)
        except DataError:  # the evaluation has already reported it
            continue
        zoom = SIDE / max(image.size)
        shown = image.resize((max(1, round(image.width * zoom)), max(1, round(image.height * zoom))))
        pen = ImageDraw.Draw(shown)
        for box in source.targets(index)[0].tolist():
            pen.rectangle([zoom * each for each in box], outline=OBJECT, width=2)
        for found in detections:
            if found["image_id"] != image_id or found["score"] < SURE:
                continue
            left, top, width, height = (zoom * each for each in found["bbox"])
            pen.rectangle((left, top, left + max(0, width), top + max(0, height)), outline=FOUND, width=2)
            # Pillow's font has no characters beyond Latin-1.
            text = f"{names[found['category_id']]} {found['score']:.2f}".encode("latin-1", "replace")
            pen.text((left + 3, top + 1), text, fill=FOUND)
        yield shown
