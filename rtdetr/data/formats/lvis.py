"""LVIS JSON: COCO's, where each image also lists other classes that annotators looked for in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rtdetr.data.classes import shown
from rtdetr.data.formats.records import BadRecord

# Keys of an image: classes verified to be absent, and classes with only some objects annotated. Detections of a class
# that is in neither list and has no boxes in the image are not false positives, as it was not annotated.
NEGATIVE, NOT_EXHAUSTIVE = "neg_category_ids", "not_exhaustive_category_ids"
FREQUENCIES = ("r", "c", "f")  # frequencies of a category: rare, common, frequent


def of_image(entry: Mapping[str, Any]) -> dict[str, list[int]]:
    """The LVIS keys of an image. Raises BadRecord if they are invalid."""
    found = {}
    for key in (NEGATIVE, NOT_EXHAUSTIVE):
        if key in entry:
            ids = entry[key]
            if not isinstance(ids, list) or not all(type(each) is int for each in ids):
                what = f"image {entry['id']}: `{key}` must be a list of category ids, got {shown(ids)}"
                raise BadRecord("image_lvis", what)
            found[key] = ids
    return found


def of_category(entry: Mapping[str, Any]) -> dict[str, str]:
    """The frequency of a category, if LVIS gives one."""
    return {"frequency": entry["frequency"]} if entry.get("frequency") in FREQUENCIES else {}


def is_federated(images: Sequence[Mapping[str, Any]]) -> bool:
    """Whether every image lists the verified classes, so that LVIS' own AP can be computed."""
    return bool(images) and all(NEGATIVE in each and NOT_EXHAUSTIVE in each for each in images)
