"""A list of images of any length, and the file of results from which an interrupted run resumes."""

from __future__ import annotations

import codecs
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rtdetr.data.classes import DataError


class Done(NamedTuple):
    """Counts of the results that a file contains already."""

    images: int = 0
    errors: int = 0  # of these
    objects: int = 0


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


def cut_partial_line(results: Path) -> None:
    """Removes the last line of a file if it is incomplete. Raises OSError."""
    with open(results, "r+b") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def already_done(results: Path, manifest: Path) -> Done:
    """Counts the complete lines of results, which belong to the first images of the manifest, in its order. An
    incomplete last line does not count.

    Raises DataError if they belong to other images, and OSError.
    """
    done = Done()
    paths = manifest_paths(manifest)
    with open(results, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                item = json.loads(line)
                name, error, objects = item["file"], "error" in item, len(item.get("detections", ()))
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise DataError(f"{results}: line {number} is no result of an image; it cannot be resumed") from problem
            expected = next(paths, None)
            if name != str(expected):
                raise DataError(
                    f"{results}: line {number} is that of {name}, the manifest has {expected or 'no more images'}; "
                    "resume with the manifest that began it"
                )
            done = Done(number, done.errors + error, done.objects + objects)
    return done
