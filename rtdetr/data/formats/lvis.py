"""LVIS JSON: COCO's, with the other classes that annotators looked for in each image."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rtdetr.data.classes import DataError, shown

# Of an image: absent classes that were looked for; classes of which only some objects have a box. A
# detection of any class that is in neither list and has no box there is no error: it was not looked for.
NEGATIVE, NOT_EXHAUSTIVE = "neg_category_ids", "not_exhaustive_category_ids"
FREQUENCIES = ("r", "c", "f")  # of a category: rare, common, frequent


def of_image(entry: Mapping[str, Any], where: str) -> dict[str, list[int]]:
    """LVIS' additional fields of an image, if any. Raises DataError, which begins with `where`."""
    found = {}
    for key in (NEGATIVE, NOT_EXHAUSTIVE):
        if key in entry:
            ids = entry[key]
            if not isinstance(ids, list) or not all(type(each) is int for each in ids):
                raise DataError(f"{where}: `{key}` must be a list of category ids, got {shown(ids)}")
            found[key] = ids
    return found


def of_category(entry: Mapping[str, Any]) -> dict[str, str]:
    """Its frequency, if LVIS states one."""
    return {"frequency": entry["frequency"]} if entry.get("frequency") in FREQUENCIES else {}


def is_federated(images: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every image lists the classes that were looked for, so that LVIS' own AP can be computed."""
    return bool(images) and all(NEGATIVE in each and NOT_EXHAUSTIVE in each for each in images)


def mentions_lvis(path: Path) -> bool:
    """Whether a JSON has LVIS' keys, without parsing up to a gigabyte. False for an unreadable file."""
    if not os.path.isfile(path):  # reading a pipe would wait for ever
        return False
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return all(content.find(f'"{key}"'.encode()) >= 0 for key in (NEGATIVE, NOT_EXHAUSTIVE))
    except (OSError, ValueError):  # ValueError: an empty file
        return False
