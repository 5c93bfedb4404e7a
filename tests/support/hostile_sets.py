"""Small detection sets with one defect each, as the field has them: what the doctor must call it, and its exit code.

`write_sound` makes the set that all of them start from: 24 images of 40 x 32 pixels with two boxes each, of three
classes. One bad record of it is less than the 5 % that may be dropped.
"""

from __future__ import annotations

import copy
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from rtdetr.config import Config, load_config

NUM_IMAGES, WIDTH, HEIGHT = 24, 40, 32
NAMES = {3: "cup", 7: "pen", 20: "key"}
NAN, INF = float("nan"), float("inf")

Document = dict[str, Any]


class Case(NamedTuple):
    """A set with a defect. change: makes it, in the document or in the folder of the set."""

    name: str
    kind: str  # a defect of that kind must be found; several separated by |
    code: int
    change: Callable[[Document, Path], Any]  # what it returns replaces the text of the annotations, if anything


def sound_document() -> Document:
    images = [{"id": 100 + i, "file_name": f"{i:02d}.png", "height": HEIGHT, "width": WIDTH} for i in range(NUM_IMAGES)]
    boxes = []
    for i in range(2 * NUM_IMAGES):
        box = [float(2 + i % 7), float(3 + i % 5), float(8 + i % 9), float(7 + i % 6)]
        category = list(NAMES)[i % 3]
        area = box[2] * box[3]
        boxes.append(
            {"id": i + 1, "image_id": 100 + i // 2, "category_id": category, "bbox": box, "area": area, "iscrowd": 0}
        )
    return {"images": images, "annotations": boxes, "categories": [{"id": i, "name": n} for i, n in NAMES.items()]}


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(NUM_IMAGES):
        pixels = np.random.default_rng(i).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png", compress_level=1)


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


def _box(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["annotations"][5][key] = value

    return change


def _without(part: str, key: str, index: int = 5) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        del document[part][index][key]

    return change


def _record(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["images"][4][key] = value

    return change


def _category(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["categories"][1][key] = value

    return change


def _many(number: int, key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        for each in document["annotations"][:number]:
            each[key] = value

    return change


def _text(edit: Callable[[str], str | bytes]) -> Callable[[Document, Path], str | bytes]:
    return lambda document, _: edit(json.dumps(document))


def _replaced(old: str, new: str) -> Callable[[Document, Path], str | bytes]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return _text(edit)


def _file(content: Callable[[Path], Any], name: str = "04.png") -> Callable[[Document, Path], None]:
    """Another file in place of an image. content: writes it, or returns its bytes."""

    def change(_: Document, folder: Path) -> None:
        (folder / name).unlink()
        written = content(folder / name)
        if isinstance(written, bytes):
            (folder / name).write_bytes(written)

    return change


def _stored(mode: str, suffix: str = "png", **arguments: Any) -> Callable[[Document, Path], None]:
    """An image of that mode in place of another one."""

    def change(document: Document, folder: Path) -> None:
        (folder / "04.png").unlink()
        document["images"][4]["file_name"] = f"04.{suffix}"
        pixels = np.random.default_rng(99).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        image = Image.fromarray(pixels)
        if mode == "I;16":
            image = Image.fromarray(pixels[..., 0].astype(np.uint16) * 257)
        elif mode:
            image = image.convert(mode)
        image.save(folder / f"04.{suffix}", **arguments)

    return change


def _animated(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    document["images"][4]["file_name"] = "04.gif"
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "04.gif", save_all=True, append_images=frames[1:])


def _turned(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    document["images"][4]["file_name"] = "04.jpg"
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (WIDTH, HEIGHT), "red").save(folder / "04.jpg", exif=exif)


def _bomb(path: Path) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return start + struct.pack(">I", 9) + b"IDAT" + bytes(9)


def _pgm(path: Path) -> bytes:
    return f"P5\n{WIDTH} {HEIGHT}\n65535\n".encode() + np.arange(WIDTH * HEIGHT, dtype=">u2").tobytes()


def _cut(path: Path) -> bytes:
    Image.fromarray(np.random.default_rng(5).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)).save(path)
    content = path.read_bytes()
    return content[: len(content) // 2]


def _outside(name: str) -> Callable[[Document, Path], None]:
    """An image beside the folder, which is there and sound; {} in the name is the folder that it is in."""

    def change(document: Document, folder: Path) -> None:
        (folder.parent / "secret").mkdir()
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder.parent / "secret" / "x.png")
        document["images"][4]["file_name"] = name.format(folder.parent / "secret")

    return change


def _corners(document: Document, _: Path) -> None:
    for i, each in enumerate(document["annotations"]):
        x, y = 2 + i % 9, 3 + i % 7
        each["bbox"] = [x, y, WIDTH - i % 5, HEIGHT - i % 4]


def _relative(document: Document, _: Path) -> None:
    for each in document["annotations"]:
        x, y, width, height = each["bbox"]
        each["bbox"] = [x / WIDTH, y / HEIGHT, width / WIDTH, height / HEIGHT]


def _again(document: Document) -> Document:
    return document["annotations"][5] | {"id": 999, "bbox": [*document["annotations"][5]["bbox"]]}


def _no_class(document: Document, _: Path) -> None:
    for each in document["annotations"]:
        if each["category_id"] == 20:
            each["category_id"] = 3
    document["annotations"][5] |= {"category_id": 20, "bbox": [1, 1, 0, 4]}


def _copy_of(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    (folder / "04.png").write_bytes((folder / "07.png").read_bytes())


def _append(part: str, entry: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document[part].append(entry)


def _set(part: str, value: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document.update({part: value})


def _copied(part: str, index: int, **changes: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document[part].append(document[part][index] | changes)


BOXES = [
    Case("zero width", "box_zero", 1, _box("bbox", [4, 4, 0, 9])),
    Case("zero height", "box_zero", 1, _box("bbox", [4, 4, 9, 0])),
    Case("zero both", "box_zero", 1, _box("bbox", [4, 4, 0, 0])),
    Case("all zeros", "box_zero", 1, _box("bbox", [0, 0, 0, 0])),
    Case("too thin for float32", "box_zero|box_outside", 1, _box("bbox", [30, 4, 1e-9, 9])),
    Case("negative width", "box_negative", 1, _box("bbox", [14, 4, -9, 9])),
    Case("negative height", "box_negative", 1, _box("bbox", [14, 14, 9, -9])),
    Case("negative both", "box_negative", 1, _box("bbox", [14, 14, -9, -9])),
    Case("left of the image", "box_outside", 1, _box("bbox", [-20, 4, 9, 9])),
    Case("right of the image", "box_outside", 1, _box("bbox", [45, 4, 9, 9])),
    Case("below the image", "box_outside", 1, _box("bbox", [4, 400, 9, 9])),
    Case("far away", "box_outside", 1, _box("bbox", [1e100, 4, 9, 9])),
    Case("partly outside", "box_clipped", 1, _box("bbox", [-5, 4, 12, 9])),
    Case("partly below", "box_clipped", 1, _box("bbox", [4, 25, 3, 20])),
    Case("huge", "box_clipped", 1, _box("bbox", [-1e6, -1e6, 1e9, 1e9])),
    Case("one as corners", "box_xyxy", 1, _box("bbox", [12, 10, 38, 30])),
    Case("all as corners", "boxes_xyxy", 2, _corners),
    Case("all relative", "boxes_relative", 2, _relative),
    Case("the same box twice", "box_copy", 0, lambda document, _: document["annotations"].append(_again(document))),
    Case("area negative", "box_area_negative", 1, _box("area", -5)),
    Case("nan", "box_not_finite", 1, _box("bbox", [1, 2, NAN, 4])),
    Case("all nan", "box_not_finite", 1, _box("bbox", [NAN] * 4)),
    Case("inf", "box_not_finite", 1, _box("bbox", [1, 2, INF, 4])),
    Case("-inf", "box_not_finite", 1, _box("bbox", [-INF, 2, 3, 4])),
    Case("1e308", "box_not_finite", 1, _box("bbox", [1e308, 1e308, 1e308, 1e308])),
    Case("-1e308", "box_not_finite", 1, _box("bbox", [-1e308, 0, 1e308, 4])),
    Case("an integer beyond floats", "box_not_finite", 1, _box("bbox", [1, 2, 3, 10**400])),
    Case("three numbers", "box_length", 1, _box("bbox", [1, 2, 3])),
    Case("five numbers", "box_length", 1, _box("bbox", [1, 2, 3, 4, 5])),
    Case("no numbers", "box_length", 1, _box("bbox", [])),
    Case("strings", "box_not_numbers", 1, _box("bbox", ["1", "2", "3", "4"])),
    Case("one string", "box_not_numbers", 1, _box("bbox", [1, 2, 3, "4"])),
    Case("one null", "box_not_numbers", 1, _box("bbox", [1, 2, None, 4])),
    Case("nested", "box_not_numbers", 1, _box("bbox", [[1], [2], [3], [4]])),
    Case("true and false", "box_not_numbers", 1, _box("bbox", [True, False, True, True])),
    Case("a string", "box_not_numbers", 1, _box("bbox", "1 2 3 4")),
    Case("a mapping", "box_not_numbers", 1, _box("bbox", {"x": 1, "y": 2, "w": 3, "h": 4})),
    Case("bbox a number", "box_not_numbers", 1, _box("bbox", 4)),
    Case("bbox null", "box_missing", 1, _box("bbox", None)),
    Case("no bbox", "box_missing", 1, _without("annotations", "bbox")),
    Case("area a word", "box_area", 1, _box("area", "wide")),
    Case("area inf", "box_area", 1, _box("area", INF)),
    Case("area a list", "box_area", 1, _box("area", [3])),
    Case("crowd 2", "box_crowd", 1, _box("iscrowd", 2)),
    Case("crowd a word", "box_crowd", 1, _box("iscrowd", "no")),
    Case("crowd a list", "box_crowd", 1, _box("iscrowd", [])),
    Case("a tenth without width", "too_much", 2, _many(5, "bbox", [4, 4, 0, 9])),
    Case("a tenth nan", "too_much", 2, _many(5, "bbox", [1, 2, NAN, 4])),
    Case("all boxes null", "too_much", 2, _many(48, "bbox", None)),
    Case("a class that would vanish", "too_much", 2, _no_class),
    Case("no box at all", "too_much", 2, _set("annotations", [])),
]
IDS = [
    Case("annotation id doubled", "box_id_twice", 1, _box("id", 1)),
    Case("annotation id null", "box_id", 1, _box("id", None)),
    Case("annotation id a string", "box_id", 1, _box("id", "6")),
    Case("annotation id a float", "box_id", 1, _box("id", 6.5)),
    Case("no annotation id", "box_id", 1, _without("annotations", "id")),
    Case("annotation id too large", "box_id", 1, _box("id", 2**70)),
    Case("unknown image", "box_image_unknown", 1, _box("image_id", 999)),
    Case("image id a string", "box_image_id", 1, _box("image_id", "102")),
    Case("image id null", "box_image_id", 1, _box("image_id", None)),
    Case("no image id", "box_image_id", 1, _without("annotations", "image_id")),
    Case("image id a fraction", "box_image_id", 1, _box("image_id", 102.5)),
    Case("image id a whole float", "box_id_not_integer", 1, _box("image_id", 102.0)),
    Case("image id a list", "box_image_id", 1, _box("image_id", [102])),
    Case("image id nan", "box_image_id", 1, _box("image_id", NAN)),
    Case("image id too large", "box_image_id", 1, _box("image_id", 2**70)),
    Case("unknown class", "box_class_unknown", 1, _box("category_id", 4)),
    Case("class 0", "box_class_unknown", 1, _box("category_id", 0)),
    Case("class id a string", "box_class_id", 1, _box("category_id", "7")),
    Case("class id null", "box_class_id", 1, _box("category_id", None)),
    Case("class id a fraction", "box_class_id", 1, _box("category_id", 7.5)),
    Case("class id a whole float", "box_id_not_integer", 1, _box("category_id", 7.0)),
    Case("class id a mapping", "box_class_id", 1, _box("category_id", {})),
    Case("annotation no mapping", "box_record", 1, _append("annotations", [1, 2])),
    Case("annotation null", "box_record", 1, _append("annotations", None)),
    Case("image id of an image doubled", "image_id_twice", 2, _record("id", 100)),
    Case("image given twice", "image_id_twice", 1, _copied("images", 3)),
    Case("own image id a string", "image_record", 1, _record("id", "104")),
    Case("own image id null", "image_record", 1, _record("id", None)),
    Case("own image id a float", "image_record", 1, _record("id", 104.0)),
    Case("own image id true", "image_record", 1, _record("id", True)),
    Case("own image id too large", "image_record", 1, _record("id", 2**64)),
    Case("image no mapping", "image_record", 1, _append("images", "05.png")),
    Case("class id doubled", "class_id_twice", 2, _category("id", 3)),
    Case("own class id a string", "class_record", 2, _category("id", "7")),
    Case("own class id null", "class_record", 2, _category("id", None)),
    Case("own class id a float", "class_record", 2, _category("id", 7.0)),
    Case("class name null", "class_record", 2, _category("name", None)),
    Case("class name a number", "class_record", 2, _category("name", 7)),
    Case("class name empty", "class_name", 1, _category("name", " ")),
    Case("two classes of one name", "class_name", 1, _category("name", "cup")),
    Case("class no mapping", "class_record", 2, _append("categories", "cup")),
    Case("no classes", "no_classes", 2, _set("categories", [])),
]
IMAGES = [
    Case("no file name", "image_record", 1, _without("images", "file_name", 4)),
    Case("file name null", "image_record", 1, _record("file_name", None)),
    Case("file name a number", "image_record", 1, _record("file_name", 4)),
    Case("file name empty", "image_record", 1, _record("file_name", "")),
    Case("file name with a zero byte", "image_record", 1, _record("file_name", "04\0.png")),
    Case("file name that no file can have", "image_record", 1, _record("file_name", "\ud800.png")),
    Case("file name without end", "image_record|picture_missing", 1, _record("file_name", "a" * 5000)),
    Case("no height", "image_size_missing", 1, _without("images", "height", 4)),
    Case("width null", "image_size_missing", 1, _record("width", None)),
    Case("width 0", "image_size_missing", 1, _record("width", 0)),
    Case("width negative", "image_size", 1, _record("width", -40)),
    Case("width a fraction", "image_size", 1, _record("width", 40.5)),
    Case("width nan", "image_size", 1, _record("width", NAN)),
    Case("width a word", "image_size", 1, _record("width", "wide")),
    Case("width in quotes", "image_size", 1, _record("width", str(WIDTH))),
    Case("width beyond 32 bits", "image_size", 1, _record("width", 2**40)),
    Case("width 1e308", "image_size", 1, _record("width", 1e308)),
    Case("another width", "picture_size", 1, _record("width", 41)),
    Case("sides exchanged", "picture_size", 1, lambda d, _: d["images"][4].update(width=HEIGHT, height=WIDTH)),
    Case("missing", "picture_missing", 1, lambda _, folder: (folder / "04.png").unlink()),
    Case("missing in a folder", "picture_missing", 1, _record("file_name", "deep/04.png")),
    Case("a link to nothing", "picture_missing", 1, _file(lambda path: path.symlink_to("nowhere.png"))),
    Case("a link to itself", "picture_missing|picture_damaged", 1, _file(lambda path: path.symlink_to(path.name))),
    Case("a folder", "picture_directory", 1, _file(lambda path: path.mkdir())),
    Case("a pipe", "picture_directory", 1, _file(lambda path: os.mkfifo(path))),
    Case("empty", "picture_not_a_picture", 1, _file(lambda path: b"")),
    Case("a web page", "picture_not_a_picture", 1, _file(lambda path: b"<html>404</html>")),
    Case("noise", "picture_not_a_picture", 1, _file(lambda path: bytes(range(256)) * 9)),
    Case("postscript", "picture_not_a_picture", 1, _file(lambda path: b"%!PS-Adobe-3.0 EPSF-3.0\n")),
    Case("truncated", "picture_damaged", 1, _file(_cut)),
    Case("a bomb", "picture_bomb", 1, _file(_bomb)),
    Case("one folder up", "picture_path_outside", 1, _outside("../secret/x.png")),
    Case("up and down", "picture_path_outside", 1, _outside("a/../../secret/x.png")),
    Case("a whole path", "picture_path_outside", 1, _outside("{}/x.png")),
    Case("of the system", "picture_path_outside", 1, _outside("/etc/passwd")),
    Case("of Windows", "picture_missing", 1, _record("file_name", "..\\secret\\x.png")),
    Case("half of the images missing", "too_much", 2, lambda _, f: [(f / f"{i:02d}.png").unlink() for i in range(12)]),
    Case("EXIF", "picture_exif", 0, _turned),
    Case("CMYK", "picture_cmyk", 0, _stored("CMYK", "jpg")),
    Case("gray", "picture_gray", 0, _stored("L")),
    Case("16 bits", "picture_16bit", 0, _stored("I;16")),
    Case("16 bits, netpbm", "picture_16bit", 0, _file(_pgm)),
    Case("floats to 255", "picture_range", 1, _stored("F", "tif")),
    Case("32-bit integers", "picture_range", 1, _stored("I", "tif")),
    Case("palette", "picture_palette", 0, _stored("P")),
    Case("alpha", "picture_alpha", 0, _stored("RGBA")),
    Case("gray and alpha", "picture_alpha", 0, _stored("LA")),
    Case("1 bit", "picture_1bit", 0, _stored("1")),
    Case("animated", "picture_animated", 0, _animated),
    Case("the same image twice", "picture_copy", 1, _copy_of),
    Case("the same file twice", "picture_twice", 1, _record("file_name", "05.png")),
]
TEXTS = [
    Case("empty file", "json_broken", 2, _text(lambda text: "")),
    Case("cut in half", "json_broken", 2, _text(lambda text: text[: len(text) // 2])),
    Case("a comma too much", "json_broken", 2, _replaced('}], "annotations"', '},], "annotations"')),
    Case("single quotes", "json_broken", 2, _text(lambda text: text.replace('"', "'"))),
    Case("more after the end", "json_broken", 2, _text(lambda text: text + "]")),
    Case("deep nesting", "json_broken", 2, _text(lambda text: "[" * 100_000)),
    Case(
        "deep nesting in a record", "json_broken", 2, _replaced('"file_name"', '"x":' + "[" * 100_000 + ',"file_name"')
    ),
    Case("a number of 5,000 digits", "json_broken", 2, _replaced('"id": 1,', f'"id": {"1" * 5000},')),
    Case(
        "UTF-16", "image_size_missing", 1, lambda d, _: [d["images"][0].pop("width"), json.dumps(d).encode("utf-16")][1]
    ),
    Case(
        "a byte order mark",
        "image_size_missing",
        1,
        lambda d, _: [d["images"][0].pop("width"), b"\xef\xbb\xbf" + json.dumps(d).encode()][1],
    ),
    Case("Latin-1", "json_broken", 2, _text(lambda text: text.replace("cup", "\xe4").encode("latin-1"))),
    Case("zero bytes", "json_broken", 2, _text(lambda text: text.encode() + b"\0\0")),
    Case("a list", "json_not_coco", 2, _text(lambda text: "[]")),
    Case("a number", "json_not_coco", 2, _text(lambda text: "7")),
    Case("null", "json_not_coco", 2, _text(lambda text: "null")),
    Case("no images", "json_not_coco", 2, lambda document, _: document.pop("images") and json.dumps(document)),
    Case("images null", "json_not_coco", 2, _set("images", None)),
    Case("categories null", "json_not_coco", 2, _set("categories", None)),
    Case("no categories", "json_not_coco", 2, lambda document, _: document.pop("categories") and json.dumps(document)),
    Case("annotations a mapping", "json_not_coco", 2, _set("annotations", {"1": {"bbox": [1, 2, 3, 4]}})),
    Case("annotations null", "json_not_coco", 2, _set("annotations", None)),
    Case("categories a mapping", "json_not_coco", 2, _set("categories", {"1": "cup"})),
    Case("no images in it", "too_much", 2, _set("images", [])),
    Case("images twice", "json_keys_twice", 2, _replaced('{"images"', '{"images": [], "images"')),
    Case("a key twice in a box", "box_keys_twice", 1, _replaced('"id": 1,', '"id": 1, "bbox": [1, 1, 2, 2],')),
    Case("a key twice in an image", "image_keys_twice", 1, _replaced('"id": 100,', '"id": 100, "width": 4,')),
    Case("a key twice in a class", "class_keys_twice", 2, _replaced('"name": "cup"', '"name": "pen", "name": "cup"')),
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
