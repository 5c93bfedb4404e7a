"""Processes that read images, and work on the images they keep; and the choice between them and threads, which share
Python's lock: if there are many, each waits for it at every call."""

from __future__ import annotations

import itertools
import math
import mmap
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from rtdetr.config import ConfigError
from rtdetr.data.classes import DataError
from rtdetr.data.workers import signals_held_back
from rtdetr.inference.reading import Task, on_kept, read
from rtdetr.outputs import RunFailed
from rtdetr.wording import counted

MAX_THREADS = 8  # that read files by default; 16 are slower, as they wait for Python's lock
MAX_PROCESSES = 16
MIN_PROCESSES = 4  # fewer are no faster than threads
FILES_PER_PROCESS = 8  # from which a running process is worth using
FILES_PER_START = 64  # from which a process makes up for its start
AHEAD = 2  # images requested from each process before the first one is needed
SECONDS = 10.0  # for processes to end
LOST = "a process that reads images has died, perhaps for lack of memory; 0 processes read in threads"
# By default, glibc returns the memory of each image to the system, which clears every page for the next image: 3 of the
# 6.4 ms for reading and drawing 640 x 480 pixels. Only glibc has these settings; a process keeps 64 MB at most.
FOR_IMAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
# NumPy would start threads, which do not survive a fork.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
CODE = (
    "import os, sys; sys.path[:] = os.environ['PYTHONPATH'].split(os.pathsep)\n"  # without the working folder
    "from rtdetr.inference.reading import serve; serve(*map(int, sys.argv[1:]))"
)


def can_start() -> bool:
    """Whether Python can be started again."""
    return bool(sys.executable) and not getattr(sys, "frozen", False)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


class Process:
    """The connection to one process, which answers requests in order; thread-safe."""

    def __init__(self, connection: Connection[Any, Any]) -> None:
        self.connection = connection
        self.asking, self.receiving = threading.Lock(), threading.Lock()
        self.asked = self.answered = 0
        self.answers: dict[int, Any] = {}
        self.forgotten: deque[int] = deque()  # images that it may release

    def ask(self, work: Callable[..., Any], *arguments: Any) -> FutureAnswer:
        """Sends a request. work: a function of a module that does not import torch."""
        with self.asking:
            forgotten = [self.forgotten.popleft() for _ in range(len(self.forgotten))]
            try:
                self.connection.send_bytes(pickle.dumps((work, arguments, forgotten)))  # `send` takes twice as long
            except ConnectionError as error:
                raise RunFailed(LOST) from error
            self.asked += 1
            return FutureAnswer(self, self.asked)

    def answer(self, number: int) -> Any:
        with self.receiving:
            while self.answered < number:
                try:
                    answer = self.connection.recv()
                except (EOFError, ConnectionError) as error:
                    raise RunFailed(LOST) from error
                self.answered += 1
                self.answers[self.answered] = answer
            return self.answers.pop(number)

    def end(self) -> None:
        """Ends the process after its current request."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as pipe:
            pipe.shutdown(socket.SHUT_WR)  # closing has no effect while a forked process has a copy
        self.connection.close()


class SharedPixels:
    """Memory shared with the processes: a file without a name."""

    def __init__(self) -> None:
        if hasattr(os, "memfd_create"):  # /dev/shm is small in containers
            self.file: IO[bytes] = os.fdopen(os.memfd_create("rtdetr"), "r+b")
        else:
            self.file = tempfile.TemporaryFile()  # noqa: SIM115 - until close()
        self.mapped, self.pinned = np.empty(0, np.uint8), False

    def slots(self, shape: tuple[int, int, int, int], pinned: bool) -> NDArray[np.uint8]:
        """Returns memory of a shape. pinned: a GPU copies from it directly."""
        size = math.prod(shape)
        if size > len(self.mapped) or pinned > self.pinned:
            self.unpin()
            self.file.truncate(max(size, len(self.mapped)))
            self.mapped = np.frombuffer(mmap.mmap(self.file.fileno(), 0), np.uint8)
            if pinned:
                torch.cuda.check_error(
                    torch.cuda.cudart().cudaHostRegister(self.mapped.ctypes.data, len(self.mapped), 1)
                )
                self.pinned = True
        return self.mapped[:size].reshape(shape)

    def unpin(self) -> None:
        if self.pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.mapped.ctypes.data))
            self.pinned = False

    def close(self) -> None:
        self.unpin()
        self.file.close()


class Team(NamedTuple):
    """Processes that were started together."""

    parent: subprocess.Popen[bytes]
    processes: list[Process]
    memory: SharedPixels

    @classmethod
    def of(cls, number: int) -> Team:
        memory, pipes = SharedPixels(), [multiprocessing.Pipe() for _ in range(number)]
        given = [memory.file.fileno(), *(there.fileno() for _, there in pipes)]
        with signals_held_back():  # permanently: only the main process handles Ctrl-C
            parent = subprocess.Popen(
                [sys.executable, "-c", CODE, *map(str, given)],
                stdin=subprocess.DEVNULL,
                pass_fds=given,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | FOR_IMAGES | ONE_THREAD,
            )
        for _, there in pipes:
            there.close()
        return cls(parent, [Process(here) for here, _ in pipes], memory)

    def end(self) -> None:
        for each in self.processes:
            each.end()
        try:
            self.parent.wait(SECONDS)
        except subprocess.TimeoutExpired:
            self.parent.kill()
            self.parent.wait()
        self.memory.close()


class FutureAnswer(NamedTuple):
    process: Process
    number: int

    def done(self) -> bool:
        return self.number <= self.process.answered

    def result(self) -> Any:
        answer = self.process.answer(self.number)
        if isinstance(answer, Exception):
            raise answer
        return answer


class KeptImage:
    """An image in the process that read it, which releases it when this object is deleted."""

    def __init__(self, process: Process, number: int) -> None:
        self.process, self.number = process, number

    def ask(self, work: Callable[..., Any], *arguments: Any) -> FutureAnswer:
        """Runs work(pixels, *arguments) in that process. work: as in `Process.ask`."""
        return self.process.ask(on_kept, self.number, work, *arguments)

    def __del__(self) -> None:
        self.process.forgotten.append(self.number)


# Height and width of an image, (0, 0) after an error, and the image itself, None if it is not kept.
Outcome = tuple[tuple[int, int], KeptImage | DataError | None]


class ReadingProcesses:
    """Processes that stay for the next list, until this object is deleted or the program ends. They serve one list at a
    time."""

    def __init__(self) -> None:
        self._teams: list[Team] = []  # one, or none
        self._serving = threading.Lock()
        self._keys = itertools.count()
        weakref.finalize(self, _end, self._teams, os.getpid())

    @property
    def running(self) -> list[Process]:
        return self._teams[0].processes if self._teams else []

    def start(self, number: int) -> None:
        """Starts `number` processes if they are not running. Raises ConfigError if that is not possible."""
        if len(self.running) == number and all(each.parent.poll() is None for each in self._teams):
            return
        self.end()
        if number and not can_start():
            raise ConfigError("num_processes: expected 0 where Python cannot be started again; threads read then")
        if number:
            self._teams.append(Team.of(number))

    def end(self) -> None:
        _end(self._teams, os.getpid())

    def taken(self, number: int) -> bool:
        """Reserves `number` processes for the caller, who then calls `batches`; False if another call uses them."""
        if not self._serving.acquire(blocking=False):
            return False
        try:
            self.start(number)
        except BaseException:
            self._serving.release()
            raise
        return True

    def batches(
        self, files: Iterator[Path | str], number: int, task: Task, pinned: bool
    ) -> Generator[tuple[list[Path | str], NDArray[np.uint8], list[Outcome]], None, None]:
        """Yields `number` files at a time, their pixels (B, h, w, 3), and the result of reading each. The pixels are
        valid until the batch after the next one is requested. pinned: a GPU copies them directly."""
        asked: deque[tuple[list[Path | str], NDArray[np.uint8], list[tuple[int, FutureAnswer]]]] = deque()
        try:
            num_batches = 2 + math.ceil(AHEAD * len(self.running) / number)
            slots = self._teams[0].memory.slots((num_batches * number, *task.size, 3), pinned)
            turn = itertools.cycle(self.running)
            for first in itertools.cycle(range(0, len(slots), number)):
                batch = list(itertools.islice(files, number))
                if not batch and not asked:
                    return
                if batch:
                    begun = [
                        (key, next(turn).ask(read, str(file), slot, key, task))
                        for file, slot, key in zip(batch, itertools.count(first), self._keys)
                    ]
                    asked.append((batch, slots[first : first + len(batch)], begun))
                if not batch or len(asked) == num_batches - 1:
                    done, pixels, begun = asked[0]
                    yield done, pixels, [_outcome(key, answer, task.keep) for key, answer in begun]
                    asked.popleft()
        finally:
            if asked:  # no caller receives the rest
                self.end()
            self._serving.release()


def _outcome(key: int, answer: FutureAnswer, keep: bool) -> Outcome:
    try:
        return answer.result(), KeptImage(answer.process, key) if keep else None
    except DataError as error:
        return (0, 0), error.with_traceback(None)  # its frames would keep this alive


def _end(teams: list[Team], owner: int) -> None:
    if os.getpid() == owner:  # not in a process forked later
        for each in teams:
            each.end()
    teams.clear()
