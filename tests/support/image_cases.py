"""Images as cameras store them, turned by EXIF, and files that only look like images."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rtdetr.data import images as images

UPRIGHT = np.kron(np.random.default_rng(0).integers(0, 256, (5, 3, 3)), np.ones((16, 16, 1))).astype(np.uint8)
STORED = {  # what a camera held in each of the eight ways stores of the upright pixels
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: UPRIGHT.transpose(1, 0, 2)[::-1],
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: UPRIGHT.transpose(1, 0, 2)[:, ::-1],
}
FORMATS: dict[str, dict[str, Any]] = {
    "jpg": {"quality": 100, "subsampling": 0},
    "png": {},
    "webp": {"lossless": True},
    "tif": {},
}


def exif_block(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def camera_file(path: Path, orientation: int, stored: np.ndarray | None = None) -> Path:
    """An image file with that EXIF orientation, upright when it is heeded."""
    pixels = Image.fromarray(np.ascontiguousarray(STORED[orientation] if stored is None else stored))
    if path.suffix == ".tif":
        pixels.save(path, tiffinfo={0x0112: orientation})
    else:
        pixels.save(path, exif=exif_block(orientation), **FORMATS[path.suffix[1:]])
    return path


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    """A grey PNG of the given header, whatever its content."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND", b"")


def as_bytes(kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(UPRIGHT).save(file, kind, **options)
    return file.getvalue()


BAD = {
    "empty.jpg": (b"", "the file is empty"),
    "page.jpg": (b"<!DOCTYPE html><html><body>404</body></html>", "its bytes are of none of the formats JPEG, PNG, "),
    "truncated.jpg": (as_bytes("JPEG")[:-400], "truncated"),
    "truncated.png": (as_bytes("PNG")[:-40], "truncated"),
    "pixels.png": (png(2, 2, chunk(b"IDAT", b"no pixels")), "broken data stream"),
    "bomb.png": (png(60_000, 60_000, chunk(b"IDAT", b"")), "it claims to be larger than data.max_megapixels=179"),
    "chunk.png": (
        png(2, 2, chunk(b"IDAT", zlib.compress(b"\0\1\2")[:5]), chunk(b"ID\0T", b"")),
        "broken PNG file",
    ),  # PIL: SyntaxError
    "header.png": (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", b"\0\0\0\2") + chunk(b"IEND", b""),
        "Truncated IHDR",
    ),  # PIL: ValueError
    "page.png": (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n",
        "of none of the formats JPEG, PNG, ",
    ),
    "table.tif": (as_bytes("TIFF")[:4] + b"\xff\xff\xff\x7f" + as_bytes("TIFF")[8:], ""),
}
