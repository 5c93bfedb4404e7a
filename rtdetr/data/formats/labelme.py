"""Reads LabelMe folders: a JSON per image, shapes in pixels."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path, PureWindowsPath
from typing import Any, NamedTuple

from rtdetr.data.classes import DataError, shown
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.named import (
    POLYGONS,
    TURNED,
    NamedBox,
    NamedImage,
    around,
    class_names,
    document_of,
    is_class_name,
    listed,
    points_of,
    read_json,
    section,
    size_of,
)
from rtdetr.data.formats.records import IMAGE_SUFFIXES, SPLITS, DataSource, Problems, walk
from rtdetr.data.image_files import Folders

MOST_BYTES = 200_000_000  # including an embedded image
HEAD = 2_000_000  # bytes at either end of a file that are searched for its keys
FEW = 5  # files that are checked to recognise a folder
POINTS = {"rectangle": 2, "polygon": 3, "circle": 2, "mask": 2, "rotation": 3}  # minimum number of points
WITHOUT_BOX = ("point", "points", "line", "linestrip")


class LabelmeFolder(NamedTuple):
    root: Path
    sets: dict[str, Path]  # train, val, test, or "" for the only one -> the folder of its files


def find_labelme(path: Path) -> LabelmeFolder | None:
    """The sets of a folder; None if it is not in LabelMe's format."""
    if not path.is_dir():
        return None
    if has_labelme(path):
        return LabelmeFolder(path, {"": path})
    sets = {split: path / name for split, names in SPLITS.items() for name in names if has_labelme(path / name)}
    return LabelmeFolder(path, sets) if sets else None


def has_labelme(folder: Path) -> bool:
    """Whether a folder has files of LabelMe, seen by the first few."""
    return any(map(_is_labelme, sorted(walk(folder, (".json",), deep=False))[:FEW]))


def _is_labelme(path: Path) -> bool:
    if not os.path.isfile(path):  # reading a pipe would block
        return False
    try:
        with open(path, "rb") as file:
            head = file.read(HEAD)
            file.seek(max(0, path.stat().st_size - HEAD))
            head += file.read(HEAD)
    except OSError:  # reported by its reader
        return False
    return b'"shapes"' in head and b'"imagePath"' in head


def read_labelme(folder: LabelmeFolder, source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of their files. Classes are those of the whole folder, for every set."""
    found: dict[str, list[NamedImage]] = {}
    counted: Counter[str] = Counter()
    for name, place in folder.sets.items():
        present = Folders(source.images or place)
        reported, counts = (problems, counted) if name == source.split else (Problems(), Counter[str]())
        files = [each for each in sorted(walk(place, (".json",), deep=False)) if each.name != "rtdetr.json"]
        found[name] = [image for each in files if (image := _read(each, present, reported, counts)) is not None]
    everything = [image for images in found.values() for image in images]
    return document_of(found[source.split], class_names(folder.root, everything), problems, counted)


def _read(path: Path, present: Folders, problems: Problems, counted: Counter[str]) -> NamedImage | None:
    try:
        content = section(read_json(path, MOST_BYTES))
    except DataError as error:
        problems.failed(path, "file", error)
        return None
    shapes, name = content.get("shapes"), content.get("imagePath")
    if not isinstance(shapes, list) or not isinstance(name, str):
        problems.add(path, 0, "file", "expected a list of `shapes` and an `imagePath`, as LabelMe writes them")
        return None
    size = size_of(content.get("imageHeight"), content.get("imageWidth"))
    if size is None:
        sides = shown(content.get("imageHeight")), shown(content.get("imageWidth"))
        problems.add(path, 0, "size", f"`imageHeight` and `imageWidth` must be whole pixels, got {', '.join(sides)}")
        return None
    boxes = []
    for place, shape in enumerate(shapes, start=1):
        found = _shape(section(shape), counted)
        if isinstance(found, NamedBox):
            boxes.append(found._replace(place=f"shape {place}: "))
        elif found is not None:
            problems.add(path, 0, found[0], f"shape {place}: {found[1]}, got {shown(shape)}")
    return NamedImage(path, 0, _image_of(path, name, present), size, boxes)


def _image_of(path: Path, written: str, present: Folders) -> str:
    """The image's name in the image folder: that of the JSON file, else the name written in it, without its folder,
    which is where the annotator had the image."""
    short = PureWindowsPath(written).name  # accepts both / and \\
    stem = path.stem
    candidates = [f"{stem}{PureWindowsPath(short).suffix}", short, *(f"{stem}{ending}" for ending in IMAGE_SUFFIXES)]
    return next((name for name in candidates if "\0" not in name and name in present), short or written)


def _shape(shape: dict[str, Any], counted: Counter[str]) -> NamedBox | tuple[str, str] | None:
    """The shape's box, or kind and message of its problem, or None for a type of shape without a box."""
    kind, name = shape.get("shape_type", "polygon"), shape.get("label")  # old files have no type
    if kind in WITHOUT_BOX:
        counted["shapes without a box (points, lines) left out"] += 1
        return None
    if not isinstance(kind, str) or kind not in POINTS:
        return "box", f"expected a shape_type of {', '.join(POINTS)}"
    if not is_class_name(name):
        return "class", "expected a class as `label`"
    points = points_of(listed(shape.get("points")))
    if points is None or len(points) < POINTS[kind]:
        return "numbers", f"a {kind} needs {POINTS[kind]} or more `points` of two numbers"
    if kind == "circle":  # its centre and a point on its edge
        (x, y), (other_x, other_y) = points[:2]
        radius = ((other_x - x) ** 2 + (other_y - y) ** 2) ** 0.5
        points = [(x - radius, y - radius), (x + radius, y + radius)]
    counted.update([POLYGONS] * (kind == "polygon") + [TURNED] * (kind == "rotation"))
    return NamedBox("", 0, str(name), around(points))
