"""Images and boxes of a detection data set in flat arrays, independent of the format they were read from."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.box_checks import judge_boxes, judge_copies
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.defects import (
    WITHOUT_AREA,
    Defect,
    Names,
    Refused,
    Totals,
    condensed,
    count_dropped,
    refusal,
)
from rtdetr.data.formats.records import DataSource
from rtdetr.data.image_files import judge_names, unreadable
from rtdetr.data.images import read_image, read_pixels, upright_size
from rtdetr.types import ImageInfo
from rtdetr.wording import counted


class ImageList(NamedTuple):
    """N images as the reader of a format returns them."""

    ids: Sequence[int]
    names: Sequence[str]  # file paths relative to the folder
    sizes: Sequence[tuple[int, int]]  # (h, w) in pixels; contains a 0 if the annotations give no size


class BoxList(NamedTuple):
    """n boxes in any order, as the reader of a format returns them."""

    images: Sequence[int] | NDArray[np.int64]  # index of each box's image in the list, 0..N-1
    labels: Sequence[int] | NDArray[np.int64]  # contiguous class indices
    corners: NDArray[np.float64]  # (n, 4) xyxy in pixels
    num_crowd: int  # crowd boxes, already removed
    record: Callable[[int], int | str] = int  # name of the i-th box in messages


class DetectionSet:
    """Images, boxes and classes of one annotation file.

    folder: the image folder. defects, tally: those of the reader, whose counts are of the whole file. drop_empty: leave
    out images without boxes. max_megapixels: larger images are dropped if their size has to be read from the file.
    limit: the largest share of images and of boxes that may be dropped; None: no limit. Boxes are clipped to their
    image; those without area in it are dropped and counted. The attribute `defects` lists every defect found.

    All data is kept in flat numpy arrays and one bytes object. Python objects per box would be copied into every forked
    worker as soon as their reference counts change, and host memory would grow throughout the run. Raises DataError if
    more than `limit` is dropped or if no image is left.
    """

    notes: tuple[str, ...] = ()  # remarks on how the annotations were read, for the summary

    origin: DataSource | Path  # to read the annotations again, for evaluation

    def __init__(
        self,
        folder: Path,
        annotation_file: Path,
        classes: Classes,
        images: ImageList,
        boxes: BoxList,
        defects: Sequence[Defect],
        tally: Totals,
        drop_empty: bool,
        max_megapixels: float,
        limit: float | None,
    ) -> None:
        self.folder = folder
        self.annotation_file = annotation_file
        self.origin = annotation_file
        self.classes = classes
        self.max_megapixels = max_megapixels
        self.defects, self.tally = [*defects], tally
        images, kept = self._present(images)
        self._ids = np.array(images.ids, np.int64)
        self._sizes = np.array(images.sizes, np.int32).reshape(-1, 2)
        self._keep_boxes(boxes, kept, images.names)
        self.num_empty = int((np.diff(self._offsets) == 0).sum())
        if limit is not None:
            self.refuse_losses(limit, except_kinds=WITHOUT_AREA)
            self.defects = condensed(self.defects)
        names = self._drop_empty(images.names) if drop_empty else list(images.names)
        if not names and limit is not None:
            raise DataError(f"{annotation_file}: no image is left to work on")
        encoded = [os.fsencode(name) for name in names]
        self._names = b"".join(encoded)
        self._name_ends = np.cumsum([0, *map(len, encoded)])

    @property
    def num_boxes(self) -> int:
        return len(self._boxes)

    def boxes_per_class(self) -> list[int]:
        """Number of boxes of each class, in the order of the classes."""
        return np.bincount(self._labels, minlength=len(self.classes)).tolist()

    def images_and_classes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct pairs of an image and a class that has boxes in it: image indices (n,) and class indices (n,)."""
        images = np.repeat(np.arange(len(self)), self.boxes_per_image())
        pairs = np.unique(images * len(self.classes) + self._labels)
        return pairs // len(self.classes), pairs % len(self.classes)

    def boxes_per_image(self) -> NDArray[np.int64]:
        """Number of boxes of each image (N,), in the order of the images."""
        return np.diff(self._offsets)

    def __len__(self) -> int:
        return len(self._ids)

    def files(self) -> Iterator[Path]:
        """Yields the annotation file, or folder, and the files of the images."""
        yield self.annotation_file
        yield from (self.folder / self.info(index).file_name for index in range(len(self)))

    def info(self, index: int) -> ImageInfo:
        height, width = self._sizes[index].tolist()
        name = os.fsdecode(self._names[self._name_ends[index] : self._name_ends[index + 1]])
        return ImageInfo(int(self._ids[index]), name, height, width)

    def image(self, index: int) -> Image.Image:
        """The RGB image, in the orientation in which its boxes were drawn. Raises DataError if the file is broken or
        its size differs from the annotated one."""
        info = self.info(index)
        image = read_image(self.folder / info.file_name, (info.height, info.width), self.max_megapixels)
        self._check_size(info, image.height, image.width)
        return image

    def pixels(self, index: int) -> NDArray[np.uint8]:
        """The pixels (h, w, 3) of `image`, read with a faster decoder if the file allows it."""
        info = self.info(index)
        pixels = read_pixels(self.folder / info.file_name, (info.height, info.width), self.max_megapixels)
        self._check_size(info, *pixels.shape[:2])
        return pixels

    def targets(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Boxes (n, 4) xyxy in pixels of the image and contiguous class indices (n,), as new arrays."""
        start, end = self._offsets[index], self._offsets[index + 1]
        return self._boxes[start:end].copy(), self._labels[start:end].astype(np.int64)

    def digest(self) -> str:
        """SHA-256 of all boxes, their classes and how many each image has, in hexadecimal."""
        parts = (self._boxes, self._labels, self._offsets)
        return hashlib.sha256(b"".join(each.tobytes() for each in parts)).hexdigest()

    def summary(self) -> str:
        """One line about the images and boxes that were read and left out."""
        empty = int((np.diff(self._offsets) == 0).sum())
        without = f" ({empty} without boxes)" if empty else ""
        gone = count_dropped(self.defects, except_kinds=WITHOUT_AREA)
        left_out = [
            counted(number, word, words)
            for number, word, words in (
                (self.num_empty if self.num_empty > empty else 0, "image without boxes", "images without boxes"),
                (self.num_crowd, "crowd box", None),
                (self.num_degenerate, "box without area", "boxes without area"),
                (gone.images, "defective image", None),
                (gone.boxes, "defective box", None),
            )
            if number
        ]
        parts = [f"{counted(len(self._boxes), 'box')} of {counted(len(self.classes), 'class')}"]
        parts += [f"left out: {', '.join(left_out)}"] if left_out else []
        return f"{self.annotation_file}: {counted(len(self), 'image')}{without}, {'; '.join([*parts, *self.notes])}"

    def _check_size(self, info: ImageInfo, height: int, width: int) -> None:
        if (height, width) != (info.height, info.width):
            raise DataError(
                f"{self.folder / info.file_name}: the image is {width} x {height} but {self.annotation_file} says "
                f"{info.width} x {info.height}, so its boxes cannot be trusted (resized later?)"
            )

    def refuse_losses(self, limit: float, except_kinds: Sequence[str] = ()) -> None:
        """Raises DataError if more than `limit` of the images or boxes is dropped, or all boxes of a class."""
        refused = self.refusal(self.defects, limit, except_kinds)
        if refused is not None:
            raise refused

    def refusal(
        self, defects: Sequence[Defect], limit: float, except_kinds: Sequence[str] = (), gone: Sequence[int] = ()
    ) -> Refused | None:
        """Why these defects make the set unusable; None if they do not. gone: indices of images to disregard."""
        there = np.ones(len(self), bool)
        there[np.array(gone, np.int64)] = False
        labels, counts = np.unique(self._labels[np.repeat(there, np.diff(self._offsets))], return_counts=True)
        left = {self.classes.category_ids[label]: count for label, count in zip(labels.tolist(), counts.tolist())}
        names = dict(zip(self.classes.category_ids, self.classes.names))
        called = Names(str(self.annotation_file), str(self.folder), names)
        return refusal(called, defects, self.tally, left, limit, except_kinds)

    def _present(self, images: ImageList) -> tuple[ImageList, NDArray[np.int64]]:
        """The images that can be opened, with their sizes, and their indices in the given list."""
        usable, defects = judge_names(self.folder, self.annotation_file, images.ids, images.names)
        self.defects += defects
        sizes, kept = [], []
        for i, (own, name, size) in enumerate(zip(images.ids, images.names, images.sizes)):
            if not usable[i]:
                continue
            if not all(size):  # many files omit sizes; images are opened only to look them up
                try:
                    size = upright_size(self.folder / name, self.max_megapixels)
                except DataError as error:
                    self.defects.append(unreadable(self.folder / name, own, error))
                    continue
                what = f"image {own}: no height and width; the file says {size[1]} x {size[0]}"
                self.defects.append(Defect(str(self.annotation_file), own, "image_size_missing", what, "kept"))
            sizes.append(size)
            kept.append(i)
        names = [images.names[i] for i in kept]
        return ImageList([images.ids[i] for i in kept], names, sizes), np.array(kept, np.int64)

    def _keep_boxes(self, boxes: BoxList, kept: NDArray[np.int64], names: Sequence[str]) -> None:
        """Fills boxes, labels and offsets, ordered by image, and counts what was left out. kept: indices of the usable
        images in the reader's list; names: their file names."""
        place = np.full(max(kept.max(initial=-1), np.max(boxes.images, initial=-1)) + 1, -1)
        place[kept] = np.arange(len(kept))
        owner = place[np.array(boxes.images, np.int64)]
        there = np.flatnonzero(owner >= 0)
        corners, labels = boxes.corners, np.array(boxes.labels, np.int32)
        if len(there) < len(owner):  # boxes of dropped images
            owner, corners, labels = owner[there], corners[there], labels[there]
        clipped, keep = clip_to_image(corners, self._sizes[owner])
        self.num_crowd, self.num_degenerate = boxes.num_crowd, int((~keep).sum())
        file = str(self.annotation_file)

        def called(i: int) -> tuple[int | str, str]:
            record = boxes.record(int(there[i]))
            return record, f"annotation {record} of {names[owner[i]]}"

        self.defects += judge_boxes(file, called, corners, self._sizes[owner], keep)
        order = np.flatnonzero(keep)[np.argsort(owner[keep], kind="stable")]
        self._boxes, self._labels = clipped[order], labels[order]
        self.defects += judge_copies(file, called, order, owner[order], self._labels, self._boxes)
        per_image = np.bincount(owner[keep], minlength=len(self._ids))
        self._offsets = np.concatenate(([0], np.cumsum(per_image)))

    def _drop_empty(self, names: Sequence[str]) -> list[str]:
        """Removes images without boxes and returns the names of those that remain."""
        keep = np.flatnonzero(np.diff(self._offsets) > 0)
        self._ids, self._sizes = self._ids[keep], self._sizes[keep]
        self._offsets = np.concatenate(([0], self._offsets[keep + 1]))
        return [names[i] for i in keep.tolist()]


def clip_to_image(corners: NDArray[np.float64], sizes: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Clips boxes (n, 4) xyxy in pixels to their images of `sizes` (n, 2) h and w. Returns the clipped boxes and a mask
    (n,) of those with an area, the only ones that training and evaluation use."""
    clipped = np.asarray(np.clip(corners, 0, sizes[:, [1, 0, 1, 0]]), np.float32)
    return clipped, (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
