"""The output of a run: lines, a progress bar, and the rows of metrics.csv, also sent to loggers and callbacks."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from tqdm import tqdm

from rtdetr.config import config_to_dict
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import DetectionLoader
from rtdetr.data.sheet import sheet_of
from rtdetr.engine import distributed
from rtdetr.engine.callbacks import Listeners, Run
from rtdetr.engine.evaluation.evaluator import EvalResult
from rtdetr.engine.failures import writing_run_file
from rtdetr.engine.run_files.metrics import MetricsLog, read_rows, short_name
from rtdetr.engine.run_files.run_state import RunState
from rtdetr.engine.step_checks import StepRecord
from rtdetr.types import Batch

IMAGES, SIDE = 6, 480  # images of the validation set that are shown, and pixels of their longer side
SURE = 0.3  # score of the detections that are drawn
OBJECT, FOUND = (40, 200, 80), (230, 40, 40)


def say(*messages: str) -> None:
    """Prints lines above the progress bar, in the main process only."""
    for message in messages if distributed.is_main() else ():
        tqdm.write(message)


class TrainingLog:
    """Writes the log of a run between `open` and `close`, in the main process only."""

    def __init__(
        self, state: RunState, output_dir: Path, device: torch.device, loader: DetectionLoader, listeners: Listeners
    ) -> None:
        self.state, self.output_dir, self.device, self.loader = state, output_dir, device, loader
        self.listeners = listeners
        self.restart_clock()
        self._log_waits = False
        self._bar: tqdm[Any] | None = None
        self._metrics: MetricsLog | None = None

    def open(self) -> None:
        if not distributed.is_main():
            return
        state = self.state
        with writing_run_file(self.output_dir):
            resume_at, due = state.iteration or None, state.evaluation_due
            self._metrics = MetricsLog(self.output_dir, resume_at, state.saved_iteration, due)
            if (aside := self._metrics.aside) is not None:
                say(f"{self._metrics.path}: was not written by a run; renamed to {aside.name}, and a new one started")
        run = Run(
            state.cfg.name,
            self.output_dir,
            config_to_dict(state.cfg),
            self.loader.classes.names,
            state.iteration,
            state.total_iterations,
            read_rows(self._metrics.path),
            renumbered=state.iteration != state.saved_iteration,
        )
        self.listeners.tell("on_start", run)
        self._bar = tqdm(
            total=state.total_iterations,
            initial=state.iteration,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # few lines in a log file
            dynamic_ncols=True,
        )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

    def restart_clock(self) -> None:
        """Starts counting images per second and the time spent waiting for data."""
        self._since, self._images, self._waited = time.perf_counter(), 0, self.loader.seconds_waited

    def show(self, record: StepRecord, values: Mapping[str, float], unreadable: int) -> None:
        """values: losses by name, empty for a skipped step; unreadable: images so far."""
        self._images += sum(len(batch.infos) for batch in record.batches) * distributed.world_size()
        if self._bar is None:
            return
        self._bar.update()
        between = (record.iteration + 1) % self.state.cfg.train.log_every and record.iteration
        if between or not values:
            return
        seconds = time.perf_counter() - self._since
        speed, data_wait = self._images / seconds, (self.loader.seconds_waited - self._waited) / seconds
        self.restart_clock()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(self.device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        shown = {"lr": record.lr, "images_per_s": speed, "data_wait": data_wait, "memory_gib": memory}
        if unreadable:
            shown["unreadable"] = unreadable
        self._log("train", record.iteration + 1, {**values, **shown})
        self._bar.set_postfix_str(
            f"epoch {self.state.epoch + 1} loss {values['loss']:.3f} lr {record.lr:.1e} {speed:.1f} img/s "
            f"(data {data_wait:.0%}) {memory:.1f} GiB"
        )

    def show_batch(self, batch: Batch) -> None:
        """Writes train_batch.jpg at the start of a run and sends it to loggers and callbacks."""
        if self._metrics is None:
            return
        sheet, file = sheet_of([batch], self.loader.classes.names), self.output_dir / "train_batch.jpg"
        try:
            sheet.save(file)
        except OSError as error:
            say(f"{file}: cannot be written ({error.strerror or error})")
        self.listeners.tell("on_images", self.state.iteration, {"train_batch": sheet})

    def log_evaluation(self, result: EvalResult, source: DetectionSet, classes: Classes) -> None:
        """source, classes: of the evaluated images, with the ids of the detections."""
        if self._metrics is None:
            return
        existing = {name: None if value < 0 else value for name, value in result.figures.items()}  # COCO's -1
        self._log("eval", self.state.iteration, existing)
        if self.listeners.want_images:
            drawn = album(source, classes, result.detections)
            images = {f"images/{number}": image for number, image in enumerate(drawn)}
            self.listeners.tell("on_images", self.state.iteration, images)

    def _log(self, kind: str, iteration: int, values: Mapping[str, float | None]) -> None:
        """Writes a row of the log. On a full disk the row is kept for the next write, with one warning."""
        if self._metrics is None:
            return
        named = {short_name(name): value for name, value in values.items()}
        try:
            self._metrics.write(kind, iteration, self.state.epoch, named)
        except OSError as error:
            if not self._log_waits:
                why = f"cannot be written ({error.strerror or error}); rows are kept until there is room"
                say(f"{self._metrics.path}: {why}")
            self._log_waits = True
        else:
            self._log_waits = False
        existing = {name: value for name, value in named.items() if value is not None}
        event = "on_step" if kind == "train" else "on_evaluation"
        self.listeners.tell(event, iteration, self.state.epoch, existing)


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
