"""VOC and YOLO folders with one defect each; see hostile_sets."""

from __future__ import annotations

from pathlib import Path

from hostile_named import BOMB, Case, Change, a_folder, each_of, edited, gone, whole
from named_sets import link
from PIL import Image
from sound_set import HEIGHT, NUM_IMAGES, WIDTH

CLASSES = ("cup", "pen", "key")


def write_voc(root: Path, images: Path) -> None:
    (root / "Annotations").mkdir(parents=True)
    link(images, root / "JPEGImages")
    for i in range(NUM_IMAGES):
        objects = "".join(
            f"<object><name>{CLASSES[k % 3]}</name><bndbox><xmin>{3 + k % 7}</xmin><ymin>{4 + k % 5}</ymin>"
            f"<xmax>{15 + k % 9}</xmax><ymax>{16 + k % 6}</ymax></bndbox></object>\n"
            for k in (2 * i, 2 * i + 1)
        )
        size = f"<size><width>{WIDTH}</width><height>{HEIGHT}</height><depth>3</depth></size>"
        text = f"<annotation>\n<filename>{i:02d}.png</filename>\n{size}\n{objects}</annotation>\n"
        (root / "Annotations" / f"{i:02d}.xml").write_text(text)


def write_yolo(root: Path, images: Path) -> None:
    (root / "labels" / "train").mkdir(parents=True)
    link(images, root / "images" / "train")
    for i in range(NUM_IMAGES):
        lines = "".join(
            f"{k % 3} {0.3 + 0.01 * (k % 7):.2f} {0.4 + 0.01 * (k % 5):.2f} 0.25 0.3\n" for k in (2 * i, 2 * i + 1)
        )
        (root / "labels" / "train" / f"{i:02d}.txt").write_text(lines)
    (root / "data.yaml").write_text("train: images/train\nnames:\n  0: cup\n  1: pen\n  2: key\n")


def _xml(old: str, new: str) -> Change:
    return edited("Annotations/02.xml", old, new)


def _xml_file(content: bytes) -> Change:
    return whole("Annotations/02.xml", content)


def _line(text: str) -> Change:
    return edited("labels/train/02.txt", "1 0.34 0.44 0.25 0.3", text)


def _yaml(old: str, new: str) -> Change:
    return edited("data.yaml", old, new)


def _corners(root: Path) -> None:
    for path in (root / "labels" / "train").iterdir():
        lines = [(label, *map(float, numbers)) for label, *numbers in map(str.split, path.read_text().splitlines())]
        path.write_text("".join(f"{k} {x - w} {y - h} {x + w} {y + h}\n" for k, x, y, w, h in lines))


def _whole_images(root: Path) -> None:
    for path in (root / "labels" / "train").iterdir():
        path.write_text("0 0.54 0.5 1.0 1.0\n" * 2)


def _another_image(root: Path) -> None:
    Image.new("RGB", (WIDTH, HEIGHT)).save(root / "images" / "train" / "02.jpg")


def _list_with(last: str) -> Change:
    """A list of images in place of the folder, with another line at its end."""
    images = "".join(f"images/train/{i:02d}.png\n" for i in range(NUM_IMAGES))
    yaml = b"train: list.txt\nnames: [cup, pen, key]\n"
    return each_of(whole("list.txt", f"{images}{last}\n".encode()), whole("data.yaml", yaml))


VOC = [
    Case("xmin a word", "box_numbers", 1, _xml("<xmin>7</xmin>", "<xmin>seven</xmin>")),
    Case("xmin nan", "box_numbers", 1, _xml("<xmin>7</xmin>", "<xmin>nan</xmin>")),
    Case("xmax inf", "box_numbers", 1, _xml("<xmax>19</xmax>", "<xmax>inf</xmax>")),
    Case("xmax 1e999", "box_numbers", 1, _xml("<xmax>19</xmax>", "<xmax>1e999</xmax>")),
    Case("no xmin", "box_numbers", 1, _xml("<xmin>7</xmin>", "")),
    Case("xmin twice", "box_text", 1, _xml("<xmin>7</xmin>", "<xmin>7</xmin><xmin>8</xmin>")),
    Case("no box", "box_box", 1, _xml("</bndbox>", "</bndbox><bndbox></bndbox>")),
    Case("no name", "box_class", 1, _xml("<name>pen</name>", "<name> </name>")),
    Case("xmax below xmin", "box_negative", 1, _xml("<xmax>19</xmax>", "<xmax>2</xmax>")),
    Case("outside", "box_outside|box_clipped", 1, _xml("<xmax>19</xmax>", "<xmax>190</xmax>")),
    Case("width -40", "image_size", 1, _xml("<width>40", "<width>-40")),
    Case("width twice", "image_size", 1, _xml("<width>40", "<width>40</width><width>40")),
    Case("filename twice", "image_file", 1, _xml("<filename>", "<filename></filename><filename>")),
    Case("width a word", "image_size", 1, _xml("<width>40", "<width>wide")),
    Case("width 41", "picture_size", 1, _xml("<width>40", "<width>41")),
    Case("no size", "image_size_missing", 1, _xml("<width>40</width>", "")),
    Case("XML cut", "image_file", 1, _xml("</annotation>", "")),
    Case("XML empty", "image_file", 1, _xml_file(b"")),
    Case("XML a web page", "image_file", 1, _xml_file(b"<html></html>")),
    Case("XML is JSON", "image_file", 1, _xml_file(b'{"images": []}')),
    Case("XML deep", "image_file", 1, _xml_file(b"<annotation>" + b"<a>" * 9000)),
    Case("XML bomb", "image_file", 1, _xml_file(f"{BOMB}]><annotation>".encode())),
    Case(
        "XML that wants a file",
        "image_file",
        1,
        _xml_file(b'<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>'),
    ),
    Case(
        "XML in no encoding",
        "image_file",
        1,
        _xml("<annotation>", '<?xml version="1.0" encoding="klingon"?><annotation>'),
    ),
    Case("XML in Latin-1", "image_file", 1, _xml_file("<annotation>\xe4".encode("latin-1"))),
    Case("image gone", "picture_missing", 1, gone("JPEGImages/02.png")),
    Case("a name outside, of an image inside", "picture_path_outside", 1, _xml("02.png", "../../02.png")),
    Case(
        "image outside", "picture_path_outside", 1, each_of(gone("JPEGImages/02.png"), _xml("02.png", "../../02.png"))
    ),
]
YOLO = [
    Case("a word", "box_text", 1, _line("1 a b c d")),
    Case("nan", "box_numbers", 1, _line("1 nan 0.4 0.2 0.3")),
    Case("1e999", "box_numbers", 1, _line("1 1e999 0.4 0.2 0.3")),
    Case("three numbers", "box_numbers", 1, _line("1 0.4 0.2")),
    Case("nine digits of a class", "box_class", 1, _line("123456789 0.4 0.4 0.2 0.3")),
    Case("class -1", "box_class", 1, _line("-1 0.4 0.4 0.2 0.3")),
    Case("class 0.5", "box_class", 1, _line("0.5 0.4 0.4 0.2 0.3")),
    Case("pixels", "box_box", 1, _line("1 20 16 8 8")),
    Case("no width", "box_zero", 1, _line("1 0.4 0.4 0 0.3")),
    Case("negative width", "box_box|box_negative", 1, _line("1 0.4 0.4 -0.2 0.3")),
    Case("beyond the edge", "box_clipped", 1, _line("1 0.95 0.4 0.4 0.3")),
    Case("UTF-16", "image_text", 1, whole("labels/train/02.txt", "1 0.4 0.4 0.2 0.3".encode("utf-16"))),
    Case("an image", "image_text", 1, whole("labels/train/02.txt", b"\x89PNG\r\n\x1a\n\xff")),
    Case("a folder", "image_text", 1, a_folder("labels/train/02.txt")),
    Case("image damaged", "image_picture|picture_damaged", 1, gone("images/train/02.png", b"x")),
    Case("list with a path outside", "picture_path_outside", 1, _list_with("/etc/passwd")),
    Case("list with a missing image", "image_file", 1, _list_with("images/train/x.png")),
    Case("two classes of one name", "class_name", 1, _yaml("1: pen", "1: cup")),
    Case("names that differ in case", "class_name", 1, _yaml("1: pen", "1: Cup")),
    Case("all as corners", "boxes_xyxy", 2, _corners),
    Case("all of nearly the whole image", "box_clipped", 1, _whole_images),
    Case("two images of one label file", "picture_twice", 1, _another_image),
    Case("YAML broken", "yaml_broken|unusable", 2, _yaml("names:", "names: [")),
    Case("YAML key twice", "yaml_broken|unusable", 2, _yaml("names:", "train: images\nnames:")),
    Case("YAML deep", "yaml_broken|unusable", 2, _yaml("names:", "x: " + "[" * 300 + "\nnames:")),
    Case(
        "YAML aliases",
        "yaml_broken|unusable",
        2,
        _yaml(
            "names:",
            "a: &a [1, 1]\n"
            + "".join(f"{k}: &{k} [{', '.join([f'*{j}'] * 9)}]\n" for j, k in zip("abcdef", "bcdefg"))
            + "names:",
        ),
    ),
    Case(
        "YAML Latin-1",
        "yaml_broken|unusable",
        2,
        whole("data.yaml", "train: images/train\nnames: [\xe4]\n".encode("latin-1")),
    ),
    Case("YAML tag", "yaml_broken|unusable", 2, _yaml("names:", "x: !!python/object/apply:os.system [true]\nnames:")),
    Case("YAML huge number", "yaml_broken|unusable", 2, _yaml("names:", f"nc: {'9' * 5000}\nnames:")),
    Case("no such folder", "unusable", 2, _yaml("images/train", "images/nowhere")),
]
