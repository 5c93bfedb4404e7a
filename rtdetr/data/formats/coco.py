"""COCO detection JSON: read, checked and put in one form, for training and evaluation alike. LVIS' is one, too."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import Classes, DataError, Match, match_classes, shown, some
from rtdetr.data.dataset import BoxList, DetectionSet, Folders, PictureList
from rtdetr.data.formats import lvis
from rtdetr.data.formats.kinds import annotations_in, kind_of_bytes, kind_of_json
from rtdetr.data.formats.records import Source
from rtdetr.data.pictures import MAX_MEGAPIXELS

CROWD: dict[Any, int] = {None: 0, 0: 0, 1: 1, "0": 0, "1": 1}  # true, false, 0.0 and 1.0 equal 1 and 0


class CocoDocument(NamedTuple):
    """What detection needs of a COCO JSON, in one form whoever wrote it."""

    images: list[dict[str, Any]]  # id, file_name or coco_url (the other is None), height and width (0: not said)
    annotations: list[dict[str, Any]]  # image_id, category_id, bbox (x, y, w, h in pixels), area, iscrowd (0 or 1)
    categories: list[dict[str, Any]]  # id, name; by id
    num_boxless_crowds: int  # crowds without a bbox: they cannot be evaluated and are not needed to train
    notes: tuple[str, ...] = ()  # what somebody should know about how it was read


class DocumentSet(DetectionSet):
    """Pictures and boxes of one document.

    source: where it was read; its `images` is the folder that file names are relative to. classes: None takes them
    from the document; otherwise boxes get the index in them that their category has by `match`, its id or its name.
    drop_empty leaves out pictures without boxes. Crowd boxes are left out and counted.
    Raises DataError for whatever is missing or contradicts itself.
    """

    def __init__(
        self,
        document: CocoDocument,
        source: Source,
        classes: Classes | None = None,
        drop_empty: bool = False,
        match: Match = "id",
    ) -> None:
        path, folder, max_megapixels = source.path, source.images, source.max_megapixels
        if folder is None or not folder.is_dir():
            raise DataError(f"{folder}: no such picture folder, expected the pictures of {path}")
        self.notes = document.notes
        own = classes_of(document)
        used = own if classes is None else match_classes(own, classes, match, path)
        pictures = PictureList(
            [each["id"] for each in document.images],
            file_names(document.images, folder),
            [(each["height"], each["width"]) for each in document.images],
        )
        boxes = _boxes(document, pictures.ids, used)
        super().__init__(folder, path, used, pictures, boxes, drop_empty, max_megapixels)
        self.origin = source


class CocoDetection(DocumentSet):
    """Pictures and boxes of one COCO detection JSON; images: the folder that `file_name` in it is relative to.
    max_megapixels: larger pictures are refused. The rest is as in DocumentSet."""

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        classes: Classes | None = None,
        drop_empty: bool = False,
        max_megapixels: float = MAX_MEGAPIXELS,
        match: Match = "id",
    ) -> None:
        source = Source("coco", Path(annotations), "", Path(images), max_megapixels)
        super().__init__(read_document(annotations), source, classes, drop_empty, match)


def read_document(annotations: str | Path) -> CocoDocument:
    """The JSON, every entry checked. Training and evaluation both read it here, so that they agree on what a crowd is
    and what null means. Raises DataError with one sentence that names the file and the entry."""
    path = Path(annotations)
    raw = _read_json(path)
    images = [_image(each, path) for each in raw["images"]]
    ids = _unique([each["id"] for each in images], "image id", path)
    categories = _categories(raw["categories"], path)
    known = {each["id"] for each in categories}
    boxes = [_annotation(each, ids, known, path) for each in raw["annotations"]]
    kept = [each for each in boxes if each is not None]
    return CocoDocument(images, kept, categories, len(boxes) - len(kept))


def read_classes(annotations: str | Path) -> Classes:
    """The classes that a COCO detection JSON names. Raises DataError."""
    path = Path(annotations)
    return _classes(_categories(_read_json(path)["categories"], path))


def classes_of(document: CocoDocument) -> Classes:
    return _classes(document.categories)


def _read_json(path: Path) -> dict[str, list[Any]]:
    if path.is_dir():
        inside = some((str(file) for file in annotations_in(path)), 3)
        advice = f"; did you mean {inside}?" if inside else ""
        raise DataError(f"{path}: is a folder, expected a COCO detection JSON{advice}")
    if not path.is_file():
        raise DataError(f"{path}: no such annotation file, expected a COCO detection JSON")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:  # broken JSON, bytes that are no text, brackets without end
        raise DataError(f"{path}: not valid JSON ({error}){kind_of_bytes(content)}") from error
    for key in ("images", "annotations", "categories"):
        if not isinstance(document, dict) or not isinstance(document.get(key), list):
            raise DataError(
                f"{path}: no list `{key}` at the top, expected a COCO detection JSON{kind_of_json(document)}"
            )
        if not all(isinstance(entry, dict) for entry in document[key]):
            raise DataError(f"{path}: every entry of `{key}` must be a mapping, expected a COCO detection JSON")
    return document


def _image(entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    name, url = entry.get("file_name"), entry.get("coco_url")
    if not _is_id(entry.get("id")) or not (isinstance(name, str) or (name is None and isinstance(url, str))):
        raise DataError(f"{path}: an image needs an integer `id` and a `file_name` (or `coco_url`), got {shown(entry)}")
    sides = {key: _number(entry, key, 0, f"{path}: image {entry['id']}") for key in ("height", "width")}
    if any(side < 0 or side != int(side) for side in sides.values()):
        raise DataError(f"{path}: image {entry['id']}: height and width must be whole pixels, got {sides}")
    image = {"id": entry["id"], "file_name": name, "coco_url": url} | {key: int(side) for key, side in sides.items()}
    return image | lvis.of_picture(entry, f"{path}: image {entry['id']}")


def _categories(entries: Sequence[Mapping[str, Any]], path: Path) -> list[dict[str, Any]]:
    if not entries:
        raise DataError(f"{path}: `categories` is empty, so there is nothing to detect")
    for each in entries:
        if not _is_id(each.get("id")) or not isinstance(each.get("name"), str):
            raise DataError(f"{path}: a category needs an integer `id` and a `name`, got {shown(each)}")
    _unique([each["id"] for each in entries], "category id", path)
    by_id = sorted(entries, key=lambda each: int(each["id"]))
    return [{"id": each["id"], "name": each["name"]} | lvis.of_category(each) for each in by_id]


def _annotation(entry: Mapping[str, Any], images: set[int], categories: set[int], path: Path) -> dict[str, Any] | None:
    """The annotation in its one form; None for a crowd without a box."""
    where = f"{path}: annotation {shown(entry.get('id'))}"
    image_id, category_id, box, crowd = (entry.get(key) for key in ("image_id", "category_id", "bbox", "iscrowd"))
    if not isinstance(image_id, (int, float)) or image_id not in images:
        raise DataError(f"{where} belongs to image id {shown(image_id)}, which is not among the images")
    if not isinstance(category_id, (int, float)) or category_id not in categories:
        raise DataError(f"{where} has category id {shown(category_id)}, which is not among the categories")
    if not isinstance(crowd, (int, float, str, type(None))) or crowd not in CROWD:
        raise DataError(f"{where}: `iscrowd` must be 0 or 1, got {shown(crowd)}")
    if CROWD[crowd] and not box:
        return None
    if not isinstance(box, list) or len(box) != 4 or not all(_is_finite(value) for value in box):
        raise DataError(f"{where}: `bbox` must be four finite numbers [x, y, width, height], got {shown(box)}")
    return {
        "image_id": int(image_id),
        "category_id": int(category_id),
        "bbox": box,
        "area": _number(entry, "area", box[2] * box[3], where),
        "iscrowd": CROWD[crowd],
    }


def _number(entry: Mapping[str, Any], key: str, default: float, where: str) -> float:
    """The value of a key, written as a number or as text; the default where it is missing or null."""
    value = entry.get(key)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if value is None:
        return default
    if not _is_finite(value):
        raise DataError(f"{where}: `{key}` must be a finite number, got {shown(value)}")
    return float(value)


def _is_finite(value: object) -> bool:
    """Also False for integers that no float can hold."""
    return isinstance(value, (int, float)) and abs(value) < 1e300


def _is_id(value: object) -> bool:
    return type(value) is int and -(2**63) <= value < 2**63


def _unique(ids: Sequence[int], what: str, path: Path) -> set[int]:
    twice = [str(each) for each, count in Counter(ids).items() if count > 1]
    if twice:
        raise DataError(f"{path}: {what} {some(twice, 1)} {'is' if len(twice) == 1 else 'are'} given twice")
    return set(ids)


def file_names(images: Sequence[Mapping[str, Any]], folder: Path) -> list[str]:
    """Relative to the folder. LVIS names a picture by its URL alone: train2017/1.jpg for those who keep COCO's folders
    (its sets draw on both), 1.jpg where that lies in the folder itself."""
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
    """The boxes (n, 4) xyxy in pixels."""
    corners = np.array([each["bbox"] for each in annotations], np.float64).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    return corners


def _boxes(document: CocoDocument, ids: Sequence[int], classes: Classes) -> BoxList:
    position = {image_id: i for i, image_id in enumerate(ids)}
    label_of = {category_id: i for i, category_id in enumerate(classes.category_ids)}
    kept = [each for each in document.annotations if not each["iscrowd"]]
    return BoxList(
        [position[each["image_id"]] for each in kept],
        [label_of[each["category_id"]] for each in kept],
        corners_of(kept),
        len(document.annotations) - len(kept) + document.num_boxless_crowds,
    )


def _classes(categories: Sequence[Mapping[str, Any]]) -> Classes:
    return Classes(tuple(each["name"] for each in categories), tuple(each["id"] for each in categories))
