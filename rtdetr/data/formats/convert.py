"""Writes sets of any format as COCO, VOC or YOLO: `rtdetr convert-data`.

Data that a format cannot hold is stored in rtdetr.json (see sidecar.py), so that converting back loses nothing that
detection needs: boxes, crowds and areas, ids and names of categories, ids and names of images, LVIS' lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
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
from rtdetr.data.formats.sources import (
    check_images,
    find_sources,
    image_folder_of,
    read_document,
    with_images,
)
from rtdetr.data.formats.voc import find_voc
from rtdetr.data.formats.yolo import find_yolo
from rtdetr.data.images import MOST_MEGAPIXELS, sideways, suffix_of, upright_size

Target = Literal["coco", "voc", "yolo"]
OF_IMAGE = ("id", "file_name", "coco_url", lvis.NEGATIVE, lvis.NOT_EXHAUSTIVE)
UNPRINTED = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff\ufffe\uffff]")  # no text in XML; lone surrogates: no UTF-8


class Part(NamedTuple):
    """One set, ready to be written."""

    split: str
    document: CocoDocument  # with its original COCO ids, if rtdetr.json has them; all sizes are known
    files: list[Path]  # image files, in the document's order
    names: list[str]  # their new names, unique even without their endings
    boxes: dict[int, list[dict[str, Any]]]  # by image id

    @property
    def num_boxes(self) -> int:
        return len(self.document.annotations)


def load(given: Path, split: str = "", images: str = "") -> list[Part]:
    """The sets of a file or folder, or only the one named `split`. images: the image folder of a JSON, if it is not
    near the file. Raises DataError if a set is unusable."""
    if images and not os.path.isdir(images):
        raise DataError(f"{images}: no such image folder")
    parts = [_part(source, name, given, images) for name, source in _chosen(given, split).items()]
    for part in parts[1:]:
        if part.document.categories != parts[0].document.categories:
            raise DataError(
                f"{given}: the categories of {part.split} are not those of {parts[0].split}; convert each with --split"
            )
    return parts


def write(parts: list[Part], out: Path, to: Target, link: bool = False) -> Iterator[None]:
    """Writes the sets into the empty folder `out`; yields after each image. link: create symbolic links to the images.
    Raises OSError, and DataError for files that are not images."""
    if to != "coco":
        parts = [part._replace(names=_distinct([*map(_findable, part.names, part.files)])) for part in parts]
    writers: dict[Target, Callable[[Path, list[Part]], _Writer]] = {"coco": _Coco, "voc": _Voc, "yolo": _Yolo}
    writer = writers[to](out, _apart(parts) if to == "voc" else parts)
    for part in writer.parts:
        for image, file, name in zip(part.document.images, part.files, part.names):
            target = writer.image(part, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if link:
                target.symlink_to(file.resolve())
            else:
                shutil.copyfile(file, target)
            writer.write(part, image, file, name)
            yield
    writer.finish()


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


def _part(source: DataSource, split: str, given: Path, images: str) -> Part:
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
    sidecar = read_sidecar(_root(source))
    if sidecar is not None:
        document = _as_it_was(document, sidecar, source.split)
        names = [image["file_name"] or name for image, name in zip(document.images, names)]
    elif source.format == "yolo":
        shared = os.path.commonpath([os.path.dirname(name) for name in names]) if names else ""
        names = [os.path.relpath(name, shared) if shared else name for name in names]
    boxes: dict[int, list[dict[str, Any]]] = {image["id"]: [] for image in document.images}
    for box in document.annotations:
        boxes[box["image_id"]].append(box)
    return Part(split, document, files, _distinct(names), boxes)


def _root(source: DataSource) -> Path:
    """The folder in which rtdetr.json would be."""
    if source.format == "voc" and (voc := find_voc(source.path)) is not None:
        return voc.root
    if source.format == "yolo" and (yolo := find_yolo(source.path)) is not None:
        return yolo.root
    return source.path / "none"


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


def _distinct(names: list[str]) -> list[str]:
    """Names that stay below a folder and are unique without their endings, as label files are named after them."""
    taken: set[str] = set()
    chosen = []
    for name in names:
        inside = name if name and below(Path("x"), name) and not Path(name).is_absolute() else os.path.basename(name)
        inside = os.path.normpath(UNPRINTED.sub("_", inside.strip()))
        stem, ending = os.path.splitext(inside)
        unused, number = stem, 1
        while unused in taken:
            number += 1
            unused = f"{stem}_{number}"
        taken.add(unused)
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


def _apart(parts: list[Part]) -> list[Part]:
    """Makes names unique across the sets: if they are not, each set gets its own folder."""
    stems = [os.path.splitext(name)[0] for part in parts for name in part.names]
    if len(set(stems)) == len(stems):
        return parts
    return [part._replace(names=[f"{part.split}/{name}" for name in part.names]) for part in parts]


class _Writer(ABC):
    def __init__(self, out: Path, parts: list[Part]) -> None:
        self.out = out
        self.parts = parts
        self.categories = [dict(each) for each in parts[0].document.categories]
        self.label_of = {each["id"]: i for i, each in enumerate(self.categories)}
        self.kept: dict[str, dict[str, dict[str, Any]]] = {part.split: {} for part in parts}

    @abstractmethod
    def image(self, part: Part, name: str) -> Path: ...

    @abstractmethod
    def write(self, part: Part, image: Mapping[str, Any], file: Path, name: str) -> None: ...

    def finish(self) -> None:
        write_sidecar(self.out, Sidecar(self.categories, self.kept))

    def _keep(self, part: Part, image: Mapping[str, Any], name: str, place: str) -> dict[str, Any]:
        """Adds the entry of an image, written to `place`, to rtdetr.json and returns it."""
        entry = {key: image[key] for key in OF_IMAGE if image.get(key) is not None}
        entry.setdefault("file_name", name)
        self.kept[part.split][place] = entry
        return entry


class _Coco(_Writer):
    """Writes annotations/instances_SET.json, and the images to SET/."""

    def image(self, part: Part, name: str) -> Path:
        return self.out / part.split / name

    def write(self, part: Part, image: Mapping[str, Any], file: Path, name: str) -> None:
        pass

    def finish(self) -> None:
        (self.out / "annotations").mkdir(exist_ok=True)
        for part in self.parts:
            images = [
                {key: value for key, value in (image | {"file_name": name}).items() if value is not None}
                for image, name in zip(part.document.images, part.names)
            ]
            boxes = [{"id": number} | box for number, box in enumerate(part.document.annotations, start=1)]
            document = {"info": {}, "images": images, "annotations": boxes, "categories": self.categories}
            path = self.out / "annotations" / f"instances_{part.split}.json"
            path.write_text(json.dumps(document), encoding="utf-8")


class _Yolo(_Writer):
    """Writes data.yaml, images/SET and labels/SET."""

    def image(self, part: Part, name: str) -> Path:
        return self.out / "images" / part.split / name

    def write(self, part: Part, image: Mapping[str, Any], file: Path, name: str) -> None:
        stored = (image["height"], image["width"])
        turn = sideways(file, stored)
        lines: list[str] = []
        kept, crowds = {}, []
        for box in part.boxes[image["id"]]:
            label = self.label_of[box["category_id"]]
            whole, size = _turned(box["bbox"], stored, turn)
            if box["iscrowd"]:
                crowds.append([label, *whole, box["area"]])
                continue
            written = clipped(whole, size)  # YOLO's numbers must be from 0 to 1
            if written != whole or box["area"] != whole[2] * whole[3]:
                kept[str(len(lines))] = [*whole, box["area"]]
            lines.append(" ".join([str(label), *map(repr, _relative(written, size))]))
        entry = self._keep(part, image, name, f"images/{part.split}/{name}")
        entry |= ({"kept": kept} if kept else {}) | ({"crowds": crowds} if crowds else {})
        label_file = (self.out / "labels" / part.split / name).with_suffix(".txt")
        label_file.parent.mkdir(parents=True, exist_ok=True)
        label_file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def finish(self) -> None:
        names = {i: each["name"] for i, each in enumerate(self.categories)}
        content = {part.split: f"images/{part.split}" for part in self.parts} | {"names": names}
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        (self.out / "data.yaml").write_text(text, encoding="utf-8")
        super().finish()


class _Voc(_Writer):
    """Writes Annotations, JPEGImages and ImageSets/Main; pixels count from 1 and the last one is part of the box."""

    def __init__(self, out: Path, parts: list[Part]) -> None:
        super().__init__(out, parts)
        self.labels: list[str] = []
        for each in self.categories:
            name = UNPRINTED.sub("_", each["name"]).strip()
            label, number = name or "_", 1
            while label in self.labels:
                number += 1
                label = f"{name} ({number})"
            self.labels.append(label)
            if label != each["name"]:
                each["label"] = label

    def image(self, part: Part, name: str) -> Path:
        return self.out / "JPEGImages" / name

    def write(self, part: Part, image: Mapping[str, Any], file: Path, name: str) -> None:
        self._keep(part, image, name, name)
        objects = [self._object(box) for box in part.boxes[image["id"]]]
        text = (
            f"<annotation>\n  <folder>JPEGImages</folder>\n  <filename>{escape(os.path.basename(name))}</filename>\n"
            f"  <size><width>{image['width']}</width><height>{image['height']}</height><depth>3</depth></size>\n"
            f"  <segmented>0</segmented>\n{''.join(objects)}</annotation>\n"
        )
        path = (self.out / "Annotations" / name).with_suffix(".xml")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def _object(self, box: Mapping[str, Any]) -> str:
        x, y, width, height = box["bbox"]
        corners = zip(("xmin", "ymin", "xmax", "ymax"), (x + 1, y + 1, x + width, y + height))
        own = [f"<iscrowd>{box['iscrowd']}</iscrowd>"] if box["iscrowd"] else []
        own += [f"<area>{_number(box['area'])}</area>"] if box["area"] != width * height else []
        return (
            f"  <object>\n    <name>{escape(self.labels[self.label_of[box['category_id']]])}</name>\n"
            f"    <difficult>{box['iscrowd']}</difficult>{''.join(own)}\n"
            f"    <bndbox>{''.join(f'<{side}>{_number(value)}</{side}>' for side, value in corners)}</bndbox>\n"
            "  </object>\n"
        )

    def finish(self) -> None:
        lists = self.out / "ImageSets" / "Main"
        lists.mkdir(parents=True)
        for part in self.parts:
            stems = [os.path.splitext(name)[0] for name in part.names]
            (lists / f"{part.split}.txt").write_text("".join(f"{stem}\n" for stem in stems), encoding="utf-8")
        super().finish()


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
