"""Any image file comes out as upright RGB, or as one sentence that names it."""

from __future__ import annotations

import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from image_cases import BAD, FORMATS, STORED, UPRIGHT, as_bytes, camera_file, chunk, exif_block, png
from messages import message
from PIL import Image

from rtdetr.data import images as images
from rtdetr.data.classes import DataError
from rtdetr.data.images import read_image, read_pixels, upright_size


def assert_pixels(image: Image.Image, expected: np.ndarray, suffix: str) -> None:
    difference = np.abs(np.asarray(image).astype(int) - expected)
    assert difference.max() <= (8 if suffix == "jpg" else 0)


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("orientation", STORED)
class TestOrientation:
    def test_upright_without_a_size_or_with_the_upright_one(
        self, tmp_path: Path, suffix: str, orientation: int
    ) -> None:
        path = camera_file(tmp_path / f"a.{suffix}", orientation)
        for annotated in (None, (80, 48), (1, 2)):
            assert_pixels(read_image(path, annotated), UPRIGHT, suffix)
        assert upright_size(path) == (80, 48)

    def test_as_the_official_decoder_gives_it(self, tmp_path: Path, suffix: str, orientation: int) -> None:
        if suffix == "webp":
            pytest.skip("OpenCV heeds the orientation of WebP from 4.11 on only")
        path = camera_file(tmp_path / f"a.{suffix}", orientation)
        official = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
        assert official is not None
        assert_pixels(read_image(path), official[..., ::-1], suffix)

    def test_stored_where_only_that_is_the_annotated_size(self, tmp_path: Path, suffix: str, orientation: int) -> None:
        path = camera_file(tmp_path / f"a.{suffix}", orientation)
        expected = STORED[orientation] if orientation >= 5 else UPRIGHT  # 1 to 4: the size does not tell
        assert_pixels(read_image(path, STORED[orientation].shape[:2]), expected, suffix)

    def test_squares_are_upright(self, tmp_path: Path, suffix: str, orientation: int) -> None:
        path = camera_file(tmp_path / f"a.{suffix}", orientation, STORED[orientation][:48, :48])
        cut = Image.fromarray(np.ascontiguousarray(STORED[orientation][:48, :48]))
        turn = images.UPRIGHT.get(orientation)
        expected = np.asarray(cut if turn is None else cut.transpose(turn))
        assert_pixels(read_image(path, (48, 48)), expected, suffix)


@pytest.mark.parametrize(
    "block",
    [
        b"Exif\0\0",
        b"Exif\0\0MM\0*\0\0\0\x08",
        b"Exif\0\0garbage of a broken editor",
        exif_block(6)[:20],
        exif_block(0),
        exif_block(9),
        exif_block(6).replace(b"\x01\x12\x00\x03", b"\x01\x12\x00\x02"),  # the orientation as text
    ],
)
@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
def test_a_damaged_exif_block_turns_nothing(tmp_path: Path, suffix: str, block: bytes) -> None:
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(UPRIGHT).save(path, exif=block, **FORMATS[suffix])
    assert_pixels(read_image(path), UPRIGHT, suffix)
    assert upright_size(path) == (80, 48)


def test_an_exif_block_behind_the_pixels_of_a_png(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(
        png(2, 1, chunk(b"IDAT", zlib.compress(b"\0\x05\x09")), chunk(b"eXIf", exif_block(6)[6:]))
    )
    assert np.asarray(read_image(tmp_path / "a.png"))[..., 0].tolist() == [[5], [9]]
    assert upright_size(tmp_path / "a.png") == (2, 1)


@pytest.mark.parametrize("name", [*BAD, "missing.jpg", "folder.jpg"])
def test_bad_files_are_one_sentence_each(tmp_path: Path, name: str) -> None:
    content, reason = BAD.get(name, (b"", "o such file" if name == "missing.jpg" else ""))
    if name in BAD:
        (tmp_path / name).write_bytes(content)
    elif name == "folder.jpg":
        (tmp_path / name).mkdir()
    for read in (read_image, read_pixels, upright_size):
        if read is upright_size and name in ("truncated.jpg", "truncated.png", "chunk.png", "pixels.png"):
            continue  # the header is whole
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        sentence = str(caught.value)
        assert sentence.startswith(f"{tmp_path / name}: cannot be read as an image") and reason in sentence
        assert "replace it or remove it" in sentence and "\n" not in sentence


@pytest.mark.parametrize("kind", ["JPEG", "MPO", "PNG", "WEBP", "TIFF", "BMP", "DIB", "GIF", "PPM", "JPEG2000", "TGA"])
def test_the_bytes_tell_the_format_and_not_the_name(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.eps").write_bytes(as_bytes(kind))
    assert read_image(tmp_path / "a.eps").size == (48, 80)


def test_postscript_is_not_handed_to_a_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object, **__: object) -> None:
        pytest.fail("started Ghostscript")

    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", start)
    (tmp_path / "a.jpg").write_bytes(as_bytes("EPS"))
    with pytest.raises(DataError, match="none of the formats"):
        read_image(tmp_path / "a.jpg")


@pytest.mark.parametrize("missing", ["AVIF", "WEBP"])
def test_a_pil_that_lacks_a_format_reads_the_others(tmp_path: Path, missing: str) -> None:
    """PIL raises KeyError for a name that it does not know, and older ones do not know AVIF."""
    code = (
        "import sys\nfrom pathlib import Path\nfrom PIL import Image\nImage.init()\n"
        "Image.OPEN.pop(sys.argv[1], None)\nfrom rtdetr.data.images import FORMATS, read_image\n"
        "assert sys.argv[1] not in FORMATS, FORMATS\nprint(read_image(Path(sys.argv[2])).size)"
    )
    (tmp_path / "a.tga").write_bytes(as_bytes("TGA"))
    done = subprocess.run([sys.executable, "-c", code, missing, tmp_path / "a.tga"], capture_output=True, text=True)
    assert done.stdout == "(48, 80)\n", done.stderr


def damaged(content: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        return content[: rng.randrange(len(content))]
    changed = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 4, 12))):
        changed[rng.randrange(min(len(changed), rng.choice((60, 300, 10_000))))] = rng.choice((0, 1, 127, 128, 255))
    return bytes(changed)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP"])
@pytest.mark.filterwarnings("ignore")
def test_damaged_files_are_read_or_refused(tmp_path: Path, kind: str) -> None:
    content, rng = as_bytes(kind, **({} if kind in ("GIF", "BMP") else {"exif": exif_block(6)})), random.Random(0)
    refused = 0
    for _ in range(200):
        (tmp_path / "a").write_bytes(damaged(content, rng))
        try:
            read_image(tmp_path / "a", max_megapixels=1)
        except DataError:
            refused += 1
    assert refused > 20


def outcome(read: Callable[..., Any], path: Path) -> str | np.ndarray:
    try:
        return np.asarray(read(path, max_megapixels=1))
    except DataError as error:
        return str(error)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("progressive", [False, True])
def test_damaged_jpegs_are_read_or_refused_alike(tmp_path: Path, progressive: bool) -> None:
    """OpenCV alone would take one that is cut off, and fill up with grey."""
    pixels = np.kron(UPRIGHT, np.ones((2, 2, 1), np.uint8))
    Image.fromarray(pixels).save(tmp_path / "whole.jpg", progressive=progressive)
    content, rng, path = (tmp_path / "whole.jpg").read_bytes(), random.Random(1), tmp_path / "a.jpg"
    read, refused = 0, 0
    for _ in range(200):
        path.write_bytes(damaged(content, rng))
        plain, fast = outcome(read_image, path), outcome(read_pixels, path)
        if isinstance(plain, str):
            refused += 1
            assert isinstance(fast, str) and fast == plain
        else:
            read += 1
            assert isinstance(fast, np.ndarray) and fast.shape == plain.shape
            assert (np.abs(fast.astype(int) - plain) <= 2).mean() > 0.999
    assert refused > 20 and read > 20


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("orientation", STORED)
def test_pixels_are_those_of_the_image(tmp_path: Path, suffix: str, orientation: int) -> None:
    path = camera_file(tmp_path / f"a.{suffix}", orientation)
    for annotated in (None, (80, 48), STORED[orientation].shape[:2]):
        difference = read_pixels(path, annotated).astype(int) - np.asarray(read_image(path, annotated))
        assert np.abs(difference).max() <= 2


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_pixels_of_every_kind_of_jpeg(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "a.jpg"
    Image.fromarray(UPRIGHT).convert(mode).save(path, quality=95)
    path.write_bytes(path.read_bytes() + b"more bytes behind the image")
    assert np.abs(read_pixels(path).astype(int) - np.asarray(read_image(path))).max() <= 2


def test_a_failure_without_words_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, formats: tuple[str, ...]) -> None:
        raise AssertionError

    monkeypatch.setattr(Image, "open", fail)
    with pytest.raises(DataError, match=message("not an image", "a.png", "AssertionError")):
        read_image(tmp_path / "a.png")


class TestLimit:
    def test_smaller_than_pils(self, tmp_path: Path) -> None:
        Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
        assert read_image(tmp_path / "a.png", max_megapixels=600e-6).size == (30, 20)
        for read in (read_image, upright_size):
            with pytest.raises(DataError, match=r"larger than data.max_megapixels=0.0005 \(30 x 20 pixels\)"):
                read(tmp_path / "a.png", max_megapixels=500e-6)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_larger_than_pils(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
        """With PIL's limit lowered to 200 pixels, to spare memory."""
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
        monkeypatch.setattr(images, "MAX_MEGAPIXELS", 200e-6)
        path = tmp_path / f"a.{suffix}"
        Image.new("RGB", (30, 20)).save(path)
        assert read_image(path, max_megapixels=600e-6).size == (30, 20)
        assert Image.MAX_IMAGE_PIXELS == 100
        with pytest.raises(DataError, match=r"larger than data.max_megapixels=0.0005"):
            read_image(path, max_megapixels=500e-6)
        assert Image.MAX_IMAGE_PIXELS == 100
        with pytest.raises(DataError, match=message("too large", "data.max_megapixels=0.0002", "600 pixels")):
            read_image(path, max_megapixels=200e-6)
