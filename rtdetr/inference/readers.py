"""The choice of what reads a list of files while the network runs: threads, or processes for long lists."""

from __future__ import annotations

import os
from typing import NamedTuple

from rtdetr.inference.processes import can_start
from rtdetr.wording import counted

MAX_THREADS = 8  # that read files by default; 16 are slower, as they wait for Python's lock
MAX_PROCESSES = 16
MIN_PROCESSES = 4  # fewer are no faster than threads
FILES_PER_PROCESS = 8  # from which a running process is worth using
FILES_PER_START = 64  # from which a process makes up for its start


class Readers(NamedTuple):
    """The number of threads, or of processes that replace them."""

    threads: int
    processes: int = 0

    @classmethod
    def choose(
        cls, num_files: int = 0, on_gpu: bool = False, started: bool = False, cores: int | None = None
    ) -> Readers:
        """Chooses the readers for `num_files` files. Threads share Python's lock, and processes take time to start; a
        network on the CPU is slower than either. started: processes are running, or will be before the first file is
        read. cores: default: those available to this process."""
        cores = cores or usable_cores()
        number, least = min(cores, MAX_PROCESSES), FILES_PER_PROCESS if started else FILES_PER_START
        if can_start() and on_gpu and number >= MIN_PROCESSES and num_files >= least * number:
            return cls(0, number)
        return cls(min(MAX_THREADS, cores))

    def __str__(self) -> str:
        return counted(self.processes, "process") if self.processes else counted(self.threads, "thread")


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
