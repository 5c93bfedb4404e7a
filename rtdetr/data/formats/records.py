"""Shared by the readers of all formats: data sources, split names, and the reporting of bad records."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from rtdetr.data.classes import DataError
from rtdetr.data.defects import Action, Defect
from rtdetr.data.images import MAX_MEGAPIXELS

Corners = tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels, unless it says otherwise
Format = Literal["coco", "voc", "yolo", "labelstudio", "cvat", "labelme", "huggingface"]

# Common names of each split. "" is the only set of a file or folder without splits.
SPLITS = {
    "train": ("train", "training", "train2017", "train2014"),
    "val": ("val", "valid", "validation", "val2017", "val2014"),
    "test": ("test", "testing", "test2017"),
}
IMAGE_SUFFIXES = (  # for the formats in rtdetr/data/images.py
    *(".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".gif", ".ppm", ".jp2", ".avif", ".tga", ".jfif"),
    *(".jpe", ".mpo", ".apng", ".dib", ".pgm", ".pbm", ".pnm", ".j2k", ".j2c", ".jpc", ".jpf", ".jpx", ".avifs"),
)
POLYGONS = "polygons taken as the boxes around them"
MAX_BYTES = 10_000_000  # limit for the annotation of one image
MAX_LIST = 1_000_000_000  # limit for a list of images
# Corners this close to a whole pixel, relative to the side, are rounded to it: most tools write only six digits, and a
# box of 32 x 32 must not become 31.9997 x 32, which is in another size class in evaluation.
WHOLE_PIXEL = 1e-6


class DataSource(NamedTuple):
    """One set of images: the location and format of its annotations."""

    format: Format
    path: Path  # the JSON or CVAT's XML; the VOC folder or list; data.yaml or the YOLO folder; else the folder
    split: str = ""  # train, val, trainval or test; "" if there is only one set
    images: Path | None = None  # the folder that image names are relative to; None: implied by the format
    max_megapixels: float = MAX_MEGAPIXELS  # larger images are refused if their size has to be read

    def __str__(self) -> str:
        return f"{self.path} ({self.split})" if self.split else str(self.path)


class BadRecord(DataError):
    """Raised by a reader for an image or a box that it cannot use; see `Problems.reported`. line, path: its place, if
    that is known better than there."""

    def __init__(self, kind: str, what: str, line: int | None = None, path: Path | None = None) -> None:
        super().__init__(what)
        self.kind, self.line, self.path = kind, line, path


class Problems:
    """Collects what a reader finds: defects, and remarks for the summary of the set; COCO's reader has its own way."""

    def __init__(self) -> None:
        self.found: list[Defect] = []
        self.counted: Counter[str] = Counter()  # by description, as of polygons taken as boxes
        self.notes: list[str] = []

    @contextmanager
    def reported(self, path: Path, line: int = 0, where: str = "", kind: str = "image_file") -> Iterator[None]:
        """Context manager: a BadRecord, or a DataError about the whole file, ends the block and is added. where: begins
        the message on a BadRecord; kind: of a DataError."""
        try:
            yield
        except BadRecord as error:
            self.add(error.path or path, line if error.line is None else error.line, error.kind, f"{where}{error}")
        except DataError as error:
            self.add(path, 0, kind, str(error).removeprefix(f"{path}: "))

    def add(self, path: Path, line: int, kind: str, what: str, action: Action = "dropped") -> None:
        """Adds a defect. One of an image drops the image; one of a box, only that. line: from 1; 0: the whole file.
        what: what was expected and what was found."""
        record, where = (f"line {line}", f"line {line}: {what}") if line else (None, what)
        self.found.append(Defect(str(path), record, kind, where, action))


def head_of(path: Path, size: int) -> bytes:
    """The first bytes of a file, to recognise its format; none if it cannot be read, which its reader reports."""
    if not os.path.isfile(path):  # reading a pipe would block
        return b""
    try:
        with open(path, "rb") as file:
            return file.read(size)
    except OSError:
        return b""


def read_bytes(path: Path, most: int = MAX_BYTES) -> bytes:
    """The content of a small file. Raises DataError if it is not a file, too large or unreadable."""
    try:
        if not os.path.isfile(path):  # reading a pipe would block
            raise DataError(f"{path}: {'is not a file' if os.path.exists(path) else 'no such file'}")
        size = path.stat().st_size
        if size > most:
            raise DataError(f"{path}: {size:,} bytes, at most {most:,} were expected; is it another file?")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


def read_lines(path: Path, most: int = MAX_BYTES) -> list[str]:
    """The stripped lines of a UTF-8 text file. Raises DataError if it is too large or cannot be read."""
    content = read_bytes(path, most)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path}: line {line}: not text in UTF-8 (a byte 0x{content[error.start]:02x}); save it as UTF-8"
        ) from error
    return [line.strip() for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]


def walk(folder: Path, endings: tuple[str, ...], deep: bool = True) -> Iterator[Path]:
    """Yields the files with these endings, in any case, in a folder and, if `deep`, its subfolders; else also folders
    called so, which a reader reports. Hidden ones are left out: file managers and notebooks keep copies there. Raises
    DataError for folders that cannot be read."""

    def fail(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise DataError(f"{error.filename}: cannot be read ({error.strerror})") from error

    seen = set()
    for root, folders, files in os.walk(folder, onerror=fail, followlinks=True):
        real = os.path.realpath(root)
        if real not in seen:  # else a circular link
            names = files if deep else [*files, *folders]
            yield from (Path(root, name) for name in names if name.lower().endswith(endings) and name[0] != ".")
        folders[:] = [name for name in folders if deep and real not in seen and name[0] != "."]
        seen.add(real)


def clipped(box: list[float], size: tuple[int, int]) -> list[float]:
    """The box x, y, w, h, clipped if it extends beyond its image of `size` (h, w)."""
    x, y, width, height = box
    if x >= 0 and y >= 0 and width >= 0 and height >= 0 and x + width <= size[1] and y + height <= size[0]:
        return box
    left, right = (min(max(each, 0), size[1]) for each in (x, x + max(width, 0)))
    top, bottom = (min(max(each, 0), size[0]) for each in (y, y + max(height, 0)))
    return [left, top, right - left, bottom - top]


def below(root: Path, name: str | Path) -> bool:
    """Whether a relative or absolute name stays below the folder, judged by its text; links are not followed."""
    return Path(os.path.abspath(root / name)).is_relative_to(os.path.abspath(root))


def to_pixels(corners: Corners, size: tuple[int, int]) -> Corners:
    """Converts corners relative to an image of `size` (h, w) to pixels."""
    x1, y1, x2, y2 = corners
    height, width = size
    return _to_pixel(x1, width), _to_pixel(y1, height), _to_pixel(x2, width), _to_pixel(y2, height)


def _to_pixel(relative: float, whole: int) -> float:
    exact = relative * whole
    near = round(exact)
    return float(near) if abs(exact - near) <= WHOLE_PIXEL * whole else round(exact, 9)


def split_folders(root: Path, is_set: Callable[[Path], bool]) -> dict[str, Path]:
    """The folder of each split below `root`: of those with its names, the first that `is_set` accepts."""
    found = {split: next(filter(is_set, map(root.joinpath, names)), None) for split, names in SPLITS.items()}
    return {split: folder for split, folder in found.items() if folder is not None}


def split_named(path: Path) -> str:
    """The split in the name of a file or folder: train, val, test, or "" if it contains none."""
    words = re.split(r"[^a-z0-9]+", path.stem.lower())
    return next((split for split, names in SPLITS.items() if any(each in names for each in words)), "")
