"""OpenMP threads that yield the CPU when other programs want it.

GNU OpenMP's threads spin for milliseconds while they wait for work. On an idle machine that is the fastest way to wait.
Next to a busy program, the one that spins holds the core that the one it waits for needs. OMP_WAIT_POLICY=PASSIVE or a
small GOMP_SPINCOUNT cures that, and slows an idle machine down by a fifth or more (docs/measurements/training.md).

libgomp itself stops spinning while a process has more OpenMP threads than there are CPUs. So while this process's
threads queue for a CPU, a second team of OpenMP threads sleeps next to the first one. The team that computes stays
as it is, and so do the results.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # user settings that take precedence
TASKS = Path("/proc/self/task")  # Linux alone has it; torch brings libgomp on Linux alone, too
INTERVAL = 0.5  # seconds between two checks
# Seconds per second that all threads together queued. A data worker makes about 0.1 of it, a busy program 0.5 to 1.
BUSY, QUIET = 0.3, 0.2
PATIENCE = 4  # consecutive quiet checks after which the machine no longer counts as crowded


@contextmanager
def yielding_cpu() -> Iterator[None]:
    """Context manager: inside, waiting OpenMP threads spin only while no other program wants the CPU."""
    if any(name in os.environ for name in CHOICES) or not (TASKS.parent / "schedstat").is_file():
        yield
        return
    with _thread("yielding_cpu", _watch):
        yield


@contextmanager
def _thread(name: str, run: Callable[[threading.Event], object]) -> Iterator[None]:
    """Context manager: inside, a thread runs, which ends when its event is set."""
    stop = threading.Event()
    thread = threading.Thread(target=run, args=(stop,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _sleep(stop: threading.Event) -> None:
    import torch

    torch.ones(2**20).add_(1)  # work for all threads: each Python thread has an OpenMP team of its own
    stop.wait()


def crowded(shares: Iterable[float]) -> Iterator[bool]:
    """Yields, after each check of the share of time that threads queued, whether the machine is crowded."""
    now, quiet = False, 0
    for share in shares:
        quiet = quiet + 1 if share < QUIET else 0
        now = share > BUSY or (now and quiet < PATIENCE)
        yield now


def seconds_queued() -> float:
    """Total seconds that the threads of this process have been runnable without running, each since its start."""
    total = 0
    for task in TASKS.iterdir():
        try:
            total += int((task / "schedstat").read_bytes().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread has just ended
    return total / 1e9


def _looks(stop: threading.Event) -> Iterator[float]:
    queued, looked = seconds_queued(), time.monotonic()
    while not stop.wait(INTERVAL):
        before, since = queued, looked
        queued, looked = seconds_queued(), time.monotonic()
        yield (queued - before) / (looked - since)


def _watch(stop: threading.Event) -> None:
    looks = crowded(_looks(stop))
    for now in looks:
        if now and hasattr(sys.modules.get("torch"), "ones"):  # not while it is being imported
            with _thread("sleeping_team", _sleep):
                for still in looks:
                    if not still:
                        break
