"""Times of calls in milliseconds, by events on a GPU, else by the clock; what they do on a GPU, and how often the host
waits for it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MOST, MOST_KERNELS = 200, 40  # calls per median, and kernels that are listed
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
CALLS = "calls"


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


class Work(NamedTuple):
    """Averages per call."""

    kernels: float  # copies and memsets included
    busy_ms: float
    waits: float
    top: list[tuple[str, float, float]]  # kernel, calls and milliseconds; the costliest first


def work_of(call: Callable[[], object], number: int) -> Work:
    """Profiles `number` calls on a GPU, one after the other. All values are zero without a GPU."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as record:
        with record_function(CALLS):
            for _ in range(number):
                call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    events = record.events()
    on_gpu = torch.autograd.DeviceType.CUDA
    ends = [event.time_range.end for event in events if event.name == CALLS and event.device_type != on_gpu]
    kernels: dict[str, list[float]] = {}
    waits = 0
    for event in events:
        if event.device_type == on_gpu and not event.is_user_annotation:
            entry = kernels.setdefault(event.name[:90], [0.0, 0.0])
            entry[0] += 1 / number
            entry[1] += event.time_range.elapsed_us() / 1e3 / number
        waits += event.name in WAITS and event.time_range.start < max(ends)  # the profiler waits at its end, too
    named = [(name, calls, ms) for name, (calls, ms) in kernels.items()]
    top = sorted(named, key=lambda each: -each[2])[:MOST_KERNELS]
    counted, busy = (sum(entry[i] for entry in kernels.values()) for i in range(2))
    return Work(counted, busy, waits / number, top)
