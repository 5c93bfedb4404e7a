"""Profiles a call on a GPU: its kernels, their total time, and how often the host waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
CALLS = "calls"


class Work(NamedTuple):
    """Averages per call."""

    kernels: float  # copies and memsets included
    busy_ms: float
    waits: float
    top: list[tuple[str, float, float]]  # kernel, calls and milliseconds; the costliest first


def work_of(call: Callable[[], object], number: int, most: int = 40) -> Work:
    """Profiles `number` calls, one after the other. All values are zero without a GPU."""
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
    top = sorted(named, key=lambda each: -each[2])[:most]
    counted, busy = (sum(entry[i] for entry in kernels.values()) for i in range(2))
    return Work(counted, busy, waits / number, top)
