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
from rtdetr.data.formats import records
from rtdetr.data.formats.coco_records import MOST_PIXELS
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.named import NamedBox, NamedImage, document_of, names_given
from rtdetr.data.formats.records import IMAGE_SUFFIXES, SPLITS, BadRecord, DataSource, Problems, below, walk
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


def find_voc(path: Path) -> VocFolder | None:
    """The sets of a folder, of its Annotations folder or of one of its lists; None if it is not in VOC's format."""
    if path.is_file():
        root = next((each for each in path.parents[:4] if _sub_folder(each, ANNOTATIONS)), None)
        if path.suffix.lower() != ".txt" or root is None or "ImageSets" not in path.parts:
            return None
        folder = _one_folder(root)
        return folder and VocFolder(root, {path.stem: folder._replace(list_file=path)})
    if path.name in ANNOTATIONS and has_xml(path):
        path = path.parent
    if folder := _one_folder(path):
        lists = path / "ImageSets" / "Main"
        files = {name: lists / f"{name}.txt" for name in (*SPLITS, "trainval")}
        sets = {name: folder._replace(list_file=file) for name, file in files.items() if file.is_file()}
        return VocFolder(path, sets or {"": folder})
    divided = records.split_folders(path, lambda each: _one_folder(each) is not None)
    if divided:
        return VocFolder(path, {split: folder for split, each in divided.items() if (folder := _one_folder(each))})
    inside = sorted(each for each in path.glob("VOC*") if _one_folder(each)) if path.is_dir() else []
    if len(inside) > 1:
        raise DataError(f"{path}: holds several VOC folders, {some(map(str, inside))}; choose one")
    return find_voc(inside[0]) if inside else None


def _one_folder(root: Path) -> VocSet | None:
    """A set of XML files in Annotations, or in the folder itself; None if there are none."""
    if not root.is_dir():
        return None
    annotations = _sub_folder(root, ANNOTATIONS)
    if annotations is None or not has_xml(annotations):
        if not any(map(_may_be_voc, walk(root, (".xml",), deep=False))):
            return None
        annotations = root
    return VocSet(annotations, _sub_folder(root, IMAGES) or annotations, None)


def _may_be_voc(path: Path) -> bool:
    """Whether an XML has VOC's root, or one that cannot be seen, which its reader reports."""
    root = ROOT.search(records.head_of(path, 10_000))
    return path.is_file() and (root is None or root[1] == b"annotation")


def _sub_folder(root: Path, names: Iterable[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def has_xml(folder: Path) -> bool:
    return any(True for _ in walk(folder, (".xml",)))


def read_voc(folder: VocFolder, source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of their names, with ids from 1. Classes are those of the whole folder,
    so that all its sets agree: in the order of rtdetr.json or classes.txt, else by name."""
    chosen = folder.sets[source.split]
    places = {each.annotations for each in folder.sets.values()}
    read = {path: _read(path) for place in places for path in walk(place, (".xml",))}
    boxes = [box for image, _ in read.values() if image is not None for box in image.boxes]
    first = 1  # the number of the first pixel
    if sidecar := read_sidecar(folder.root):
        names = sidecar.labels()
    else:
        given = names_given(folder.root)
        names = sorted({box.name for box in boxes}) if given is None else given
        if any(0 <= corner < 1 for box in boxes for corner in box.corners[:2]):  # negative ones indicate neither
            first = 0
            problems.notes.append("boxes counted from pixel 0, as some begin there")
    folders = Folders(source.images or chosen.images)
    images: list[NamedImage] = []
    for path in _listed(chosen, problems):
        image, own = read[path]
        problems.found += own.found
        if image is None or any(defect.kind == "image_size" for defect in own.found):
            continue
        with problems.reported(path):
            name = _image_of(path, image.file_name, chosen, folders, problems)
            images.append(image._replace(file_name=name, boxes=[_from_zero(box, first) for box in image.boxes]))
    if not names:
        raise DataError(f"{folder.root}: no XML in it names an object, so there is nothing to detect")
    return document_of(images, names, problems)


def _from_zero(box: NamedBox, first: int) -> NamedBox:
    left, top, right, bottom = box.corners
    return box._replace(corners=(round(left - first, 9), round(top - first, 9), right, bottom))


def _listed(chosen: VocSet, problems: Problems) -> list[Path]:
    """The XML files of a set, sorted. A line of a list may end in 1, 0 or -1, as in lists of single classes, or in a
    file name extension."""
    if chosen.list_file is None:
        return sorted(walk(chosen.annotations, (".xml",)))
    found: dict[Path, None] = {}
    for number, line in enumerate(records.read_lines(chosen.list_file, records.MAX_LIST), start=1):
        plain = line.rpartition(" ")[0].rstrip() if line.endswith((" 1", " 0", " -1")) else ""
        short = line[: -len(Path(line).suffix)] if line.lower().endswith((".xml", *IMAGE_SUFFIXES)) else ""
        names = [name for name in (line, plain, short) if name]
        if not names:
            continue
        with problems.reported(chosen.list_file, number):
            if not all(below(chosen.annotations, name) for name in names):
                raise BadRecord("image_file", f"{shown(line)} leaves {chosen.annotations}; remove it")
            files = [chosen.annotations / f"{name}{ending}" for name in names for ending in (".xml", ".XML")]
            path = next(filter(os.path.isfile, files), None)
            if path is None:
                raise BadRecord("image_file", f"{files[0]}: no such annotation; write it, or leave it out")
            if path in found:
                raise BadRecord("image_file", f"{shown(line)} is listed twice")
            found[path] = None
    return sorted(found)


def _image_of(path: Path, written: str, chosen: VocSet, images: Folders, problems: Problems) -> str:
    """The image of an XML, relative to the image folder: that of the same name as the XML, else the one named in it.
    Raises BadRecord."""
    stem = path.relative_to(chosen.annotations).with_suffix("").as_posix()
    suffix = PureWindowsPath(written).suffix
    folder = images.root
    for ending in dict.fromkeys((suffix, *IMAGE_SUFFIXES, *map(str.upper, IMAGE_SUFFIXES))):
        if ending and f"{stem}{ending}" in images:
            if "\0" not in written and not below(folder, written):
                what = f"its <filename> {shown(written)} leaves the folder {folder} and is not opened"
                problems.add(path, 0, "picture_path_outside", f"{what}; {stem}{ending} is taken", "kept")
            return f"{stem}{ending}"
    if re.search(r"[\x00-\x1f]", written):
        raise BadRecord("image_picture", f"its <filename> is {shown(written)}, expected the name of an image")
    if not written:
        raise BadRecord("image_picture", f"no image {stem}.* in {folder}, and it has no <filename>")
    if not below(folder, written):
        what = f"its image {shown(written)} leaves the folder {folder}; it is not opened"
        raise BadRecord("picture_path_outside", what)
    return os.path.normpath(written)  # a later check of all images finds missing ones


def _read(path: Path) -> tuple[NamedImage | None, Problems]:
    """Reads one XML: the image, with boxes as written, and what is wrong with it. None: it is unusable."""
    problems, size, boxes = Problems(), (0, 0), list[NamedBox]()
    with problems.reported(path):
        root = parse_xml(records.read_bytes(path), path)
        if root.tag != "annotation":
            raise BadRecord("image_file", f"expected <annotation> of Pascal VOC, got <{root.tag}>", root.line)
        with problems.reported(path):
            size = _size(root)
        for node in root.all("object"):
            with problems.reported(path):
                boxes.append(_object(node))
        name = _text(root, "filename", "image_file") or ""
        return NamedImage(path, 0, name, size, boxes), problems
    return None, problems


def _size(root: Node) -> tuple[int, int]:
    """(h, w); zeros if it is missing. Raises BadRecord."""
    for node in root.all("size")[:1]:
        height, width = (_number(node, side, 0.0, "image_size") for side in ("height", "width"))
        if any(not 0 <= side <= MOST_PIXELS or side != int(side) for side in (height, width)):
            raise BadRecord("image_size", f"height and width must be whole pixels, got {height}, {width}", node.line)
        return int(height), int(width)
    return 0, 0


def _object(node: Node) -> NamedBox:
    """The box of an object, in pixels as written. Raises BadRecord."""
    name, boxes = _text(node, "name"), node.all("bndbox")
    if not name or len(boxes) != 1:
        kind, wanted = ("box_box", "one <bndbox>") if name else ("box_class", "a <name>")
        inside = some((f"<{each.tag}>" for each in node.children), 6)
        raise BadRecord(kind, f"an object needs {wanted}, got {inside or 'nothing'}", node.line)
    left, top, right, bottom = (_number(boxes[0], side) for side in SIDES)
    crowd, area = _number(node, "iscrowd", 0.0), _number(node, "area", math.nan)
    if crowd not in (0, 1):
        raise BadRecord("box_numbers", f"<iscrowd> must be 0 or 1, got {crowd:g}", node.line)
    own_area = None if math.isnan(area) else area
    return NamedBox("", node.line, name, (left, top, right, bottom), crowd=int(crowd), area=own_area)


def _text(node: Node, tag: str, kind: str = "box_text") -> str | None:
    """The text of the only child of that name; None if there is none. Raises BadRecord, of that kind, if it is
    duplicate."""
    found = node.all(tag)
    if len(found) > 1:
        raise BadRecord(kind, f"<{tag}> is given twice in one <{node.tag}>", found[1].line)
    return found[0].text.strip() if found else None


def _number(node: Node, tag: str, default: float | None = None, kind: str = "") -> float:
    """The finite number in the only child of that name; the default if there is none. Raises BadRecord, of that kind
    instead of a box's."""
    text = _text(node, tag, kind or "box_text")
    if not text and default is not None:
        return default
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) < 1e300:
        what = f"<{node.tag}> needs a finite number in <{tag}>, got {shown(text)}"
        raise BadRecord(kind or "box_numbers", what, node.line)
    return value
