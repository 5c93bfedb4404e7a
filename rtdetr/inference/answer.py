"""Detection in sources of any kind: single images, batches of tensors, lists of files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from rtdetr.data.classes import Classes, DataError
from rtdetr.inference.detection_arrays import DetectionArrays
from rtdetr.inference.images import AnyImage
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.prefetch import batches
from rtdetr.inference.result import Result
from rtdetr.inference.slicing import predict_sliced
from rtdetr.inference.sources import Item, Source
from rtdetr.inference.thresholds import Lowest

logger = logging.getLogger(__name__)


def results_of(
    predictor: Predictor, source: Source, threshold: Lowest, batch_size: int, tile: tuple[int, int] | None
) -> Result | list[Result] | Iterator[Result]:
    """Detects in a source, see `RTDETRv3.predict`. tile: (h, w) in pixels of tiles that are searched as well."""

    def detect(images: list[AnyImage]) -> list[DetectionArrays]:
        if tile is None:
            return predictor.find(images, threshold)
        search = partial(predict_sliced, partial(predictor.predict, threshold=threshold))
        return [DetectionArrays.of(search(image, tile, batch_size), predictor.classes) for image in images]

    if source.files and tile is None:
        return [*_of_files(predictor, source.files, threshold, batch_size, source.tolerant)]
    if source.batch is not None and tile is None:
        parts = source.batch.split(batch_size) if len(source.batch) > batch_size else [source.batch]
        found = [hits for part in parts for hits in predictor.find(part, threshold)]
        results: Iterator[Result] = map(Result, source.items, found)
    else:
        results = _one_by_one(detect, source.items, 1 if source.kind == "live" else batch_size, predictor.classes)
    if source.kind == "one":
        return next(results)
    return list(results) if source.kind == "list" else results


def _one_by_one(
    detect: Callable[[list[AnyImage]], list[DetectionArrays]], items: Iterator[Item], batch_size: int, classes: Classes
) -> Iterator[Result]:
    for batch in batches(items, batch_size):
        images = [item.image for item in batch if item.image is not None]
        found = iter(detect(images) if images else [])
        for item in batch:
            if item.image is None:
                logger.warning(item.error)
            yield Result(item, DetectionArrays.of([], classes) if item.image is None else next(found))


def _of_files(
    predictor: Predictor, files: Sequence[Path], threshold: Lowest, batch_size: int, tolerant: bool
) -> Iterator[Result]:
    """Yields results without images; `Result.image` reads them again."""
    readers = predictor.readers(len(files))
    logger.debug("%d files are read by %s", len(files), readers)
    found = predictor.predict_files(
        files, batch_size, readers.threads, num_processes=readers.processes, threshold=threshold, with_images=False
    )
    for each, file in zip(found, files):
        if each.error and not tolerant:
            raise DataError(each.error)
        if each.error:
            logger.warning(each.error)
        width, height = each.size
        item = Item(str(file), None, each.error, file)
        yield Result(item, DetectionArrays.of(each.detections, predictor.classes), (height, width))
