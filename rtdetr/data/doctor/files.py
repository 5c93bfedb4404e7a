"""Checks the image files of sets for unreadable, unusual and duplicate ones."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from PIL import Image

from rtdetr.data.classes import DataError
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import Defect
from rtdetr.data.depth import scaled_from
from rtdetr.data.image_files import unreadable
from rtdetr.data.images import UPRIGHT, opened_image, orientation_of

LARGE = 20_000_000  # pixels; larger images are decoded one at a time
MOST_SIZES, MOST_READ = 20_000, 2_000  # largest numbers of files to compare by size and by content before training
_one_at_a_time = threading.Lock()
File = TypeVar("File")
# PIL modes: the kind of defect, and how training reads them.
MODES = {
    "CMYK": ("picture_cmyk", "is CMYK, taken as RGB"),
    "YCCK": ("picture_cmyk", "is CMYK, taken as RGB"),
    "L": ("picture_gray", "is gray, taken as RGB"),
    "LA": ("picture_gray", "is gray, taken as RGB"),
    "P": ("picture_palette", "has a palette, taken as RGB"),
    "PA": ("picture_palette", "has a palette, taken as RGB"),
    "1": ("picture_1bit", "has one bit a pixel, taken as black and white"),
}


class Copy(NamedTuple):
    """An image of one set that may be a duplicate."""

    set_name: str
    path: Path
    record: int


def examine_files(data: DetectionSet, done: Callable[[], object]) -> tuple[list[Defect], list[int]]:
    """Reads every image as training does. Returns the defects and the indices of the images dropped for them. done: is
    called after each image."""
    defects: list[Defect] = []
    gone: list[int] = []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for i, found in enumerate(pool.map(lambda i: list(_examine(data, i)), range(len(data)))):
            defects += found
            if any(each.action == "dropped" for each in found):
                gone.append(i)
            done()
    return defects, gone


def _examine(data: DetectionSet, index: int) -> Iterator[Defect]:
    info = data.info(index)
    path = data.folder / info.file_name
    try:
        with opened_image(path, data.max_megapixels) as opened:
            is_large, notes = opened.width * opened.height > LARGE, _notes(opened)
        with _one_at_a_time if is_large else contextlib.nullcontext():
            data.image(index)
    except DataError as error:
        yield unreadable(path, info.image_id, error)
        return
    for kind, what in notes:
        yield Defect(str(path), info.image_id, kind, f"image {info.image_id}: {what}", "kept")


def _notes(opened: Image.Image) -> list[tuple[str, str]]:
    """The unusual properties of an image that PIL has opened but not decoded: kinds of defects, and descriptions."""
    mode, white = opened.mode, scaled_from(opened)
    has_alpha = mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in opened.info
    is_animated = getattr(opened, "is_animated", False) and opened.format != "MPO"  # MPO has a preview
    orientation = orientation_of(opened)  # the last, as PIL may decode the file to find it
    notes = (
        (orientation in UPRIGHT, "picture_exif", f"has EXIF orientation {orientation}, turned as its boxes need it"),
        (white, "picture_16bit", f"has values from 0 to {white}, scaled to 8 bits"),
        (has_alpha, "picture_alpha", "has transparency, which is left out"),
        (is_animated, "picture_animated", "is animated, and its first frame is taken"),
    )
    of_mode = [MODES[mode]] if mode in MODES else []
    return of_mode + [(kind, what) for applies, kind, what in notes if applies]


def copies(sets: Sequence[tuple[str, DetectionSet]]) -> dict[str, list[Defect]]:
    """Defects by set: images that occur twice, in one set or in two of them, compared by the bytes of their files."""
    images = [Copy(name, data.folder / each.file_name, each.image_id) for name, data in sets for each in data.infos()]
    defects: defaultdict[str, list[Defect]] = defaultdict(list)
    for alike in _by_size(images, lambda image: image.path).values():
        first: dict[bytes, Copy] = {}
        for each in alike if len(alike) > 1 else ():
            digest = _digest(each.path)
            earlier = first.setdefault(digest, each) if digest else each
            if earlier is not each:
                defects[each.set_name].append(_twice(each, earlier))
    return defects


def in_both(first: DetectionSet, second: DetectionSet) -> list[str]:
    """File names of images of `second` whose path or content is also in `first`. Compares paths only if too many files
    would have to be read: this check runs before every training."""
    one, two = _by_path(first), _by_path(second)
    shared = {two[path] for path in two.keys() & one.keys()}
    if len(one) + len(two) <= MOST_SIZES:
        sizes, others = _by_size(one, Path), _by_size(two, Path)
        alike = sizes.keys() & others.keys()
        if sum(len(sizes[size]) + len(others[size]) for size in alike) <= MOST_READ:
            digests = {_digest(Path(path)) for size in alike for path in sizes[size]} - {None}
            shared |= {two[path] for size in alike for path in others[size] if _digest(Path(path)) in digests}
    return sorted(shared)


def _by_path(data: DetectionSet) -> dict[str, str]:
    """File names of the images by their absolute paths."""
    folder = os.path.realpath(data.folder)
    return {os.path.normpath(os.path.join(folder, each.file_name)): each.file_name for each in data.infos()}


def _by_size(files: Iterable[File], path_of: Callable[[File], Path]) -> dict[int, list[File]]:
    """Files by their size in bytes, without missing and empty ones."""
    found: defaultdict[int, list[File]] = defaultdict(list)
    for file in files:
        with contextlib.suppress(OSError):  # missing files are reported elsewhere
            found[os.path.getsize(path_of(file))].append(file)
    found.pop(0, None)
    return found


def _twice(copy: Copy, first: Copy) -> Defect:
    if copy.set_name != first.set_name:
        kind, what = "picture_in_two_sets", f"is in {first.set_name or 'another set'} too, as {first.path}"
    elif os.path.samefile(copy.path, first.path):
        kind, what = "picture_twice", f"is the file of image {first.record}, too"
    else:
        kind, what = "picture_copy", f"has the bytes of image {first.record}, {first.path}"
    return Defect(str(copy.path), copy.record, kind, f"image {copy.record}: {what}", "kept")


def _digest(path: Path) -> bytes | None:
    """The SHA-256 digest, or None if the file cannot be read, which is reported elsewhere."""
    try:
        return hashlib.sha256(path.read_bytes()).digest()
    except OSError:
        return None
