"""Shared by formats whose boxes contain class names: Label Studio, CVAT, LabelMe, Hugging Face and Pascal VOC."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.formats.coco_records import MOST_PIXELS, is_finite
from rtdetr.data.formats.document import CocoDocument, new_document
from rtdetr.data.formats.json_lists import DuplicateKeys, one_object
from rtdetr.data.formats.records import MAX_BYTES, BadRecord, Corners, Problems, read_bytes, read_lines
from rtdetr.data.formats.sniff import kind_of_bytes

NO_CLASSES = ("__ignore__", "_background_")  # first lines of LabelMe's labels.txt
TURNED = "rotated rectangles taken as the upright boxes around them"


class NamedBox(NamedTuple):
    place: str  # position in its file, for messages; empty: the line number suffices
    line: int  # from 1; 0: unknown
    name: str
    corners: Corners
    number: int | None = None  # class number, if the file has one instead of a name
    crowd: int = 0  # or 1
    area: float | None = None  # None: that of the box


class NamedImage(NamedTuple):
    path: Path  # the annotation file
    line: int
    file_name: str
    size: tuple[int, int]  # (h, w) in pixels; zeros: unknown
    boxes: list[NamedBox]


def document_of(
    images: Iterable[NamedImage], names: Sequence[str], problems: Problems, first_id: int = 1
) -> CocoDocument:
    """Builds the document: images with ids from 1, classes with ids from `first_id` in the order of `names`."""
    categories = dict(enumerate(names, start=first_id))
    id_of = {name: own for own, name in categories.items()}
    document = new_document(categories)
    for path, line, file_name, size, boxes in images:
        if not is_file_name(file_name):
            problems.add(path, line, "image_image", f"expected the name of an image file, got {shown(file_name)}")
            continue
        number = document.add_image(file_name, size)
        for each in boxes:
            category = id_of.get(each.name) if each.number is None else each.number
            if category is None or category not in categories:
                known = some(map(repr, names), 10)
                what = f"{each.place}the class {shown(each.name)} is not among those of its set, {known}"
                problems.add(path, each.line, "box_class", what)
                continue
            document.add_box(number, category, each.corners, each.crowd, each.area)
    return document


def class_names(folder: Path, images: Iterable[NamedImage]) -> list[str]:
    """Class names in the order of classes.txt or labels.txt, else sorted. Raises DataError if there are none."""
    given = names_given(folder, NO_CLASSES)
    if given is not None:
        return given
    found = sorted({box.name for image in images for box in image.boxes})
    if not found:
        raise DataError(f"{folder}: nothing in it names a class, so there is nothing to detect")
    return found


def names_given(folder: Path, ignored: Sequence[str] = ()) -> list[str] | None:
    """Class names, one per line, of a classes.txt or labels.txt; None if there is neither. Raises DataError if one is
    there twice."""
    path = next((folder / name for name in ("classes.txt", "labels.txt") if (folder / name).is_file()), None)
    if path is None:
        return None
    names = [line for line in read_lines(path) if line and line not in ignored]
    if len(set(names)) < len(names):
        raise DataError(f"{path}: a class is named twice")
    return names


def is_file_name(name: object) -> bool:
    """Whether a value can be a file name; whether it leaves the folder is checked later, for all formats alike."""
    if not isinstance(name, str) or not name.strip() or re.search(r"[\x00-\x1f]", name):
        return False
    try:
        os.fsencode(name)
    except UnicodeEncodeError:  # a lone surrogate
        return False
    return True


def is_class_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and name.isprintable()


def read_json(path: Path, most: int = MAX_BYTES) -> Any:
    """The content of a JSON file of at most `most` bytes. Raises DataError if it cannot be read."""
    content = read_bytes(path, most)
    try:
        return json.loads(content, object_pairs_hook=one_object)
    except (ValueError, RecursionError) as error:  # broken JSON, invalid UTF-8, too deep nesting
        raise DataError(f"{path}: not valid JSON ({error}){kind_of_bytes(content)}") from error


def section(value: object) -> dict[str, Any]:
    """The value if it is a JSON object without duplicate keys, else an empty one."""
    return value if isinstance(value, dict) and not isinstance(value, DuplicateKeys) else {}


def record(value: object, of: Literal["image", "box"]) -> dict[str, Any]:
    """The value if it is a JSON object, else an empty one. Raises BadRecord if it has duplicate keys."""
    if isinstance(value, DuplicateKeys):
        raise BadRecord(f"{of}_keys_twice", f"a key is given twice, got {shown(value)}")
    return section(value)


def as_list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def number_of(value: object) -> float | None:
    """The value as a finite number; None for anything else."""
    return float(value) if is_finite(value) else None


def numbers_of(values: Iterable[object]) -> list[float] | None:
    """The values as finite numbers; None if one of them is not."""
    found = [number_of(each) for each in values]
    return None if None in found else [each for each in found if each is not None]


def size_of(height: object, width: object) -> tuple[int, int]:
    """(h, w) in whole pixels; zeros if both are missing. Raises BadRecord if they are invalid."""
    if height is None and width is None:
        return 0, 0
    sides = numbers_of((height, width))
    if sides is None or any(not 0 < side <= MOST_PIXELS or side != int(side) for side in sides):
        raise BadRecord("image_size", f"height and width must be whole pixels, got {shown(height)}, {shown(width)}")
    return int(sides[0]), int(sides[1])


def points_of(values: object) -> list[tuple[float, float]] | None:
    """Pairs of finite numbers; None for anything else."""
    pairs = [numbers_of(as_list(each)) for each in as_list(values)]
    if not pairs or any(each is None or len(each) != 2 for each in pairs):
        return None
    return [(each[0], each[1]) for each in pairs if each is not None]


def around(points: Sequence[tuple[float, float]]) -> Corners:
    """The bounding box of points."""
    xs, ys = [x for x, _ in points], [y for _, y in points]
    return min(xs), min(ys), max(xs), max(ys)


def turned(corners: Corners, degrees: float, pivot: tuple[float, float]) -> Corners:
    """The axis-aligned bounding box of a rectangle rotated clockwise about `pivot`."""
    x1, y1, x2, y2 = corners
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    offsets = [(x - pivot[0], y - pivot[1]) for x, y in ((x1, y1), (x2, y1), (x1, y2), (x2, y2))]
    box = around([(pivot[0] + x * cos - y * sin, pivot[1] + x * sin + y * cos) for x, y in offsets])
    return round(box[0], 9), round(box[1], 9), round(box[2], 9), round(box[3], 9)
