"""Reads Pascal VOC folders: one XML per image, and lists of the images in each set.

Pixels are counted from 1 and the last one is part of the box, as in VOC itself: xmin 1, xmax 10 becomes [0, 10). Many
tools write edges counted from 0 instead; a folder with a box that begins below 1 is read as such as a whole.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path, PureWindowsPath
from typing import NamedTuple

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.formats.coco_records import MOST_PIXELS
from rtdetr.data.formats.document import CocoDocument, new_document
from rtdetr.data.formats.named import names_given
from rtdetr.data.formats.records import (
    IMAGE_SUFFIXES,
    MAX_LIST,
    SPLITS,
    DataSource,
    Problems,
    below,
    read_bytes,
    read_lines,
    walk,
)
from rtdetr.data.formats.sidecar import read_sidecar
from rtdetr.data.formats.xml import Node, parse_xml
from rtdetr.data.image_files import Folders

ANNOTATIONS = ("Annotations", "annotations")
IMAGES = ("JPEGImages", "images", "Images", "jpegimages")
ROOT = re.compile(rb"<([A-Za-z_][\w.-]*)")
SIDES = ("xmin", "ymin", "xmax", "ymax")


class VocSet(NamedTuple):
    annotations: Path  # folder of XML files
    images: Path  # folder of the images
    list_file: Path | None  # names without .xml, one per line; None: every XML in the folder


class VocFolder(NamedTuple):
    root: Path
    sets: dict[str, VocSet]  # train, val, trainval, test, or "" for the only one


class VocObject(NamedTuple):
    line: int
    name: str
    corners: tuple[float, float, float, float]  # as written in the file
    crowd: int
    area: float | None


class VocImage(NamedTuple):
    file_name: str  # as written in the file; may be empty
    size: tuple[int, int]  # (h, w) in pixels; zeros: unknown
    objects: list[VocObject]


def find_voc(path: Path) -> VocFolder | None:
    """The sets of a folder, of its Annotations folder or of one of its lists; None if it is not in VOC's format."""
    if path.is_file():
        root = next((each for each in list(path.parents)[:4] if _sub_folder(each, ANNOTATIONS)), None)
        if path.suffix.lower() != ".txt" or root is None or "ImageSets" not in path.parts:
            return None
        folder = _one_folder(root)
        return folder and VocFolder(root, {path.stem: folder._replace(list_file=path)})
    if path.name in ANNOTATIONS and has_xml(path):
        path = path.parent
    if (folder := _one_folder(path)) is not None:
        lists = path / "ImageSets" / "Main"
        sets = {name: lists / f"{name}.txt" for name in (*SPLITS, "trainval") if (lists / f"{name}.txt").is_file()}
        return VocFolder(path, {name: folder._replace(list_file=file) for name, file in sets.items()} or {"": folder})
    divided = {}
    for split, names in SPLITS.items():
        below_it = [found for name in names if (found := _one_folder(path / name)) is not None]
        if below_it:
            divided[split] = below_it[0]
    if divided:
        return VocFolder(path, divided)
    inside = sorted(each for each in path.glob("VOC*") if _one_folder(each)) if path.is_dir() else []
    if len(inside) > 1:
        raise DataError(f"{path}: holds several VOC folders, {some(map(str, inside))}; choose one")
    return find_voc(inside[0]) if inside else None


def _one_folder(root: Path) -> VocSet | None:
    """A set of XML files in Annotations, or in the folder itself; None if there are none."""
    if not root.is_dir():
        return None
    annotations = _sub_folder(root, ANNOTATIONS)
    if annotations is not None and has_xml(annotations):
        return VocSet(annotations, _sub_folder(root, IMAGES) or annotations, None)
    has_own = any(map(_may_be_voc, walk(root, (".xml",), deep=False)))
    return VocSet(root, _sub_folder(root, IMAGES) or root, None) if has_own else None


def _may_be_voc(path: Path) -> bool:
    """Whether an XML has VOC's root, or one that cannot be seen, which its reader reports."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        root = ROOT.search(file.read(10_000))
    return root is None or root[1] == b"annotation"


def _sub_folder(root: Path, names: Iterable[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def has_xml(folder: Path) -> bool:
    return any(True for _ in walk(folder, (".xml",)))


def read_voc(folder: VocFolder, source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of their names, with ids from 1. Classes are those of the whole folder,
    so that all its sets agree: in the order of rtdetr.json or classes.txt, else by name."""
    chosen = folder.sets[source.split]
    read: dict[Path, tuple[VocImage | None, Problems]] = {}
    for place in {each.annotations: None for each in folder.sets.values()}:
        for path in sorted(walk(place, (".xml",))):
            own = Problems()
            read[path] = read_image_xml(path, own), own
    everything = [image for image, _ in read.values() if image is not None]
    sidecar = read_sidecar(folder.root)
    names = _class_names(folder.root, everything) if sidecar is None else sidecar.labels()
    first = _first_pixel(everything) if sidecar is None else 1
    category_of = {name: number for number, name in enumerate(names, start=1)}
    folders = Folders(source.images or chosen.images)
    notes = () if first else ("boxes counted from pixel 0, as some begin there",)
    document = new_document({number: name for name, number in category_of.items()}, notes)
    for path in _listed(chosen, problems):
        image, own = read[path]
        problems.found += own.found
        if image is None or any(defect.kind == "image_size" for defect in own.found):
            continue
        file_name = _image_of(path, image.file_name, chosen, folders, problems)
        if file_name is None:
            continue
        image_id = document.add_image(file_name, image.size)
        for each in image.objects:
            if each.name in category_of:
                left, top, right, bottom = each.corners
                corners = round(left - first, 9), round(top - first, 9), right, bottom
                document.add_box(image_id, category_of[each.name], corners, each.crowd, each.area)
            else:
                known = some(map(repr, category_of), 10)
                what = f"the class {each.name!r} is not among those of its folder, {known}"
                problems.add(path, each.line, "class", what)
    if not names:
        raise DataError(f"{folder.root}: no XML in it names an object, so there is nothing to detect")
    return document


def _first_pixel(images: Iterable[VocImage]) -> int:
    """0 if some box begins between 0 and 1, else 1. Negative corners indicate neither."""
    return int(not any(0 <= corner < 1 for image in images for each in image.objects for corner in each.corners[:2]))


def _class_names(root: Path, images: Iterable[VocImage]) -> list[str]:
    given = names_given(root)
    return sorted({each.name for image in images for each in image.objects}) if given is None else given


def _listed(chosen: VocSet, problems: Problems) -> list[Path]:
    """The XML files of a set, sorted. A line of a list may end in 1, 0 or -1, as in lists of single classes, or in a
    file name extension."""
    if chosen.list_file is None:
        return sorted(walk(chosen.annotations, (".xml",)))
    found: dict[Path, None] = {}
    for number, line in enumerate(read_lines(chosen.list_file, MAX_LIST), start=1):
        plain = line.rpartition(" ")[0].rstrip() if line.endswith((" 1", " 0", " -1")) else ""
        short = line[: -len(Path(line).suffix)] if line.lower().endswith((".xml", *IMAGE_SUFFIXES)) else ""
        names = [name for name in (line, plain, short) if name]
        if not names:
            continue
        if not all(below(chosen.annotations, name) for name in names):
            problems.add(chosen.list_file, number, "file", f"{shown(line)} leaves {chosen.annotations}; remove it")
            continue
        files = [chosen.annotations / f"{name}{ending}" for name in names for ending in (".xml", ".XML")]
        paths = [each for each in files if os.path.isfile(each)]
        if not paths:
            missing = chosen.annotations / f"{names[0]}.xml"
            problems.add(chosen.list_file, number, "file", f"{missing}: no such annotation; write it, or leave it out")
        elif paths[0] in found:
            problems.add(chosen.list_file, number, "file", f"{shown(line)} is listed twice")
        else:
            found[paths[0]] = None
    return sorted(found)


def _image_of(path: Path, written: str, chosen: VocSet, images: Folders, problems: Problems) -> str | None:
    """The image of an XML, relative to the image folder: that of the same name as the XML, else the one named in it."""
    stem = path.relative_to(chosen.annotations).with_suffix("").as_posix()
    suffix = PureWindowsPath(written).suffix
    folder = images.root
    for ending in dict.fromkeys((suffix, *IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))):
        if ending and f"{stem}{ending}" in images:
            if "\0" not in written and not below(folder, written):
                what = f"its <filename> {shown(written)} leaves the folder {folder} and is not opened"
                problems.add(path, 0, "unused", f"{what}; {stem}{ending} is taken")
            return f"{stem}{ending}"
    if re.search(r"[\x00-\x1f]", written):
        what = f"its <filename> is {shown(written)}, expected the name of an image"
    elif not written:
        what = f"no image {stem}.* in {folder}, and it has no <filename>"
    elif not below(folder, written):
        what = f"its image {shown(written)} leaves the folder {folder}; it is not opened"
    else:
        return os.path.normpath(written)  # a later check of all images finds missing ones
    problems.add(path, 0, "picture", what)
    return None


def read_image_xml(path: Path, problems: Problems) -> VocImage | None:
    """Reads one XML; returns None if it is unusable."""
    try:
        root = parse_xml(read_bytes(path), path)
    except DataError as error:
        problems.failed(path, "file", error)
        return None
    if root.tag != "annotation":
        problems.add(path, root.line, "file", f"expected <annotation> of Pascal VOC, got <{root.tag}>")
        return None
    size = _size(root, path, problems)
    objects = [found for each in root.all("object") if (found := _object(each, path, problems)) is not None]
    return VocImage(_text(root, "filename", path, problems) or "", size, objects)


def _size(root: Node, path: Path, problems: Problems) -> tuple[int, int]:
    """(h, w); zeros if it is missing, or invalid and reported."""
    for node in root.all("size")[:1]:
        sides = [_number(node, side, path, problems, 0.0) for side in ("height", "width")]
        if any(side is not None and (not 0 <= side <= MOST_PIXELS or side != int(side)) for side in sides):
            problems.add(path, node.line, "size", f"height and width must be whole pixels, got {sides[0]}, {sides[1]}")
        elif None not in sides:
            return int(sides[0] or 0), int(sides[1] or 0)
    return 0, 0


def _object(node: Node, path: Path, problems: Problems) -> VocObject | None:
    name = _text(node, "name", path, problems)
    boxes = node.all("bndbox")
    if not name or len(boxes) != 1:
        wanted = "one <bndbox>" if name else "a <name>"
        problems.add(path, node.line, "box" if name else "class", f"an object needs {wanted}, got {_shown(node)}")
        return None
    corners = [_number(boxes[0], side, path, problems) for side in SIDES]
    crowd = _number(node, "iscrowd", path, problems, 0.0)
    area = _number(node, "area", path, problems, math.nan)
    if crowd not in (0, 1, None):
        problems.add(path, node.line, "numbers", f"<iscrowd> must be 0 or 1, got {crowd:g}")
        return None
    left, top, right, bottom = corners
    if left is None or top is None or right is None or bottom is None or crowd is None or area is None:
        return None
    return VocObject(node.line, name, (left, top, right, bottom), int(crowd), None if math.isnan(area) else area)


def _text(node: Node, tag: str, path: Path, problems: Problems) -> str | None:
    """The text of the only child of that name; None if there is none, or if it is duplicate."""
    found = node.all(tag)
    if len(found) > 1:
        problems.add(path, found[1].line, "text", f"<{tag}> is given twice in one <{node.tag}>")
        return None
    return found[0].text.strip() if found else None


def _number(node: Node, tag: str, path: Path, problems: Problems, default: float | None = None) -> float | None:
    """The finite number in the only child of that name; the default if there is none; None if it is invalid."""
    text = _text(node, tag, path, problems)
    if not text and default is not None and len(node.all(tag)) < 2:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) < 1e300:
        if len(node.all(tag)) < 2:
            problems.add(
                path, node.line, "numbers", f"<{node.tag}> needs a finite number in <{tag}>, got {shown(text)}"
            )
        return None
    return value


def _shown(node: Node) -> str:
    return some((f"<{each.tag}>" for each in node.children), 6) or "nothing"
