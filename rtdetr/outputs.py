"""Output paths: they are checked before the work, so that existing files are not replaced and unwritable paths are
reported early; files are replaced as a whole; one process can lock them."""

from __future__ import annotations

import fcntl
import os
import select
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain, count
from pathlib import Path


class OutputError(ValueError):
    """Results cannot or must not be written to this path; the message is one sentence."""

    exit_code = 2


class RunFailed(RuntimeError):
    """The work failed after it had started, as in writing; the message is one sentence."""

    exit_code = 1


def check_outputs(targets: Iterable[Path], sources: Iterable[Path], overwrite: bool) -> None:
    """Raises OutputError if a target is a source (under any name), exists (unless `overwrite`), or is in a folder that
    cannot be written to. Creates nothing."""
    read: set[tuple[int, int]] | None = None  # of the sources, which may be many: found when first needed
    taken = set()
    for target in targets:
        if target in taken:
            raise OutputError(f"{target}: is named for two results; choose another place for one of them")
        taken.add(target)
        try:
            is_folder = target.is_dir()
        except OSError as error:
            raise OutputError(f"{target}: cannot be written ({error.strerror}); choose another place") from error
        if is_folder:
            raise OutputError(f"{target}: is a folder, expected the name of a file to write")
        if not os.path.lexists(target):
            continue
        if read is None:
            read = {_identity(source) for source in sources if os.path.exists(source)}
        if target.exists() and _identity(target) in read:
            raise OutputError(f"{target}: would be read and replaced at once; choose another place for the results")
        if not overwrite:
            raise OutputError(f"{target}: exists already; choose another place, or replace it with --overwrite")
    for folder in sorted({target.parent for target in taken}):
        check_folder(folder)


def check_new_folder(folder: Path, sources: Iterable[Path], overwrite: bool) -> None:
    """Raises OutputError if a folder exists, unless `overwrite`, or if a source is inside it."""
    if os.path.lexists(folder) and not overwrite:
        raise OutputError(f"{folder}: exists already; choose another place, or replace its files with --overwrite")
    for source in sources:
        if folder.resolve() in source.resolve().parents:
            raise OutputError(f"{folder}: {source} would be read from it; choose another place for the results")


def check_folder(folder: Path) -> None:
    """Raises OutputError if a folder cannot be created or written to. Creates nothing, as another process may be about
    to use the folders above it."""
    try:
        there = next(each for each in (folder, *folder.parents) if each.is_symlink() or each.exists())
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        why = "it is a file" if os.path.isfile(folder) else error.strerror
        raise OutputError(f"{folder}: nothing can be written there ({why}); choose another folder") from error


def unused_path(path: Path, ending: str = "") -> Path:
    """The path, or NAME-2, NAME-3, ...: the first that does not exist. ending: of a file, which stays the end."""
    numbered = (path.with_name(f"{path.name.removesuffix(ending)}-{number}{ending}") for number in count(2))
    return next(each for each in chain([path], numbered) if not each.exists())


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """Context manager for code that writes a path. Raises RunFailed if an OSError occurs, as on a full disk."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) and nobody_reads():
            raise  # an error unrelated to the path
        where = error.filename or place
        raise RunFailed(f"{where}: cannot be written ({error.strerror or error})") from error


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Context manager: yields a temporary file in the same folder, which replaces `path` if the block ends without an
    error, and is removed otherwise. The target of a symbolic link is not changed. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(place: Path, text: str) -> None:
    """Writes a whole file or nothing, a device or the target of a link directly. Raises RunFailed like `writing`."""
    direct = place.is_symlink() or (place.exists() and not place.is_file())
    with writing(place), nullcontext(place) if direct else atomic_write(place) as file:
        file.write_text(text, encoding="utf-8")


def lock(descriptor: int, wait: bool = False) -> bool:
    """Locks an open file or folder until it is closed or the process ends; False if another process holds it, unless
    `wait`. File systems without locks give no protection."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError:  # no locks, as on NFS
        return True
    return True


def nobody_reads() -> bool:
    """Whether the standard output is broken, as in `rtdetr doctor SET | head`."""
    if sys.stdout is None:
        return False
    watched = select.poll()
    watched.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in watched.poll(0))


def _identity(path: Path) -> tuple[int, int]:
    """Returns a key that is equal for every name of a file, including links."""
    status = path.stat()
    return status.st_dev, status.st_ino
