"""Hugging Face `datasets` on disk: parquet or arrow files that contain the images, unpacked into a folder of images
with metadata.jsonl (see huggingface.py)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.defects import one_line
from rtdetr.data.formats.huggingface import CLASS_KEYS, NAME
from rtdetr.data.formats.records import IMAGE_SUFFIXES, SPLITS, split_named

ENDINGS = (".parquet", ".arrow")


def packed_files(path: Path) -> dict[str, list[Path]]:
    """The files of each set: train-00000-of-00001.parquet, also in data/, or train/data-00000-of-00001.arrow. Empty if
    there are none."""
    if path.is_file():
        return {split_named(path) or "train": [path]} if path.suffix.lower() in ENDINGS else {}
    found: dict[str, list[Path]] = {}
    for folder in (path, path / "data", *(path / name for names in SPLITS.values() for name in names)):
        inside = folder.iterdir() if folder.is_dir() else ()
        for file in sorted(each for each in inside if each.suffix.lower() in ENDINGS and each.is_file()):
            if not file.name.startswith("cache-"):
                found.setdefault(split_named(file) or split_named(folder) or "train", []).append(file)
    return found


def unpack(path: Path, out: Path) -> None:
    """Writes the unchanged images of all sets, and the columns that detection needs. Raises DataError."""
    names: list[str] | None = None
    for split, files in packed_files(path).items():
        folder = out / split
        folder.mkdir(parents=True)
        rows = ((file, *each) for file in files for each in _rows(file))
        with open(folder / NAME, "w", encoding="utf-8") as lines:
            for number, (file, row, of_file) in enumerate(rows):
                if names not in (None, of_file):
                    raise DataError(f"{file}: its classes are {some(of_file)}, in an earlier file {some(names)}")
                names = of_file
                lines.write(json.dumps(_written(row, folder, number, file), default=str) + "\n")
    if names:
        text = "".join(f"{one_line(name).strip() or f'class{i}'}\n" for i, name in enumerate(names))
        (out / "classes.txt").write_text(text, encoding="utf-8")


def _rows(file: Path) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """The rows of a file, each with the class names. Raises DataError if the file cannot be read."""
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
        names = _class_names(schema.metadata or {})
        if not {"image", "objects"} <= {*schema.names}:
            raise DataError(f"{file}: expected columns `image` and `objects`, got {some(schema.names)}")
        for batch in batches:
            for row in batch.select(["image", "objects"]).to_pylist():
                yield row, names
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(f"{file}: cannot be read ({what[0]})") from error


def _class_names(metadata: dict[bytes, bytes]) -> list[str]:
    """Names of the ClassLabel in `objects`, in the features that datasets stores in a file; empty if there is none."""
    try:
        features = json.loads(metadata.get(b"huggingface", b"{}"))["info"]["features"]["objects"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    waiting, found = [features], list[str]()
    while waiting and not found:
        each = waiting.pop()
        if isinstance(each, dict):
            names = each.get("names") if each.get("_type") == "ClassLabel" else None
            found = names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []
            waiting += list(each.values())
        elif isinstance(each, list):
            waiting += each
    return found


def _written(row: dict[str, Any], folder: Path, number: int, file: Path) -> dict[str, Any]:
    """Writes the image of a row into the folder and returns the row's metadata line."""
    image, objects = row["image"], row["objects"]
    content = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(content, bytes):
        raise DataError(f"{file}: row {number + 1} has no image in it, got {shown(image)}")
    called = image.get("path") if isinstance(image, dict) else ""
    suffix = os.path.splitext(called)[1].lower() if isinstance(called, str) else ""
    name = f"{number:06d}{suffix if suffix in IMAGE_SUFFIXES else '.png'}"  # readers detect the format by its bytes
    (folder / name).write_bytes(content)
    keys = ("bbox", *CLASS_KEYS)
    if isinstance(objects, dict):
        return {"file_name": name, "objects": {key: objects[key] for key in keys if key in objects}}
    return {"file_name": name, "objects": objects}
