"""One switch for the whole package: `auto`, own kernels where they can run, or `plain`, PyTorch and SciPy alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Kernels = Literal["auto", "plain"]

_lock, _plain_uses = threading.Lock(), 0


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """In here, and in all threads meanwhile, `plain` turns `auto` backends and fused kernels off; a backend that is
    named runs all the same. Raises ValueError for another word."""
    global _plain_uses
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels: expected one of {', '.join(get_args(Kernels))}, got {kernels!r}")
    with _lock:  # counted, as threads may leave in another order than they came
        _plain_uses += kernels == "plain"
    try:
        yield
    finally:
        with _lock:
            _plain_uses -= kernels == "plain"


def are_plain() -> bool:
    return _plain_uses > 0
