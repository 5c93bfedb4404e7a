"""Finds the image files that a list of paths, folders and globs names, and what was left out; reads manifests, lists of
any length."""

from __future__ import annotations

import codecs
import glob
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from rtdetr.data.classes import DataError
from rtdetr.wording import counted, option

# Searched for in folders. A file that is named itself may have any suffix.
ENDINGS = {
    ".avif", ".bmp", ".dib", ".gif", ".j2k", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".pnm",
    ".ppm", ".tga", ".tif", ".tiff", ".webp",
}  # fmt: skip


@dataclass
class Listing:
    """Images in the order of the sources, sorted within each, and what else the folders contain."""

    images: dict[Path, Path] = field(default_factory=dict)  # file -> its name relative to its source
    endings: Counter[str] = field(default_factory=Counter)  # of the files that were left out
    folders: list[Path] = field(default_factory=list)  # that were not searched

    def add(self, found: Listing) -> None:
        self.images.update(found.images)
        self.endings.update(found.endings)
        self.folders += found.folders

    def left_out(self) -> str:
        """Returns one line, empty if nothing was left out."""
        parts = []
        if self.endings:
            kinds = ", ".join(f"{ending or 'none'} {number}" for ending, number in self.endings.most_common(5))
            parts.append(f"{counted(self.endings.total(), 'file')} without the ending of an image ({kinds})")
        if self.folders:
            names = ", ".join(str(folder) for folder in self.folders[:3])
            more = ", ..." if len(self.folders) > 3 else ""
            into = f"a glob such as {self.folders[0].parent}/**/*.jpg{option(', or predict --recursive,', '')}"
            parts.append(f"{counted(len(self.folders), 'sub-folder')} ({names}{more}; {into} looks into them)")
        return f"left out: {' and '.join(parts)}" if parts else ""


def find_images(sources: Sequence[str], recursive: bool = False, except_in: Path | None = None) -> Listing:
    """Finds the image files that files, folders and globs name, each once.

    recursive: include sub-folders, except `except_in`, the folder of the results. A folder that has the suffix of an
    image is listed as one, so that it is reported as unreadable. Raises DataError if a source yields no image, or a
    folder cannot be listed.
    """
    listing = Listing()
    for source in sources:
        if not source:  # an unset shell variable, not a request to search this folder
            raise DataError("source: got an empty name; expected an image, a folder of images or a glob")
        path = Path(source)
        found = Listing()
        if path.is_dir():
            found = _in_folder(path, recursive, except_in)
        elif path.is_file():
            found.images[path] = Path(path.name)
        else:
            found.images.update({each: Path(each.name) for each in _matching(source)})
        if not found.images:
            left_out = f" ({found.left_out()})" if found.left_out() else ""
            raise DataError(f"{source}: no image found; expected an image, a folder of images or a glob{left_out}")
        listing.add(found)
    return listing


def _matching(pattern: str) -> list[Path]:
    """The files that match a glob, each folder under its shortest name, as links to folders may form a cycle."""
    files: dict[str, Path] = {}
    for each in sorted(map(Path, glob.glob(pattern, recursive=True)), key=lambda path: (len(path.parts), path)):
        if each.is_file():
            files.setdefault(os.path.join(os.path.realpath(each.parent), each.name), each)
    return sorted(files.values())


def look_at(path: Path) -> None:
    """Raises DataError if a path cannot be checked: its name is too long, or a folder denies permission."""
    try:
        path.stat()
    except FileNotFoundError:  # it may be a glob
        pass
    except OSError as error:
        raise DataError(f"{path}: cannot be accessed ({error.strerror})") from error


def _in_folder(folder: Path, recursive: bool, except_in: Path | None) -> Listing:
    """Lists the images of a folder and its other contents."""

    def cannot_list(error: OSError) -> NoReturn:
        raise DataError(f"{error.filename}: this folder cannot be listed ({error.strerror})") from error

    listing, found = Listing(), []
    seen = {folder.resolve(), *([except_in.resolve()] if except_in is not None else [])}  # links may form a cycle
    for place, folders, files in os.walk(folder, onerror=cannot_list, followlinks=True):
        here = Path(place)
        for name in files:
            ending = os.path.splitext(name)[1].lower()
            if ending in ENDINGS:
                found.append(here / name)
            else:
                listing.endings[ending] += 1
        if recursive:
            for each in sorted(folders, key=lambda name: ((here / name).is_symlink(), name)):  # links after folders
                if (real := (here / each).resolve()) in seen:
                    folders.remove(each)
                seen.add(real)
            continue
        named_as_images = [here / each for each in folders if os.path.splitext(each)[1].lower() in ENDINGS]
        found += named_as_images
        listing.folders += sorted(here / each for each in folders if here / each not in named_as_images)
        break
    listing.images = {each: each.relative_to(folder) for each in sorted(found)}
    return listing


def manifest_paths(manifest: Path) -> Iterator[Path]:
    """Yields the paths of a text file, one per line, unchanged; skips empty lines, and a byte order mark. Raises
    DataError, also for UTF-16, and for a pipe, which can be read only once."""
    if manifest.exists() and not manifest.is_file():
        what = "folder" if manifest.is_dir() else "pipe or device"
        raise DataError(f"{manifest}: is a {what}, expected a text file, a path per line")
    try:
        with open(manifest, "rb") as file:
            for number, line in enumerate(file):
                if not number:
                    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                        raise DataError(f"{manifest}: is in UTF-16, expected UTF-8, a path per line; save it as UTF-8")
                    line = line.removeprefix(codecs.BOM_UTF8)
                if name := line.strip(b"\r\n"):
                    yield Path(os.fsdecode(name))
    except OSError as error:
        raise DataError(
            f"{manifest}: cannot be read ({error.strerror}); expected a text file, a path per line"
        ) from error
