"""Reads Label Studio's JSON export: tasks with the regions of each annotator, in percent of the image."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from rtdetr.data.classes import DataError, shown
from rtdetr.data.formats import named
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.named import NamedBox, NamedImage
from rtdetr.data.formats.records import IMAGE_SUFFIXES, POLYGONS, BadRecord, Corners, Problems, head_of, to_pixels
from rtdetr.data.image_files import Folders

MOST_BYTES = 1_000_000_000
LOOKED_AT = 20  # images that are looked up to find their folder
UPLOAD = re.compile(r"[0-9a-f]{8}-")  # prefix that Label Studio adds to uploaded files
POLYGON, ELLIPSE = "polygonlabels", "ellipselabels"
SHAPES = ("rectanglelabels", "labels", POLYGON, ELLIPSE)


def is_labelstudio(path: Path) -> bool:
    """Whether a JSON begins like a Label Studio export."""
    head = head_of(path, 2**22).removeprefix(b"\xef\xbb\xbf").lstrip()
    return head.startswith(b"[") and b'"annotations"' in head and b'"data"' in head


def read_labelstudio(path: Path, groups: Sequence[Sequence[Path]], problems: Problems) -> CocoDocument:
    """Reads of each task the annotation marked as ground truth, else the last one submitted. Tasks without annotations
    are left out. groups: candidates for the image folder, likely ones in the first group."""
    tasks = named.read_json(path, MOST_BYTES)
    if not isinstance(tasks, list):
        raise DataError(f"{path}: expected a list of tasks, as Label Studio exports JSON, got {shown(tasks)}")
    images: list[NamedImage] = []
    for number, task in enumerate(tasks, start=1):
        place = f"task {shown(named.section(task).get('id'))} (entry {number}): "
        with problems.reported(path, where=place):
            images += _task(path, place, task, problems)
    present = _folder(images, groups)
    if present is not None:
        images = [each._replace(file_name=_in_folder(each.file_name, present)) for each in images]
    return named.document_of(images, named.class_names(path.parent, images), problems)


def _task(path: Path, place: str, task: Any, problems: Problems) -> Iterator[NamedImage]:
    """Yields the image of a task, unless it has no annotation. Raises BadRecord."""
    own = named.record(task, "image")
    data, annotations = named.record(own.get("data"), "image"), own.get("annotations")
    if not data or not isinstance(annotations, list):
        raise BadRecord("image_file", f"needs `data` and a list of `annotations`, got {shown(task)}")
    source = _image_of(data)
    if source is None:
        raise BadRecord("image_image", f"no value of `data` names an image file, got {shown(data)}")
    submitted = [each for each in map(named.section, annotations) if not each.get("was_cancelled")]
    if not submitted:
        problems.counted["tasks without an annotation left out"] += 1
        return
    if len(submitted) > 1:
        problems.counted["tasks with several annotations, of which one was taken"] += 1
    chosen = next((each for each in submitted if each.get("ground_truth") is True), submitted[-1])
    if not isinstance(chosen.get("result"), list):
        raise BadRecord("image_file", f"its annotation needs a list as `result`, got {shown(chosen)}")
    regions = [named.section(each) for each in chosen["result"]]
    sizes = {
        named.size_of(each.get("original_height"), each.get("original_width"))
        for each in regions
        if each.get("type") in SHAPES and "original_width" in each
    }
    sizes.discard((0, 0))
    if len(sizes) > 1:
        raise BadRecord("image_size", "`original_width` and `original_height` must be one size for all regions")
    size = sizes.pop() if sizes else (0, 0)
    boxes: list[NamedBox] = []
    for number, region in enumerate(chosen["result"], start=1):
        kind = named.section(region).get("type")
        if isinstance(kind, str) and kind not in SHAPES:
            problems.counted["regions of other types left out"] += 1
            continue
        where = f"{place}region {number}: "
        with problems.reported(path, where=where):
            boxes.append(_box(region, size, where, problems.counted))
    yield NamedImage(path, 0, source, size, boxes)


def _image_of(data: dict[str, Any]) -> str | None:
    """The image path of a task; the one under the key `image`, if several values could be images."""
    for key in sorted(data, key=lambda key: key != "image"):
        if isinstance(data[key], str) and (name := _path_in(data[key])).lower().endswith(IMAGE_SUFFIXES):
            return name
    return None


def _path_in(url: str) -> str:
    """The path of a URL or file: s3://bucket/a.jpg, /data/upload/1/a.jpg, /data/local-files/?d=a.jpg, a.jpg."""
    try:
        parts = urlsplit(url)
        given = parse_qs(parts.query).get("d")
    except ValueError:  # an incomplete IPv6 address
        return url
    return given[0] if given else unquote(parts.path) if parts.scheme or url.startswith("/data/") else url


def _box(given: object, size: tuple[int, int], where: str, counted: Counter[str]) -> NamedBox:
    """The box of a region. Raises BadRecord."""
    region = named.record(given, "box")
    kind, value = region.get("type"), named.record(region.get("value"), "box")
    if not isinstance(kind, str):
        raise BadRecord("box_box", f"expected a region with a `type`, got {shown(given)}")
    names = value.get(kind)
    if not isinstance(names, list) or len(names) != 1 or not named.is_class_name(names[0]):
        raise BadRecord("box_class", f"expected one class in `{kind}`, got {shown(given)}")
    if region.get("image_rotation") not in (None, 0):
        what = "the image was rotated in Label Studio (`image_rotation`); rotate the file instead"
        raise BadRecord("box_box", f"{what}, got {shown(given)}")
    if not all(size):
        raise BadRecord("box_numbers", f"`original_width` and `original_height` are missing, got {shown(given)}")
    corners = _corners(kind, value, size, counted)
    if corners is None:
        needed = {POLYGON: "`points` of two numbers", ELLIPSE: "`x`, `y`, `radiusX` and `radiusY`"}
        what = f"expected {needed.get(kind, '`x`, `y`, `width` and `height`')} in percent"
        raise BadRecord("box_numbers", f"{what}, got {shown(given)}")
    return NamedBox(where, 0, names[0], corners)


def _corners(kind: str, value: dict[str, Any], size: tuple[int, int], counted: Counter[str]) -> Corners | None:
    rotation = named.number_of(value.get("rotation", 0))
    keys = {POLYGON: (), ELLIPSE: ("x", "y", "radiusX", "radiusY")}.get(kind, ("x", "y", "width", "height"))
    numbers = named.numbers_of(value.get(key) for key in keys)
    if rotation is None or numbers is None:
        return None
    if kind == POLYGON:
        points = named.points_of(value.get("points"))
        if points is None or len(points) < 3:
            return None
        counted[POLYGONS] += 1
        x1, y1, x2, y2 = named.around(points)
    elif kind == ELLIPSE:
        x, y, across, down = numbers
        x1, y1, x2, y2 = x - across, y - down, x + across, y + down
    else:
        x1, y1, x2, y2 = numbers[0], numbers[1], numbers[0] + numbers[2], numbers[1] + numbers[3]
    box = to_pixels((x1 / 100, y1 / 100, x2 / 100, y2 / 100), size)
    if rotation == 0 or kind == POLYGON:
        return box
    counted[named.TURNED] += 1
    centre = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    return named.turned(box, rotation, centre if kind == ELLIPSE else box[:2])


def _folder(images: Sequence[NamedImage], groups: Sequence[Sequence[Path]]) -> Folders | None:
    """The first of the folders that contain most of the first images, in the first group that has any; None if no
    folder has one."""
    names = [_names(each.file_name) for each in images[:LOOKED_AT]]
    for folders in groups:
        counts = {each: sum(any(name in each for name in own) for own in names) for each in map(Folders, folders)}
        if any(counts.values()):
            return max(counts, key=counts.__getitem__)
    return None


def _names(path: str) -> list[str]:
    """Candidate names of an image in its folder: all trailing parts of its path, and its name without the prefix of an
    upload."""
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..") and "\0" not in part]
    ends = ["/".join(parts[start:]) for start in range(len(parts))]
    short = [UPLOAD.sub("", parts[-1], count=1)] if parts and UPLOAD.match(parts[-1]) else []
    return ends + short


def _in_folder(path: str, present: Folders) -> str:
    return next((name for name in _names(path) if name in present), PurePosixPath(path).name)
