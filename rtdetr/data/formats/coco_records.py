"""Checks each record of a COCO JSON by itself: valid ones are appended to flat arrays, others become a Defect.

Most records of most files are valid, so each one first takes a short test, and is examined in detail only if that
fails.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import shown
from rtdetr.data.defects import Action, Defect, Totals
from rtdetr.data.formats import lvis
from rtdetr.data.formats.document import NO_OWN_ID, BoxTable
from rtdetr.data.formats.json_lists import DuplicateKeys
from rtdetr.data.formats.records import BadRecord

CROWD: dict[Any, int] = {None: 0, 0: 0, 1: 1, "0": 0, "1": 1}  # true, false, 0.0 and 1.0 equal 1 and 0
LARGEST = 2**63 - 1
LARGEST_NUMBER = 1e150
MOST_PIXELS = 1_000_000  # longest side; no image is larger, and boxes are stored in 32 bits


class Images:
    """Takes the entries of `images` one by one; `finish` returns the valid ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.defects: list[Defect] = []
        self.gone: set[int] = set()  # ids of images that are dropped with their boxes
        self._kept: list[dict[str, Any]] = []

    def take(self, entry: Any) -> None:
        own = entry.get("id") if isinstance(entry, dict) else None
        record = own if is_id(own) else f"images[{self.count}]"
        self.count += 1
        try:
            self._kept.append(self._checked(entry))
        except BadRecord as error:
            self._drop(record, error.kind, str(error))

    def finish(self) -> list[dict[str, Any]]:
        """The images, without those whose id is used for several files: their boxes cannot be assigned."""
        file_of: dict[int, str] = {}
        ambiguous: set[int] = set()
        for each in self._kept:
            file = each["file_name"] or each["coco_url"]
            if file_of.setdefault(each["id"], file) != file:
                ambiguous.add(each["id"])
        kept: dict[int, dict[str, Any]] = {}
        for each in self._kept:
            own = each["id"]
            if own not in kept and own not in ambiguous:
                kept[own] = each
            else:
                what = f"image id {own} is given twice" + (", for different files" if own in ambiguous else "")
                self._drop(own, "image_id_twice", what, gone=own in ambiguous)
        return list(kept.values())

    def _checked(self, entry: Any) -> dict[str, Any]:
        """The image in the form of CocoDocument. Raises BadRecord."""
        if not isinstance(entry, dict):
            raise BadRecord("image_record", f"every entry of `images` must be a mapping, got {shown(entry)}")
        own, name, url = entry.get("id"), entry.get("file_name"), entry.get("coco_url")
        if not is_id(own) or not (_is_name(name) or (name is None and _is_name(url))):
            needed = "an image needs an integer `id`, of at most 64 bits, and a `file_name` (or `coco_url`)"
            raise BadRecord("image_record", f"{needed}, got {shown(entry)}")
        if isinstance(entry, DuplicateKeys):
            raise BadRecord("image_keys_twice", f"image {own}: has a key twice")
        sides = []
        for key in ("height", "width"):
            side = number(entry.get(key), 0)
            if side is None:
                raise BadRecord("image_size", f"image {own}: `{key}` must be a finite number, got {shown(entry[key])}")
            sides.append(side)
        height, width = sides
        if any(not 0 <= side <= MOST_PIXELS or side != int(side) for side in sides):
            what = f"height and width must be whole pixels, got {height:g} x {width:g}"
            raise BadRecord("image_size", f"image {own}: {what}")
        more = lvis.of_image(entry)
        if texts := [key for key in ("height", "width") if isinstance(entry.get(key), str)]:
            what = f"image {own}: `{texts[0]}` is text, {shown(entry[texts[0]])}, taken as a number"
            self.defects.append(Defect(str(self.path), own, "image_size", what, "kept"))
        needed_url = url if isinstance(url, str) and (name is None or more) else None  # COCO has both
        image = {"id": own, "file_name": name, "coco_url": needed_url, **more}
        return image | {"height": int(height), "width": int(width)}

    def _drop(self, record: int | str, kind: str, what: str, gone: bool = True) -> None:
        self.defects.append(Defect(str(self.path), record, kind, what, "dropped"))
        if isinstance(record, int) and gone:
            self.gone.add(record)


class Annotations:
    """Takes the entries of `annotations` one by one; `finish` returns the valid ones."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.count = 0
        self.defects: list[Defect] = []
        self.num_boxless_crowds = 0
        self.lost_of: Counter[int] = Counter()  # invalid boxes, which have no row, by category id
        # places, own, image and category ids, five numbers per row, crowds
        self._lists = array("q"), array("q"), array("q"), array("q"), array("d"), array("b")

    def take(self, entry: Any) -> None:
        place, self.count = self.count, self.count + 1
        if not self._take_quickly(entry, place):
            self._take_slowly(entry, place)

    def finish(self, images: Sequence[int], gone: set[int], categories: set[int]) -> tuple[BoxTable, Totals]:
        """The valid annotations with these image and category ids, and the counts of the whole file. gone: ids of
        dropped images; their boxes are dropped without a defect of their own."""
        table = BoxTable(*map(np.asarray, self._lists))  # the arrays share the memory of the lists
        table.numbers = table.numbers.reshape(-1, 5)
        named, counts = np.unique(table.category_ids[table.crowds == 0], return_counts=True)
        boxes_of = Counter(dict(zip(named.tolist(), counts.tolist()))) + self.lost_of
        boxes_of = Counter({own: count for own, count in boxes_of.items() if own in categories})
        tally = Totals(0, self.count - self.num_boxless_crowds - int(table.crowds.sum()), boxes_of)
        in_images, in_categories = _among(table.image_ids, images), _among(table.category_ids, categories)
        of_gone = _among(table.image_ids, gone) & ~in_images
        for i in np.flatnonzero(~(in_images | of_gone) | ~in_categories).tolist():
            if in_images[i] or of_gone[i]:
                kind = "box_class_unknown"
                what = f"has category id {table.category_ids[i]}, which is not among the categories"
            else:
                kind = "box_image_unknown"
                what = f"belongs to image id {table.image_ids[i]}, which is not among the images"
            self._add(table.name(i), kind, f"annotation {table.name(i)} {what}")
        self._note_oddities(table)
        sound = in_images & in_categories
        return (table if sound.all() else table.where(sound)), tally

    def _note_oddities(self, table: BoxTable) -> None:
        """Reports records that are kept. Invalid and duplicate annotation ids are a problem in other programs only."""
        own = table.own_ids
        for i in np.flatnonzero(table.numbers[:, 4] < 0).tolist():
            what = f"`area` is {table.numbers[i, 4]:g}, which evaluation by size cannot use"
            self._add(table.name(i), "box_area_negative", f"annotation {table.name(i)}: {what}", "kept")
        for place in table.places[own == NO_OWN_ID].tolist():
            record = f"annotations[{place}]"
            self._add(record, "box_id", f"{record}: an annotation needs an integer `id`, not used here", "kept")
        ids, counts = np.unique(own[own != NO_OWN_ID], return_counts=True)
        for own_id, count in zip(ids[counts > 1].tolist(), counts[counts > 1].tolist()):
            self._add(own_id, "box_id_twice", f"annotation id {own_id} is given {count} times, not used here", "kept")

    def _take_quickly(self, entry: Any, place: int) -> bool:
        """Appends a row if the entry is valid in every respect, and returns whether it is."""
        if type(entry) is not dict:
            return False
        get = entry.get
        own, image, category, box = get("id"), get("image_id"), get("category_id"), get("bbox")
        crowd, area = get("iscrowd", 0), get("area")
        if not (type(image) is type(category) is type(own) is int and type(box) is list and len(box) == 4):
            return False
        x, y, w, h = box
        if area is None and type(w) in (int, float) and type(h) in (int, float):
            area = w * h
        for value in (x, y, w, h, area):
            if (type(value) is not float and type(value) is not int) or not -LARGEST_NUMBER < value < LARGEST_NUMBER:
                return False
        if crowd not in (0, 1) or max(image, category, own) > LARGEST or min(image, category, own) <= NO_OWN_ID:
            return False
        self._row(place, own, image, category, box, area or 0, int(crowd))
        return True

    def _row(
        self, place: int, own: int, image: int, category: int, box: Sequence[float], area: float, crowd: int
    ) -> None:
        places, own_ids, image_ids, category_ids, all_numbers, crowds = self._lists
        places.append(place)
        own_ids.append(own)
        image_ids.append(image)
        category_ids.append(category)
        all_numbers.extend(box)
        all_numbers.append(area)
        crowds.append(crowd)

    def _take_slowly(self, entry: Any, place: int) -> None:
        """Appends a row if the entry is usable, else a defect with the reason."""
        own: Any = entry.get("id") if isinstance(entry, dict) else None
        record: int | str = own if is_id(own) else f"annotations[{place}]"
        try:
            area = _checked_area(entry)
        except BadRecord as error:
            called = f"annotation {shown(own)}" if isinstance(entry, dict) else f"annotations[{place}]"
            self._add(record, error.kind, f"{called}{error}")
            if isinstance(entry, dict) and is_id(entry.get("category_id")):
                self.lost_of[entry["category_id"]] += 1
            return
        if area is None:
            self.num_boxless_crowds += 1
            return
        image, category, box = entry["image_id"], entry["category_id"], [*map(float, entry["bbox"])]
        if type(image) is not int or type(category) is not int:
            what = f"annotation {record}: its ids are no integers, but equal one"
            self._add(record, "box_id_not_integer", what, "kept")
        crowd = CROWD[entry.get("iscrowd")]
        self._row(place, own if is_id(own) else NO_OWN_ID, int(image), int(category), box, area, crowd)

    def _add(self, record: int | str, kind: str, what: str, action: Action = "dropped") -> None:
        self.defects.append(Defect(str(self.path), record, kind, what, action))


def _checked_area(entry: Any) -> float | None:
    """The area of a usable annotation, None for a crowd without a box. Raises BadRecord for others."""
    if not isinstance(entry, dict):
        raise BadRecord("box_record", f": every entry of `annotations` must be a mapping, got {shown(entry)}")
    if isinstance(entry, DuplicateKeys):
        raise BadRecord("box_keys_twice", ": has a key twice")
    image, category, box, crowd = (entry.get(key) for key in ("image_id", "category_id", "bbox", "iscrowd"))
    if not _is_whole(image):
        raise BadRecord("box_image_id", f" belongs to image id {shown(image)}, which is not among the images")
    if not _is_whole(category):
        raise BadRecord("box_class_id", f" has category id {shown(category)}, which is not among the categories")
    if not isinstance(crowd, (int, float, str, type(None))) or crowd not in CROWD:
        raise BadRecord("box_crowd", f": `iscrowd` must be 0 or 1, got {shown(crowd)}")
    if CROWD[crowd] and not box:
        return None
    if not isinstance(box, list) or len(box) != 4 or not all(is_finite(value) for value in box):
        what = f": `bbox` must be four finite numbers [x, y, width, height], got {shown(box)}"
        raise BadRecord(_kind_of_box(box), what)
    area = number(entry.get("area"), box[2] * box[3])
    if area is None:
        raise BadRecord("box_area", f": `area` must be a finite number, got {shown(entry.get('area'))}")
    return area


def _kind_of_box(box: Any) -> str:
    if box is None:
        return "box_missing"
    if not isinstance(box, list) or len(box) != 4:
        return "box_length" if isinstance(box, list) else "box_not_numbers"
    numbers = all(type(value) in (int, float) for value in box)
    return "box_not_finite" if numbers else "box_not_numbers"


def number(value: Any, default: float) -> float | None:
    """The value of a number or of a numeric string; the default for null; None for everything else."""
    if value is None:
        value = default
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    return float(value) if is_finite(value) else None


def is_finite(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number below LARGEST_NUMBER, so that it fits a float, and so does a product of two."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def is_id(value: object) -> TypeGuard[int]:
    return type(value) is int and NO_OWN_ID < value <= LARGEST


def _is_whole(value: object) -> bool:
    """Whether a value is an integer of 64 bits, or a float equal to one."""
    return isinstance(value, (int, float)) and abs(value) <= LARGEST // 2 and value == int(value)


def _is_name(value: object) -> bool:
    """Whether a value is a string that can be a file name."""
    if not isinstance(value, str) or not value or "\0" in value:
        return False
    with contextlib.suppress(UnicodeEncodeError):
        return len(os.fsencode(value)) < 4096
    return False


def _among(ids: NDArray[np.int64], known: Sequence[int] | set[int]) -> NDArray[np.bool_]:
    return np.isin(ids, np.fromiter(known, np.int64, len(known)))
