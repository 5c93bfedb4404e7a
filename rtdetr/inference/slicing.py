"""Small objects in large images: detects in the whole image and in overlapping tiles, and merges the boxes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from math import ceil
from numbers import Integral
from typing import NamedTuple

import torch

from rtdetr.data.classes import DataError
from rtdetr.inference.draw import Detection
from rtdetr.inference.images import AnyImage, crop, size_of
from rtdetr.inference.predictor import File, FileResult
from rtdetr.inference.prefetch import ahead

OVERLAP = 0.2  # share of a tile that its neighbour contains, too, so that no small object is cut in both
SAME_OBJECT = 0.5  # IoU from which two boxes of a class count as one

Predict = Callable[[list[AnyImage]], list[list[Detection]]]


class Slices(NamedTuple):
    """How images are cut: into tiles of a size, or into a grid of rows and columns."""

    size: tuple[int, int]  # (height, width) in pixels, or (rows, columns)
    is_grid: bool = False
    overlap: float = OVERLAP

    @classmethod
    def of(cls, text: str, overlap: float = OVERLAP) -> Slices:
        """Parses "640", the side of a tile, or "2x3", rows and columns. Raises DataError."""
        rows, cross, columns = text.lower().partition("x")
        if not cross and text.isdecimal():
            return cls(tile_size(int(text)), overlap=overlap)
        if not (rows.isdecimal() and columns.isdecimal() and 1 <= int(rows) <= 64 and 1 <= int(columns) <= 64):
            raise DataError(f"slices: expected the side of a tile in pixels, or ROWSxCOLUMNS up to 64, got {text!r}")
        return cls((int(rows), int(columns)), True, overlap)

    def tile(self, image: tuple[int, int]) -> tuple[int, int]:
        """Returns (h, w) in pixels of the tiles of an image of (width, height)."""
        if not self.is_grid:
            return self.size
        height, width = (_side(extent, number, self.overlap) for extent, number in zip(image[::-1], self.size))
        return height, width


def _side(extent: int, number: int, overlap: float) -> int:
    """Returns the side in pixels of `number` tiles that cover an extent."""
    side = ceil(extent / (number - (number - 1) * overlap))
    while len(_starts(extent, side, overlap)) > number:  # steps are whole pixels
        side += 1
    return side


def tile_size(slices: int | Sequence[int]) -> tuple[int, int]:
    """Returns (h, w) in pixels, from a number or a pair. Raises DataError."""
    sides = [*slices] if isinstance(slices, Sequence) else [slices, slices]
    whole = all(isinstance(side, Integral) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not whole or min(sides) < 16:
        raise DataError(f"slices: expected the side of a tile, or (height, width), from 16 pixels, got {slices!r}")
    return int(sides[0]), int(sides[1])


def tiles(size: tuple[int, int], tile: tuple[int, int], overlap: float = OVERLAP) -> list[tuple[int, int, int, int]]:
    """Areas xyxy in pixels that cover an image of (width, height), each as large as the tile (h, w) or the image."""
    columns, rows = _starts(size[0], tile[1], overlap), _starts(size[1], tile[0], overlap)
    return [(x, y, min(x + tile[1], size[0]), min(y + tile[0], size[1])) for y, x in product(rows, columns)]


def _starts(length: int, side: int, overlap: float) -> list[int]:
    step = max(1, round(side * (1 - overlap)))
    last = max(0, length - side)
    return [*range(0, last, step), last]


def predict_sliced(
    predict: Predict, image: AnyImage, tile: tuple[int, int], batch_size: int, overlap: float = OVERLAP
) -> list[Detection]:
    """Returns the detections of an image, best first. predict: for a batch of images; tile: (h, w) in pixels."""
    height, width = size_of(image)
    areas = tiles((width, height), tile, overlap)
    if len(areas) > 1:
        areas.append((0, 0, width, height))  # for objects larger than a tile
    found: list[Detection] = []
    for start in range(0, len(areas), batch_size):
        part = areas[start : start + batch_size]
        for (x, y, _, _), detections in zip(part, predict([crop(image, area) for area in part])):
            moved = [(each.box[0] + x, each.box[1] + y, each.box[2] + x, each.box[3] + y) for each in detections]
            found += [each._replace(box=box) for each, box in zip(detections, moved)]
    return merge(found)


def merge(detections: list[Detection]) -> list[Detection]:
    """Returns the detections without those that overlap a better one of their class, best first."""
    from torchvision.ops import batched_nms  # here, because torchvision takes as long as torch to import

    if not detections:
        return []
    boxes = torch.tensor([each.box for each in detections])
    scores = torch.tensor([each.score for each in detections])
    kept = batched_nms(boxes, scores, torch.tensor([each.category_id for each in detections]), SAME_OBJECT)
    return [detections[index] for index in kept.tolist()]


def predict_files_sliced(
    predict: Predict, files: Iterable[File], slices: Slices, batch_size: int, read: Callable[[File], AnyImage]
) -> Iterator[FileResult]:
    """Yields the result of each file in order. A file for which `read` raises DataError is skipped and reported.
    predict: for a batch of images."""

    def opened(file: File) -> FileResult:
        try:
            image = read(file)
            height, width = size_of(image)
            return FileResult(file, image, [], size=(width, height))
        except DataError as error:
            return FileResult(file, None, [], error=str(error))

    for found in ahead(map(opened, files), 2):
        if found.image is None:
            yield found
            continue
        tile = slices.tile(found.size)
        detections = predict_sliced(predict, found.image, tile, batch_size, slices.overlap)
        yield found._replace(detections=detections, best_score=max((each.score for each in detections), default=0.0))
