"""Reads LabelMe folders: a JSON per image, shapes in pixels."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PureWindowsPath

from rtdetr.data.classes import shown
from rtdetr.data.formats import named
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.named import NamedBox, NamedImage
from rtdetr.data.formats.records import IMAGE_SUFFIXES, POLYGONS, BadRecord, DataSource, Problems, split_folders, walk
from rtdetr.data.image_files import Folders

MOST_BYTES = 200_000_000  # including an embedded image
HEAD = 2_000_000  # bytes at either end of a file that are searched for its keys
FEW = 5  # files that are checked to recognise a folder
POINTS = {"rectangle": 2, "polygon": 3, "circle": 2, "mask": 2, "rotation": 3}  # minimum number of points
BOUNDED = {"polygon": POLYGONS, "rotation": named.TURNED}  # counted, as only the boxes around them are used
WITHOUT_BOX = ("point", "points", "line", "linestrip")


def find_labelme(path: Path) -> dict[str, Path]:
    """The folder of each set; empty if a folder is not in LabelMe's format."""
    if has_labelme(path):
        return {"": path}
    return split_folders(path, has_labelme)


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


def read_labelme(sets: Mapping[str, Path], source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of their files. Classes are those of the whole folder, for every set."""
    found: dict[str, list[NamedImage]] = {name: [] for name in sets}
    for name, place in sets.items():
        present = Folders(source.images or place)
        own = problems if name == source.split else Problems()
        for path in sorted(walk(place, (".json",), deep=False)):
            if path.name != "rtdetr.json":
                with own.reported(path):
                    found[name].append(_read(path, present, own))
    everything = [image for images in found.values() for image in images]
    return named.document_of(found[source.split], named.class_names(source.path, everything), problems)


def _read(path: Path, present: Folders, problems: Problems) -> NamedImage:
    content = named.record(named.read_json(path, MOST_BYTES), "image")
    shapes, name = content.get("shapes"), content.get("imagePath")
    if not isinstance(shapes, list) or not isinstance(name, str):
        raise BadRecord("image_file", "expected a list of `shapes` and an `imagePath`, as LabelMe writes them")
    size = named.size_of(content.get("imageHeight"), content.get("imageWidth"))
    boxes: list[NamedBox] = []
    for number, shape in enumerate(shapes, start=1):
        if named.section(shape).get("shape_type") in WITHOUT_BOX:
            problems.counted["shapes without a box (points, lines) left out"] += 1
            continue
        place = f"shape {number}: "
        with problems.reported(path, where=place):
            boxes.append(_box(shape, place, problems.counted))
    return NamedImage(path, 0, _image_of(path, name, present), size, boxes)


def _image_of(path: Path, written: str, present: Folders) -> str:
    """The image's name in the image folder: that of the JSON file, with the ending written in it; else the written
    name, without the annotator's folder; else that of the JSON file with the ending of any image."""
    short = PureWindowsPath(written).name  # takes slashes of both kinds
    stem = path.stem
    candidates = [f"{stem}{PureWindowsPath(short).suffix}", short, *(f"{stem}{ending}" for ending in IMAGE_SUFFIXES)]
    return next((name for name in candidates if "\0" not in name and name in present), short or written)


def _box(given: object, place: str, counted: Counter[str]) -> NamedBox:
    """The box of a shape. Raises BadRecord."""
    shape = named.record(given, "box")
    kind, name = shape.get("shape_type", "polygon"), shape.get("label")  # old files have no type
    if not isinstance(kind, str) or kind not in POINTS:
        raise BadRecord("box_box", f"expected a shape_type of {', '.join(POINTS)}, got {shown(given)}")
    if not named.is_class_name(name):
        raise BadRecord("box_class", f"expected a class as `label`, got {shown(given)}")
    points = named.points_of(named.as_list(shape.get("points")))
    if points is None or len(points) < POINTS[kind]:
        wanted = f"{POINTS[kind]} or more `points` of two numbers"
        raise BadRecord("box_numbers", f"a {kind} needs {wanted}, got {shown(given)}")
    if kind == "circle":  # its centre and a point on its edge
        (x, y), (other_x, other_y) = points[:2]
        radius = ((other_x - x) ** 2 + (other_y - y) ** 2) ** 0.5
        points = [(x - radius, y - radius), (x + radius, y + radius)]
    if kind in BOUNDED:
        counted[BOUNDED[kind]] += 1
    return NamedBox(place, 0, str(name), named.around(points))
