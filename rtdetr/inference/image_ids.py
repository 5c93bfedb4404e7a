"""The image ids in COCO results, which match those of the annotations."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from rtdetr.data.classes import DataError, some
from rtdetr.inference.predictor import File


def file_number(name: File) -> int | None:
    """Returns the number in a file name such as COCO's (000000000139.jpg is 139), else None."""
    stem = Path(name).stem
    return int(stem) if stem.isdecimal() and stem.isascii() else None


def image_ids(files: Collection[File], annotations: Path | None = None) -> dict[File, int]:
    """Returns the ids in the annotations; without annotations the numbers of the files or, if one has none or two are
    equal, their positions in the list, from 1. Raises DataError for files that the annotations do not name."""
    if annotations is not None:
        return _annotated(files, annotations)
    numbers = {each: file_number(each) for each in files}
    if None in numbers.values() or len({*numbers.values()}) < len(numbers):
        return {each: place for place, each in enumerate(files, start=1)}
    return {each: number for each, number in numbers.items() if number is not None}


def _annotated(files: Collection[File], annotations: Path) -> dict[File, int]:
    from rtdetr.data.formats.sources import read_document  # here: the readers take long to import

    by_name: dict[str, list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    for image in read_document(annotations, limit=None).images:
        parts = PurePosixPath(image["file_name"]).parts
        by_name[parts[-1]].append((parts, image["id"]))
    ids = {each: _id_of(each, by_name[Path(each).name]) for each in files}
    if unknown := [str(each) for each, number in ids.items() if number is None]:
        raise DataError(
            f"{annotations}: names no image, or several, for {some(unknown)}; leave them or --annotations out"
        )
    file_of: dict[int | None, File] = {}
    for file, number in ids.items():
        if file_of.setdefault(number, file) != file:
            both = f"{file_of[number]} and {file}"
            raise DataError(f"{annotations}: names one image for {both}; leave one of them or --annotations out")
    return {each: number for each, number in ids.items() if number is not None}


def _id_of(file: File, candidates: list[tuple[tuple[str, ...], int]]) -> int | None:
    """Returns the id of the only image in the same folders, of as many as possible, else of the only one with this
    name, else None."""
    path = Path(os.path.abspath(file)).parts
    same = [(len(parts), number) for parts, number in candidates if path[-len(parts) :] == parts]
    most = max((depth for depth, _ in same), default=0)
    chosen = [number for depth, number in same if depth == most] or [number for _, number in candidates]
    return chosen[0] if len(chosen) == 1 else None
