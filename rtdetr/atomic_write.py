"""Files that are replaced as a whole: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
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
