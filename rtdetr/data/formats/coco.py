"""Reads and checks COCO detection JSON, including LVIS, into one form for both training and evaluation."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import Classes, Match, match_classes, shown, some
from rtdetr.data.dataset import BoxList, DetectionSet, ImageList
from rtdetr.data.defects import MOST_DROPPED, Defect, Names, Refused, Totals, count_dropped, refusal
from rtdetr.data.formats import lvis
from rtdetr.data.formats.coco_records import Annotations, BoxTable, Images, as_table, is_id
from rtdetr.data.formats.json_lists import DuplicateKeys, one_object, read_lists
from rtdetr.data.formats.records import Corners, DataSource
from rtdetr.data.formats.sniff import annotations_in, kind_of_bytes, kind_of_json, kind_of_value
from rtdetr.data.image_files import Folders


class CocoDocument(NamedTuple):
    """The parts of a COCO JSON that detection needs, in one form for the readers of all formats."""

    images: list[dict[str, Any]]  # id, file_name or coco_url (the other is None), height and width (0: unknown)
    # image_id, category_id, bbox (x, y, w, h in pixels), area, iscrowd (0 or 1); may be a BoxTable
    annotations: list[dict[str, Any]]
    categories: list[dict[str, Any]]  # id, name; sorted by id
    num_boxless_crowds: int  # crowds without a bbox: unusable in evaluation, unneeded in training
    notes: tuple[str, ...]  # remarks for the user on how it was read
    defects: Sequence[Defect]  # of dropped records, and of some that were kept
    tally: Totals  # counts of all records

    def add_image(self, file_name: str, size: tuple[int, int]) -> int:
        """Adds an image of `size` (h, w) and returns its id; ids count from 1."""
        image_id, (height, width) = len(self.images) + 1, size
        image = {"id": image_id, "file_name": file_name, "coco_url": None, "height": height, "width": width}
        self.images.append(image)
        return image_id

    def add_box(
        self, image_id: int, category_id: int, corners: Corners, crowd: int = 0, area: float | None = None
    ) -> None:
        """Adds a box. area: None: that of the box."""
        x1, y1, x2, y2 = corners
        width, height = round(x2 - x1, 9), round(y2 - y1, 9)
        box = {"image_id": image_id, "category_id": category_id, "bbox": [x1, y1, width, height]}
        self.annotations.append(box | {"area": width * height if area is None else area, "iscrowd": crowd})


def new_document(classes: Mapping[int, str], notes: tuple[str, ...] = ()) -> CocoDocument:
    """A document without images. classes: names by id."""
    categories = [{"id": number, "name": name} for number, name in classes.items()]
    return CocoDocument([], [], categories, 0, notes, (), Totals())


class DocumentSet(DetectionSet):
    """Images and boxes of one document.

    source: the location of the document; its `images` is the folder that file names are relative to. classes: None uses
    those of the document; otherwise boxes get the index of their category in `classes`, matched by id or name as
    `match` says. drop_empty leaves out images without boxes. Crowd boxes are left out and counted. limit: the largest
    share of images, and of boxes, that may be dropped because of defects; None: no limit. Clears the document's
    BoxTable, the largest object in memory. Raises DataError if the set is unusable.
    """

    def __init__(
        self,
        document: CocoDocument,
        source: DataSource,
        classes: Classes | None = None,
        drop_empty: bool = False,
        match: Match = "id",
        limit: float | None = MOST_DROPPED,
    ) -> None:
        path, folder, max_megapixels = source.path, source.images, source.max_megapixels
        if folder is None or not folder.is_dir():
            raise Refused(folder, "folder_missing", f"no such image folder, expected the images of {path}")
        self.notes = document.notes
        own = _classes(document.categories)
        used = own if classes is None else match_classes(own, classes, match, path)
        images = ImageList(
            [each["id"] for each in document.images],
            file_names(document.images, folder),
            [(each["height"], each["width"]) for each in document.images],
        )
        boxes = _boxes(document, images.ids, used)
        if isinstance(document.annotations, BoxTable):
            document.annotations.clear()
        defects, tally = document.defects, document.tally
        super().__init__(folder, path, used, images, boxes, defects, tally, drop_empty, max_megapixels, limit)
        self.origin = source
        self.defects += _odd_names(own, path)


def _odd_names(classes: Classes, path: Path) -> list[Defect]:
    """Defects of classes with a duplicate name or none."""
    found = []
    times = Counter(classes.names)
    for own, name in zip(classes.category_ids, classes.names):
        if not name.strip() or times[name] > 1:
            what = f"category {own} is called {shown(name)}" + (", as another one is" if name.strip() else "")
            found.append(Defect(str(path), own, "class_name", what, "kept"))
    return found


def read_document(annotations: str | Path, limit: float | None = MOST_DROPPED) -> CocoDocument:
    """The valid records of the JSON, and the defects of the others. Training and evaluation both use this function, so
    that they agree on what a crowd is, what null means and which records are left out.

    limit: the largest share of images, and of annotations, that may be dropped; None: no limit. Raises DataError with
    one sentence that names the file and the entry.
    """
    path = Path(annotations)
    images, boxes, entries = _judged(path)
    categories = _categories(entries, path)
    sound = images.finish()
    table, tally = boxes.finish([each["id"] for each in sound], images.gone, {each["id"] for each in categories})
    tally.images = images.count
    defects = [*images.defects, *boxes.defects]
    boxes_like_a_list = cast(list[dict[str, Any]], table)
    document = CocoDocument(sound, boxes_like_a_list, categories, boxes.num_boxless_crowds, (), defects, tally)
    refuse_bad(document, path, limit)
    return document


def with_defects(document: CocoDocument, defects: Sequence[Defect], path: Path, limit: float | None) -> CocoDocument:
    """The document of another format with the defects of its records. Raises DataError as `read_document` does."""
    gone = count_dropped(defects)
    boxes_of = Counter(each["category_id"] for each in document.annotations if not each["iscrowd"])
    tally = Totals(len(document.images) + gone.images, boxes_of.total() + gone.boxes, boxes_of)
    document = document._replace(defects=defects, tally=tally)
    refuse_bad(document, path, limit)
    return document


def refuse_bad(document: CocoDocument, path: Path, limit: float | None) -> None:
    """Raises DataError if more than `limit` of the records were dropped, or all boxes of a class."""
    if limit is None or not document.defects:
        return
    left = Counter(each["category_id"] for each in document.annotations if not each["iscrowd"])
    names = Names(str(path), "", {each["id"]: each["name"] for each in document.categories})
    refused = refusal(names, document.defects, document.tally, left, limit)
    if refused is not None:
        raise refused


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


def read_classes(annotations: str | Path) -> Classes:
    """The classes of a COCO detection JSON. Raises DataError if it cannot be read."""
    path = Path(annotations)
    return _classes(_categories(_read_json(path)["categories"], path))


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


def file_names(images: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """File names relative to the folder. LVIS has only URLs: the name is 1.jpg if that is in the folder itself, else
    train2017/1.jpg, as LVIS sets contain images of several COCO folders."""
    present = Folders(folder)
    names = []
    for each in images:
        name = each["file_name"]
        if name is None:
            url = PurePosixPath(urlsplit(each["coco_url"]).path)
            name = url.name if url.name in present else "/".join(url.parts[-2:])
        names.append(name)
    return names


def corners_of(annotations: Sequence[Mapping[str, Any]]) -> NDArray[np.float64]:
    """Boxes (n, 4) xyxy in pixels."""
    corners = np.array([each["bbox"] for each in annotations], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return corners


def _boxes(document: CocoDocument, ids: Sequence[int], classes: Classes) -> BoxList:
    table = as_table(document.annotations)
    keep = table.columns.crowds == 0
    image_ids, category_ids = table.columns.image_ids[keep], table.columns.category_ids[keep]
    corners = table.columns.numbers[keep, :4]
    corners[:, 2:] += corners[:, :2]
    num_crowd = len(table) - len(corners) + document.num_boxless_crowds
    places = _places(image_ids, ids), _places(category_ids, classes.category_ids)
    return BoxList(*places, corners, num_crowd, table.names(keep))


def _places(values: NDArray[np.int64], among: Sequence[int]) -> NDArray[np.int64]:
    """The index of each value in a list that contains it once."""
    listed = np.array([max(each, -(2**63)) for each in among], np.int64)  # NO_ID is below int64; no value equals it
    order = np.argsort(listed, kind="stable")
    return order[np.searchsorted(listed, values, sorter=order)] if len(listed) else values[:0]


def _classes(categories: Sequence[Mapping[str, Any]]) -> Classes:
    return Classes(tuple(each["name"] for each in categories), tuple(each["id"] for each in categories))
