"""Python's garbage collector, out of the way where it would look at a million objects and find nothing."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected(for_good: bool = False) -> Iterator[None]:
    """In here no garbage is collected. A fifth of the time that importing torch takes is looking for some.

    for_good: what is there at the end, modules, say, is never looked at again; for programs, as it concerns their
    other objects, too.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if for_good:
            gc.freeze()
        if was_on:
            gc.enable()
