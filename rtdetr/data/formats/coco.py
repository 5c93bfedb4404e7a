"""COCO detection sets: the annotation file becomes a few flat arrays, and class indices stay tied to category ids."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.preprocess import as_rgb_array
from rtdetr.types import ImageInfo

logger = logging.getLogger(__name__)


class CocoDetection:
    """Pictures and boxes of one COCO detection JSON.

    images: the folder that `file_name` in the JSON is relative to. classes: None takes them from the JSON; otherwise
    boxes get the index of their category id in `classes`. drop_empty leaves out pictures without boxes.
    Crowd boxes and boxes without area inside their picture are left out and counted.

    Everything is kept in flat numpy arrays and one bytes object. Python objects per box would be copied into every
    forked worker as soon as it touches their reference counts, and host memory would grow through the whole run.
    Raises DataError for whatever is missing or contradicts itself in the files.
    """

    def __init__(
        self, images: str | Path, annotations: str | Path, classes: Classes | None = None, drop_empty: bool = False
    ) -> None:
        self.folder = Path(images)
        self.annotation_file = Path(annotations)
        document = _read_json(self.annotation_file)
        if not self.folder.is_dir():
            raise DataError(f"{self.folder}: no such picture folder, expected the pictures of {self.annotation_file}")
        own = _read_classes(document["categories"], self.annotation_file)
        if classes is not None:
            _check_same_classes(own, classes, self.annotation_file)
        self.classes = classes or own
        names = self._read_pictures(document["images"])
        self._read_boxes(document["annotations"], set(own.category_ids))
        self.num_empty = int((np.diff(self._offsets) == 0).sum())
        if drop_empty:
            names = self._drop_empty(names)
        if not names:
            raise DataError(f"{self.annotation_file}: no picture is left to work on")
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
        """The picture as RGB. Raises DataError when the file is broken or has another size than the annotations say."""
        info = self.info(index)
        path = self.folder / info.file_name
        try:
            with Image.open(path) as opened:
                picture = Image.fromarray(as_rgb_array(opened))
        except OSError as error:
            reason = str(error).splitlines()[0]
            raise DataError(f"{path}: cannot be read as a picture ({reason}); replace it or remove it") from error
        if picture.size != (info.width, info.height):
            raise DataError(
                f"{path}: the picture is {picture.width} x {picture.height} but {self.annotation_file} says "
                f"{info.width} x {info.height}, so its boxes cannot be trusted (rotated by EXIF, or resized later?)"
            )
        return picture

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
            "boxes without area"
        )

    def _read_pictures(self, images: Sequence[Mapping[str, Any]]) -> list[str]:
        """Fills ids and sizes; the file names, all of which exist."""
        ids, names, sizes = [], [], []
        for image in images:
            if type(image.get("id")) is not int or not isinstance(image.get("file_name"), str):
                raise DataError(
                    f"{self.annotation_file}: an image needs an integer `id` and a `file_name`, got {image}"
                )
            ids.append(image["id"])
            names.append(image["file_name"])
            sizes.append((image.get("height") or 0, image.get("width") or 0))
        self._ids = np.array(ids, np.int64)
        if len(np.unique(self._ids)) < len(ids):
            twice = int(np.flatnonzero(np.bincount(np.unique(self._ids, return_inverse=True)[1]) > 1)[0])
            raise DataError(f"{self.annotation_file}: image id {np.unique(self._ids)[twice]} is given twice")
        self._check_files(names)
        for i, (height, width) in enumerate(sizes):
            if not height or not width:  # optional in the wild; the header of the file knows
                with Image.open(self.folder / names[i]) as opened:
                    sizes[i] = (opened.height, opened.width)
        self._sizes = np.array(sizes, np.int32).reshape(-1, 2)
        return names

    def _check_files(self, names: Sequence[str]) -> None:
        """One directory listing per folder instead of one look-up per picture: network drives are slow."""
        present: dict[Path, set[str]] = {}
        missing = []
        for name in names:
            path = self.folder / name
            if path.parent not in present:
                present[path.parent] = set(os.listdir(path.parent)) if path.parent.is_dir() else set()
            if path.name not in present[path.parent]:
                missing.append(path)
        if missing:
            raise DataError(
                f"{missing[0]}: no such picture; {len(missing)} of the {len(names)} in {self.annotation_file} are "
                "missing, check the picture folder"
            )

    def _read_boxes(self, annotations: Sequence[Mapping[str, Any]], known: set[int]) -> None:
        """Fills boxes, labels, offsets and the counts of what was left out."""
        position = {image_id: i for i, image_id in enumerate(self._ids.tolist())}
        label_of = {category_id: i for i, category_id in enumerate(self.classes.category_ids)}
        pictures, labels, boxes = [], [], []
        self.num_crowd = 0
        for each in annotations:
            where = f"{self.annotation_file}: annotation {each.get('id')}"
            if each.get("image_id") not in position:
                raise DataError(f"{where} belongs to image id {each.get('image_id')}, which is not among the images")
            if each.get("category_id") not in known:
                raise DataError(f"{where} has category id {each.get('category_id')}, which is not among the categories")
            if each.get("iscrowd"):
                self.num_crowd += 1
                continue
            pictures.append(position[each["image_id"]])
            labels.append(label_of[each["category_id"]])
            boxes.append(_bbox(each, where))
        owner = np.array(pictures, np.int64)
        corners = np.array(boxes, np.float64).reshape(-1, 4)
        corners[:, 2:] += corners[:, :2]
        limits = self._sizes[owner][:, [1, 0, 1, 0]] if len(owner) else np.zeros((0, 4))
        clipped = np.asarray(np.clip(corners, 0, limits), np.float32)
        keep = (clipped[:, 2] > clipped[:, 0]) & (clipped[:, 3] > clipped[:, 1])
        self.num_degenerate = int((~keep).sum())
        order = np.argsort(owner[keep], kind="stable")
        self._boxes = clipped[keep][order]
        self._labels = np.array(labels, np.int32)[keep][order]
        per_picture = np.bincount(owner[keep], minlength=len(self._ids))
        self._offsets = np.concatenate(([0], np.cumsum(per_picture)))

    def _drop_empty(self, names: list[str]) -> list[str]:
        """Leaves out pictures without boxes; the names that remain."""
        keep = np.flatnonzero(np.diff(self._offsets) > 0)
        self._ids, self._sizes = self._ids[keep], self._sizes[keep]
        self._offsets = np.concatenate(([0], self._offsets[keep + 1]))
        return [names[i] for i in keep]


def _read_json(path: Path) -> dict[str, list[Any]]:
    if not path.is_file():
        raise DataError(f"{path}: no such annotation file, expected a COCO detection JSON")
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:  # broken JSON, or bytes that are no text
        raise DataError(f"{path}: not valid JSON ({error})") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise DataError(f"{path}: no list `{key}` at the top, expected a COCO detection JSON")
        if not all(isinstance(entry, dict) for entry in document[key]):
            raise DataError(f"{path}: every entry of `{key}` must be a mapping, expected a COCO detection JSON")
    return document


def read_classes(annotations: str | Path) -> Classes:
    """The classes that a COCO detection JSON names. Raises DataError."""
    return _read_classes(_read_json(Path(annotations))["categories"], Path(annotations))


def _read_classes(categories: Sequence[Mapping[str, Any]], path: Path) -> Classes:
    if not categories:
        raise DataError(f"{path}: `categories` is empty, so there is nothing to detect")
    for each in categories:
        if type(each.get("id")) is not int or not isinstance(each.get("name"), str):
            raise DataError(f"{path}: a category needs an integer `id` and a `name`, got {each}")
    ordered = sorted(categories, key=lambda each: int(each["id"]))
    classes = Classes(tuple(each["name"] for each in ordered), tuple(each["id"] for each in ordered))
    if len(set(classes.category_ids)) < len(classes):
        raise DataError(f"{path}: two categories share an id, got {classes.category_ids}")
    return classes


def _check_same_classes(own: Classes, expected: Classes, path: Path) -> None:
    """Every category of the file must be a class of the model, under the same id."""
    name_of = dict(zip(expected.category_ids, expected.names))
    id_of = dict(zip(expected.names, expected.category_ids))
    unknown = [f"{i} ({name})" for i, name in zip(own.category_ids, own.names) if i not in name_of]
    if unknown:
        known = ", ".join(f"{i} ({name})" for i, name in list(name_of.items())[:10])
        raise DataError(
            f"{path}: category ids unknown to the model: {', '.join(unknown)}; it was trained for {known}"
            + (", ..." if len(name_of) > 10 else "")
        )
    for category_id, name in zip(own.category_ids, own.names):
        if name == name_of[category_id]:
            continue
        if id_of.get(name, category_id) != category_id:
            raise DataError(
                f"{path}: category {name!r} has id {category_id}, but the model knows it as id {id_of[name]}"
            )
        logger.warning("%s: category %d is called %r, by the model %r", path, category_id, name, name_of[category_id])


def _bbox(annotation: Mapping[str, Any], where: str) -> list[float]:
    box = annotation.get("bbox")
    if (
        not isinstance(box, list)
        or len(box) != 4
        or not all(isinstance(v, (int, float)) and math.isfinite(v) for v in box)
    ):
        raise DataError(f"{where}: `bbox` must be four finite numbers [x, y, width, height], got {box}")
    return box
