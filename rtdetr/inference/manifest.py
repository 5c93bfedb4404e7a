"""A list of images of any length, and the file of results from which an interrupted run resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rtdetr.data.classes import DataError

BLOCK = 1 << 20  # bytes


class Done(NamedTuple):
    """What a file of results holds already."""

    images: int = 0
    errors: int = 0  # of those
    objects: int = 0


def manifest_paths(manifest: Path) -> Iterator[Path]:
    """The paths of a text file, one per line, as written; empty lines are skipped. Raises DataError."""
    try:
        with open(manifest, "rb") as file:
            for line in file:
                if name := line.strip(b"\r\n"):
                    yield Path(os.fsdecode(name))
    except OSError as error:
        raise DataError(
            f"{manifest}: cannot be read ({error.strerror}); expected a text file, a path per line"
        ) from error


def cut_partial_line(results: Path) -> None:
    """Takes the last line off a file, unless it is whole. Raises OSError."""
    with open(results, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        while end:
            start = max(0, end - BLOCK)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        file.truncate(end)


def already_done(results: Path, manifest: Path) -> Done:
    """What whole lines of results there are; they belong to the first images of the manifest, in its order. A last
    line that is cut off does not count.

    Raises DataError when they are those of other images, and OSError.
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
