"""Times of calls in milliseconds: by events on a GPU, else by the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

MOST = 200  # number of calls per median


def wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], object], on_gpu: bool) -> float:
    """Time of one call that waits for the previous one."""
    if on_gpu:
        wait(on_gpu)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        last.synchronize()
        return first.elapsed_time(last)
    start = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start)


def median_time(call: Callable[[], object], on_gpu: bool, number: int) -> float:
    """Median of `number` calls, after one that does not count."""
    call()
    return statistics.median(milliseconds(call, on_gpu) for _ in range(number))


def latency(call: Callable[[], object], seconds: float, on_gpu: bool = False, least: int = 3) -> float:
    """Median of the calls of so many seconds, of at least `least` of them."""
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < least or (time.perf_counter() < end and len(taken) < MOST):
        taken.append(milliseconds(call, on_gpu))
    return statistics.median(taken)
