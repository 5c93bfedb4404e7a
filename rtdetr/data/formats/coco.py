"""Reads and checks COCO detection JSON, including LVIS, into one form for both training and evaluation."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rtdetr.data.classes import Classes, shown, some
from rtdetr.data.defects import MOST_DROPPED, Refused
from rtdetr.data.formats import lvis
from rtdetr.data.formats.coco_records import Annotations, Images, is_id
from rtdetr.data.formats.document import CocoDocument, classes_of, refuse_bad
from rtdetr.data.formats.json_lists import DuplicateKeys, one_object, read_lists
from rtdetr.data.formats.sniff import annotations_in, kind_of_bytes, kind_of_json, kind_of_value


def read_coco(path: Path, limit: float | None = MOST_DROPPED) -> CocoDocument:
    """The valid records of the JSON, and the defects of the others. Training and evaluation both use this function, so
    that they agree on what a crowd is, what null means and which records are left out.

    limit: the largest share of images, and of annotations, that may be dropped; None: no limit. Raises DataError with
    one sentence that names the file and the entry.
    """
    images, boxes, entries = _judged(path)
    categories = _categories(entries, path)
    sound = images.finish()
    table, tally = boxes.finish([each["id"] for each in sound], images.gone, {each["id"] for each in categories})
    tally.images = images.count
    defects = [*images.defects, *boxes.defects]
    like_a_list = cast(list[dict[str, Any]], table)
    document = CocoDocument(sound, like_a_list, categories, boxes.num_boxless_crowds, (), defects, tally)
    refuse_bad(document, path, limit)
    return document


def _judged(path: Path) -> tuple[Images, Annotations, list[Any]]:
    """The checked records, and the unchecked categories."""
    _check_file(path)
    try:
        images, boxes, categories = Images(path), Annotations(path), list[Any]()
        if read_lists(path, {"images": images.take, "annotations": boxes.take, "categories": categories.append}):
            return images, boxes, categories
    except OSError as error:
        raise Refused(path, "file_unreadable", f"cannot be read ({error.strerror})") from error
    images, boxes = Images(path), Annotations(path)  # read it again with json.loads
    document = _read_json(path)
    for take, key in ((images.take, "images"), (boxes.take, "annotations")):
        for entry in document[key]:
            take(entry)
    return images, boxes, document["categories"]


def read_classes(path: Path) -> Classes:
    """The classes of a COCO detection JSON. Raises DataError if it cannot be read."""
    return classes_of(_categories(_read_json(path)["categories"], path))


def _check_file(path: Path) -> None:
    if os.path.isdir(path):
        inside = some((str(file) for file in annotations_in(path)), 3)
        advice = f"; did you mean {inside}?" if inside else ""
        raise Refused(path, "file_is_folder", f"is a folder, expected a COCO detection JSON{advice}")
    if not os.path.exists(path):  # also False for names that no file can have
        raise Refused(path, "file_missing", "no such annotation file, expected a COCO detection JSON")
    if not path.is_file():  # reading a pipe would block
        raise Refused(path, "file_unreadable", "is a device, expected a COCO detection JSON")


def _read_json(path: Path) -> dict[str, list[Any]]:
    """The document with its three lists. Raises DataError if it cannot be read or lacks one."""
    _check_file(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise Refused(path, "file_unreadable", f"cannot be read ({error.strerror})") from error
    try:
        document = json.loads(content, object_pairs_hook=one_object)
    except (ValueError, RecursionError) as error:  # broken JSON, invalid UTF-8, too deep nesting
        raise Refused(path, "json_broken", f"not valid JSON ({error}){kind_of_bytes(content)}") from error
    if what := _no_lists(document):
        raise Refused(path, "json_not_coco", what)
    if isinstance(document, DuplicateKeys):
        what = "has a key twice at the top, and readers know but the last of the two; remove one"
        raise Refused(path, "json_keys_twice", what)
    return document


def _no_lists(document: Any) -> str:
    """What is wrong with a JSON that lacks one of COCO's three lists; empty if it has all of them."""
    keys = ("images", "annotations", "categories")
    if not isinstance(document, dict):
        return f"no `images`, `annotations` and `categories`, expected a COCO detection JSON{kind_of_json(document)}"
    wrong = [key for key in keys if not isinstance(document.get(key), list)]
    instead = [f"`{key}` is {kind_of_value(document[key]) if key in document else 'missing'}" for key in wrong]
    expected = f"expected {'a list' if len(wrong) == 1 else 'lists'} of a COCO detection JSON"
    kind = "" if document.keys() >= set(keys) else kind_of_json(document)
    return f"{' and '.join(instead)} at the top, {expected}{kind}" if wrong else ""


def _categories(entries: Sequence[Any], path: Path) -> list[dict[str, Any]]:
    """The categories, sorted by id. Raises DataError for any invalid one, as the boxes depend on them."""
    if not entries:
        raise Refused(path, "no_classes", "`categories` is empty, so there is nothing to detect")
    for each in entries:
        if not isinstance(each, dict):
            what = "every entry of `categories` must be a mapping, expected a COCO detection JSON"
            raise Refused(path, "class_record", what)
        if not is_id(each.get("id")) or not isinstance(each.get("name"), str):
            what = f"a category needs an integer `id` and a `name`, got {shown(each)}"
            raise Refused(path, "class_record", what)
        if isinstance(each, DuplicateKeys):
            raise Refused(path, "class_keys_twice", f"category {each['id']} has a key twice", each["id"])
    twice = [str(own) for own, count in Counter(each["id"] for each in entries).items() if count > 1]
    if twice:
        what = f"category id {some(twice, 1)} {'is' if len(twice) == 1 else 'are'} given twice"
        raise Refused(path, "class_id_twice", what)
    by_id = sorted(entries, key=lambda each: int(each["id"]))
    return [{"id": each["id"], "name": each["name"]} | lvis.of_category(each) for each in by_id]
