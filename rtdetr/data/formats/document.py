"""One document for all formats: what their readers return, and training and evaluation use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import Classes
from rtdetr.data.defects import Defect, Names, Totals, count_dropped, refusal
from rtdetr.data.formats.records import Corners, Problems
from rtdetr.data.image_files import Folders

NO_OWN_ID = -(2**63)  # for annotations without a valid id, which only messages use


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


def new_document(classes: Mapping[int, str]) -> CocoDocument:
    """A document without images. classes: names by id."""
    categories = [{"id": number, "name": name} for number, name in classes.items()]
    return CocoDocument([], [], categories, 0, (), (), Totals())


def with_problems(document: CocoDocument, problems: Problems, path: Path, limit: float | None) -> CocoDocument:
    """The document of another format with what its reader found. Raises DataError as `read_document` does."""
    images, boxes = count_dropped(problems.found)
    boxes_of = Counter(each["category_id"] for each in document.annotations if not each["iscrowd"])
    tally = Totals(len(document.images) + images, boxes_of.total() + boxes, boxes_of)
    counts = [f"{what}: {count}" for what, count in sorted(problems.counted.items())]
    document = document._replace(defects=problems.found, tally=tally, notes=(*counts, *problems.notes))
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


def classes_of(categories: Sequence[Mapping[str, Any]]) -> Classes:
    return Classes(tuple(each["name"] for each in categories), tuple(each["id"] for each in categories))


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


@dataclass(eq=False)
class BoxTable(Sequence[dict[str, Any]]):
    """Annotations in flat arrays of n rows, which also acts as a sequence of COCO's dictionaries."""

    places: NDArray[np.int64]  # (n,) index in the file's list
    own_ids: NDArray[np.int64]  # (n,)
    image_ids: NDArray[np.int64]  # (n,)
    category_ids: NDArray[np.int64]  # (n,)
    numbers: NDArray[np.float64]  # (n, 5) x, y, w, h, area in pixels
    crowds: NDArray[np.int8]  # (n,) 0 or 1

    def __len__(self) -> int:
        return len(self.image_ids)

    def __getitem__(self, index: Any) -> Any:
        return next(iter(self.where(np.array([index]))))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for image, category, (*box, area), crowd in zip(
            self.image_ids.tolist(), self.category_ids.tolist(), self.numbers.tolist(), self.crowds.tolist()
        ):
            yield {"image_id": image, "category_id": category, "bbox": box, "area": area, "iscrowd": crowd}

    def clear(self) -> None:
        """Frees the memory by removing all rows."""
        for name, column in vars(self).items():
            setattr(self, name, column[:0].copy())

    def where(self, keep: NDArray[Any]) -> BoxTable:
        """Selects rows by a mask or by indices."""
        return BoxTable(**{name: column[keep] for name, column in vars(self).items()})

    def name(self, row: int) -> int | str:
        """The name of an annotation for messages: its id, or its place in the file."""
        own = int(self.own_ids[row])
        return own if own != NO_OWN_ID else f"annotations[{self.places[row]}]"


def as_table(annotations: Sequence[dict[str, Any]]) -> BoxTable:
    """Converts valid annotations of any reader to a table."""
    if isinstance(annotations, BoxTable):
        return annotations
    numbers = [[*each["bbox"], each["area"]] for each in annotations]
    ids = [[each.get("id", i), each["image_id"], each["category_id"]] for i, each in enumerate(annotations)]
    own, images, categories = np.array(ids, np.int64).reshape(-1, 3).T
    crowds = np.array([each["iscrowd"] for each in annotations], np.int8)
    places = np.arange(len(annotations))
    return BoxTable(places, own, images, categories, np.array(numbers, np.float64).reshape(-1, 5), crowds)
