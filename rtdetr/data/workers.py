"""Data workers: their threads and signals, so that they serve the main process and never outlive it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import cv2
import torch

ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM)
SECONDS = 2.0  # between two looks at the main process


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Context manager in which workers are started. A stop signal waits for its end, and a worker starts with signals
    blocked until `prepare_worker` handles them: Ctrl-C and schedulers reach every process of a group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def memory_shared() -> Iterator[None]:
    """Start workers in here. They share their memory with the main process until somebody writes to it, and a garbage
    collector writes to every object: whenever it came, it would copy some 90 MB, in every process. So workers leave
    alone what they were born with, and the main process has its copy made now and not in hour nine. Nor may a worker
    free what of the main process lies on a GPU: the driver does not survive a fork, and the worker would abort."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def prepare_worker(worker_id: int) -> None:
    """Sets one thread per worker: workers x threads would compete for CPUs, and OpenCV's pool does not survive a fork.
    Only the main process decides about a stop signal, and it still needs data until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # a worker that was not forked is born without
        threading.Thread(target=_leave_with_main, daemon=True).start()
    else:  # macOS; there torch's own look at the main process has to do
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)


def _leave_with_main() -> None:
    """Ends this worker, whatever it is doing, when the main process asks for it or has died. SIGTERM stays blocked in
    the other threads, and from any other sender it has no effect."""
    main, started_by = multiprocessing.parent_process(), os.getppid()
    while main is not None and os.getppid() == started_by and main.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], SECONDS)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)
