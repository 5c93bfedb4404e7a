"""Small detection sets with one defect each, as the field has them: what the doctor must call it, and its exit code.

All start from the set of sound_set.py, of which one bad record is less than the 5 % that may be dropped.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import hostile_edits as edit
from sound_set import HEIGHT, WIDTH, Document, sound_document

from rtdetr.config import Config, load_config

NAN, INF = float("nan"), float("inf")


class Case(NamedTuple):
    """A set with a defect. change: makes it, in the document or in the folder of the set."""

    name: str
    kind: str  # a defect of that kind must be found; several separated by |
    code: int
    change: Callable[[Document, Path], Any]  # what it returns replaces the text of the annotations, if anything


def write_case(case: Case, root: Path, images: Path) -> tuple[Path, Path]:
    """The annotation file and the image folder of a case. images: those of `write_images`, which are linked."""
    (root / "pictures").mkdir()
    for each in images.iterdir():
        os.link(each, root / "pictures" / each.name)
    document = copy.deepcopy(sound_document())
    text = case.change(document, root / "pictures")
    path = root / "a.json"
    if isinstance(text, bytes):
        path.write_bytes(text)
    else:
        path.write_text(text if isinstance(text, str) else json.dumps(document))
    return path, root / "pictures"


BOXES = [
    Case("zero width", "box_zero", 1, edit.box("bbox", [4, 4, 0, 9])),
    Case("zero height", "box_zero", 1, edit.box("bbox", [4, 4, 9, 0])),
    Case("zero both", "box_zero", 1, edit.box("bbox", [4, 4, 0, 0])),
    Case("all zeros", "box_zero", 1, edit.box("bbox", [0, 0, 0, 0])),
    Case("too thin for float32", "box_zero|box_outside", 1, edit.box("bbox", [30, 4, 1e-9, 9])),
    Case("negative width", "box_negative", 1, edit.box("bbox", [14, 4, -9, 9])),
    Case("negative height", "box_negative", 1, edit.box("bbox", [14, 14, 9, -9])),
    Case("negative both", "box_negative", 1, edit.box("bbox", [14, 14, -9, -9])),
    Case("left of the image", "box_outside", 1, edit.box("bbox", [-20, 4, 9, 9])),
    Case("right of the image", "box_outside", 1, edit.box("bbox", [45, 4, 9, 9])),
    Case("below the image", "box_outside", 1, edit.box("bbox", [4, 400, 9, 9])),
    Case("far away", "box_outside", 1, edit.box("bbox", [1e100, 4, 9, 9])),
    Case("partly outside", "box_clipped", 1, edit.box("bbox", [-5, 4, 12, 9])),
    Case("partly below", "box_clipped", 1, edit.box("bbox", [4, 25, 3, 20])),
    Case("huge", "box_clipped", 1, edit.box("bbox", [-1e6, -1e6, 1e9, 1e9])),
    Case("one as corners", "box_xyxy", 1, edit.box("bbox", [12, 10, 38, 30])),
    Case("all as corners", "boxes_xyxy", 2, edit.corners),
    Case("all relative", "boxes_relative", 2, edit.relative),
    Case("the same box twice", "box_copy", 0, lambda document, _: document["annotations"].append(edit.again(document))),
    Case("area negative", "box_area_negative", 1, edit.box("area", -5)),
    Case(
        "a crowd of negative width",
        "box_area_negative",
        1,
        edit.copied("annotations", 5, id=999, iscrowd=1, bbox=[14, 14, -9, 9], area=-81),
    ),
    Case("nan", "box_not_finite", 1, edit.box("bbox", [1, 2, NAN, 4])),
    Case("all nan", "box_not_finite", 1, edit.box("bbox", [NAN] * 4)),
    Case("inf", "box_not_finite", 1, edit.box("bbox", [1, 2, INF, 4])),
    Case("-inf", "box_not_finite", 1, edit.box("bbox", [-INF, 2, 3, 4])),
    Case("1e308", "box_not_finite", 1, edit.box("bbox", [1e308, 1e308, 1e308, 1e308])),
    Case("-1e308", "box_not_finite", 1, edit.box("bbox", [-1e308, 0, 1e308, 4])),
    Case("an integer beyond floats", "box_not_finite", 1, edit.box("bbox", [1, 2, 3, 10**400])),
    Case("three numbers", "box_length", 1, edit.box("bbox", [1, 2, 3])),
    Case("five numbers", "box_length", 1, edit.box("bbox", [1, 2, 3, 4, 5])),
    Case("no numbers", "box_length", 1, edit.box("bbox", [])),
    Case("strings", "box_not_numbers", 1, edit.box("bbox", ["1", "2", "3", "4"])),
    Case("one string", "box_not_numbers", 1, edit.box("bbox", [1, 2, 3, "4"])),
    Case("one null", "box_not_numbers", 1, edit.box("bbox", [1, 2, None, 4])),
    Case("nested", "box_not_numbers", 1, edit.box("bbox", [[1], [2], [3], [4]])),
    Case("true and false", "box_not_numbers", 1, edit.box("bbox", [True, False, True, True])),
    Case("a string", "box_not_numbers", 1, edit.box("bbox", "1 2 3 4")),
    Case("a mapping", "box_not_numbers", 1, edit.box("bbox", {"x": 1, "y": 2, "w": 3, "h": 4})),
    Case("bbox a number", "box_not_numbers", 1, edit.box("bbox", 4)),
    Case("bbox null", "box_missing", 1, edit.box("bbox", None)),
    Case("no bbox", "box_missing", 1, edit.without("annotations", "bbox")),
    Case("area a word", "box_area", 1, edit.box("area", "wide")),
    Case("area inf", "box_area", 1, edit.box("area", INF)),
    Case("area a list", "box_area", 1, edit.box("area", [3])),
    Case("crowd 2", "box_crowd", 1, edit.box("iscrowd", 2)),
    Case("crowd a word", "box_crowd", 1, edit.box("iscrowd", "no")),
    Case("crowd a list", "box_crowd", 1, edit.box("iscrowd", [])),
    Case("a tenth without width", "too_much", 2, edit.many(5, "bbox", [4, 4, 0, 9])),
    Case("a tenth nan", "too_much", 2, edit.many(5, "bbox", [1, 2, NAN, 4])),
    Case("all boxes null", "too_much", 2, edit.many(48, "bbox", None)),
    Case("a class that would vanish", "too_much", 2, edit.no_class),
    Case("no box at all", "too_much", 2, edit.put("annotations", [])),
]
IDS = [
    Case("annotation id doubled", "box_id_twice", 1, edit.box("id", 1)),
    Case("annotation id null", "box_id", 1, edit.box("id", None)),
    Case("annotation id a string", "box_id", 1, edit.box("id", "6")),
    Case("annotation id a float", "box_id", 1, edit.box("id", 6.5)),
    Case("no annotation id", "box_id", 1, edit.without("annotations", "id")),
    Case("annotation id too large", "box_id", 1, edit.box("id", 2**70)),
    Case("unknown image", "box_image_unknown", 1, edit.box("image_id", 999)),
    Case("image id a string", "box_image_id", 1, edit.box("image_id", "102")),
    Case("image id null", "box_image_id", 1, edit.box("image_id", None)),
    Case("no image id", "box_image_id", 1, edit.without("annotations", "image_id")),
    Case("image id a fraction", "box_image_id", 1, edit.box("image_id", 102.5)),
    Case("image id a whole float", "box_id_not_integer", 1, edit.box("image_id", 102.0)),
    Case("image id a list", "box_image_id", 1, edit.box("image_id", [102])),
    Case("image id nan", "box_image_id", 1, edit.box("image_id", NAN)),
    Case("image id too large", "box_image_id", 1, edit.box("image_id", 2**70)),
    Case("unknown class", "box_class_unknown", 1, edit.box("category_id", 4)),
    Case("class 0", "box_class_unknown", 1, edit.box("category_id", 0)),
    Case("class id a string", "box_class_id", 1, edit.box("category_id", "7")),
    Case("class id null", "box_class_id", 1, edit.box("category_id", None)),
    Case("class id a fraction", "box_class_id", 1, edit.box("category_id", 7.5)),
    Case("class id a whole float", "box_id_not_integer", 1, edit.box("category_id", 7.0)),
    Case("class id a mapping", "box_class_id", 1, edit.box("category_id", {})),
    Case("annotation no mapping", "box_record", 1, edit.append("annotations", [1, 2])),
    Case("annotation null", "box_record", 1, edit.append("annotations", None)),
    Case("image id of an image doubled", "image_id_twice", 2, edit.record("id", 100)),
    Case("image given twice", "image_id_twice", 1, edit.copied("images", 3)),
    Case("own image id a string", "image_record", 1, edit.record("id", "104")),
    Case("own image id null", "image_record", 1, edit.record("id", None)),
    Case("own image id a float", "image_record", 1, edit.record("id", 104.0)),
    Case("own image id true", "image_record", 1, edit.record("id", True)),
    Case("own image id too large", "image_record", 1, edit.record("id", 2**64)),
    Case("image no mapping", "image_record", 1, edit.append("images", "05.png")),
    Case("class id doubled", "class_id_twice", 2, edit.category("id", 3)),
    Case("own class id a string", "class_record", 2, edit.category("id", "7")),
    Case("own class id null", "class_record", 2, edit.category("id", None)),
    Case("own class id a float", "class_record", 2, edit.category("id", 7.0)),
    Case("class name null", "class_record", 2, edit.category("name", None)),
    Case("class name a number", "class_record", 2, edit.category("name", 7)),
    Case("class name empty", "class_name", 1, edit.category("name", " ")),
    Case("two classes of one name", "class_name", 1, edit.category("name", "cup")),
    Case("class no mapping", "class_record", 2, edit.append("categories", "cup")),
    Case("no classes", "no_classes", 2, edit.put("categories", [])),
]
IMAGES = [
    Case("no file name", "image_record", 1, edit.without("images", "file_name", 4)),
    Case("file name null", "image_record", 1, edit.record("file_name", None)),
    Case("file name a number", "image_record", 1, edit.record("file_name", 4)),
    Case("file name empty", "image_record", 1, edit.record("file_name", "")),
    Case("file name with a zero byte", "image_record", 1, edit.record("file_name", "04\0.png")),
    Case("file name that no file can have", "image_record", 1, edit.record("file_name", "\ud800.png")),
    Case("file name without end", "image_record|picture_missing", 1, edit.record("file_name", "a" * 5000)),
    Case("no height", "image_size_missing", 1, edit.without("images", "height", 4)),
    Case("width null", "image_size_missing", 1, edit.record("width", None)),
    Case("width 0", "image_size_missing", 1, edit.record("width", 0)),
    Case("width negative", "image_size", 1, edit.record("width", -40)),
    Case("width a fraction", "image_size", 1, edit.record("width", 40.5)),
    Case("width nan", "image_size", 1, edit.record("width", NAN)),
    Case("width a word", "image_size", 1, edit.record("width", "wide")),
    Case("width in quotes", "image_size", 1, edit.record("width", str(WIDTH))),
    Case("width beyond 32 bits", "image_size", 1, edit.record("width", 2**40)),
    Case("width 1e308", "image_size", 1, edit.record("width", 1e308)),
    Case("another width", "picture_size", 1, edit.record("width", 41)),
    Case("sides exchanged", "picture_size", 1, lambda d, _: d["images"][4].update(width=HEIGHT, height=WIDTH)),
    Case("missing", "picture_missing", 1, lambda _, folder: (folder / "04.png").unlink()),
    Case("missing in a folder", "picture_missing", 1, edit.record("file_name", "deep/04.png")),
    Case("a link to nothing", "picture_missing", 1, edit.file(lambda path: path.symlink_to("nowhere.png"))),
    Case("a link to itself", "picture_missing|picture_damaged", 1, edit.file(lambda path: path.symlink_to(path.name))),
    Case("a folder", "picture_directory", 1, edit.file(lambda path: path.mkdir())),
    Case("a pipe", "picture_directory", 1, edit.file(lambda path: os.mkfifo(path))),
    Case("empty", "picture_not_a_picture", 1, edit.file(lambda path: b"")),
    Case("a web page", "picture_not_a_picture", 1, edit.file(lambda path: b"<html>404</html>")),
    Case("noise", "picture_not_a_picture", 1, edit.file(lambda path: bytes(range(256)) * 9)),
    Case("postscript", "picture_not_a_picture", 1, edit.file(lambda path: b"%!PS-Adobe-3.0 EPSF-3.0\n")),
    Case("truncated", "picture_damaged", 1, edit.file(edit.cut)),
    Case("a bomb", "picture_bomb", 1, edit.file(edit.bomb)),
    Case("one folder up", "picture_path_outside", 1, edit.outside("../secret/x.png")),
    Case("up and down", "picture_path_outside", 1, edit.outside("a/../../secret/x.png")),
    Case("a whole path", "picture_path_outside", 1, edit.outside("{}/x.png")),
    Case("of the system", "picture_path_outside", 1, edit.outside("/etc/passwd")),
    Case("of Windows", "picture_missing", 1, edit.record("file_name", "..\\secret\\x.png")),
    Case("half of the images missing", "too_much", 2, lambda _, f: [(f / f"{i:02d}.png").unlink() for i in range(12)]),
    Case("EXIF", "picture_exif", 0, edit.turned),
    Case("CMYK", "picture_cmyk", 0, edit.stored("CMYK", "jpg")),
    Case("gray", "picture_gray", 0, edit.stored("L")),
    Case("16 bits", "picture_16bit", 0, edit.stored("I;16")),
    Case("16 bits, netpbm", "picture_16bit", 0, edit.file(edit.pgm)),
    Case("floats to 255", "picture_range", 1, edit.stored("F", "tif")),
    Case("32-bit integers", "picture_range", 1, edit.stored("I", "tif")),
    Case("palette", "picture_palette", 0, edit.stored("P")),
    Case("alpha", "picture_alpha", 0, edit.stored("RGBA")),
    Case("gray and alpha", "picture_alpha", 0, edit.stored("LA")),
    Case("1 bit", "picture_1bit", 0, edit.stored("1")),
    Case("animated", "picture_animated", 0, edit.animated),
    Case("the same image twice", "picture_copy", 1, edit.copy_of),
    Case("the same file twice", "picture_twice", 1, edit.record("file_name", "05.png")),
]
TEXTS = [
    Case("empty file", "json_broken", 2, edit.text(lambda text: "")),
    Case("cut in half", "json_broken", 2, edit.text(lambda text: text[: len(text) // 2])),
    Case("a comma too much", "json_broken", 2, edit.replaced('}], "annotations"', '},], "annotations"')),
    Case("single quotes", "json_broken", 2, edit.text(lambda text: text.replace('"', "'"))),
    Case("more after the end", "json_broken", 2, edit.text(lambda text: text + "]")),
    Case("deep nesting", "json_broken", 2, edit.text(lambda text: "[" * 100_000)),
    Case(
        "deep nesting in a record",
        "json_broken",
        2,
        edit.replaced('"file_name"', '"x":' + "[" * 100_000 + ',"file_name"'),
    ),
    Case("a number of 5,000 digits", "json_broken", 2, edit.replaced('"id": 1,', f'"id": {"1" * 5000},')),
    Case(
        "UTF-16", "image_size_missing", 1, lambda d, _: [d["images"][0].pop("width"), json.dumps(d).encode("utf-16")][1]
    ),
    Case(
        "a byte order mark",
        "image_size_missing",
        1,
        lambda d, _: [d["images"][0].pop("width"), b"\xef\xbb\xbf" + json.dumps(d).encode()][1],
    ),
    Case("Latin-1", "json_broken", 2, edit.text(lambda text: text.replace("cup", "\xe4").encode("latin-1"))),
    Case("zero bytes", "json_broken", 2, edit.text(lambda text: text.encode() + b"\0\0")),
    Case("a list", "json_not_coco", 2, edit.text(lambda text: "[]")),
    Case("a number", "json_not_coco", 2, edit.text(lambda text: "7")),
    Case("null", "json_not_coco", 2, edit.text(lambda text: "null")),
    Case("no images", "json_not_coco", 2, lambda document, _: document.pop("images") and json.dumps(document)),
    Case("images null", "json_not_coco", 2, edit.put("images", None)),
    Case("categories null", "json_not_coco", 2, edit.put("categories", None)),
    Case("no categories", "json_not_coco", 2, lambda document, _: document.pop("categories") and json.dumps(document)),
    Case("annotations a mapping", "json_not_coco", 2, edit.put("annotations", {"1": {"bbox": [1, 2, 3, 4]}})),
    Case("annotations null", "json_not_coco", 2, edit.put("annotations", None)),
    Case("categories a mapping", "json_not_coco", 2, edit.put("categories", {"1": "cup"})),
    Case("no images in it", "too_much", 2, edit.put("images", [])),
    Case("images twice", "json_keys_twice", 2, edit.replaced('{"images"', '{"images": [], "images"')),
    Case("a key twice in a box", "box_keys_twice", 1, edit.replaced('"id": 1,', '"id": 1, "bbox": [1, 1, 2, 2],')),
    Case("a key twice in an image", "image_keys_twice", 1, edit.replaced('"id": 100,', '"id": 100, "width": 4,')),
    Case(
        "a key twice in a class", "class_keys_twice", 2, edit.replaced('"name": "cup"', '"name": "pen", "name": "cup"')
    ),
]
SOUND = Case("sound", "", 0, lambda document, folder: None)
CASES = [*BOXES, *IDS, *IMAGES, *TEXTS]


def config_of(annotations: Path, images: Path, *updates: str) -> Config:
    """Of a nano run on such a set, for training and validation alike."""
    from engine_helpers import NANO, tiny_updates

    paths = [
        f"data.{name}.{key}={json.dumps(str(value))}"
        for name in ("train", "val")
        for key, value in (("images", images if images.name else ""), ("annotations", annotations))
    ]
    return load_config(NANO, [*tiny_updates(images), *paths, *updates])
