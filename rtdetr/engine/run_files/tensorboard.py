"""What TensorBoard shows of a run: the numbers of metrics.csv, and a few validation images with what was found."""

from __future__ import annotations

import io
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.dataset import DetectionSet

IMAGES, SIDE = 6, 480  # images of the validation set, and pixels of their longer side
SURE = 0.3  # score of the detections that are drawn
OBJECT, FOUND = (40, 200, 80), (230, 40, 40)


class EventFile:
    """A file of events. torch's SummaryWriter has a thread write it, which a full disk ends for good.

    purge_step: what older files of the folder say from that step on no longer counts. Raises OSError.
    """

    def __init__(self, folder: Path, purge_step: int | None) -> None:
        self.path = folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_step is not None:
            started = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=purge_step, session_log=started))

    def add_numbers(self, iteration: int, numbers: Mapping[str, float]) -> None:
        """Raises OSError; the file stays whole."""
        self._add(iteration, [Summary.Value(tag=tag, simple_value=value) for tag, value in numbers.items()])

    def add_image(self, iteration: int, tag: str, image: Image.Image) -> None:
        """Raises OSError; the file stays whole."""
        packed = io.BytesIO()
        image.save(packed, "PNG")
        size = {"height": image.height, "width": image.width, "colorspace": 3}
        summary = Summary.Image(**size, encoded_image_string=packed.getvalue())
        self._add(iteration, [Summary.Value(tag=tag, image=summary)])

    def _add(self, iteration: int, values: Sequence[Summary.Value]) -> None:
        self._write(Event(wall_time=time.time(), step=iteration, summary=Summary(value=values)))

    def _write(self, event: Event) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)  # somebody may have moved it away
        with open(self.path, "ab") as file:
            size = file.tell()
            try:
                RecordWriter(file).write(event.SerializeToString())
                file.flush()
            except OSError:
                os.truncate(self.path, size)  # no half record: readers stop there
                raise


def album(source: DetectionSet, classes: Classes, detections: Sequence[dict[str, Any]]) -> Iterator[Image.Image]:
    """A few images, the same ones each time: objects green, detections red, with class and score. classes: those of
    the detections, which are COCO results."""
    names = dict(zip(classes.category_ids, classes.names))
    for index in np.linspace(0, len(source) - 1, min(IMAGES, len(source))).astype(int).tolist():
        image_id = source.info(index).image_id
        try:
            image = source.image(index)
        except DataError:  # the evaluation has said so
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
            text = f"{names[found['category_id']]} {found['score']:.2f}"
            pen.text((left + 3, top + 1), text.encode("latin-1", "replace"), fill=FOUND)  # Pillow's font knows no more
        yield shown
