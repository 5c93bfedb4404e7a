"""Locks a run folder: two trainings in it would overwrite each other's state."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from rtdetr.config import ConfigError
from rtdetr.outputs import lock
from rtdetr.wording import option

GRACE = 5.0  # seconds in which the workers of a killed run end; they hold its folder, too


@contextlib.contextmanager
def run_lock(folder: Path, wait: bool = True) -> Iterator[None]:
    """Locks the folder until the end of the block, or of the process and its workers; raises ConfigError if
    another training holds it, after GRACE seconds if `wait`. File systems without locks give no protection."""
    descriptor, end = os.open(folder, os.O_RDONLY), time.monotonic() + GRACE
    try:
        while not lock(descriptor):
            if not wait or time.monotonic() > end:
                raise ConfigError(
                    f"{folder}: another training is running in it, perhaps this one, started twice; wait for its "
                    f"end, stop it, or choose another {option('--output-dir', 'output_dir')}"
                )
            time.sleep(0.1)
        yield
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # workers that are still running hold it, too
    finally:
        os.close(descriptor)
