"""Detects single images in batches: the next batch is read while the current one is processed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from rtdetr.data.images import read_bytes
from rtdetr.inference.draw import Detection

Returned = TypeVar("Returned")
Detect = Callable[[list[Image.Image]], list[list[Detection]]]
READERS = 4  # images that are decoded at once
PATIENCE = 0.002  # seconds between two checks whether the detector is free


class Answer(NamedTuple):
    """The size of an image in pixels, upright, and its detections."""

    width: int
    height: int
    detections: list[Detection]  # best first, of every score


class Batcher:
    """Detects in submitted files, in the order of arrival and up to `max_batch` images at a time.

    A batch takes all waiting files; it waits for more only while the previous batch is processed, so a single image is
    detected immediately. At most two batches of decoded images exist; the others wait as files.
    detect: images to detections, called from one thread. seen: receives the size of every batch.
    """

    def __init__(self, detect: Detect, max_batch: int, max_megapixels: float, seen: Callable[[int], None]) -> None:
        self.detect, self.max_batch, self.max_megapixels, self.seen = detect, max_batch, max_megapixels, seen
        self.files: queue.SimpleQueue[tuple[bytes, Future[Answer]] | None] = queue.SimpleQueue()  # in no batch yet
        self.readers = ThreadPoolExecutor(min(READERS, max_batch), "rtdetr-read")
        self.detector = ThreadPoolExecutor(1, "rtdetr-detect")
        self.thread = threading.Thread(target=self._run, name="rtdetr-batch", daemon=True)
        self.thread.start()

    def submit(self, data: bytes) -> Future[Answer]:
        """Returns the future answer for a file; it raises DataError if the image cannot be read."""
        answer: Future[Answer] = Future()
        self.files.put((data, answer))
        return answer

    def close(self) -> None:
        """Answers what was submitted, then ends the threads."""
        self.files.put(None)
        self.thread.join()
        self.readers.shutdown()
        self.detector.shutdown()

    def _run(self) -> None:
        at_work: Future[list[Answer]] = Future()
        at_work.set_result([])
        while True:
            batch, last = self._gather(at_work)
            wait([image for _, image in batch])
            wait([at_work])
            answers, images = [], []
            for answer, image in batch:
                if error := image.exception():
                    answer.set_exception(error)
                else:
                    answers.append(answer)
                    images.append(image.result())
            if images:
                self.seen(len(images))
                at_work = _submit(self.detector, self._detect, images)
                at_work.add_done_callback(partial(_deliver, answers))
            if last:
                return

    def _gather(self, at_work: Future[list[Answer]]) -> tuple[list[tuple[Future[Answer], Future[Image.Image]]], bool]:
        """Returns the next batch, whose images are being read, and whether it is the last one."""
        batch: list[tuple[Future[Answer], Future[Image.Image]]] = []
        while len(batch) < self.max_batch:
            try:
                file = self.files.get(timeout=None if not batch else 0 if at_work.done() else PATIENCE)
            except queue.Empty:
                if at_work.done():
                    break
                continue
            if file is None:
                return batch, True
            data, answer = file
            if answer.set_running_or_notify_cancel():
                batch.append((answer, _submit(self.readers, read_bytes, data, self.max_megapixels)))
        return batch, False

    def _detect(self, images: list[Image.Image]) -> list[Answer]:
        return [Answer(*image.size, found) for image, found in zip(images, self.detect(images))]


def _submit(pool: ThreadPoolExecutor, call: Callable[..., Returned], *arguments: Any) -> Future[Returned]:
    """The future result of a call, which raises the error of a system that has no more threads for the pool."""
    try:
        return pool.submit(call, *arguments)
    except RuntimeError as error:
        failed: Future[Returned] = Future()
        failed.set_exception(error)
        return failed


def _deliver(answers: list[Future[Answer]], done: Future[list[Answer]]) -> None:
    """Passes the answers of a batch, or its error, to the futures."""
    error = done.exception()
    for number, answer in enumerate(answers):
        if error is None:
            answer.set_result(done.result()[number])
        else:
            answer.set_exception(error)
