"""rtdetr.json: data that `rtdetr convert-data` stores in a VOC or YOLO folder because the format cannot hold it.

Ids of categories and images, original file names and LVIS' lists are used only to convert back to COCO: a set is
evaluated under the ids of its own format. Crowds and areas, which YOLO lacks, are used whenever the folder is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.data.classes import DataError
from rtdetr.data.formats.records import MAX_BYTES

NAME = "rtdetr.json"
MADE_BY = "rtdetr convert-data"


class Sidecar(NamedTuple):
    categories: list[dict[str, Any]]  # id, name, label (the name in VOC) and LVIS' frequency, in class order
    # Split -> image -> id, file_name, LVIS' lists; for YOLO also `kept`: by line index, x, y, w, h and area in pixels
    # of boxes that the line does not hold exactly; `crowds`: lists of class number, x, y, w, h and area.
    images: dict[str, dict[str, dict[str, Any]]]

    def labels(self) -> list[str]:
        return [each.get("label", each["name"]) for each in self.categories]


def read_sidecar(root: Path) -> Sidecar | None:
    """The rtdetr.json of a folder; None if there is none of ours. Raises DataError if its content is invalid."""
    path = root / NAME
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > 100 * MAX_BYTES:
            raise ValueError("too large")
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict) or found.get("made_by") != MADE_BY:
            return None
        _check(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{path}: not as `{MADE_BY}` wrote it ({error}); remove it, or convert again") from error
    return Sidecar(found["categories"], found["images"])


def write_sidecar(root: Path, sidecar: Sidecar) -> None:
    text = json.dumps({"made_by": MADE_BY, **sidecar._asdict()})
    (root / NAME).write_text(text, encoding="utf-8")


def _check(found: dict[str, Any]) -> None:
    """Raises ValueError, TypeError, KeyError or AttributeError if the content is invalid."""
    ids = [each["id"] for each in found["categories"]]
    if not all(type(each) is int for each in ids) or len(set(ids)) < len(ids) or not ids:
        raise ValueError("category ids")
    labels = [each.get("label", each["name"]) for each in found["categories"]]
    if not all(isinstance(each, str) for each in [*labels, *(each["name"] for each in found["categories"])]):
        raise ValueError("category names")
    for images in found["images"].values():
        for each in images.values():
            if type(each["id"]) is not int or not isinstance(each["file_name"], (str, type(None))):
                raise ValueError("id or file_name of an image")
            for label, *numbers in each.get("crowds", []):
                if len(numbers) != 5 or type(label) is not int or not 0 <= label < len(ids) or not _finite(numbers):
                    raise ValueError("a crowd")
            for line, numbers in each.get("kept", {}).items():
                if not line.isdecimal() or len(numbers) != 5 or not _finite(numbers):
                    raise ValueError("a kept box")


def _finite(numbers: Any) -> bool:
    return all(type(each) in (int, float) and abs(each) < 1e300 for each in numbers)
