"""Images and boxes of a detection data set in flat arrays, independent of the format they were read from."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.box_checks import judge_boxes, judge_copies
from rtdetr.data.classes import Classes, DataError, Match, match_classes, shown
from rtdetr.data.defects import MOST_DROPPED, WITHOUT_AREA, Defect, Names, Refused, condensed, count_dropped, refusal
from rtdetr.data.formats.document import BoxTable, CocoDocument, as_table, classes_of, file_names
from rtdetr.data.formats.records import DataSource
from rtdetr.data.image_files import judge_names, unreadable
from rtdetr.data.images import read_image, read_pixels, upright_size
from rtdetr.types import ImageInfo
from rtdetr.wording import counted


class DetectionSet:
    """Images, boxes and classes of one document.

    source: where it was read; its `images` is the folder that file names are relative to. classes: None uses those of
    the document; otherwise boxes get the index of their category in `classes`, matched by id or name as `match` says.
    drop_empty: leave out images without boxes. limit: the largest share of images, and of boxes, that may be dropped
    because of defects; None: no limit. Crowd boxes are left out and counted. Boxes are clipped to their image; those
    without area in it are dropped and counted. The attribute `defects` lists every defect found.

    All data is kept in flat numpy arrays and one bytes object. Python objects per box would be copied into every forked
    worker as soon as their reference counts change, and host memory would grow throughout the run. Clears the
    document's BoxTable, the largest object in memory. Raises DataError if the set is unusable or no image is left.
    """

    def __init__(
        self,
        document: CocoDocument,
        source: DataSource,
        classes: Classes | None = None,
        drop_empty: bool = False,
        match: Match = "id",
        limit: float | None = MOST_DROPPED,
    ) -> None:
        folder, path = source.images, source.path
        if folder is None or not folder.is_dir():
            raise Refused(folder, "folder_missing", f"no such image folder, expected the images of {path}")
        self.folder, self.annotation_file = folder, path
        self.origin = source  # to read the annotations again, for evaluation
        self.max_megapixels = source.max_megapixels
        self.notes = document.notes  # on how the annotations were read, for the summary
        self.defects, self.tally = [*document.defects], document.tally
        own = classes_of(document.categories)
        self.classes = own if classes is None else match_classes(own, classes, match, path)
        names = self._keep_images(document.images)
        self._keep_boxes(document, names)
        self.num_empty = int((self.boxes_per_image() == 0).sum())
        if limit is not None:
            self.refuse_losses(limit, except_kinds=WITHOUT_AREA)
            self.defects = condensed(self.defects)
        if drop_empty:
            names = self._drop_empty(names)
        if not names and limit is not None:
            raise DataError(f"{path}: no image is left to work on")
        encoded = [os.fsencode(name) for name in names]
        self._names = b"".join(encoded)
        self._name_ends = np.cumsum([0, *map(len, encoded)])
        self.defects += _odd_names(own, path)

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
        yield from (self.folder / info.file_name for info in self.infos())

    def info(self, index: int) -> ImageInfo:
        height, width = self._sizes[index].tolist()
        name = os.fsdecode(self._names[self._name_ends[index] : self._name_ends[index + 1]])
        return ImageInfo(int(self._ids[index]), name, height, width)

    def infos(self) -> Iterator[ImageInfo]:
        """Yields `info` of every image."""
        return map(self.info, range(len(self)))

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
        empty = int((self.boxes_per_image() == 0).sum())
        without = f" ({empty} without boxes)" if empty else ""
        images, boxes = count_dropped(self.defects, except_kinds=WITHOUT_AREA)
        left_out = [
            counted(number, word, words)
            for number, word, words in (
                (self.num_empty if self.num_empty > empty else 0, "image without boxes", "images without boxes"),
                (self.num_crowd, "crowd box", None),
                (self.num_degenerate, "box without area", "boxes without area"),
                (images, "defective image", None),
                (boxes, "defective box", None),
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
        labels, counts = np.unique(self._labels[np.repeat(there, self.boxes_per_image())], return_counts=True)
        left = {self.classes.category_ids[label]: count for label, count in zip(labels.tolist(), counts.tolist())}
        names = dict(zip(self.classes.category_ids, self.classes.names))
        called = Names(str(self.annotation_file), str(self.folder), names)
        return refusal(called, defects, self.tally, left, limit, except_kinds)

    def _keep_images(self, images: Sequence[Mapping[str, Any]]) -> list[str]:
        """Fills ids and sizes with those of the images that can be opened, and returns their names."""
        names = file_names(images, self.folder)
        usable, defects = judge_names(self.folder, self.annotation_file, [each["id"] for each in images], names)
        self.defects += defects
        ids, sizes, kept = [], [], []
        for image, name, is_usable in zip(images, names, usable):
            if not is_usable:
                continue
            own, size = image["id"], (image["height"], image["width"])
            if not all(size):  # many files omit sizes; images are opened only to look them up
                try:
                    size = upright_size(self.folder / name, self.max_megapixels)
                except DataError as error:
                    self.defects.append(unreadable(self.folder / name, own, error))
                    continue
                what = f"image {own}: no height and width; the file says {size[1]} x {size[0]}"
                if self.origin.format != "labelstudio":  # which has sizes at boxes alone
                    self.defects.append(Defect(str(self.annotation_file), own, "image_size_missing", what, "kept"))
            ids.append(own)
            sizes.append(size)
            kept.append(name)
        self._ids, self._sizes = np.array(ids, np.int64), np.array(sizes, np.int32).reshape(-1, 2)
        return kept

    def _keep_boxes(self, document: CocoDocument, names: Sequence[str]) -> None:
        """Fills boxes, labels and offsets, ordered by image, and counts what was left out. names: of the images."""
        table = as_table(document.annotations)
        owner = _places(table.image_ids, self._ids)
        is_crowd = table.crowds > 0
        self.num_crowd = int(is_crowd.sum()) + document.num_boxless_crowds
        there = ~is_crowd & (owner >= 0)
        owner, table = owner[there], table.where(there)
        if isinstance(document.annotations, BoxTable):
            document.annotations.clear()
        labels = _places(table.category_ids, self.classes.category_ids).astype(np.int32)
        corners = table.numbers[:, :4]  # a copy that `where` made
        corners[:, 2:] += corners[:, :2]
        clipped, keep = clip_to_image(corners, self._sizes[owner])
        self.num_degenerate = int((~keep).sum())
        file = str(self.annotation_file)

        def called(i: int) -> tuple[int | str, str]:
            return table.name(i), f"annotation {table.name(i)} of {names[owner[i]]}"

        self.defects += judge_boxes(file, called, corners, self._sizes[owner], keep, self.origin.format == "yolo")
        order = np.flatnonzero(keep)[np.argsort(owner[keep], kind="stable")]
        self._boxes, self._labels = clipped[order], labels[order]
        self.defects += judge_copies(file, called, order, owner[order], self._labels, self._boxes)
        per_image = np.bincount(owner[keep], minlength=len(self._ids))
        self._offsets = np.concatenate(([0], np.cumsum(per_image)))

    def _drop_empty(self, names: Sequence[str]) -> list[str]:
        """Removes images without boxes and returns the names of those that remain."""
        keep = np.flatnonzero(self.boxes_per_image())
        self._ids, self._sizes = self._ids[keep], self._sizes[keep]
        self._offsets = np.concatenate(([0], self._offsets[keep + 1]))
        return [names[i] for i in keep.tolist()]


def clip_to_image(corners: NDArray[np.float64], sizes: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Clips boxes (n, 4) xyxy in pixels to their images of `sizes` (n, 2) h and w. Returns the clipped boxes and a mask
    (n,) of those with an area, the only ones that training and evaluation use."""
    clipped = np.asarray(np.clip(corners, 0, sizes[:, [1, 0, 1, 0]]), np.float32)
    return clipped, (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])


def _places(values: NDArray[np.int64], among: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
    """The index of each value in `among`, which contains it at most once; -1 if it is not there."""
    listed = np.array([max(each, -(2**63)) for each in among], np.int64)  # NO_ID is below int64; no value equals it
    if len(listed) == 0:
        return np.full(len(values), -1)
    order = np.argsort(listed, kind="stable")
    places = order[np.searchsorted(listed, values, sorter=order).clip(max=len(listed) - 1)]
    return np.where(listed[places] == values, places, -1)


def _odd_names(classes: Classes, path: Path) -> list[Defect]:
    """Defects of classes with a name that another one has, upper case and spaces around it apart, or with none."""
    found = []
    times = Counter(name.strip().casefold() for name in classes.names)
    for own, name in zip(classes.category_ids, classes.names):
        if not name.strip() or times[name.strip().casefold()] > 1:
            what = f"category {own} is called {shown(name)}"
            what += ", as another one is, upper case apart" if name.strip() else ""
            found.append(Defect(str(path), own, "class_name", what, "kept"))
    return found
