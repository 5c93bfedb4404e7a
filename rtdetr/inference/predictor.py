"""Detection with a checkpoint alone: it knows its model, classes and preprocessing."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from rtdetr.config import Config
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.pictures import read_pixels
from rtdetr.data.preprocess import as_rgb_array, resize_cubic, resize_cubic_there
from rtdetr.inference.ahead import one_opencv_thread
from rtdetr.inference.deploy import Plan, build_detector, waking
from rtdetr.inference.draw import Detection
from rtdetr.inference.processes import ReadingProcesses
from rtdetr.models.postprocess import EndToEnd
from rtdetr.models.rtdetrv3 import RTDETRv3, check_backend
from rtdetr.types import Detections
from rtdetr.weights.load import model_from_checkpoint

MAX_THREADS = 16  # that read files, unless more are asked for


class Found(NamedTuple):
    """What became of one file: a picture with detections, or the sentence why there is none."""

    file: Path | str  # str: an address
    picture: Image.Image | None  # None too where processes read it
    detections: list[Detection]
    best_score: float = 0.0  # of all detections, those below the threshold included
    error: str = ""
    size: tuple[int, int] = (0, 0)  # width, height of the picture, where it was searched whole


Picture = NDArray[np.uint8]  # (H, W, 3) RGB


class HostPixels:
    """A batch of pictures that get the network's size on the host.

    They lie in memory that a GPU copies from by itself, where there is one (`pinned`).
    """

    def __init__(self, number: int, size: tuple[int, int], pinned: bool) -> None:
        self.pixels = torch.empty(number, *size, 3, dtype=torch.uint8, pin_memory=pinned)
        self.sizes = torch.ones(number, 2, pin_memory=pinned)  # height, width of the pictures

    def put(self, index: int, picture: Picture) -> None:
        place = self.pixels[index].numpy()
        resize_cubic(picture, (place.shape[0], place.shape[1]), place)
        self.sizes[index].numpy()[:] = picture.shape[:2]

    def on(self, device: torch.device) -> Tensor:
        """(B, h, w, 3) uint8; a place without a picture holds anything."""
        return self.pixels.to(device, non_blocking=True)


class DevicePixels:
    """A batch of pictures that get the network's size on the device."""

    def __init__(self, number: int, size: tuple[int, int], pinned: bool) -> None:
        self.size, self.pinned = size, pinned
        self.pictures = [torch.zeros(1, 1, 3, dtype=torch.uint8)] * number  # (H, W, 3), each of its own size
        self.sizes = torch.ones(number, 2, pin_memory=pinned)

    def put(self, index: int, picture: Picture) -> None:
        self.pictures[index] = torch.empty(picture.shape, dtype=torch.uint8, pin_memory=self.pinned)
        self.pictures[index].numpy()[:] = picture
        self.sizes[index].numpy()[:] = picture.shape[:2]

    def on(self, device: torch.device) -> Tensor:
        """(B, h, w, 3) uint8; a place without a picture is black."""
        there = (each.to(device, non_blocking=True) for each in self.pictures)
        return torch.stack([resize_cubic_there(each, self.size) for each in there])


Pixels = HostPixels | DevicePixels
File = Path | str
Read = Callable[[File], Picture]  # raises DataError


class Pending(NamedTuple):
    """Detections on the host, complete once `done` has happened."""

    found: Detections
    sizes: Tensor  # (B, 2)
    done: torch.cuda.Event | None


# Files, their pixels at the network's size, and their pictures, where they come along, or why there is none.
Batches = Generator[tuple[list[File], Pixels, Sequence[Image.Image | DataError | None]], None, None]


def _when_read(
    files: list[File], pixels: Pixels, reading: list[Future[Image.Image | DataError]]
) -> tuple[list[File], Pixels, list[Image.Image | DataError]]:
    return files, pixels, [each.result() for each in reading]


class Predictor:
    """Finds objects in pictures.

    device: "cpu", "cuda" or a torch.device. threshold: lowest score that is reported, 0 to 1. options: how the model
    runs, see `deploy.Plan`; by default folded, on a GPU in float16 and with CUDA graphs.
    Raises CheckpointError, ConfigError, also for options that cannot be had, or ValueError for the threshold.
    """

    def __init__(
        self, checkpoint: str | Path, device: torch.device | str = "cpu", threshold: float = 0.5, **options: Any
    ) -> None:
        with waking(torch.device(device)):
            self._set_up(*model_from_checkpoint(checkpoint), device, threshold, options, in_place=True)

    @classmethod
    def of(
        cls,
        model: RTDETRv3 | EndToEnd,
        cfg: Config,
        classes: Classes,
        device: torch.device | str = "cpu",
        threshold: float = 0.5,
        **options: Any,
    ) -> Predictor:
        """The predictor of a model at hand, which is left as it is, unless fold=False; what detects by itself, an
        exported file, say, runs without options. Raises as the class does."""
        predictor = cls.__new__(cls)
        predictor._set_up(model, cfg, classes, device, threshold, options)
        return predictor

    def _set_up(
        self,
        model: RTDETRv3 | EndToEnd,
        cfg: Config,
        classes: Classes,
        device: torch.device | str,
        threshold: float,
        options: dict[str, Any],
        in_place: bool = False,
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: expected a number in [0, 1], got {threshold}")
        self.device, self.threshold = torch.device(device), threshold
        self.cfg, self.classes = cfg, classes
        check_backend(cfg.model, self.device)
        self.plan = Plan(**options).on(self.device)
        self.model, self._detect = build_detector(model, self.device, cfg.eval.max_detections, self.plan, in_place)
        self._upload = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def predict(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each picture of one batch, best first. Boxes end where the picture ends; what lies wholly
        outside is left out."""
        if not pictures:
            return []
        batch = self._empty_batch(len(pictures))
        for i, picture in enumerate(pictures):
            batch.put(i, as_rgb_array(picture))
        return [detections for detections, _ in self._reported(self._start(batch))]

    def predict_files(
        self,
        files: Iterable[File],
        batch_size: int = 8,
        num_threads: int | None = None,
        read: Read | None = None,
        num_processes: int = 0,
    ) -> Iterator[Found]:
        """One after the other. A file that is no picture costs that file alone.

        read: makes RGB pixels (H, W, 3) of each, by default of a file.
        num_threads: that read the next batches while the present one is at work; by default one per processor, at most
        MAX_THREADS.
        num_processes: that do so instead; they do not share Python's lock, and what is found comes without its picture.
        """
        num_threads = num_threads or min(MAX_THREADS, os.cpu_count() or 1)
        waiting: deque[tuple[list[File], Sequence[Image.Image | DataError | None], Pending]] = deque()
        at_work = 1 if self._upload else 0  # batches left to the GPU while the next one is prepared
        begun = self._read_ahead(iter(files), batch_size, num_threads, read or self.read_file)
        if num_processes:
            begun = self._read_by_processes(iter(files), batch_size, num_processes, read or self.read_file)
        try:
            for batch, pixels, pictures in begun:
                waiting.append((batch, pictures, self._start(pixels)))
                while len(waiting) > at_work:
                    yield from self._found(*waiting.popleft())
            while waiting:
                yield from self._found(*waiting.popleft())
        finally:
            begun.close()

    def predict_tensors(self, images: Tensor, sizes: Tensor | None = None) -> Detections:
        """Scores, labels and boxes of every picture, on the predictor's device, without threshold and not clipped.

        images: (B, 3, H, W) RGB on any device, uint8 or floats in [0, 1], resized already; sizes: (B, 2) height and
        width in pixels that the boxes shall refer to, by default H and W. Labels count from 0 in the order of
        `classes`. Raises ValueError for other shapes or types.
        """
        if images.dim() != 4 or images.shape[1] != 3 or 0 in images.shape:
            raise ValueError(f"images: expected (B, 3, H, W), got {tuple(images.shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images: expected uint8 or floats in [0, 1], got {images.dtype}")
        if sizes is None:
            sizes = torch.tensor([images.shape[2:]], dtype=torch.float32).expand(len(images), 2)
        if sizes.shape != (len(images), 2):
            raise ValueError(f"sizes: expected ({len(images)}, 2) for so many images, got {tuple(sizes.shape)}")
        if torch.is_inference_mode_enabled():  # what is made in it stays in it, and much is kept here from call to call
            with torch.inference_mode(False):
                return self.predict_tensors(images, sizes)
        with torch.no_grad():
            return self._detect(images.to(self.device), sizes.to(self.device, torch.float32))

    def _empty_batch(self, number: int) -> Pixels:
        kind = HostPixels if self.plan.resize == "host" else DevicePixels
        return kind(number, self.cfg.data.image_size, pinned=self._upload is not None)

    def _read_ahead(self, files: Iterator[File], batch_size: int, num_threads: int, read: Read) -> Batches:
        """Batches of files, what becomes of their pixels and the pictures; so many are begun before the first one is
        asked for that every thread has two pictures to go on with."""
        begun: deque[tuple[list[File], Pixels, list[Future[Image.Image | DataError]]]] = deque()
        pool = ThreadPoolExecutor(num_threads, "rtdetr-read")
        try:
            with one_opencv_thread():
                while batch := list(islice(files, batch_size)):
                    pixels = self._empty_batch(len(batch))
                    reading = [pool.submit(self._read, read, file, pixels, i) for i, file in enumerate(batch)]
                    begun.append((batch, pixels, reading))
                    if len(begun) > math.ceil(2 * num_threads / batch_size):
                        yield _when_read(*begun.popleft())
                while begun:
                    yield _when_read(*begun.popleft())
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_by_processes(self, files: Iterator[File], batch_size: int, num_processes: int, read: Read) -> Batches:
        """`_read_ahead` without the pictures themselves."""
        size = self.cfg.data.image_size
        with ReadingProcesses(num_processes, batch_size, size, read) as processes:
            for batch, pixels, results in processes.batches(files):
                kept = HostPixels(len(batch), size, pinned=self._upload is not None)
                kept.pixels.numpy()[:] = pixels
                for i, result in enumerate(results):
                    if not isinstance(result, DataError):
                        kept.sizes[i].numpy()[:] = result
                yield batch, kept, [each if isinstance(each, DataError) else None for each in results]

    def read_file(self, file: File) -> Picture:
        """The RGB pixels of a file. Raises DataError."""
        return read_pixels(Path(file), max_megapixels=self.cfg.data.max_megapixels)

    def _read(self, read: Read, file: File, pixels: Pixels, index: int) -> Image.Image | DataError:
        """The picture, after its pixels were put in their place; a place without a picture stays as it is."""
        try:
            picture = read(file)
        except DataError as error:
            return error
        pixels.put(index, picture)
        return Image.fromarray(picture)

    def _start(self, batch: Pixels) -> Pending:
        """Detects in a batch; on a GPU this returns before anything is done."""
        if self._upload is None:
            images = batch.on(self.device).permute(0, 3, 1, 2)
            return Pending(self.predict_tensors(images, batch.sizes), batch.sizes, None)
        with torch.cuda.device(self.device):
            here = torch.cuda.current_stream()
            with torch.cuda.stream(self._upload):  # under the batch before
                pixels, sizes = batch.on(self.device), batch.sizes.to(self.device, non_blocking=True)
            here.wait_stream(self._upload)
            for each in (pixels, sizes):
                each.record_stream(here)
            found = self.predict_tensors(pixels.permute(0, 3, 1, 2), sizes)
            on_host = (torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in found)
            copied = [host.copy_(each, non_blocking=True) for host, each in zip(on_host, found)]
            return Pending(Detections(*copied), batch.sizes, here.record_event())

    def _reported(self, pending: Pending) -> list[tuple[list[Detection], float]]:
        """Detections of each picture that reach the threshold, clipped, and its best score; waits for the GPU."""
        if pending.done is not None:
            pending.done.synchronize()
        # by NumPy: torch would start threads that wait for one another, beside those that read
        scores, labels, boxes = (each.numpy() for each in pending.found)
        boxes = boxes.clip(0, np.tile(pending.sizes.numpy()[:, None, ::-1], 2))  # width, height, width, height
        inside = (boxes[..., :2] < boxes[..., 2:]).all(axis=-1)
        scores = scores.astype(np.float64)  # compared with the threshold as it was given
        shown = inside & (scores >= self.threshold)
        best = np.where(inside, scores, 0).max(axis=1, initial=0)
        ids, names = self.classes.category_ids, self.classes.names
        every = (
            Detection(ids[label], names[label], score, (x1, y1, x2, y2))
            for score, label, (x1, y1, x2, y2) in zip(*(each[shown].tolist() for each in (scores, labels, boxes)))
        )
        return [(list(islice(every, n)), score) for n, score in zip(shown.sum(axis=1).tolist(), best.tolist())]

    def _found(
        self, files: list[File], pictures: Sequence[Image.Image | DataError | None], pending: Pending
    ) -> Iterator[Found]:
        sizes = pending.sizes.int().tolist()
        for file, picture, (height, width), (detections, best) in zip(files, pictures, sizes, self._reported(pending)):
            if isinstance(picture, DataError):
                yield Found(file, None, [], error=str(picture))
            else:
                yield Found(file, picture, detections, best, size=(width, height))
