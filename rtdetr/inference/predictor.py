"""Detection from a checkpoint alone, which contains the model, its classes and its preprocessing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rtdetr.config import Config, ConfigError
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.images import Jpeg, ordinary_jpeg, read_pixels
from rtdetr.inference.deploy import CAPTURE_AT, Plan, build_detector, starting_gpu
from rtdetr.inference.detection_arrays import DetectionArrays
from rtdetr.inference.draw import Detection
from rtdetr.inference.images import (
    AnyImage,
    Batch,
    DevicePixels,
    DeviceTensors,
    FileBatch,
    HostPixels,
    Pixels,
    as_image,
    check_decoder,
)
from rtdetr.inference.prefetch import delayed, one_opencv_thread
from rtdetr.inference.processes import KeptImage, Readers, ReadingProcesses
from rtdetr.inference.reading import Task, working_folder
from rtdetr.inference.thresholds import Lowest, lowest_scores
from rtdetr.models.postprocess import EndToEnd
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Detections
from rtdetr.weights.load import model_from_checkpoint


class FileResult(NamedTuple):
    """The result of one file: an image with detections, or the error that prevented them."""

    file: Path | str  # str: a URL
    image: AnyImage | None  # None after an error, if a process keeps it, or if not requested
    detections: Sequence[Detection]
    best_score: float = 0.0  # of all detections, including those below the threshold
    error: str = ""
    size: tuple[int, int] = (0, 0)  # width, height of the image; (0, 0) after an error
    kept: KeptImage | None = None  # the image in the process that read it

    @property
    def as_pil(self) -> Image.Image | None:
        """The image converted to PIL, once per access."""
        return None if self.image is None else as_image(self.image)


MAX_SIZES = 256  # number of tensors of image sizes that are cached on the device
OF_NETWORKS = ("half", "graphs", "compile", "fuse_relu", "kernels")  # options that exported files do not take
AT_ONCE = 4  # largest number of images per task of a thread
File = Path | str
Read = Callable[[File], Any]  # returns Pixels, or a Jpeg if the device decodes; raises DataError


class PendingBatch(NamedTuple):
    """Detections on the host, complete once the event `done` has occurred."""

    found: Detections
    sizes: Tensor  # (B, 2)
    done: torch.cuda.Event | None


# Files, their pixels at the network's size, and for each file its image, None if not requested, or its error.
ReadImage = Pixels | KeptImage | DataError | None
Batches = Generator[tuple[list[File], Batch, Sequence[ReadImage]], None, None]


class Predictor:
    """Detects objects in images; thread-safe.

    device: "cpu", "cuda" or a torch.device. threshold: lowest score that is reported, 0 to 1, or one per class; None:
    those in the file, else 0.5. options: how the model runs, see `deploy.Plan`; default: folded, on a GPU in float16
    and with CUDA graphs.
    Raises CheckpointError, ConfigError, also for unsupported options, or ValueError for the threshold.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        device: torch.device | str = "cpu",
        threshold: Lowest | None = None,
        **options: Any,
    ) -> None:
        with starting_gpu(torch.device(device)):
            self._set_up(model_from_checkpoint(checkpoint), device, threshold, options, in_place=True)

    @classmethod
    def of(
        cls,
        model: Network | EndToEnd,
        cfg: Config,
        classes: Classes,
        device: torch.device | str = "cpu",
        threshold: Lowest | None = None,
        in_place: bool = False,
        **options: Any,
    ) -> Predictor:
        """Creates a predictor from a model, which is not changed unless fold=False. An `EndToEnd` model, such as an
        exported file, takes none of OF_NETWORKS. in_place: a network may be changed, and cannot be used afterwards.
        Raises the errors of the class."""
        predictor = cls.__new__(cls)
        predictor._set_up((model, cfg, classes), device, threshold, options, in_place)
        return predictor

    def _set_up(
        self,
        opened: tuple[Network | EndToEnd, Config, Classes],
        device: torch.device | str,
        threshold: Lowest | None,
        options: dict[str, Any],
        in_place: bool,
    ) -> None:
        model, self.cfg, self.classes = opened
        if threshold is None:
            threshold = lowest_scores(self.classes)
        if not np.all((np.asarray(threshold) >= 0) & (np.asarray(threshold) <= 1)):  # NaN, too
            raise ValueError(f"threshold: expected a number in [0, 1], got {threshold}")
        asked = [name for name in OF_NETWORKS if options.get(name, "auto") not in ("auto", False)]
        if asked and isinstance(model, EndToEnd):
            raise ConfigError(f"{', '.join(asked)}: an exported file runs as it was exported; leave out this option")
        self.device, self.threshold = torch.device(device), threshold
        self.plan = Plan(**{"kernels": self.cfg.kernels, **options}).on(self.device)
        self.model, self._detect = build_detector(model, self.device, self.cfg.eval.max_detections, self.plan, in_place)
        self._upload = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._known_sizes: dict[bytes, Tensor] = {}
        self.processes = ReadingProcesses()  # started for the first long list
        if self.plan.decode == "device":
            check_decoder(self.device)

    def predict(self, images: Sequence[AnyImage], threshold: Lowest | None = None) -> list[list[Detection]]:
        """Detections of each image of one batch, best first. Boxes are clipped to the image; those outside it are
        dropped. threshold: for this call, instead of the predictor's. Thread-safe."""
        return [each.detections for each in self.find(images, threshold)]

    def find(self, images: Sequence[AnyImage] | Tensor, threshold: Lowest | None = None) -> list[DetectionArrays]:
        """Like `predict`. images: or a tensor (B, 3, H, W) uint8. Tensors on the predictor's device stay there."""
        if len(images) == 0:
            return []
        return self._reported(self._start(self._batch_of(images)), self.threshold if threshold is None else threshold)

    def predict_files(
        self,
        files: Iterable[File],
        batch_size: int = 8,
        num_threads: int | None = None,
        read: Read | None = None,
        num_processes: int = 0,
        threshold: Lowest | None = None,
        with_images: bool = True,
    ) -> Iterator[FileResult]:
        """Yields the result of each file in order. A file that is not an image is skipped and reported.

        read: returns the RGB pixels (H, W, 3) of a file; default: `read_file`.
        num_threads: threads that read the next batches during the current one; default: see `Readers.choose`.
        num_processes: processes that read instead, unless they serve another call. They do not share Python's lock, do
        not support `read`, and stay for the next call.
        threshold: for this call, instead of the predictor's. with_images: keep the images of results, here or in the
        process that read them. If the device decodes, threads only read, and results have no image.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size: expected a whole number from 1, got {batch_size}")
        if read is not None and num_processes:
            raise ValueError(f"read: only threads call it, expected num_processes=0, got {num_processes}")
        threshold = self.threshold if threshold is None else threshold
        num_threads = num_threads or Readers.choose().threads
        at_work = 1 if self._upload else 0  # batches left to the GPU while the next one is prepared
        if self.plan.decode == "device":
            begun = self._read_ahead(iter(files), batch_size, num_threads, read or self._read_stored, False)
        elif num_processes and self.processes.taken(num_processes):
            begun = self._read_by_processes(iter(files), batch_size, with_images)
        else:
            begun = self._read_ahead(iter(files), batch_size, num_threads, read or self.read_file, with_images)
        started = ((batch, images, self._start(pixels, ahead=True)) for batch, pixels, images in begun)
        try:
            for batch, images, pending in delayed(started, at_work):
                yield from self._found(batch, images, pending, threshold)
        finally:
            if self._upload is not None:
                self._upload.synchronize()  # it may still copy from memory that closing `begun` releases
            begun.close()

    def warm_up(self, batch_size: int = 1) -> None:
        """Does the work of the first calls with a batch size now: compiling, and capturing a CUDA graph."""
        images = torch.zeros(batch_size, 3, *self.cfg.data.image_size, dtype=torch.uint8, device=self.device)
        for _ in range(CAPTURE_AT + 1 if self._upload else 1):
            self.predict_tensors(images)
        if self._upload:
            torch.cuda.synchronize(self.device)

    def predict_tensors(self, images: Tensor, sizes: Tensor | None = None) -> Detections:
        """Scores, labels and boxes of every image, on the predictor's device, without threshold and not clipped.

        images: (B, 3, H, W) RGB on any device, uint8 or floats in [0, 1], already resized; sizes: (B, 2) height and
        width in pixels to which the boxes refer, default: H and W. Labels count from 0 in the order of `classes`.
        Raises ValueError for other shapes or types.
        """
        if not isinstance(images, Tensor):
            raise ValueError(f"images: expected a tensor (B, 3, H, W), got {type(images).__name__}")
        shape = images.shape
        if len(shape) != 4 or shape[1] != 3 or 0 in shape:
            raise ValueError(f"images: expected (B, 3, H, W), got {tuple(shape)}")
        if images.dtype != torch.uint8 and not images.is_floating_point():
            raise ValueError(f"images: expected uint8 or floats in [0, 1], got {images.dtype}")
        if sizes is None:
            sizes = torch.tensor([shape[2:]], dtype=torch.float32).expand(shape[0], 2)
        if sizes.shape != (shape[0], 2):
            raise ValueError(f"sizes: expected ({shape[0]}, 2) for so many images, got {tuple(sizes.shape)}")
        # Tensors of inference mode cannot leave it, and the model caches tensors; `half` alone sets the precision.
        with torch.inference_mode(False), torch.autocast(self.device.type, enabled=False), torch.no_grad():
            return self._detect(images.to(self.device), sizes.to(self.device, torch.float32))

    def _empty_batch(self, number: int, for_files: bool = False) -> FileBatch:
        there = self.plan.resize == "device" or (for_files and self.plan.decode == "device")
        kind, data = DevicePixels if there else HostPixels, self.cfg.data
        return kind(number, data.image_size, self._upload is not None, data.interpolation)

    def _batch_of(self, images: Sequence[AnyImage] | Tensor) -> Batch:
        """Builds a batch: from the tensors if all images are tensors on the device, else from pixels prepared on the
        host. A single array that needs no resize is copied to the device directly."""
        if (array := self._fitting(images)) is not None:
            planes = torch.from_numpy(array)[None].permute(0, 3, 1, 2)
            return DeviceTensors(planes.to(self.device, non_blocking=True), self.cfg.data.image_size)
        if self.plan.resize != "host" and all(map(self._stays, [images] if isinstance(images, Tensor) else images)):
            there = images if isinstance(images, Tensor) else [each for each in images if isinstance(each, Tensor)]
            return DeviceTensors(there, self.cfg.data.image_size, self.cfg.data.interpolation)
        batch = self._empty_batch(len(images))
        for i, image in enumerate(images):
            batch.put(i, image)
        return batch

    def _stays(self, image: AnyImage | Tensor) -> bool:
        """Whether an image is a tensor on this device; on a CPU, OpenCV resizes better than torch."""
        if not isinstance(image, Tensor) or image.device != self.device:
            return False
        return self._upload is not None or image.shape[-2:] == self.cfg.data.image_size

    def _fitting(self, images: Sequence[AnyImage] | Tensor) -> Pixels | None:
        """Returns the only image if it is an array of the network's size. Read-only arrays make torch warn."""
        if isinstance(images, Tensor) or len(images) > 1 or not isinstance(array := images[0], np.ndarray):
            return None
        usual = array.dtype == np.uint8 and array.flags.c_contiguous and array.flags.writeable
        fits = array.shape == (*self.cfg.data.image_size, 3) and self.plan.resize != "host"
        return array if usual and fits else None

    def _read_ahead(
        self, files: Iterator[File], batch_size: int, num_threads: int, read: Read, with_images: bool
    ) -> Batches:
        """Yields batches of files, their pixels and their images, read by threads. Starts enough batches in advance for
        every thread to have two more images to read."""
        pool = ThreadPoolExecutor(num_threads, "rtdetr-read")

        def begun() -> Iterator[tuple[list[File], Batch, list[Future[list[ReadImage]]]]]:
            while batch := list(islice(files, batch_size)):
                pixels = self._empty_batch(len(batch), for_files=True)
                step = max(1, min(AT_ONCE, len(batch) // num_threads))
                parts = ((read, batch[i : i + step], pixels, i, with_images) for i in range(0, len(batch), step))
                yield batch, pixels, [pool.submit(self._read, *part) for part in parts]

        try:
            with one_opencv_thread():
                for batch, pixels, reading in delayed(begun(), math.ceil(2 * num_threads / batch_size)):
                    yield batch, pixels, [image for part in reading for image in part.result()]
        finally:
            pool.shutdown(cancel_futures=True)

    def _read_by_processes(self, files: Iterator[File], batch_size: int, with_images: bool) -> Batches:
        """Like `_read_ahead`, by processes reserved with `taken`, which keep the images."""
        data, pinned = self.cfg.data, self._upload is not None
        task = Task(data.image_size, data.interpolation, data.max_megapixels, with_images, working_folder())
        with contextlib.closing(self.processes.batches(files, batch_size, task, pinned)) as batches:
            for names, pixels, outcomes in batches:
                batch = HostPixels(len(names), data.image_size, pinned, pixels=torch.from_numpy(pixels))
                batch.sizes.numpy()[:] = [size for size, _ in outcomes]
                yield names, batch, [image for _, image in outcomes]

    def readers(self, num_files: int) -> Readers:
        """Chooses what reads `num_files` files. If only torch can resize, processes would have to import it first."""
        suited = self.device.type == "cuda" and self.cfg.data.interpolation == "cubic" and self.plan.decode == "host"
        return Readers.choose(num_files, suited, bool(self.processes.running))

    def read_file(self, file: File) -> Pixels:
        """The RGB pixels of a file. Raises DataError."""
        path = file if isinstance(file, Path) else Path(file)  # creating a Path takes as long as opening the file
        return read_pixels(path, max_megapixels=self.cfg.data.max_megapixels)

    def _read_stored(self, file: File) -> Jpeg | Pixels:
        """Returns a JPEG as stored, the pixels of any other file. Raises DataError."""
        return ordinary_jpeg(Path(file), self.cfg.data.max_megapixels) or self.read_file(file)

    @staticmethod
    def _read(read: Read, files: list[File], batch: FileBatch, first: int, with_images: bool) -> list[ReadImage]:
        """Puts the pixels of files into the batch, and returns the images, None if not requested, or errors. After an
        error, the place in the batch is not written."""
        images: list[ReadImage] = []
        for index, file in enumerate(files, first):
            try:
                pixels = read(file)
            except DataError as error:
                images.append(error)
                continue
            batch.put(index, pixels)
            images.append(pixels if with_images else None)
        return images

    def _start(self, batch: Batch, ahead: bool = False) -> PendingBatch:
        """Starts detection in a batch; on a GPU it returns immediately. ahead: upload while the previous batch is
        processed."""
        if self._upload is None:
            return PendingBatch(self.predict_tensors(batch.on(self.device), batch.sizes), batch.sizes, None)
        here = torch.cuda.current_stream(self.device)
        if ahead and not isinstance(batch, DeviceTensors):  # DeviceTensors were created on this stream
            with torch.cuda.stream(self._upload):
                pixels, sizes = batch.on(self.device), batch.sizes.to(self.device, non_blocking=True)
            here.wait_stream(self._upload)
            for each in (pixels, sizes):
                each.record_stream(here)
        else:
            pixels, sizes = batch.on(self.device), self._sizes_of(batch)
        found = self.predict_tensors(pixels, sizes)
        on_host = (each.to("cpu", non_blocking=True) for each in found)  # in pinned memory
        return PendingBatch(Detections(*on_host), batch.sizes, here.record_event())

    def _sizes_of(self, batch: Batch) -> Tensor:
        """(B, 2) on the device; known sizes are cached there, as copying them takes as long as copying an image."""
        key = batch.sizes.numpy().tobytes()
        there = self._known_sizes.get(key)
        if there is None:
            if len(self._known_sizes) >= MAX_SIZES:
                self._known_sizes.clear()
            there = self._known_sizes[key] = batch.sizes.to(self.device)
        return there

    def _reported(self, pending: PendingBatch, threshold: Lowest) -> list[DetectionArrays]:
        """Detections of each image that reach the threshold, clipped; waits for the GPU."""
        if pending.done is not None:
            pending.done.synchronize()
        # in NumPy, as torch would start threads that compete with the readers
        scores, labels, boxes = (each.numpy() for each in pending.found)
        ends = pending.sizes.numpy()[:, None, [1, 0, 1, 0]]  # width, height, width, height
        boxes = np.minimum(np.maximum(boxes, 0), ends)  # several times as fast as clip
        inside = (boxes[..., 0] < boxes[..., 2]) & (boxes[..., 1] < boxes[..., 3])
        lowest = threshold[labels] if isinstance(threshold, np.ndarray) else threshold
        shown = inside & (scores.astype(np.float64) >= lowest)  # in float64, as the threshold was given
        best = scores.max(axis=1, initial=0, where=inside).tolist()
        return [
            DetectionArrays(
                boxes[i].compress(each, 0), scores[i].compress(each), labels[i].compress(each), self.classes, best[i]
            )
            for i, each in enumerate(shown)
        ]

    def _found(
        self, files: list[File], images: Sequence[ReadImage], pending: PendingBatch, threshold: Lowest
    ) -> Iterator[FileResult]:
        sizes = pending.sizes.int().tolist()
        for file, image, (height, width), hits in zip(files, images, sizes, self._reported(pending, threshold)):
            if isinstance(image, DataError):
                yield FileResult(file, None, [], error=str(image))
            elif isinstance(image, KeptImage):
                yield FileResult(file, None, hits, hits.best, size=(width, height), kept=image)
            else:
                yield FileResult(file, image, hits, hits.best, size=(width, height))
