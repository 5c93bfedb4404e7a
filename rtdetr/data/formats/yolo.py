"""Reads YOLO folders: a text file per image with lines `class cx cy w h`, relative to the image size, and a data.yaml
with the splits and class names. Category ids are YOLO's class numbers, from 0."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.config_file import ConfigError, parse_yaml
from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.formats.document import CocoDocument, new_document
from rtdetr.data.formats.records import (
    IMAGE_SUFFIXES,
    MAX_BYTES,
    MAX_LIST,
    POLYGONS,
    SPLITS,
    WHOLE_PIXEL,
    BadRecord,
    Corners,
    DataSource,
    Problems,
    below,
    clipped,
    head_of,
    read_lines,
    to_pixels,
    walk,
)
from rtdetr.data.formats.sidecar import read_sidecar
from rtdetr.data.image_files import slashes
from rtdetr.data.images import upright_size
from rtdetr.wording import counted

NAME_FILES = ("classes.txt", "labels/classes.txt", "obj.names")
MOST_CLASSES = 10_000
KEYS = re.compile(rb"^(\xef\xbb\xbf)?[\"']?(train|val|test|names)[\"']?[ \t]*:", re.MULTILINE)  # at the top of a YAML


class YoloFolder(NamedTuple):
    path: Path  # data.yaml, or the folder if there is none
    root: Path  # image names are relative to it
    names: dict[int, str] | None  # None: unknown
    sets: dict[str, list[Path]]  # train, val, test, or "" for the only one -> image folders and list files
    num_more: int = 0  # number of keypoint values that follow a box
    notes: tuple[str, ...] = ()


Line = tuple[int, Corners]  # class number, and corners relative to the image size


def find_yolo(path: Path) -> YoloFolder | None:
    """The sets of a data.yaml, a folder or a list of images; None if it is not in YOLO's format. Raises DataError if a
    data.yaml is invalid."""
    if path.is_file():
        if path.suffix.lower() in (".yaml", ".yml"):
            return _of_yaml(path, _read_yaml(path))
        lines = read_lines(path, MAX_LIST) if path.suffix.lower() == ".txt" else []
        is_list = any(line.lower().endswith(IMAGE_SUFFIXES) for line in lines)
        return YoloFolder(path, path.parent, _names_beside(path.parent), {"": [path]}) if is_list else None
    for file, content in _yaml_files(path):
        if of_yolo(content, file.stem == "data"):
            return _of_yaml(file, content)
    sets = undeclared_sets(path)
    if not sets and "images" in path.absolute().parts and os.path.isdir(label_file_of(path.absolute() / "x").parent):
        sets = {"": [path]} if path.name == "images" or path.parent.name == "images" else {}
    if not sets:
        return None
    names, num_more = _declared_near(path)
    return YoloFolder(path, path, names, sets, num_more)


def _yaml_files(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields the YAML files that may describe a set, data.yaml first, and what they hold."""
    for file in sorted(walk(folder, (".yaml", ".yml"), deep=False), key=lambda each: (each.stem != "data", each)):
        # Others are of other tools and need not even be valid.
        if file.stem == "data" or KEYS.search(head_of(file, MAX_BYTES)):
            content = _read_yaml(file)
            if isinstance(content, dict):
                yield file, content


def of_yolo(content: Mapping[str, Any], is_named_so: bool) -> bool:
    """Whether a YAML file names splits or classes. A config of training has a mapping as `train`, other tools have
    numbers there, which are reported only in a data.yaml."""
    given = [content[key] for key in ("train", "val", "test", "names") if key in content]
    return not isinstance(content.get("train"), dict) and any(
        is_named_so or isinstance(each, (str, list, dict)) for each in given
    )


def _read_yaml(path: Path) -> Any:
    read_lines(path)  # raises DataError if it is no small text file
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except ConfigError as error:
        raise DataError(str(error).replace("which no config", "which no data.yaml")) from error


def _of_yaml(path: Path, content: Any) -> YoloFolder:
    if not isinstance(content, dict):
        raise DataError(f"{path}: expected `key: value` lines, as train, val and names, got {shown(content)}")
    root = _root(path, content.get("path"))
    notes: tuple[str, ...] = ()
    sets = {}
    for split, keys in SPLITS.items():
        given = next((content[key] for key in keys if content.get(key)), None)
        if given is not None:
            entries = given if isinstance(given, list) else [given]
            if not all(isinstance(each, str) for each in entries):
                raise DataError(f"{path}: `{split}` must be a folder, a list file or several, got {shown(given)}")
            try:
                sets[split] = [_place(path, root, each, split) for each in entries]
            except DataError as error:
                if split != "test" or not sets:
                    raise
                notes = (str(error),)  # many exporters name a test set that they did not export
    if not sets:
        sets = undeclared_sets(root)
    if not sets:
        raise DataError(f"{path}: names no `train`, `val` or `test`, and there are no images and labels in {root}")
    return YoloFolder(path, root, _names(path, content), sets, _num_more(path, content.get("kpt_shape")), notes)


def _num_more(path: Path, keypoints: Any) -> int:
    if keypoints is None:
        return 0
    if not isinstance(keypoints, list) or len(keypoints) != 2 or not all(type(n) is int and n > 0 for n in keypoints):
        raise DataError(f"{path}: `kpt_shape` must be two numbers, keypoints and values each, got {shown(keypoints)}")
    return math.prod(keypoints)


def _root(path: Path, given: Any) -> Path:
    """The folder in `path:`, relative to the file or the current folder; the file's folder if it does not exist."""
    if given is not None and not isinstance(given, str):
        raise DataError(f"{path}: `path` must be a folder, got {shown(given)}")
    places = [path.parent / given, Path(given)] if given else []
    return next((place for place in places if os.path.isdir(place)), path.parent)


def _place(path: Path, root: Path, given: str, split: str) -> Path:
    """Finds a folder or list file: relative to the root, to data.yaml, or without the superfluous ../ that Roboflow
    writes. Raises DataError if it does not exist."""
    places = [root / given, path.parent / given, path.parent / given.removeprefix("../")]
    for place in places:
        if os.path.exists(place):
            return Path(os.path.normpath(place))
    raise DataError(
        f"{path}: `{split}` is {shown(given)}, but there is none below {root}; correct it, or `path`, the "
        f"folder that it is relative to{slashes(given)}"
    )


def _names(path: Path, content: Mapping[str, Any]) -> dict[int, str] | None:
    names, count = content.get("names"), content.get("nc")
    if count is not None and (type(count) is not int or not 0 < count <= MOST_CLASSES):
        raise DataError(f"{path}: `nc` must be the number of classes, got {shown(count)}")
    if names is None:
        return {i: f"class{i}" for i in range(count)} if count else _names_beside(path.parent)
    if not names or not isinstance(names, (list, dict)):
        raise DataError(f"{path}: `names` must be a list of the classes, or a section of `number: name`")
    found: dict[int, str] = {}
    for key, name in enumerate(names) if isinstance(names, list) else names.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        if type(number) is not int or not 0 <= number < MOST_CLASSES or number in found:
            raise DataError(f"{path}: `names`: expected each number from 0 once, got {shown(key)}")
        if isinstance(name, (bool, float)) or not isinstance(name, (str, int)):
            quotes = "; in YAML, yes, no, on, off and decimal numbers need quotes to be text"
            raise DataError(f"{path}: `names`: class {number} must be text, got {shown(name)}{quotes}")
        found[number] = str(name)
    if count is not None and count != len(found):
        raise DataError(f"{path}: `nc` is {count}, but `names` has {len(found)}")
    return dict(sorted(found.items()))


def _declared_near(folder: Path) -> tuple[dict[int, str] | None, int]:
    """Class names and `num_more` for a folder of a single split. A data.yaml, the only other YAML with `names`, or a
    classes.txt may be above it."""
    for each in (folder.absolute(), *list(folder.absolute().parents)[:2]):
        files = _yaml_files(each) if os.access(each, os.R_OK) else ()
        found = [(file, content) for file, content in files if file.stem == "data" or "names" in content]
        if found and (found[0][0].stem == "data" or len(found) == 1):
            file, content = found[0]
            return _names(file, content), _num_more(file, content.get("kpt_shape"))
        if names := _names_beside(each):
            return names, 0
    return None, 0


def _names_beside(root: Path) -> dict[int, str] | None:
    """Class names of a classes.txt, as labelImg writes it; None if there is none."""
    for name in NAME_FILES:
        if (root / name).is_file():
            lines = "\n".join(read_lines(root / name)).rstrip().split("\n")
            if "" in lines and any(lines):
                raise DataError(f"{root / name}: line {lines.index('') + 1} is empty, expected the name of a class")
            return dict(enumerate(filter(None, lines))) or None
    return None


def undeclared_sets(root: Path) -> dict[str, list[Path]]:
    """Finds images/train with labels/train, train/images with train/labels, or one pair of images and labels."""

    def has_labels(images: str) -> bool:
        return (root / images).is_dir() and (root / images.replace("images", "labels")).is_dir()

    found = {}
    for split, names in SPLITS.items():
        there = [root / each for name in names for each in (f"images/{name}", f"{name}/images") if has_labels(each)]
        if there and (split != "test" or any(there[0].iterdir())):  # an empty one is no set
            found[split] = there[:1]
    if not found and has_labels("images"):
        found[""] = [root / "images"]
    return found


def read_yolo(folder: YoloFolder, source: DataSource, problems: Problems) -> CocoDocument:
    """Reads the images of a set, in the order of their paths, with ids from 1, in the size and orientation that
    `upright_size` finds in their headers. Polygons become their bounding boxes."""
    split, root = source.split, source.images or image_folder(folder, source.split)
    names = folder.names or _numbered(folder)
    sidecar = read_sidecar(folder.root)
    kept = {} if sidecar is None else sidecar.images.get(split, {})
    document = new_document(names)
    paths = _images(folder.sets[split], root, problems)
    num_labelled = 0
    used = set()
    for path in paths:
        label_file = label_file_of(path)
        if label_file in used and os.path.exists(label_file):
            problems.add(path, 0, "picture_twice", f"has the labels of another image, {label_file}", "kept")
        used.add(label_file)
        with problems.reported(path, kind="image_picture"):
            size = upright_size(path, source.max_megapixels)
            lines = _lines(label_file, names, problems, folder.num_more)
            name = path.relative_to(root).as_posix() if path.is_relative_to(root) else os.path.abspath(path)
            image_id = document.add_image(name, size)
            num_labelled += os.path.exists(label_file)
            for label, corners in lines:
                document.add_box(image_id, label, to_pixels(corners, size))
            if name in kept:
                _restore(document, kept[name], image_id, size, len(lines))
    if document.images and not num_labelled:
        what = f"none of {counted(len(paths), 'image')} has a label file; the first is {label_file_of(paths[0])}"
        raise DataError(f"{folder.path}: {what}")
    _labels_alone(folder.sets[split], used, problems)
    problems.notes += folder.notes
    return document


def _labels_alone(places: Iterable[Path], used: Container[Path], problems: Problems) -> None:
    """Reports label files whose image is missing, which is otherwise not noticed."""
    for place in places:
        labels = label_file_of(place / "x").parent
        if not place.is_dir() or labels == place:  # text files in an image folder may be anything
            continue
        for path in walk(labels, (".txt",)):
            if path not in used and path.name not in NAME_FILES:
                inside = place / path.relative_to(labels).with_suffix(".*")
                problems.add(path, 0, "picture_missing", f"no such image, {inside}, for these labels")


def image_folder(folder: YoloFolder, split: str) -> Path:
    """The folder that image names are relative to: the root, or the common folder of images outside it."""
    places = [place if place.is_dir() else place.parent for place in folder.sets[split]]
    if all(place.is_relative_to(folder.root) for place in places):
        return folder.root
    return Path(os.path.commonpath([os.path.abspath(place) for place in places]))


def _restore(
    document: CocoDocument, entry: Mapping[str, Any], image_id: int, size: tuple[int, int], num_lines: int
) -> None:
    """Restores an image's crowds from rtdetr.json, and the exact boxes of lines that have not been edited since."""
    for line, (*box, area) in entry.get("kept", {}).items():
        if int(line) < num_lines:
            annotation = document.annotations[int(line) - num_lines]
            written, near = clipped(box, size), 3 * WHOLE_PIXEL * max(size)  # tools write six digits
            if all(abs(now - then) <= near for now, then in zip(annotation["bbox"], written)):
                annotation.update(bbox=box, area=area)
    labels = [each["id"] for each in document.categories]
    for label, *box, area in entry.get("crowds", []):
        if label < len(labels):
            crowd = {"image_id": image_id, "category_id": labels[label], "bbox": box, "area": area, "iscrowd": 1}
            document.annotations.append(crowd)


def _images(places: Iterable[Path], root: Path, problems: Problems) -> list[Path]:
    found: dict[Path, None] = {}
    for place in places:
        found |= dict.fromkeys(walk(place, IMAGE_SUFFIXES) if place.is_dir() else _listed(place, root, problems))
    if not found:
        raise DataError(f"{some(map(str, places))}: no images there; looked for {', '.join(IMAGE_SUFFIXES)}")
    return sorted(found)


def _listed(path: Path, root: Path, problems: Problems) -> Iterator[Path]:
    """The images of a list file, relative to it or to the root. Paths outside both are reported, not opened."""
    for number, line in enumerate(read_lines(path, MAX_LIST), start=1):
        if not line:
            continue
        places = [folder / line for folder in (path.parent, root) if "\0" not in line and below(folder, line)]
        if not places:
            what = f"{shown(line)} lies outside {root}; set `path` to a folder that holds all images"
            problems.add(path, number, "picture_path_outside", what)
            continue
        there = [place for place in places if os.path.isfile(place)]
        if there:
            yield Path(os.path.normpath(there[0]))
        else:
            problems.add(path, number, "image_file", f"{places[0]}: no such image{slashes(line)}")


def label_file_of(image: Path) -> Path:
    """images/a/b.jpg -> labels/a/b.txt for the last `images` in the path, else in the folder of the image."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        place = len(parts) - 2 - parts[-2::-1].index("images")
        labels = Path(*parts[:place], "labels")
        if labels.is_dir():
            return labels.joinpath(*parts[place + 1 :]).with_suffix(".txt")
    return image.with_suffix(".txt")


def _lines(path: Path, names: Mapping[int, str], problems: Problems, num_more: int) -> list[Line]:
    """The valid lines of a label file; none if there is no file. Raises BadRecord if it cannot be read."""
    try:
        lines = read_lines(path) if os.path.exists(path) else []
    except DataError as error:  # the objects of its image are unknown
        raise BadRecord("image_text", str(error).removeprefix(f"{path}: "), 0, path) from error
    found: list[Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            if line:
                found.append(_parse(line, names, num_more, problems.counted))
        except BadRecord as error:
            problems.add(path, number, error.kind, str(error))
    return found


def _parse(line: str, names: Mapping[int, str], num_more: int, tally: Counter[str]) -> Line:
    """The box of a line. num_more: keypoint values that may follow a box. Raises BadRecord."""
    try:
        label, *numbers = map(float, line.split())
    except ValueError as error:
        raise BadRecord("box_text", f"expected `class cx cy w h` in numbers, got {shown(line)}") from error
    if num_more and len(numbers) == 4 + num_more:
        numbers = numbers[:4]
    is_polygon = len(numbers) >= 6 and len(numbers) % 2 == 0
    if len(numbers) != 4 and not is_polygon:
        wanted = "a class and 4 numbers (or the x and y of a polygon)"
        raise BadRecord("box_numbers", f"expected {wanted}, got a class and {len(numbers)}")
    if not all(map(math.isfinite, (label, *numbers))):
        raise BadRecord("box_numbers", f"expected finite numbers, got {shown(line)}")
    if label not in names:
        what = f"class {label:g} is not among the {len(names)} from {min(names)} to {max(names)}"
        raise BadRecord("box_class", what)
    if min(numbers) < -WHOLE_PIXEL or max(numbers) > 1 + WHOLE_PIXEL:
        raise BadRecord("box_box", f"expected numbers from 0 to 1, relative to the image, got {shown(line)}")
    if is_polygon:
        tally[POLYGONS] += 1
        xs, ys = numbers[0::2], numbers[1::2]
        return int(label), (min(xs), min(ys), max(xs), max(ys))
    x, y, width, height = numbers
    return int(label), (x - width / 2, y - height / 2, x + width / 2, y + height / 2)


def _numbered(folder: YoloFolder) -> dict[int, str]:
    """class0, class1, ... up to the largest number in the label files of all sets, for folders without class names."""
    most, everything = -1, dict.fromkeys(range(MOST_CLASSES), "")
    for places in folder.sets.values():
        for image in _images(places, folder.root, Problems()):
            with Problems().reported(image):
                lines = _lines(label_file_of(image), everything, Problems(), folder.num_more)
                most = max([most, *(label for label, _ in lines)])
    if most < 0:
        raise DataError(f"{folder.path}: names no classes and has no boxes; write `names` in a data.yaml")
    return {i: f"class{i}" for i in range(most + 1)}
