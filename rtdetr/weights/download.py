"""Downloads weight files: each once, resumed if interrupted, verified and converted."""

from __future__ import annotations

import contextlib
import http.client
import logging
import os
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from rtdetr import __version__
from rtdetr.outputs import lock
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.digest import file_sha256
from rtdetr.weights.official import OFFICIAL_LICENCE

logger = logging.getLogger(__name__)

SILENCE = 30.0  # seconds without a byte until a download times out


class OfficialFile(NamedTuple):
    url: str
    num_bytes: int | None = None  # None: unknown, any size is accepted
    sha256: str | None = None  # None: unknown; the hash of the first file that converts is printed and stored
    licence: str = OFFICIAL_LICENCE


def fetched(official: OfficialFile, file: Path, checkpoint: Path, save: Callable[[], None]) -> Path:
    """The checkpoint of a file, downloaded, verified and converted if necessary, by one process at a time.

    save: converts the file and writes the checkpoint. A file that this call downloads and cannot convert is removed.
    Raises CheckpointError.
    """
    try:
        if checkpoint.is_file():
            return checkpoint
        with _alone(checkpoint):
            if checkpoint.is_file():  # another process has written it in the meantime
                return checkpoint
            new = not file.is_file()
            if new:
                logger.info("%s: downloading the weights (%s) to %s", checkpoint.stem, official.licence, file)
                download(official, file)
            verify(official, file)
            try:
                save()
            except CheckpointError:
                if new:
                    file.unlink()
                raise
            if official.sha256 is None and not _noted(file).is_file():
                found = file_sha256(file)  # only now it is whole: it may have been copied by hand during `verify`
                logger.warning("%s: its hash is not published; trusting this file, sha256 %s", file, found)
                _noted(file).write_text(f"{found}\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or checkpoint}: cannot be written ({error.strerror}); RTDETR_WEIGHTS names another folder"
        ) from error
    return checkpoint


@contextlib.contextmanager
def _alone(checkpoint: Path) -> Iterator[None]:
    """Context manager: waits until no other process is writing the checkpoint. Raises OSError."""
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    with open(checkpoint.with_name(f".{checkpoint.name}.lock"), "wb") as file:
        if not lock(file.fileno()):
            logger.info("%s: waiting for another process, which downloads or converts it", checkpoint.stem)
            lock(file.fileno(), wait=True)
        yield


def download(official: OfficialFile, file: Path) -> None:
    """Downloads and verifies the file. An interrupted download stays as FILE.part and is resumed by the next call.

    Raises CheckpointError.
    """
    part = file.with_name(f"{file.name}.part")
    by_hand = f"; without a network, bring the file to {file} and try again"
    if file.suffix == ".pdparams":
        by_hand += f", or convert it where it is: rtdetr convert {file.name} -o {file.stem}.pth"
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _receive(official, part)
    except urllib.error.HTTPError as error:
        raise CheckpointError(f"{official.url}: the server answers {error.code} ({error.reason}){by_hand}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise CheckpointError(f"{official.url}: cannot be downloaded ({reason}){by_hand}") from error
    try:
        verify(official, part)
    except CheckpointError:
        part.unlink()
        raise
    os.replace(part, file)


def verify(official: OfficialFile, file: Path) -> None:
    """Raises CheckpointError unless a file is the official one, or, if its hash is not published, the one that was
    converted first, whose hash is next to it as FILE.sha256."""
    found, size = file_sha256(file), file.stat().st_size
    noted = _noted(file)
    expected, where = official.sha256, ""
    if expected is None and noted.is_file():
        expected, where = noted.read_text(encoding="utf-8").strip(), f" as noted in {noted}"
    if expected not in (None, found):
        yourself = f", or convert it yourself if you trust it: rtdetr convert {file.name} -o {file.stem}.pth"
        raise CheckpointError(
            f"{file}: not the official file: sha256 {found} ({size:,} bytes), expected {expected}{where}; "
            "download it again"
            + (f", or remove {noted.name} if you trust the new file" if where else "")
            + (yourself if file.suffix == ".pdparams" else "")
        )


def _noted(file: Path) -> Path:
    """The file with the hash of the first download."""
    return file.with_name(f"{file.name.removesuffix('.part')}.sha256")


def _receive(official: OfficialFile, part: Path) -> None:
    """Appends the missing bytes to `part`. Raises OSError, HTTPException or CheckpointError."""
    have = part.stat().st_size if part.is_file() else 0
    if have and have == official.num_bytes:
        return
    headers = {"User-Agent": f"rtdetr/{__version__}"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(official.url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=SILENCE)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing, or the part is of another file: the hash decides
            return
        raise
    with response:
        if response.headers.get_content_type() == "text/html":
            raise CheckpointError(
                f"{official.url}: the server sends a web page instead of the file (asked too often?); open it in a "
                f"browser and save the file as {part.with_suffix('')}"
            )
        resumed = response.status == 206
        total = (have if resumed else 0) + (response.length or 0)
        if official.num_bytes and response.length and total != official.num_bytes:
            raise CheckpointError(
                f"{official.url}: the server has {total:,} bytes, the official file {official.num_bytes:,}; "
                "it has been replaced"
            )
        with open(part, "ab" if resumed else "wb") as file:
            while chunk := response.read1(1 << 20):
                file.write(chunk)
        if response.length:
            raise OSError(f"the connection ended {response.length:,} bytes too early; try again, the download resumes")
