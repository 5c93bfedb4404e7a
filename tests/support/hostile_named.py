"""Sets of Label Studio, CVAT, LabelMe and Hugging Face with one defect each; see hostile_sets and named_sets."""

from __future__ import annotations

import functools
import json
import operator
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAN, INF = float("nan"), float("inf")
DIGITS, DEEP = "9" * 5000, "[" * 100_000
BOMB = '<!DOCTYPE a [<!ENTITY a "aaaa">' + "".join(
    f'<!ENTITY {b} "{f"&{a};" * 20}">' for a, b in zip("abcdefgh", "bcdefghi")
)
Change = Callable[[Path], Any]  # of the folder of a set


class Case(NamedTuple):
    name: str
    kind: str  # a defect of that kind must be found; several separated by |
    code: int  # of the doctor
    change: Change


def _with(text: str, place: Sequence[Any], value: Any) -> str:
    """A JSON text with another value at a place; the last key of the place may be new. Nothing: the key goes."""
    document = json.loads(text)
    *way, last = place
    inner = functools.reduce(operator.getitem, way, document)
    if value is Ellipsis:
        del inner[last]
    else:
        inner[last] = value
    return json.dumps(document)


def _json(file: str, place: Sequence[Any], value: Any) -> Change:
    return lambda root: (root / file).write_text(_with((root / file).read_text(), place, value))


def each_of(*changes: Change) -> Change:
    return lambda root: [change(root) for change in changes]


def edited(file: str, old: str, new: str | bytes) -> Change:
    def change(root: Path) -> None:
        text = (root / file).read_text()
        assert old in text
        if isinstance(new, bytes):
            (root / file).write_bytes(text.encode().replace(old.encode(), new, 1))
        else:
            (root / file).write_text(text.replace(old, new, 1))

    return change


def whole(file: str, content: bytes) -> Change:
    return lambda root: (root / file).write_bytes(content)


def _cut(file: str) -> Change:
    return lambda root: (root / file).write_bytes((root / file).read_bytes()[:-40])


def _encoded(file: str, encoding: str) -> Change:
    return lambda root: (root / file).write_bytes((root / file).read_text().encode(encoding))


def gone(file: str, instead: bytes | None = None) -> Change:
    def change(root: Path) -> None:
        (root / file).unlink()  # it is a hard link
        if instead is not None:
            (root / file).write_bytes(instead)

    return change


def a_folder(file: str) -> Change:
    return each_of(gone(file), lambda root: (root / file).mkdir())


def _task(*place_and_value: Any) -> Change:
    *place, value = place_and_value
    return _json("export.json", (2, *place), value)


def _result(*place_and_value: Any) -> Change:
    return _task("annotations", 0, "result", *place_and_value)


def _region(*place_and_value: Any) -> Change:
    return _result(0, *place_and_value)


def _both(key: str, value: Any) -> Change:
    return each_of(*(_result(i, key, value) for i in (0, 1)))


LABEL_STUDIO = [
    Case("region null", "box_box", 1, _result(0, None)),
    Case("a key twice", "box_keys_twice", 1, edited("export.json", '"type":', '"type": "rectanglelabels", "type":')),
    Case("region without type", "box_box", 1, _region("type", ...)),
    Case("type a number", "box_box", 1, _region("type", 7)),
    Case("value a list", "box_class", 1, _region("value", [])),
    Case("no class", "box_class", 1, _region("value", "rectanglelabels", ...)),
    Case("two classes", "box_class", 1, _region("value", "rectanglelabels", ["cup", "key"])),
    Case("class a number", "box_class", 1, _region("value", "rectanglelabels", [7])),
    Case("class empty", "box_class", 1, _region("value", "rectanglelabels", [" "])),
    Case("class of two lines", "box_class", 1, _region("value", "rectanglelabels", ["a\nb"])),
    Case("x nan", "box_numbers", 1, _region("value", "x", NAN)),
    Case("x text", "box_numbers", 1, _region("value", "x", "7")),
    Case("width inf", "box_numbers", 1, _region("value", "width", INF)),
    Case("width null", "box_numbers", 1, _region("value", "width", None)),
    Case("width true", "box_numbers", 1, _region("value", "width", True)),
    Case("width beyond floats", "box_numbers", 1, _region("value", "width", 10**400)),
    Case("rotation a word", "box_numbers", 1, _region("value", "rotation", "half")),
    Case("width 0", "box_zero", 1, _region("value", "width", 0)),
    Case("width negative", "box_negative", 1, _region("value", "width", -9)),
    Case("beyond the image", "box_outside", 1, _region("value", "x", 140)),
    Case("far beyond", "box_outside", 1, _region("value", "x", 1e100)),
    Case("image turned there", "box_box", 1, _region("image_rotation", 90)),
    Case("size negative", "image_size", 1, _region("original_width", -40)),
    Case("size a fraction", "image_size", 1, _region("original_width", 40.5)),
    Case("two sizes", "image_size", 1, _region("original_width", 41)),
    Case("another size", "picture_size", 1, _both("original_width", 41)),
    Case("no size", "box_numbers", 1, each_of(_both("original_width", ...), _both("original_height", ...))),
    Case("no data", "image_file", 1, _task("data", ...)),
    Case("data without an image", "image_image", 1, _task("data", {"text": "hello", "n": 3})),
    Case("image outside", "picture_missing", 1, _task("data", "image", "../../../etc/passwd.png")),
    Case("image with a zero byte", "image_image", 1, _task("data", "image", "a\0.png")),
    Case("image half a character", "image_image", 1, _task("data", "image", "\ud800.png")),
    Case("image of half an address", "picture_missing", 1, _task("data", "image", "http://[::1/x.png")),
    Case("task text", "image_file", 1, _json("export.json", (2,), "x")),
    Case("annotations a mapping", "image_file", 1, _task("annotations", {"id": 1})),
    Case("result null", "image_file", 1, _task("annotations", 0, "result", None)),
    Case("no image file", "picture_missing", 1, gone("images/02.png")),
    Case("cut", "unusable", 2, _cut("export.json")),
    Case("deep", "unusable", 2, edited("export.json", "[", f"[{DEEP}")),
    Case("digits", "unusable", 2, edited("export.json", '"id": 7', f'"id": {DIGITS}')),
    Case("nothing labelled", "json_not_coco", 2, whole("export.json", b"[]")),
    Case("UTF-16", "json_not_coco", 2, _encoded("export.json", "utf-16")),
    Case(
        "a third unlabelled",
        "too_much|unusable",
        2,
        each_of(*(_json("export.json", (i, "data"), {}) for i in range(8))),
    ),
]


def _xml(old: str, new: str | bytes) -> Change:
    return edited("annotations.xml", old, new)


BOX = '<box label="key" source="manual" occluded="0" xtl="6.00" ytl="7.00" xbr="18.00" ybr="18.00" z_order="0"></box>'


def _xml_of_box(old: str, new: str) -> Change:
    assert old in BOX
    return _xml(BOX, BOX.replace(old, new))


CVAT = [
    Case("xtl a word", "box_numbers", 1, _xml_of_box('xtl="6.00"', 'xtl="six"')),
    Case("xtl nan", "box_numbers", 1, _xml_of_box('xtl="6.00"', 'xtl="nan"')),
    Case("xbr inf", "box_numbers", 1, _xml_of_box('xbr="18.00"', 'xbr="inf"')),
    Case("xbr 1e999", "box_numbers", 1, _xml_of_box('xbr="18.00"', 'xbr="1e999"')),
    Case("no xtl", "box_numbers", 1, _xml_of_box('xtl="6.00"', "")),
    Case("xtl empty", "box_numbers", 1, _xml_of_box('xtl="6.00"', 'xtl=""')),
    Case("rotation a word", "box_numbers", 1, _xml_of_box('z_order="0"', 'rotation="half"')),
    Case("no label", "box_class", 1, _xml_of_box('label="key"', "")),
    Case("label empty", "box_class", 1, _xml_of_box('label="key"', 'label=" "')),
    Case("label that is not listed", "box_class", 1, _xml_of_box('label="key"', 'label="fork"')),
    Case("right of left", "box_negative", 1, _xml_of_box('xbr="18.00"', 'xbr="2.00"')),
    Case("no width", "box_zero", 1, _xml_of_box('xbr="18.00"', 'xbr="6.00"')),
    Case("partly outside", "box_clipped", 1, _xml_of_box('xbr="18.00"', 'xbr="190.00"')),
    Case(
        "far outside", "box_outside", 1, _xml_of_box('xtl="6.00" ytl="7.00" xbr="18.00"', 'xtl="60" ytl="7" xbr="1e99"')
    ),
    Case("an unknown shape", "box_box", 1, _xml(BOX, "<circle label='key'/>")),
    Case("a polygon of two points", "box_numbers", 1, _xml(BOX, "<polygon label='key' points='1,2;3,4'/>")),
    Case("a polygon of words", "box_numbers", 1, _xml(BOX, "<polygon label='key' points='a,b;c,d;e,f'/>")),
    Case("a polygon of threes", "box_numbers", 1, _xml(BOX, "<polygon label='key' points='1,2,3;1,2,3;4,5,6'/>")),
    Case("a mask without a side", "box_numbers", 1, _xml(BOX, "<mask label='key' left='1' top='2' width='3'/>")),
    Case("width -40", "image_size", 1, _xml('width="40"', 'width="-40"')),
    Case("width a word", "image_size", 1, _xml('width="40"', 'width="wide"')),
    Case("no width of an image", "image_size", 1, _xml('width="40"', "")),
    Case("width 41", "picture_size", 1, _xml('width="40"', 'width="41"')),
    Case("no name", "image_image", 1, _xml('name="02.png"', "")),
    Case("a name of two lines", "image_image", 1, _xml('name="02.png"', 'name="a&#10;b.png"')),
    Case("outside", "picture_path_outside", 1, _xml('name="02.png"', 'name="../../../etc/passwd"')),
    Case("no such image", "picture_missing", 1, _xml('name="02.png"', 'name="x.png"')),
    Case("tracks", "unusable", 2, _xml("</meta>", "</meta><track id='0' label='key'></track>")),
    Case("cut", "unusable", 2, _cut("annotations.xml")),
    Case("deep", "unusable", 2, _xml("</meta>", "</meta>" + "<a>" * 9000)),
    Case("bomb", "unusable", 2, _xml("<annotations>", f"{BOMB}]><annotations>")),
    Case(
        "wants a file",
        "unusable",
        2,
        _xml("<annotations>", '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotations>&x;'),
    ),
    Case("in no encoding", "unusable", 2, _xml("encoding='utf-8'", "encoding='klingon'")),
    Case("Latin-1", "unusable", 2, _xml("<version>", "<version>\xe4".encode("latin-1"))),
    Case("an attribute twice", "unusable", 2, _xml('name="02.png"', 'name="02.png" name="03.png"')),
    Case(
        "subsets of unknown names",
        "unusable",
        2,
        each_of(_xml('id="1"', 'id="1" subset="mine"'), _xml('id="2"', 'id="2" subset="Train"')),
    ),
    Case("no image", "too_much|unusable", 2, whole("annotations.xml", b"<annotations></annotations>")),
]


def _labelme(*place_and_value: Any) -> Change:
    *place, value = place_and_value
    return _json("02.json", place, value)


def _shape(*place_and_value: Any) -> Change:
    return _labelme("shapes", 0, *place_and_value)


LABELME = [
    Case("cut", "image_file", 1, _cut("02.json")),
    Case("empty", "image_file", 1, whole("02.json", b"")),
    Case("a list", "image_file", 1, whole("02.json", b"[1, 2]")),
    Case("null", "image_file", 1, whole("02.json", b"null")),
    Case("deep", "image_file", 1, whole("02.json", DEEP.encode())),
    Case("digits", "image_file", 1, edited("02.json", '"imageHeight": 32', f'"imageHeight": {DIGITS}')),
    Case("bytes", "image_file", 1, whole("02.json", b"\x89PNG\r\n\x1a\n\xff")),
    Case("Latin-1", "image_file", 1, edited("02.json", '"5.5.0"', b'"\xe4"')),
    Case("a key twice", "image_keys_twice", 1, edited("02.json", '"version"', '"shapes": [], "version"')),
    Case("a folder", "image_file", 1, a_folder("02.json")),
    Case("a pipe", "image_file", 1, lambda root: [(root / "00.json").unlink(), os.mkfifo(root / "00.json")]),
    Case("shapes null", "image_file", 1, _labelme("shapes", None)),
    Case("no imagePath", "image_file", 1, _labelme("imagePath", ...)),
    Case("imagePath a number", "image_file", 1, _labelme("imagePath", 7)),
    Case("height -3", "image_size", 1, _labelme("imageHeight", -3)),
    Case("height 32.5", "image_size", 1, _labelme("imageHeight", 32.5)),
    Case("height a word", "image_size", 1, _labelme("imageHeight", "32")),
    Case("no height", "image_size", 1, _labelme("imageHeight", None)),
    Case("width 41", "picture_size", 1, _labelme("imageWidth", 41)),
    Case("shape text", "box_class", 1, _labelme("shapes", 0, "x")),
    Case("shape_type a number", "box_box", 1, _shape("shape_type", 7)),
    Case("shape_type a list", "box_box", 1, _shape("shape_type", ["rectangle"])),
    Case("shape_type unknown", "box_box", 1, _shape("shape_type", "blob")),
    Case("label null", "box_class", 1, _shape("label", None)),
    Case("label empty", "box_class", 1, _shape("label", "")),
    Case("label of two lines", "box_class", 1, _shape("label", "a\nb")),
    Case("label half a character", "box_class", 1, _shape("label", "\ud800")),
    Case("points null", "box_numbers", 1, _shape("points", None)),
    Case("one point", "box_numbers", 1, _shape("points", [[1, 2]])),
    Case("points of three", "box_numbers", 1, _shape("points", [[1, 2, 3], [4, 5, 6]])),
    Case("a point nan", "box_numbers", 1, _shape("points", 0, [NAN, 2])),
    Case("a point text", "box_numbers", 1, _shape("points", 0, ["1", "2"])),
    Case("points flat", "box_numbers", 1, _shape("points", [1, 2, 3, 4])),
    Case("a point beyond floats", "box_numbers", 1, _shape("points", 0, [10**400, 2])),
    Case("no width", "box_zero", 1, _shape("points", [[3, 4], [3, 9]])),
    Case("outside", "box_outside", 1, _shape("points", [[300, 4], [310, 9]])),
    Case("no image", "picture_missing", 1, gone("02.png")),
    Case("image elsewhere", "picture_missing", 1, each_of(gone("02.png"), _labelme("imagePath", "/etc/passwd"))),
    Case("image damaged", "picture_not_a_picture|picture_damaged", 1, gone("02.png", b"x")),
]


def _edited_line(edit: Callable[[str], str]) -> Change:
    def change(root: Path) -> None:
        file = root / "train" / "metadata.jsonl"
        lines = file.read_text().splitlines()
        lines[2] = edit(lines[2])
        file.write_text("\n".join(lines))

    return change


def _row(*place_and_value: Any) -> Change:
    *place, value = place_and_value
    return _edited_line(lambda line: _with(line, place, value))


def _line(text: str) -> Change:
    return _edited_line(lambda _: text)


HUGGING_FACE = [
    Case("a line of words", "image_file", 1, _line("hello")),
    Case("a line cut", "image_file", 1, _line('{"file_name": "02.png", "obj')),
    Case("a line deep", "image_file", 1, _line(DEEP)),
    Case("a line of digits", "image_file", 1, _line(f'{{"file_name": {DIGITS}}}')),
    Case("a line null", "image_image", 1, _line("null")),
    Case(
        "a key twice", "image_keys_twice", 1, _line('{"file_name": "02.png", "file_name": "03.png", "objects": null}')
    ),
    Case("no file_name", "image_image", 1, _row("file_name", ...)),
    Case("file_name a number", "image_image", 1, _row("file_name", 2)),
    Case("file_name with a zero byte", "image_image", 1, _row("file_name", "a\0.png")),
    Case("file_name half a character", "image_image", 1, _row("file_name", "\ud800.png")),
    Case("outside", "picture_path_outside", 1, _row("file_name", "../../../etc/passwd")),
    Case("no such image", "picture_missing", 1, _row("file_name", "x.png")),
    Case("image damaged", "image_image", 1, gone("train/02.png", b"x")),
    Case("no objects", "image_file", 1, _row("objects", ...)),
    Case("objects a number", "image_file", 1, _row("objects", 7)),
    Case("objects a list of numbers", "box_numbers", 1, _row("objects", [1])),
    Case("more classes than boxes", "image_file", 1, _row("objects", "categories", [0, 1, 2])),
    Case("no classes", "image_file", 1, _row("objects", "categories", ...)),
    Case("boxes a word", "image_file", 1, _row("objects", "bbox", "none")),
    Case("three numbers", "box_numbers", 1, _row("objects", "bbox", 0, [1, 2, 3])),
    Case("a box null", "box_numbers", 1, _row("objects", "bbox", 0, None)),
    Case("a box of text", "box_numbers", 1, _row("objects", "bbox", 0, ["1", "2", "3", "4"])),
    Case("nan", "box_numbers", 1, _row("objects", "bbox", 0, [1, NAN, 3, 4])),
    Case("inf", "box_numbers", 1, _row("objects", "bbox", 0, [1, 2, INF, 4])),
    Case("class -1", "box_class", 1, _row("objects", "categories", 0, -1)),
    Case("class 1.5", "box_class", 1, _row("objects", "categories", 0, 1.5)),
    Case("class null", "box_class", 1, _row("objects", "categories", 0, None)),
    Case("class true", "box_class", 1, _row("objects", "categories", 0, True)),
    Case("class 7 of 3", "box_class", 1, _row("objects", "categories", 0, 7)),
    Case("class 9 digits", "box_class", 1, _row("objects", "categories", 0, 123456789)),
    Case("width 0", "box_zero", 1, _row("objects", "bbox", 0, [1, 2, 0, 4])),
    Case("width negative", "box_negative", 1, _row("objects", "bbox", 0, [9, 2, -3, 4])),
    Case("outside its image", "box_outside", 1, _row("objects", "bbox", 0, [99, 2, 3, 4])),
    Case("width 41", "picture_size", 1, each_of(_row("width", 41), _row("height", 32))),
    Case("height -1", "image_size", 1, _row("height", -1)),
    Case("UTF-16", "too_much", 2, _encoded("train/metadata.jsonl", "utf-16")),
    Case("a class twice", "unusable", 2, whole("classes.txt", b"cup\ncup\n")),
    Case("empty", "unusable|too_much", 2, whole("train/metadata.jsonl", b"")),
]
HOSTILE = {"labelstudio": LABEL_STUDIO, "cvat": CVAT, "labelme": LABELME, "huggingface": HUGGING_FACE}
