"""Writes sets of any format as COCO, VOC or YOLO: `rtdetr convert-data`.

Data that a format cannot hold is stored in rtdetr.json (see sidecar.py), so that converting back loses nothing that
detection needs: boxes, crowds and areas, ids and names of categories, ids and names of images, LVIS' lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple
from xml.sax.saxutils import escape

import yaml
from PIL import Image

from rtdetr.data.classes import DataError, some
from rtdetr.data.formats import lvis
from rtdetr.data.formats.document import CocoDocument, file_names
from rtdetr.data.formats.records import IMAGE_SUFFIXES, DataSource, below, clipped, split_named
from rtdetr.data.formats.sidecar import Sidecar, read_sidecar, write_sidecar
from rtdetr.data.formats.sources import check_images, find_sources, image_folder_of, read_document, with_images
from rtdetr.data.formats.voc import find_voc
from rtdetr.data.formats.yolo import find_yolo
from rtdetr.data.images import MOST_MEGAPIXELS, sideways, suffix_of, upright_size

Target = Literal["coco", "voc", "yolo"]
OF_IMAGE = ("id", "file_name", "coco_url", lvis.NEGATIVE, lvis.NOT_EXHAUSTIVE)
UNPRINTED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # no text in XML; lone surrogates: no UTF-8


class PreparedSet(NamedTuple):
    """One set, ready to be written."""

    split: str
    document: CocoDocument  # with its original COCO ids, if rtdetr.json has them; all sizes are known
    files: list[Path]  # image files, in the document's order
    names: list[str]  # their new names, unique even without their endings
    boxes: dict[int, list[dict[str, Any]]]  # by image id

    @property
    def num_boxes(self) -> int:
        return len(self.document.annotations)


def load(given: Path, split: str = "", images: str = "") -> list[PreparedSet]:
    """The sets of a file or folder, or only the one named `split`. images: the image folder of a JSON, if it is not
    near the file. Raises DataError if a set is unusable."""
    if images and not os.path.isdir(images):
        raise DataError(f"{images}: no such image folder")
    parts = [_prepared(source, name, given, images) for name, source in _chosen(given, split).items()]
    for part in parts[1:]:
        if part.document.categories != parts[0].document.categories:
            raise DataError(
                f"{given}: the categories of {part.split} are not those of {parts[0].split}; convert each with --split"
            )
    return parts


def write(parts: list[PreparedSet], out: Path, to: Target, link: bool = False) -> Iterator[None]:
    """Writes the sets into the empty folder `out`; yields after each image. link: create symbolic links to the images.
    Raises OSError, and DataError for files that are not images."""
    if to != "coco":
        names = ([*map(_findable, part.names, part.files)] for part in parts)
        parts = [part._replace(names=_distinct(each, stems=True)) for part, each in zip(parts, names)]
    if to == "voc":
        parts = _apart(parts)
    yield from {"coco": _write_coco, "voc": _write_voc, "yolo": _write_yolo}[to](parts, out, link)


def _chosen(given: Path, split: str) -> dict[str, DataSource]:
    """The sources by the split name that they will have."""
    sources = find_sources(given, MOST_MEGAPIXELS)
    if split:
        found = [name for name in (split, "", "trainval" if split == "train" else split) if name in sources]
        if not found:
            raise DataError(f"{given}: has no set `{split}`, only {some(sources)}")
        return {"train" if split == "trainval" else split: sources[found[0]]}
    if "trainval" in sources and len(sources) > 1:  # trainval is the union of both
        sources.pop("trainval" if "val" in sources else "train", None)
    names = {"": split_named(given) or "train", "trainval": "train"}
    return {names.get(name, name): source for name, source in sources.items()}


def _prepared(source: DataSource, split: str, given: Path, images: str) -> PreparedSet:
    check_images(source, images)
    source = with_images(source, images)
    document = read_document(source, limit=0)  # a conversion must not drop records
    folder = image_folder_of(source, document, given, images)
    names = file_names(document.images, folder)
    files = [folder / name for name in names]
    outside = [file for file, name in zip(files, names) if not below(folder, name)]
    if outside:
        raise DataError(f"{outside[0]}: leaves the image folder {folder} and is not opened; give --images DIR")
    missing = [file for file in files if not os.path.isfile(file)]
    if missing:
        raise DataError(f"{missing[0]}: no such image; {len(missing)} of {len(files)} are missing, this is the first")
    for image, file in zip(document.images, files):
        if not image["height"] or not image["width"]:
            image["height"], image["width"] = upright_size(file, MOST_MEGAPIXELS)
    root = _root(source)
    sidecar = read_sidecar(root) if root else None
    if sidecar is not None:
        document = _as_it_was(document, sidecar, source.split)
        names = [image["file_name"] or name for image, name in zip(document.images, names)]
    elif source.format == "yolo":
        shared = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
        names = [os.path.relpath(name, shared) if shared else name for name in names]
    boxes: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in document.images}
    for box in document.annotations:
        boxes[box["image_id"]].append(box)
    return PreparedSet(split, document, files, _distinct(names), boxes)


def _root(source: DataSource) -> Path | None:
    """The folder in which rtdetr.json would be, in the formats that have it beside them."""
    if source.format == "voc" and (voc := find_voc(source.path)) is not None:
        return voc.root
    if source.format == "yolo" and (yolo := find_yolo(source.path)) is not None:
        return yolo.root
    return None


def _as_it_was(document: CocoDocument, sidecar: Sidecar, split: str) -> CocoDocument:
    """The document with the ids and names that it had before its conversion, if its classes are still the same."""
    names = [each["name"] for each in document.categories]
    if names not in (sidecar.labels(), [each["name"] for each in sidecar.categories]):
        return document
    category = {now["id"]: then["id"] for now, then in zip(document.categories, sidecar.categories)}
    entries = sidecar.images.get(split or "train", {})
    kept = [entries.get(image["file_name"]) for image in document.images]
    free = 1 + max([0, *(each["id"] for each in kept if each)])  # for images added since the conversion
    number_of, images = {}, []
    for image, entry in zip(document.images, kept):
        number = entry["id"] if entry else free
        free += entry is None
        number_of[image["id"]] = number
        known = {key: value for key, value in (entry or {"file_name": None}).items() if key in OF_IMAGE}
        images.append(image | known | {"id": number})
    boxes = [
        box | {"image_id": number_of[box["image_id"]], "category_id": category[box["category_id"]]}
        for box in document.annotations
    ]
    categories = [{key: value for key, value in each.items() if key != "label"} for each in sidecar.categories]
    return document._replace(images=images, annotations=boxes, categories=categories)


def _distinct(names: list[str], stems: bool = False) -> list[str]:
    """Names that stay below a folder and are unique, also where case is ignored, as on macOS and Windows. stems: also
    without their endings, as label files are named after them."""
    taken: set[str] = set()
    chosen = []
    for name in names:
        inside = name if name and below(Path("x"), name) and not Path(name).is_absolute() else os.path.basename(name)
        inside = os.path.normpath(UNPRINTED.sub("_", inside.strip()))
        stem, ending = os.path.splitext(inside)
        unused, number = stem, 1
        while (key := (unused if stems else f"{unused}{ending}").casefold()) in taken:
            number += 1
            unused = f"{stem}_{number}"
        taken.add(key)
        chosen.append(f"{unused}{ending}")
    return chosen


def _findable(name: str, file: Path) -> str:
    """The name under which the readers of VOC and YOLO find an image: with the ending of one, no dot at its start, no
    space at its end, and not in another folder `images`, beside which YOLO's readers would look for its labels."""
    *folders, last = Path(name).parts
    stem, ending = os.path.splitext(last)
    if ending.lower() not in IMAGE_SUFFIXES:
        stem, ending = last, suffix_of(file)
    dot = "_" if stem.startswith(".") else ""
    return "/".join([*("images_" if each == "images" else each for each in folders), f"{dot}{stem.rstrip()}{ending}"])


def _apart(parts: list[PreparedSet]) -> list[PreparedSet]:
    """Makes names unique across the sets: if they are not, each set gets its own folder."""
    stems = [os.path.splitext(name)[0].casefold() for part in parts for name in part.names]
    if len(set(stems)) == len(stems):
        return parts
    return [part._replace(names=[f"{part.split}/{name}" for name in part.names]) for part in parts]


def _write_coco(parts: list[PreparedSet], out: Path, link: bool) -> Iterator[None]:
    """annotations/instances_SET.json, and the images in SET/."""
    for part in parts:
        for file, name in zip(part.files, part.names):
            _write_image(out / part.split / name, file, link)
            yield
        images = [
            {key: value for key, value in (image | {"file_name": name}).items() if value is not None}
            for image, name in zip(part.document.images, part.names)
        ]
        boxes = [{"id": number} | box for number, box in enumerate(part.document.annotations, start=1)]
        document = {"info": {}, "images": images, "annotations": boxes, "categories": part.document.categories}
        _write_text(out / "annotations" / f"instances_{part.split}.json", json.dumps(document))


def _write_yolo(parts: list[PreparedSet], out: Path, link: bool) -> Iterator[None]:
    """data.yaml, images/SET and labels/SET."""
    categories = parts[0].document.categories
    label_of = {each["id"]: i for i, each in enumerate(categories)}
    kept: dict[str, dict[str, dict[str, Any]]] = {part.split: {} for part in parts}
    for part in parts:
        for image, file, name in zip(part.document.images, part.files, part.names):
            _write_image(out / "images" / part.split / name, file, link)
            lines, rest = _yolo_lines(part.boxes[image["id"]], label_of, (image["height"], image["width"]), file)
            _write_text((out / "labels" / part.split / name).with_suffix(".txt"), lines)
            kept[part.split][f"images/{part.split}/{name}"] = _entry(image, name) | rest
            yield
    names = {i: each["name"] for i, each in enumerate(categories)}
    content = {part.split: f"images/{part.split}" for part in parts} | {"names": names}
    _write_text(out / "data.yaml", yaml.safe_dump(content, sort_keys=False, allow_unicode=True))
    write_sidecar(out, Sidecar(categories, kept))


def _yolo_lines(
    boxes: list[dict[str, Any]], label_of: Mapping[int, int], stored: tuple[int, int], file: Path
) -> tuple[str, dict[str, Any]]:
    """The label file of an image of `stored` size (h, w), and what it cannot hold, for rtdetr.json."""
    turn = sideways(file, stored)
    lines: list[str] = []
    kept, crowds = {}, []
    for box in boxes:
        label = label_of[box["category_id"]]
        whole, size = _turned(box["bbox"], stored, turn)
        if box["iscrowd"]:
            crowds.append([label, *whole, box["area"]])
            continue
        written = clipped(whole, size)  # YOLO's numbers must be from 0 to 1
        if written != whole or box["area"] != whole[2] * whole[3]:
            kept[str(len(lines))] = [*whole, box["area"]]
        lines.append(" ".join([str(label), *map(repr, _relative(written, size))]) + "\n")
    return "".join(lines), ({"kept": kept} if kept else {}) | ({"crowds": crowds} if crowds else {})


def _write_voc(parts: list[PreparedSet], out: Path, link: bool) -> Iterator[None]:
    """Annotations, JPEGImages and ImageSets/Main."""
    categories = [dict(each) for each in parts[0].document.categories]
    labels: dict[int, str] = {}  # by category id; unique, and without characters that XML cannot hold
    for each in categories:
        name = UNPRINTED.sub("_", each["name"]).strip()
        label, number = name or "_", 1
        while label in labels.values():
            number += 1
            label = f"{name} ({number})"
        labels[each["id"]] = label
        if label != each["name"]:
            each["label"] = label
    kept: dict[str, dict[str, dict[str, Any]]] = {part.split: {} for part in parts}
    for part in parts:
        for image, file, name in zip(part.document.images, part.files, part.names):
            _write_image(out / "JPEGImages" / name, file, link)
            objects = [_voc_object(box, labels[box["category_id"]]) for box in part.boxes[image["id"]]]
            file_name = escape(os.path.basename(name))
            text = (
                f"<annotation>\n  <folder>JPEGImages</folder>\n  <filename>{file_name}</filename>\n"
                f"  <size><width>{image['width']}</width><height>{image['height']}</height><depth>3</depth></size>\n"
                f"  <segmented>0</segmented>\n{''.join(objects)}</annotation>\n"
            )
            _write_text((out / "Annotations" / name).with_suffix(".xml"), text)
            kept[part.split][name] = _entry(image, name)
            yield
        stems = [os.path.splitext(name)[0] for name in part.names]
        _write_text(out / "ImageSets" / "Main" / f"{part.split}.txt", "".join(f"{stem}\n" for stem in stems))
    write_sidecar(out, Sidecar(categories, kept))


def _voc_object(box: Mapping[str, Any], label: str) -> str:
    """An <object>; its pixels count from 1 and the last one is part of the box."""
    x, y, width, height = box["bbox"]
    corners = zip(("xmin", "ymin", "xmax", "ymax"), (x + 1, y + 1, x + width, y + height))
    own = [f"<iscrowd>{box['iscrowd']}</iscrowd>"] if box["iscrowd"] else []
    own += [f"<area>{_number(box['area'])}</area>"] if box["area"] != width * height else []
    return (
        f"  <object>\n    <name>{escape(label)}</name>\n"
        f"    <difficult>{box['iscrowd']}</difficult>{''.join(own)}\n"
        f"    <bndbox>{''.join(f'<{side}>{_number(value)}</{side}>' for side, value in corners)}</bndbox>\n"
        "  </object>\n"
    )


def _entry(image: dict[str, Any], name: str) -> dict[str, Any]:
    """What rtdetr.json keeps of an image. name: the new one, if there was none."""
    named = image | {"file_name": image["file_name"] or name}
    return {key: named[key] for key in OF_IMAGE if named.get(key) is not None}


def _write_image(target: Path, file: Path, link: bool) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if link:
        target.symlink_to(file.resolve())
    else:
        shutil.copyfile(file, target)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(round(value, 9))


def _turned(
    box: list[float], size: tuple[int, int], turn: Image.Transpose | None
) -> tuple[list[float], tuple[int, int]]:
    """Converts a box x, y, w, h of the stored image, of `size` (h, w), and this size to those of the upright image."""
    if turn is None:
        return box, size
    (height, width), (x, y, w, h) = size, box
    right, below_it = width - x - w, height - y - h
    places: dict[Image.Transpose, tuple[float, float]] = {
        Image.Transpose.TRANSPOSE: (y, x),
        Image.Transpose.ROTATE_90: (y, right),
        Image.Transpose.TRANSVERSE: (below_it, right),
        Image.Transpose.ROTATE_270: (below_it, x),
    }
    return [*places[turn], h, w], (width, height)


def _relative(box: list[float], size: tuple[int, int]) -> tuple[float, float, float, float]:
    """YOLO's centre, width and height, from 0 to 1, of a box x, y, w, h in pixels."""
    height, width = size
    x, y, w, h = box
    return (x + w / 2) / width, (y + h / 2) / height, w / width, h / height
