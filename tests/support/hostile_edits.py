"""Edits that put one defect into the set of sound_set.py: into its COCO document, or into the folder of its images."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from sound_set import HEIGHT, WIDTH, Document


def box(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["annotations"][5][key] = value

    return change


def without(part: str, key: str, index: int = 5) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        del document[part][index][key]

    return change


def record(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["images"][4][key] = value

    return change


def category(key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        document["categories"][1][key] = value

    return change


def many(number: int, key: str, value: Any) -> Callable[[Document, Path], None]:
    def change(document: Document, _: Path) -> None:
        for each in document["annotations"][:number]:
            each[key] = value

    return change


def text(edit: Callable[[str], str | bytes]) -> Callable[[Document, Path], str | bytes]:
    return lambda document, _: edit(json.dumps(document))


def replaced(old: str, new: str) -> Callable[[Document, Path], str | bytes]:
    def edit(text: str) -> str:
        assert old in text
        return text.replace(old, new, 1)

    return text(edit)


def file(content: Callable[[Path], Any], name: str = "04.png") -> Callable[[Document, Path], None]:
    """Another file in place of an image. content: writes it, or returns its bytes."""

    def change(_: Document, folder: Path) -> None:
        (folder / name).unlink()
        written = content(folder / name)
        if isinstance(written, bytes):
            (folder / name).write_bytes(written)

    return change


def stored(mode: str, suffix: str = "png", **arguments: Any) -> Callable[[Document, Path], None]:
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


def animated(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    document["images"][4]["file_name"] = "04.gif"
    frames = [Image.new("RGB", (WIDTH, HEIGHT), colour) for colour in ("red", "blue")]
    frames[0].save(folder / "04.gif", save_all=True, append_images=frames[1:])


def turned(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    document["images"][4]["file_name"] = "04.jpg"
    exif = Image.Exif()
    exif[0x0112] = 3
    Image.new("RGB", (WIDTH, HEIGHT), "red").save(folder / "04.jpg", exif=exif)


def bomb(path: Path) -> bytes:
    header = b"IHDR" + struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return start + struct.pack(">I", 9) + b"IDAT" + bytes(9)


def pgm(path: Path) -> bytes:
    return f"P5\n{WIDTH} {HEIGHT}\n65535\n".encode() + np.arange(WIDTH * HEIGHT, dtype=">u2").tobytes()


def cut(path: Path) -> bytes:
    Image.fromarray(np.random.default_rng(5).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)).save(path)
    content = path.read_bytes()
    return content[: len(content) // 2]


def outside(name: str) -> Callable[[Document, Path], None]:
    """An image beside the folder, which is there and sound; {} in the name is the folder that it is in."""

    def change(document: Document, folder: Path) -> None:
        (folder.parent / "secret").mkdir()
        Image.new("RGB", (WIDTH, HEIGHT)).save(folder.parent / "secret" / "x.png")
        document["images"][4]["file_name"] = name.format(folder.parent / "secret")

    return change


def corners(document: Document, _: Path) -> None:
    for i, each in enumerate(document["annotations"]):
        x, y = 2 + i % 9, 3 + i % 7
        each["bbox"] = [x, y, WIDTH - i % 5, HEIGHT - i % 4]


def relative(document: Document, _: Path) -> None:
    for each in document["annotations"]:
        x, y, width, height = each["bbox"]
        each["bbox"] = [x / WIDTH, y / HEIGHT, width / WIDTH, height / HEIGHT]


def again(document: Document) -> Document:
    return document["annotations"][5] | {"id": 999, "bbox": [*document["annotations"][5]["bbox"]]}


def no_class(document: Document, _: Path) -> None:
    for each in document["annotations"]:
        if each["category_id"] == 20:
            each["category_id"] = 3
    document["annotations"][5] |= {"category_id": 20, "bbox": [1, 1, 0, 4]}


def copy_of(document: Document, folder: Path) -> None:
    (folder / "04.png").unlink()
    (folder / "04.png").write_bytes((folder / "07.png").read_bytes())


def append(part: str, entry: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document[part].append(entry)


def put(part: str, value: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document.update({part: value})


def copied(part: str, index: int, **changes: Any) -> Callable[[Document, Path], None]:
    return lambda document, _: document[part].append(document[part][index] | changes)
