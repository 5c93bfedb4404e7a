"""Threads, signals and lifetime of data workers: they serve the main process and never outlive it."""

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
SECONDS = 2.0  # between checks of the main process


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Context manager to start workers in: SIGINT and SIGTERM are delayed until the end of the block. Workers inherit
    the mask until `prepare_worker` sets their handling: Ctrl-C and schedulers signal every process of a group."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASKED_TO_STOP)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def memory_shared() -> Iterator[None]:
    """Context manager to start workers in. Forked workers share memory with the main process until it is written to,
    and a garbage collection writes to every object: it would copy some 90 MB per process. So workers keep the inherited
    objects frozen, and the main process collects right after the fork. A worker also must not free CUDA memory of the
    main process: the driver does not survive a fork, and the worker would abort."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.collect()


def prepare_worker(worker_id: int) -> None:
    """Uses one thread per worker, as workers x threads would compete for cores and OpenCV's pool does not survive a
    fork. Ignores signals from outside: only the main process decides when to stop, and it needs data until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # only a fork inherits the mask
        threading.Thread(target=_leave_with_main, daemon=True).start()
    else:  # macOS: rely on torch's own check of the main process
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(1)
    cv2.setNumThreads(0)


def _leave_with_main() -> None:
    """Exits this worker, whatever it is doing, when the main process sends SIGTERM or has died. SIGTERM stays blocked
    in the other threads, and is ignored from any other sender."""
    main, started_by = multiprocessing.parent_process(), os.getppid()
    while main is not None and os.getppid() == started_by and main.is_alive():
        received = signal.sigtimedwait([signal.SIGTERM], SECONDS)
        if received is not None and received.si_pid == main.pid:
            break
    os._exit(0)
