"""Pictures and boxes of a detection set in a few flat arrays, whatever format they were read from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.classes import Classes, DataError, some
from rtdetr.data.formats.records import Source
from rtdetr.data.pictures import MAX_MEGAPIXELS, read_picture, read_pixels, upright_size
from rtdetr.types import ImageInfo


class PictureList(NamedTuple):
    """N pictures, as a format names them."""

    ids: Sequence[int]
    names: Sequence[str]  # files, relative to the folder
    sizes: Sequence[tuple[int, int]]  # (h, w) in pixels; a 0 where the annotations do not say


class BoxList(NamedTuple):
    """n boxes in any order, as a format gives them."""

    pictures: Sequence[int]  # which picture of the list each lies in, 0..N-1
    labels: Sequence[int]  # contiguous class indices
    corners: NDArray[np.float64]  # (n, 4) xyxy in pixels
    num_crowd: int  # left out already


class DetectionSet:
    """Pictures, boxes and classes of one annotation file.

    folder: where the pictures lie. drop_empty leaves out pictures without boxes. max_megapixels: larger pictures are
    refused. Boxes are clipped to their picture; those without area in it are left out and counted.

    Everything is kept in flat numpy arrays and one bytes object. Python objects per box would be copied into every
    forked worker as soon as it touches their reference counts, and host memory would grow through the whole run.
    Raises DataError for missing pictures, and when nothing is left.
    """

    notes: tuple[str, ...] = ()  # on how the annotations were read, for the summary

    origin: Source | Path  # to read the annotations again, for evaluation

    def __init__(
        self,
        folder: Path,
        annotation_file: Path,
        classes: Classes,
        pictures: PictureList,
        boxes: BoxList,
        drop_empty: bool = False,
        max_megapixels: float = MAX_MEGAPIXELS,
    ) -> None:
        self.folder = folder
        self.annotation_file = annotation_file
        self.origin = annotation_file
        self.classes = classes
        self.max_megapixels = max_megapixels
        self._check_files(pictures.names)
        self._ids = np.array(pictures.ids, np.int64)
        sizes = [
            # Optional in the wild. No file is opened where they are given.
            size if all(size) else upright_size(folder / name, max_megapixels)
            for name, size in zip(pictures.names, pictures.sizes)
        ]
        self._sizes = np.array(sizes, np.int32).reshape(-1, 2)
        self._keep_boxes(boxes)
        self.num_empty = int((np.diff(self._offsets) == 0).sum())
        names = self._drop_empty(pictures.names) if drop_empty else list(pictures.names)
        if not names:
            raise DataError(f"{annotation_file}: no picture is left to work on")
        encoded = [os.fsencode(name) for name in names]
        self._names = b"".join(encoded)
        self._name_ends = np.cumsum([0, *map(len, encoded)])

    def __len__(self) -> int:
        return len(self._ids)

    def info(self, index: int) -> ImageInfo:
        height, width = self._sizes[index].tolist()
        name = os.fsdecode(self._names[self._name_ends[index] : self._name_ends[index + 1]])
        return ImageInfo(int(self._ids[index]), name, height, width)

    def image(self, index: int) -> Image.Image:
        """The picture as RGB, in the orientation of its boxes. Raises DataError when the file is broken or has another
        size than the annotations say."""
        info = self.info(index)
        picture = read_picture(self.folder / info.file_name, (info.height, info.width), self.max_megapixels)
        self._check_size(info, picture.height, picture.width)
        return picture

    def pixels(self, index: int) -> NDArray[np.uint8]:
        """The pixels (h, w, 3) of `image`, from a faster decoder where the file allows it."""
        info = self.info(index)
        pixels = read_pixels(self.folder / info.file_name, (info.height, info.width), self.max_megapixels)
        self._check_size(info, *pixels.shape[:2])
        return pixels

    def targets(self, index: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Boxes (n, 4) xyxy in pixels of the picture and contiguous class indices (n,), as fresh arrays."""
        start, end = self._offsets[index], self._offsets[index + 1]
        return self._boxes[start:end].copy(), self._labels[start:end].astype(np.int64)

    def summary(self) -> str:
        """One line on what was read and what was left out."""
        empty = int((np.diff(self._offsets) == 0).sum())
        dropped = f", {self.num_empty} more without boxes left out" if self.num_empty > empty else ""
        return (
            f"{self.annotation_file}: {len(self)} pictures ({empty} without boxes{dropped}), {len(self._boxes)} boxes "
            f"of {len(self.classes)} classes; left out {self.num_crowd} crowd boxes and {self.num_degenerate} "
            "boxes without area" + "".join(f"; {note}" for note in self.notes)
        )

    def _check_size(self, info: ImageInfo, height: int, width: int) -> None:
        if (height, width) != (info.height, info.width):
            raise DataError(
                f"{self.folder / info.file_name}: the picture is {width} x {height} but {self.annotation_file} says "
                f"{info.width} x {info.height}, so its boxes cannot be trusted (resized later?)"
            )

    def _check_files(self, names: Sequence[str]) -> None:
        present = Folders(self.folder)
        missing = [name for name in names if name not in present]
        if missing:
            raise DataError(
                f"{self.folder / missing[0]}: no such picture; {len(missing)} of the {len(names)} in "
                f"{self.annotation_file} are missing, this is the first; {_where_else(self.folder, missing[0])}"
            )

    def _keep_boxes(self, boxes: BoxList) -> None:
        """Fills boxes, labels and offsets, by picture, and counts what was left out."""
        owner = np.array(boxes.pictures, np.int64)
        clipped, keep = clip_to_picture(boxes.corners, self._sizes[owner])
        self.num_crowd, self.num_degenerate = boxes.num_crowd, int((~keep).sum())
        order = np.argsort(owner[keep], kind="stable")
        self._boxes = clipped[keep][order]
        self._labels = np.array(boxes.labels, np.int32)[keep][order]
        per_picture = np.bincount(owner[keep], minlength=len(self._ids))
        self._offsets = np.concatenate(([0], np.cumsum(per_picture)))

    def _drop_empty(self, names: Sequence[str]) -> list[str]:
        """Leaves out pictures without boxes; the names that remain."""
        keep = np.flatnonzero(np.diff(self._offsets) > 0)
        self._ids, self._sizes = self._ids[keep], self._sizes[keep]
        self._offsets = np.concatenate(([0], self._offsets[keep + 1]))
        return [names[i] for i in keep.tolist()]


def clip_to_picture(corners: NDArray[np.float64], sizes: NDArray[Any]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The boxes (n, 4) xyxy in pixels cut to their pictures, of `sizes` (n, 2) h and w, and which of them (n,) have an
    area there. The others are left out of training and evaluation alike."""
    clipped = np.asarray(np.clip(corners, 0, sizes[:, [1, 0, 1, 0]]), np.float32)
    return clipped, (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])


def _where_else(folder: Path, name: str) -> str:
    """Advice on a picture that is not where it was looked for. Looks one folder up, beside and one folder down."""
    if Path(name).is_absolute():
        return "`file_name` is a whole path there: make it relative to the picture folder"
    roots = [root for root in (folder, folder.parent) if os.access(root, os.R_OK)]
    around = sorted(Path(each) for root in roots for each in os.scandir(root) if each.is_dir())
    near = [folder.parent, *around]
    right = [str(each) for each in near if (each / name).is_file()]
    if right:
        return f"did you mean the picture folder {some(right, 3)}?"
    plain = PureWindowsPath(name)  # takes / and \\ alike
    if (folder / plain.name).is_file():
        return f"{folder / plain.name} is there: remove the folder from `file_name`"
    if "\\" in name and (folder / plain.as_posix()).is_file():
        return "write `file_name` with / instead of \\"
    return "check the picture folder"


class Folders:
    """Which files lie below a folder. One listing per folder, not one look-up per file: network drives are slow."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._present: dict[Path, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        path = self.root / name
        if path.parent not in self._present:
            self._present[path.parent] = set(os.listdir(path.parent)) if os.path.isdir(path.parent) else set()
        return path.name in self._present[path.parent]
