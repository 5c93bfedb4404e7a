"""Reads Hugging Face image folders with a metadata.jsonl, one line per image, as in its object detection guide:

{"file_name": "a.jpg", "objects": {"bbox": [[x, y, width, height]], "categories": [0]}}

Parquet and arrow files of `datasets`, which contain the images, are unpacked into such a folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.defects import one_line
from rtdetr.data.formats import named, records
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.json_lists import one_object
from rtdetr.data.formats.named import NamedBox, NamedImage
from rtdetr.data.formats.records import SPLITS, BadRecord, DataSource, Problems, split_folders
from rtdetr.data.formats.yolo import MOST_CLASSES
from rtdetr.data.image_files import stays_in
from rtdetr.data.images import upright_size
from rtdetr.wording import first_line

NAME = "metadata.jsonl"
CLASS_KEYS = ("category", "categories", "category_id", "label", "labels", "class", "classes")  # in order of preference
MOST_BYTES = 1_000_000_000
PACKED = (".parquet", ".arrow")


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
        content = records.read_bytes(path, MOST_BYTES).removeprefix(b"\xef\xbb\xbf")
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
    boxes, classes = _boxes_and_classes(objects)
    if not isinstance(boxes, list) or not isinstance(classes, list) or len(boxes) != len(classes):
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


def _boxes_and_classes(objects: object) -> tuple[Any, Any]:
    """The two lists, from a dictionary of lists or a list of dictionaries; anything else if it is neither."""
    if objects in (None, [], {}):
        return [], []
    rows = [named.section(each) for each in (objects if isinstance(objects, list) else [objects])]
    keys = "bbox", next((key for key in CLASS_KEYS if key in rows[0]), "")
    boxes, classes = ([row.get(key) for row in rows] for key in keys)
    return (boxes, classes) if isinstance(objects, list) else (boxes[0], classes[0])


def _box(box: object, own: object, place: str, line: int) -> NamedBox:
    """The box with its own class. Raises BadRecord."""
    numbers = named.numbers_of(named.as_list(box))
    if numbers is None or len(numbers) != 4:
        raise BadRecord("box_numbers", f"expected x, y, width and height, got {shown(box)}")
    if not (named.is_class_name(own) or (type(own) is int and 0 <= own < MOST_CLASSES)):
        raise BadRecord("box_class", f"expected a class, as a name or a number, got {shown(own)}")
    x, y, width, height = numbers
    return NamedBox(place, line, str(own), (x, y, x + width, y + height), own if isinstance(own, int) else None)


def packed_files(path: Path) -> dict[str, list[Path]]:
    """The parquet and arrow files of each set: train-00000-of-00001.parquet, also in data/, or
    train/data-00000-of-00001.arrow. Empty if there are none."""
    if path.is_file():
        return {records.split_named(path) or "train": [path]} if path.suffix.lower() in PACKED else {}
    found: dict[str, list[Path]] = {}
    for folder in (path, path / "data", *(path / name for names in SPLITS.values() for name in names)):
        for file in sorted(folder.iterdir()) if folder.is_dir() else ():
            if file.suffix.lower() in PACKED and file.is_file() and not file.name.startswith("cache-"):
                found.setdefault(records.split_named(file) or records.split_named(folder) or "train", []).append(file)
    return found


def unpack(path: Path, out: Path) -> None:
    """Writes the unchanged images of all sets, and the columns that detection needs. Raises DataError."""
    names: list[str] | None = None
    for split, files in packed_files(path).items():
        folder = out / split
        folder.mkdir(parents=True)
        rows = (row for file in files for row in _packed_rows(file))
        with open(folder / NAME, "w", encoding="utf-8") as lines:
            for number, (file, row, of_file) in enumerate(rows):
                if names not in (None, of_file):
                    raise DataError(f"{file}: its classes are {some(of_file)}, in an earlier file {some(names)}")
                names = of_file
                lines.write(json.dumps(_unpacked(row, folder, number, file), default=str) + "\n")
    if names:
        text = "".join(f"{one_line(name).strip() or f'class{i}'}\n" for i, name in enumerate(names))
        (out / "classes.txt").write_text(text, encoding="utf-8")


def _packed_rows(file: Path) -> Iterator[tuple[Path, dict[str, Any], list[str]]]:
    """The rows of a file, each with the file and the class names. Raises DataError if the file cannot be read."""
    try:
        import pyarrow
        from pyarrow import ipc, parquet
    except ImportError as error:
        raise DataError(f"{file}: needs pyarrow; `pip install 'rtdetr[datasets]'` brings it") from error
    try:
        if file.suffix.lower() == ".parquet":
            opened = parquet.ParquetFile(file)
            schema, batches = opened.schema_arrow, opened.iter_batches(batch_size=64)
        else:
            opened = ipc.open_stream(file)
            schema, batches = opened.schema, iter(opened)
        names = _label_names(schema.metadata or {})
        if not {"image", "objects"} <= {*schema.names}:
            raise DataError(f"{file}: expected columns `image` and `objects`, got {some(schema.names)}")
        for batch in batches:
            for row in batch.select(["image", "objects"]).to_pylist():
                yield file, row, names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read ({first_line(error)})") from error


def _label_names(metadata: dict[bytes, bytes]) -> list[str]:
    """Names of the ClassLabel in `objects`, in the features that datasets stores in a file; empty if there is none."""
    try:
        waiting = [json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]["objects"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            names = each.get("names") if each.get("_type") == "ClassLabel" else None
            if names and isinstance(names, list) and all(isinstance(name, str) for name in names):
                return names
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return []


def _unpacked(row: dict[str, Any], folder: Path, number: int, file: Path) -> dict[str, Any]:
    """Writes the image of a row into the folder and returns the row's metadata line."""
    image, objects = row["image"], row["objects"]
    if not isinstance(image, dict):
        image = {"bytes": image}
    content, called = image.get("bytes"), image.get("path")
    if not isinstance(content, bytes):
        raise DataError(f"{file}: row {number + 1} has no image in it, got {shown(row['image'])}")
    suffix = os.path.splitext(called)[1].lower() if isinstance(called, str) else ""
    ending = suffix if suffix in records.IMAGE_SUFFIXES else ".png"  # readers detect the format by its bytes
    name = f"{number:06d}{ending}"
    (folder / name).write_bytes(content)
    if isinstance(objects, dict):
        objects = {key: objects[key] for key in ("bbox", *CLASS_KEYS) if key in objects}
    return {"file_name": name, "objects": objects}
