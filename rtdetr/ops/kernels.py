"""One switch for the whole package: `auto`, our kernels if they can run, or `plain`, only PyTorch and SciPy."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

Kernels = Literal["auto", "plain"]

_lock, _plain_uses = threading.Lock(), 0


@contextmanager
def using(kernels: Kernels) -> Iterator[None]:
    """Context manager: inside, and in all threads meanwhile, `plain` disables kernels of `auto` backends and fused
    kernels; backends selected by name still run. Raises ValueError for other values."""
    global _plain_uses
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels: expected one of {', '.join(get_args(Kernels))}, got {kernels!r}")
    with _lock:  # a count, as threads may exit in another order than they entered
        _plain_uses += kernels == "plain"
    try:
        yield
    finally:
        with _lock:
            _plain_uses -= kernels == "plain"


def are_plain() -> bool:
    return _plain_uses > 0
