"""Reads Hugging Face image folders with a metadata.jsonl, one line per image, as in its object detection guide:

{"file_name": "a.jpg", "objects": {"bbox": [[x, y, width, height]], "categories": [0]}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtdetr.data.classes import DataError, shown
from rtdetr.data.formats import named
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.json_lists import one_object
from rtdetr.data.formats.named import NamedBox, NamedImage
from rtdetr.data.formats.records import BadRecord, DataSource, Problems, read_bytes, split_folders
from rtdetr.data.formats.yolo import MOST_CLASSES
from rtdetr.data.image_files import stays_in
from rtdetr.data.images import upright_size

NAME = "metadata.jsonl"
CLASS_KEYS = ("category", "categories", "category_id", "label", "labels", "class", "classes")  # in order of preference
MOST_BYTES = 1_000_000_000


def find_image_folder(path: Path) -> dict[str, Path]:
    """The folder of each set, with its images and metadata.jsonl, of a folder or of its metadata.jsonl; empty if it is
    not a Hugging Face image folder."""
    root = _root(path)
    if has_metadata(root):
        return {"": root}
    return split_folders(root, has_metadata) or split_folders(root / "data", has_metadata)


def has_metadata(folder: Path) -> bool:
    return (folder / NAME).is_file()


def _root(path: Path) -> Path:
    return path.parent if path.name == NAME and os.path.isfile(path) else path


def read_image_folder(sets: Mapping[str, Path], source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of its lines. Class numbers, from 0, get names from a classes.txt, else
    class0, class1, ...; the classes are those of the whole folder, the same for every set."""
    rows = {
        name: _read(place / NAME, problems if name == source.split else Problems(), source.max_megapixels)
        for name, place in sets.items()
    }
    everything = [image for images in rows.values() for image in images]
    numbers = [box.number for image in everything for box in image.boxes if box.number is not None]
    if not numbers:
        return named.document_of(rows[source.split], named.class_names(_root(source.path), everything), problems)
    names = named.names_given(_root(source.path)) or [f"class{i}" for i in range(max(numbers) + 1)]
    return named.document_of(rows[source.split], names, problems, first_id=0)


def _read(path: Path, problems: Problems, max_megapixels: float) -> list[NamedImage]:
    images: list[NamedImage] = []
    with problems.reported(path):
        content = read_bytes(path, MOST_BYTES).removeprefix(b"\xef\xbb\xbf")
        for number, line in enumerate(content.split(b"\n"), start=1):
            if line.strip():
                with problems.reported(path, number):
                    images.append(_image(path, number, line, problems, max_megapixels))
    return images


def _image(path: Path, number: int, line: bytes, problems: Problems, max_megapixels: float) -> NamedImage:
    try:
        given = json.loads(line.decode(), object_pairs_hook=one_object)
    except (ValueError, RecursionError) as error:
        raise BadRecord("image_file", f"not valid JSON ({error})") from error
    row = named.record(given, "image")
    name = row.get("file_name")
    if not isinstance(name, str) or not named.is_file_name(name):
        raise BadRecord("image_image", f"expected the name of an image file as `file_name`, got {shown(name)}")
    size = named.size_of(row.get("height"), row.get("width"))
    objects = row.get("objects", ())
    boxes, classes = _objects(objects)
    if boxes is None or classes is None or len(boxes) != len(classes):
        wanted = "`objects` with as many classes (`categories`) as boxes (`bbox`)"
        raise BadRecord("image_file", f"expected {wanted}, got {shown(objects)}")
    file = path.parent / name
    if not all(size) and stays_in(path.parent, name) and os.path.isfile(file):
        try:
            size = upright_size(file, max_megapixels)
        except DataError as error:
            raise BadRecord("image_image", str(error).removeprefix(f"{file}: "), 0, file) from error
    found: list[NamedBox] = []
    for i, (box, own) in enumerate(zip(boxes, classes), start=1):
        with problems.reported(path, number, f"box {i}: "):
            found.append(_box(box, own, f"box {i}: ", number))
    return NamedImage(path, number, name, size, found)


def _box(box: object, own: object, place: str, line: int) -> NamedBox:
    """The box with its own class. Raises BadRecord."""
    numbers = named.numbers_of(named.as_list(box))
    if numbers is None or len(numbers) != 4:
        raise BadRecord("box_numbers", f"expected x, y, width and height, got {shown(box)}")
    if not (named.is_class_name(own) or (type(own) is int and 0 <= own < MOST_CLASSES)):
        raise BadRecord("box_class", f"expected a class, as a name or a number, got {shown(own)}")
    x, y, width, height = numbers
    return NamedBox(place, line, str(own), (x, y, x + width, y + height), own if isinstance(own, int) else None)


def _objects(objects: object) -> tuple[list[Any] | None, list[Any] | None]:
    """Boxes and classes, from a dictionary of lists or a list of dictionaries; None if invalid."""
    if objects in (None, [], {}):
        return [], []
    if isinstance(objects, list):
        rows = [named.section(each) for each in objects]
        key = next((key for key in CLASS_KEYS if key in rows[0]), "")
        return [each.get("bbox") for each in rows], [each.get(key) for each in rows]
    columns = named.section(objects)
    key = next((key for key in CLASS_KEYS if key in columns), "")
    boxes, classes = columns.get("bbox"), columns.get(key)
    return boxes if isinstance(boxes, list) else None, classes if isinstance(classes, list) else None
