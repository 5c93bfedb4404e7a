"""Images of more than 8 bits a channel come out by the range of their type or file, or are refused in a sentence."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from rtdetr.data.classes import DataError
from rtdetr.data.depth import scaled_from
from rtdetr.data.images import opened_image, read_image, read_pixels, upright_size
from rtdetr.data.resize import as_rgb_array

HEIGHT, WIDTH = 40, 64
RAMP = np.linspace(0, 1, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH)  # from black to white
COLOURS = np.stack([RAMP, RAMP[::-1], 1 - RAMP], axis=-1)
SOF, SOF_12 = b"\xff\xc0\x00\x0b\x08", b"\xff\xc0\x00\x0b\x0c"  # the head of a grey JPEG, of 8 bits and of 12
LOSSLESS = cv2.IMWRITE_JPEG2000_COMPRESSION_X1000
UNSIGNED, SIGNED, FLOAT = 1, 2, 3  # of TIFF's SampleFormat


def whole(values: np.ndarray, largest: int, dtype: str) -> np.ndarray:
    return np.rint(values * largest).astype(dtype)


def packed(values: np.ndarray, bits: int) -> bytes:
    digits = "".join(f"{value:0{bits}b}" for value in values.ravel().tolist())
    return int(digits, 2).to_bytes(len(digits) // 8, "big")


def tiff(content: bytes, bits: int, sample_format: int, order: str = "<", photometric: int = 1) -> bytes:
    """A grey TIFF of one strip. photometric: 0 where zero is white."""
    tags = {256: WIDTH, 257: HEIGHT, 258: bits, 259: 1, 262: photometric, 277: 1, 278: HEIGHT, 279: len(content)}
    tags |= {273: 8 + 2 + 12 * 10 + 4, 339: sample_format}  # where the strip is, behind these ten
    fields = [struct.pack(f"{order}HHII", tag, 4, 1, tags[tag]) for tag in sorted(tags)]
    head = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(tags))
    return head + b"".join(fields) + bytes(4) + content


def netpbm(kind: str, values: np.ndarray, largest: int) -> bytes:
    head = f"{kind}\n{WIDTH} {HEIGHT}\n{largest}\n"
    numbers = whole(values, largest, ">u2" if largest > 255 else "u1")
    if kind in ("P2", "P3"):
        return (head + " ".join(map(str, numbers.ravel().tolist()))).encode()
    return head.encode() + numbers.tobytes()


def encoded(suffix: str, pixels: np.ndarray) -> bytes:
    done, content = cv2.imencode(suffix, pixels[..., ::-1] if pixels.ndim == 3 else pixels)
    assert done
    return content.tobytes()


def jpeg_2000(pixels: np.ndarray, bits: int = 16) -> bytes:
    """OpenCV writes 16 bits alone. A decoder adds half the range, of the `bits` that the header names."""
    shifted = pixels + np.uint16(2**15 - 2 ** (bits - 1))
    done, content = cv2.imencode(".jp2", shifted[..., [2, 1, 0, 3][: pixels.shape[2]]], [LOSSLESS, 1000])
    assert done
    file = bytearray(content)
    file[file.index(b"ihdr") + 14] = bits - 1
    first = file.index(b"\xff\x4f\xff\x51") + 42
    file[first : first + 3 * pixels.shape[2] : 3] = bytes([bits - 1]) * pixels.shape[2]
    return bytes(file)


GREY: dict[str, Callable[[], bytes]] = {  # file -> its bytes, which show RAMP
    "16 bits.png": lambda: encoded(".png", whole(RAMP, 65535, "u2")),
    "16 bits.jp2": lambda: encoded(".jp2", whole(RAMP, 65535, "u2")),
    "16 bits, lzw.tif": lambda: encoded(".tif", whole(RAMP, 65535, "u2")),
    "16 bits.tif": lambda: tiff(whole(RAMP, 65535, "<u2").tobytes(), 16, UNSIGNED),
    "16 bits, big-endian.tif": lambda: tiff(whole(RAMP, 65535, ">u2").tobytes(), 16, UNSIGNED, ">"),
    "16 bits, zero is white.tif": lambda: tiff(whole(1 - RAMP, 65535, "<u2").tobytes(), 16, UNSIGNED, photometric=0),
    "12 bits.tif": lambda: tiff(packed(whole(RAMP, 4095, "u2"), 12), 12, UNSIGNED),
    "floats.tif": lambda: tiff(RAMP.astype("<f4").tobytes(), 32, FLOAT),
    "floats, lzw.tif": lambda: encoded(".tif", RAMP.astype(np.float32)),
    "floats, big-endian.tif": lambda: tiff(RAMP.astype(">f4").tobytes(), 32, FLOAT, ">"),
    "floats, zero is white.tif": lambda: tiff((1 - RAMP).astype("<f4").tobytes(), 32, FLOAT, photometric=0),
    "floats.pfm": lambda: f"Pf\n{WIDTH} {HEIGHT}\n-1.0\n".encode() + RAMP[::-1].astype("<f4").tobytes(),
    "16 bits.pgm": lambda: netpbm("P5", RAMP, 65535),
    "12 bits.pgm": lambda: netpbm("P5", RAMP, 4095),
    "10 bits.pgm": lambda: netpbm("P5", RAMP, 1023),
    "16 bits, text.pgm": lambda: netpbm("P2", RAMP, 65535),
    "12 bits, text.pgm": lambda: netpbm("P2", RAMP, 4095),
}
COLOUR: dict[str, Callable[[], bytes]] = {  # which show COLOURS
    "16 bits, rgb.png": lambda: encoded(".png", whole(COLOURS, 65535, "u2")),
    "16 bits, rgb.tif": lambda: encoded(".tif", whole(COLOURS, 65535, "u2")),
    "16 bits, rgb.jp2": lambda: jpeg_2000(whole(COLOURS, 65535, "u2")),
    "12 bits, rgb.jp2": lambda: jpeg_2000(whole(COLOURS, 4095, "u2"), bits=12),
    "16 bits, rgba.jp2": lambda: jpeg_2000(whole(np.dstack((COLOURS, RAMP)), 65535, "u2")),
    "16 bits.ppm": lambda: netpbm("P6", COLOURS, 65535),
    "12 bits.ppm": lambda: netpbm("P6", COLOURS, 4095),
    "12 bits, text.ppm": lambda: netpbm("P3", COLOURS, 4095),
}
REFUSED = {  # file -> its bytes, and why
    "32 bits.tif": (lambda: tiff(whole(RAMP, 2**32 - 1, "<u4").tobytes(), 32, UNSIGNED), "32-bit or signed integers"),
    "32 bits, signed.tif": (lambda: tiff(whole(RAMP, 9999, "<i4").tobytes(), 32, SIGNED), "32-bit or signed integers"),
    "32 bits, big-endian.tif": (lambda: tiff(whole(RAMP, 255, ">i4").tobytes(), 32, SIGNED, ">"), "signed integers"),
    "8 bits, signed.tif": (lambda: tiff(whole(RAMP, 127, "i1").tobytes(), 8, SIGNED), "32-bit or signed integers"),
    "16 bits, signed.tif": (lambda: tiff(whole(RAMP, 32767, "<i2").tobytes(), 16, SIGNED), "signed integers"),
    "floats to 255.tif": (lambda: tiff((RAMP * 255).astype("<f4").tobytes(), 32, FLOAT), "from 0 to 255"),
    "floats below 0.tif": (lambda: tiff((RAMP - 0.5).astype("<f4").tobytes(), 32, FLOAT), "from -0.5 to 0.5"),
    "floats, one nan.tif": (lambda: tiff(with_nan().tobytes(), 32, FLOAT), "from nan to nan"),
    "64-bit floats.tif": (lambda: tiff(RAMP.astype("<f8").tobytes(), 64, FLOAT), "a TIFF that is damaged, or"),
    "16-bit floats.tif": (lambda: tiff(RAMP.astype("<f2").tobytes(), 16, FLOAT), "a TIFF that is damaged, or"),
    "rgb.pfm": (lambda: f"PF\n{WIDTH} {HEIGHT}\n-1.0\n".encode() + COLOURS.astype("<f4").tobytes(), "a colour PFM"),
    "12 bits.jpg": (lambda: encoded(".jpg", whole(RAMP, 255, "u1")).replace(SOF, SOF_12), "a JPEG that is damaged, or"),
    "10 bits.tif": (lambda: tiff(packed(whole(RAMP, 1023, "u2"), 10), 10, UNSIGNED), "a TIFF that is damaged, or"),
}


def with_nan() -> np.ndarray:
    values = RAMP.astype("<f4")
    values[3, 4] = np.nan
    return values


@pytest.mark.parametrize("name", [*GREY, *COLOUR])
def test_black_stays_black_and_white_white(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes({**GREY, **COLOUR}[name]())
    expected = (COLOURS if name in COLOUR else np.stack([RAMP] * 3, axis=-1)) * 255
    pixels = read_pixels(tmp_path / name)
    assert np.abs(pixels - expected).max() <= 1 and (pixels.min(), pixels.max()) == (0, 255)
    assert np.array_equal(pixels, read_image(tmp_path / name))
    with Image.open(tmp_path / name) as opened:  # as the caller of `predict` may hand it over
        assert np.array_equal(pixels, as_rgb_array(opened))


@pytest.mark.parametrize("name", REFUSED)
def test_values_without_a_known_range_are_refused(name: str, tmp_path: Path) -> None:
    content, reason = REFUSED[name]
    (tmp_path / name).write_bytes(content())
    for read in (read_image, read_pixels):
        with pytest.raises(DataError) as caught:
            read(tmp_path / name)
        sentence = str(caught.value)
        assert sentence.startswith(f"{tmp_path / name}: cannot be read as an image (") and reason in sentence
        assert "8 or 16 bits" in sentence and "\n" not in sentence


def white_of(path: Path) -> int:
    with opened_image(path, max_megapixels=1) as opened:
        return scaled_from(opened)


def test_the_header_says_what_becomes_white(tmp_path: Path) -> None:
    largest = {"floats": 1, "10": 1023, "12": 4095, "16": 65535}
    for name in [*GREY, *COLOUR]:
        (tmp_path / name).write_bytes({**GREY, **COLOUR}[name]())
        assert white_of(tmp_path / name) == largest[name.split(".")[0].split()[0].strip(",")], name
        assert upright_size(tmp_path / name) == (HEIGHT, WIDTH)
    for kind, mode in (("png", "P"), ("png", "1"), ("png", "LA"), ("jpg", "L"), ("jpg", "CMYK"), ("pgm", "L")):
        Image.new("RGB", (WIDTH, HEIGHT)).convert(mode).save(tmp_path / f"{mode}.{kind}")
        assert white_of(tmp_path / f"{mode}.{kind}") == 0


@pytest.mark.parametrize("mode", ["I", "F"])
def test_pil_images_that_never_were_a_file(mode: str) -> None:
    ramp = Image.fromarray(RAMP.astype(np.float32))
    if mode == "F":
        assert np.abs(as_rgb_array(ramp) - RAMP[..., None] * 255).max() <= 0.5
    assert as_rgb_array(Image.new(mode, (0, 5))).shape == (5, 0, 3)
    with pytest.raises(ValueError, match="8 or 16 bits"):
        as_rgb_array(Image.fromarray((RAMP * 255).astype(np.int32 if mode == "I" else np.float32)))


OTHERS = {  # of 8 bits and less, whatever else is unusual about them: mode, suffix, how it is saved
    "1 bit": ("1", "png", {}),
    "1 bit, netpbm": ("1", "pbm", {}),
    "1 bit, fax": ("1", "tif", {"compression": "group4"}),
    "palette": ("P", "png", {}),
    "palette, tiff": ("P", "tif", {}),
    "grey and alpha": ("LA", "png", {}),
    "grey and alpha, tiff": ("LA", "tif", {}),
    "colours and alpha": ("RGBA", "tif", {}),
    "CMYK": ("CMYK", "jpg", {}),
    "CMYK, tiff": ("CMYK", "tif", {}),
    "YCbCr, tiff": ("YCbCr", "tif", {"compression": "jpeg"}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_modes_of_8_bits_are_what_pil_makes_of_them(name: str, tmp_path: Path) -> None:
    mode, suffix, options = OTHERS[name]
    pixels = Image.fromarray(whole(COLOURS, 255, "u1")).convert(mode)
    pixels.save(tmp_path / f"a.{suffix}", **options)
    with Image.open(tmp_path / f"a.{suffix}") as opened:
        assert np.array_equal(read_pixels(tmp_path / f"a.{suffix}"), opened.convert("RGB"))


def test_the_first_page_counts(tmp_path: Path) -> None:
    """Each page has a header of its own."""
    pages = [Image.fromarray(whole(RAMP, 65535, "u2")), Image.new("RGB", (9, 9), "red")]
    pages[0].save(tmp_path / "a.tif", save_all=True, append_images=pages[1:])
    assert np.abs(read_pixels(tmp_path / "a.tif") - RAMP[..., None] * 255).max() <= 1
