"""Reads CVAT for images 1.1: one XML for all images, in pixels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.formats import named
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.named import NamedBox, NamedImage
from rtdetr.data.formats.records import POLYGONS, SPLITS, BadRecord, Corners, DataSource, Problems, head_of, read_bytes
from rtdetr.data.formats.xml import Node, parse_xml

MOST_BYTES = 1_000_000_000
IMAGE = re.compile(rb"<image\b")
SUBSET = re.compile(rb'<image\b[^>]*?\bsubset="([^"]*)"')
SIDES = {
    "box": ("xtl", "ytl", "xbr", "ybr"),
    "ellipse": ("cx", "cy", "rx", "ry"),
    "mask": ("left", "top", "width", "height"),
}
WITHOUT_BOX = ("tag", "points", "polyline", "skeleton", "cuboid")


def cvat_file(path: Path) -> Path:
    return path / "annotations.xml" if path.is_dir() else path


def find_cvat(path: Path) -> dict[str, str]:
    """The CVAT subset of each split, of an XML or of a folder with an annotations.xml: "" -> "" without subsets. Empty
    if it is not in CVAT's format. Raises DataError if the subsets cannot be mapped to splits."""
    file = cvat_file(path)
    if file.suffix.lower() != ".xml" or not re.search(rb"<annotations\b", _without_zeros(head_of(file, 10_000))):
        return {}
    content = _without_zeros(read_bytes(file, MOST_BYTES))
    subsets = [each.decode("utf-8", "replace") for each in SUBSET.findall(content)]
    without = [""] if subsets and len(subsets) < len(IMAGE.findall(content)) else []
    named = sorted({*subsets, *without})
    if len(named) < 2:
        return {"": ""}
    found = {split: name for name in named for split, names in SPLITS.items() if name.lower() in names}
    if len(found) < len(named):
        raise DataError(f"{file}: its subsets are {some(map(repr, named))}; call each of them train, val or test")
    return found


def _without_zeros(content: bytes) -> bytes:
    """ASCII as it is, also from UTF-16, which has zeros in between."""
    return content.replace(b"\0", b"")


def read_cvat(subsets: Mapping[str, str], source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set. The classes are those of the whole file, in the order of its labels, else by name."""
    path = source.path
    root = parse_xml(read_bytes(path, MOST_BYTES), path)
    if root.tag != "annotations":
        raise DataError(f"{path}: line {root.line}: expected <annotations> of CVAT, got <{root.tag}>")
    tracks = root.all("track")
    if tracks:
        raise DataError(f"{path}: line {tracks[0].line}: has tracks of a video; export it as CVAT for images 1.1")
    subset = subsets[source.split]
    images: list[NamedImage] = []
    for node in root.all("image"):
        if not subset or node.attributes.get("subset") == subset:
            with problems.reported(path, node.line):
                images.append(_image(path, node, problems))
    return named.document_of(images, _labels(root) or named.class_names(path.parent, images), problems)


def _labels(root: Node) -> list[str]:
    """The names in <meta><task><labels>; the labels may also be in a project or a job."""
    found: dict[str, None] = {}
    for meta in root.all("meta"):
        for kind in ("task", "project", "job"):
            for labels in [each for part in meta.all(kind) for each in part.all("labels")]:
                names = [name.text.strip() for label in labels.all("label") for name in label.all("name")]
                found |= dict.fromkeys(name for name in names if name)
    return list(found)


def _image(path: Path, node: Node, problems: Problems) -> NamedImage:
    height, width = (_parsed(node.attributes[key]) if key in node.attributes else None for key in ("height", "width"))
    size = named.size_of(height, width)
    boxes: list[NamedBox] = []
    for child in node.children:
        if child.tag in WITHOUT_BOX:
            problems.counted["shapes without a box (points, lines, tags) left out"] += 1
            continue
        with problems.reported(path, child.line):
            boxes.append(_box(child, problems.counted))
    return NamedImage(path, node.line, node.attributes.get("name", ""), size, boxes)


def _box(node: Node, counted: Counter[str]) -> NamedBox:
    """The box of a shape. Raises BadRecord."""
    name = node.attributes.get("label")
    if node.tag not in (*SIDES, "polygon"):
        raise BadRecord("box_box", f"expected <box>, <polygon>, <ellipse> or <mask>, got <{node.tag}>")
    if name is None or not named.is_class_name(name):
        raise BadRecord("box_class", f"<{node.tag}> needs a class as `label`, got {shown(node.attributes)}")
    corners = _corners(node, counted)
    if corners is None:
        needed = "`points` as x,y;x,y;x,y" if node.tag == "polygon" else f"numbers as {', '.join(SIDES[node.tag])}"
        raise BadRecord("box_numbers", f"<{node.tag}> needs {needed}, got {shown(node.attributes)}")
    return NamedBox("", node.line, name, corners)


def _corners(node: Node, counted: Counter[str]) -> Corners | None:
    if node.tag == "polygon":
        counted[POLYGONS] += 1
        pairs = node.attributes.get("points", "").split(";")
        points = named.points_of([[_parsed(each) for each in pair.split(",")] for pair in pairs])
        return None if points is None or len(points) < 3 else named.around(points)
    numbers = named.numbers_of(_number(node, key) for key in SIDES[node.tag])
    rotation = _number(node, "rotation") if "rotation" in node.attributes else 0.0
    if numbers is None or rotation is None:
        return None
    a, b, c, d = numbers
    if node.tag == "ellipse":
        a, b, c, d = a - c, b - d, a + c, b + d
    elif node.tag == "mask":
        c, d = a + c, b + d
    if rotation == 0:
        return a, b, c, d
    counted[named.TURNED] += 1
    return named.turned((a, b, c, d), rotation, ((a + c) / 2, (b + d) / 2))


def _number(node: Node, key: str) -> float | None:
    return named.number_of(_parsed(node.attributes.get(key, "")))


def _parsed(text: str) -> float | str:
    """The number that a text holds, else the text."""
    try:
        return float(text)
    except ValueError:
        return text
