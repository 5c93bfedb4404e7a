"""Detection in sources of any kind (single images, batches of tensors, lists of files), and its results, for use in
Python."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, overload
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.data_arguments import path_of
from rtdetr.data.images import MAX_MEGAPIXELS, read_image
from rtdetr.extras import optional
from rtdetr.foreign_names import no_attribute
from rtdetr.inference.detection_arrays import DetectionArrays
from rtdetr.inference.draw import Detection, draw
from rtdetr.inference.images import AnyImage, as_image, size_of
from rtdetr.inference.predictor import FileResult, Predictor
from rtdetr.inference.prefetch import batches
from rtdetr.inference.results import file_number, item_of
from rtdetr.inference.slicing import predict_sliced
from rtdetr.inference.sources import Item, Source
from rtdetr.inference.thresholds import Lowest
from rtdetr.outputs import unused_path
from rtdetr.wording import counted, reason_of

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
        return [*_of_files(predictor, source, threshold, batch_size)]
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


def _of_files(predictor: Predictor, source: Source, threshold: Lowest, batch_size: int) -> Iterator[Result]:
    """Yields results without images; `Result.image` reads them again."""
    files = source.files
    readers = predictor.readers(len(files))
    logger.debug("%d files are read by %s", len(files), readers)
    found = predictor.predict_files(
        files, batch_size, readers.threads, num_processes=readers.processes, threshold=threshold, with_images=False
    )
    for each, file in zip(found, files):
        if each.error and not source.tolerant:
            raise DataError(each.error)
        if each.error:
            logger.warning(each.error)
        hits = DetectionArrays.of(each.detections, predictor.classes)
        yield Result(Item(str(file), None, each.error, file), hits, each.size[::-1])


class Result:
    """The n detections of an image, best first. `len(result)` is n; iteration and `result[i]` give a Detection.

    boxes: (n, 4) float32 xyxy, pixels of the image. scores: (n,) float32. class_ids: (n,) int64, category ids of the
    data set. names: n class names. source: file, URL or kind of the input. width, height: of the image, pixels.
    error: message if a file of a folder could not be read, else empty.
    """

    def __init__(self, item: Item, hits: DetectionArrays, size: tuple[int, int] | None = None) -> None:
        """size: (height, width), if the item has no image."""
        self.source, self.error, self.hits = item.name, item.error, hits
        self.height, self.width = size or (size_of(item.image) if item.image is not None else (0, 0))
        # The file if there is one: the images of a folder would fill the memory.
        self._image: AnyImage | Path | None = item.file or item.image
        self.boxes, self.scores = hits.boxes, hits.scores

    @property
    def class_ids(self) -> NDArray[np.int64]:
        return self.hits.class_ids

    @property
    def names(self) -> list[str]:
        return self.hits.names

    @property
    def detections(self) -> list[Detection]:
        return self.hits.detections

    def __len__(self) -> int:
        return len(self.scores)

    @overload
    def __getitem__(self, index: int) -> Detection: ...

    @overload
    def __getitem__(self, index: slice) -> list[Detection]: ...

    def __getitem__(self, index: Any) -> Any:
        try:
            return self.hits[index]
        except IndexError as error:
            found = f"found {counted(len(self), 'object')}, got number {index}"
            raise IndexError(f"{found}; predict() of one image gives its Result, not a list") from error
        except TypeError as error:
            got = f"expected a number or a slice, got {type(index).__name__}"
            raise TypeError(f"{got}; boxes, scores and class_ids are arrays, which take masks") from error

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("Result", name)

    def __iter__(self) -> Iterator[Detection]:
        return iter(self.detections)

    def __repr__(self) -> str:
        if self.error:
            return f"Result({self.error})"
        found = ", ".join(f"{each.name} {each.score:.2f}" for each in self.detections[:5])
        more = ", ..." if len(self) > 5 else ""
        return f"Result({self.source}, {self.width} x {self.height}, {counted(len(self), 'object')}: {found}{more})"

    @property
    def image(self) -> Image.Image:
        """The RGB image as PIL, created at each access: a file is read again, an array or tensor is used in its current
        state. Raises DataError if the file is gone."""
        if isinstance(self._image, Path):
            return read_image(self._image, max_megapixels=max(MAX_MEGAPIXELS, self.width * self.height / 1e6))
        if self._image is None:
            raise ValueError(f"{self.source}: there is no image to show")
        return as_image(self._image)

    picture = image  # its name in version 0.1

    def draw(self) -> Image.Image:
        """Returns the image with boxes, names and scores; a tiny one is scaled up by a whole number."""
        return draw(self.image, self.detections)

    def save(self, path: str | os.PathLike[str] | None = None) -> Path:
        """Writes what `draw` returns in the format of the path's suffix, or `to_json` for .json, and returns the path.
        Default: NAME-detected.jpg in the working directory, with a number if that exists. Not to the source's file."""
        stem = Path(urlsplit(self.source).path).stem.replace(" ", "-") or "image"
        target = unused_path(Path(f"{stem}-detected.jpg"), ".jpg") if path is None else path_of("path", path)
        if os.path.exists(target) and os.path.exists(self.source) and os.path.samefile(target, self.source):
            raise DataError(f"{target}: the source would be replaced by its result; choose another path")
        try:
            if target.suffix.lower() == ".json":
                target.write_text(self.to_json(), encoding="utf-8")
            else:
                self.draw().save(target)
        except (OSError, ValueError) as error:  # ValueError: a suffix that PIL does not know
            raise DataError(f"{target}: cannot be written ({reason_of(error)})") from error
        return target

    def show(self) -> None:
        """Shows the drawn image in the notebook, or in the viewer of the system."""
        ipython = sys.modules.get("IPython")  # loaded in every notebook
        if ipython is not None and ipython.get_ipython() is not None:
            ipython.display.display(self.draw())
        else:
            self.draw().show()

    def _repr_png_(self) -> bytes | None:
        """Returns the PNG that a notebook shows for a result at the end of a cell."""
        if self.error:
            return None
        png = io.BytesIO()
        self.draw().save(png, format="PNG")
        return png.getvalue()

    def to_supervision(self) -> Any:
        """Returns supervision.Detections, with the names under data["class_name"]."""
        supervision = optional("supervision", "supervision", "to_supervision()")
        return supervision.Detections(
            xyxy=self.boxes.reshape(-1, 4),
            confidence=self.scores,
            class_id=self.class_ids,
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def to_hf(self) -> list[dict[str, Any]]:
        """Returns the format of transformers' object-detection pipeline: score, label, box (xmin, ymin, xmax, ymax)."""
        corners = ("xmin", "ymin", "xmax", "ymax")
        return [{"score": each.score, "label": each.name, "box": dict(zip(corners, each.box))} for each in self]

    def to_coco(self, image_id: int | None = None) -> list[dict[str, Any]]:
        """Returns COCO results: image_id, category_id, bbox (x, y, width, height in pixels) and score. image_id:
        default: the number in a file name such as COCO's (000000000139.jpg is 139), else 0."""
        number = (file_number(self.source) or 0) if image_id is None else image_id
        return [
            {
                "image_id": number,
                "category_id": each.category_id,
                "bbox": [each.box[0], each.box[1], each.box[2] - each.box[0], each.box[3] - each.box[1]],
                "score": each.score,
            }
            for each in self
        ]

    def to_json(self) -> str:
        """Returns the item that `rtdetr predict` writes to results.json, as text."""
        found = FileResult(self.source, None, self.detections, error=self.error, size=(self.width, self.height))
        return json.dumps(item_of(found))
