"""Processes that read images. Threads share Python's lock, and with many of them each waits for it at every call."""

from __future__ import annotations

import math
import mmap
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtdetr.config import ConfigError, Resize
from rtdetr.data.classes import DataError
from rtdetr.data.preprocess import resize
from rtdetr.data.workers import memory_shared, prepare_worker, signals_held_back

File = Path | str
Read = Callable[[File], NDArray[np.uint8]]  # RGB (H, W, 3); raises DataError
Result = tuple[int, int] | DataError  # height and width of an image
AT_ONCE = 4  # images that a process is asked for

# In a process: what reads, the memory (slots, B, h, w, 3) that all see, and how images get their size.
_work: tuple[Read, NDArray[np.uint8], Resize]


class ReadingProcesses:
    """So many processes, which end with the block, at the latest with this process.

    They are forked, so `read` may be any function, and they see the memory that was there when they began.
    """

    def __init__(
        self, number: int, batch_size: int, size: tuple[int, int], read: Read, interpolation: Resize = "cubic"
    ) -> None:
        """size: (h, w) that images get. Raises ConfigError where processes cannot be forked."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError(
                "num_processes: expected 0 where processes cannot be forked; num_threads reads in threads"
            )
        self.batch_size = batch_size
        self.num_slots = 1 + math.ceil(2 * AT_ONCE * number / batch_size)  # every process has two tasks to go on with
        shape = (self.num_slots, batch_size, *size, 3)
        self.pixels = np.frombuffer(mmap.mmap(-1, math.prod(shape)), np.uint8).reshape(shape)
        context = multiprocessing.get_context("fork")
        self.pool = ProcessPoolExecutor(number, context, _begin, (read, self.pixels, interpolation))
        with signals_held_back(), memory_shared():
            self.pool.submit(int)  # all of them are forked now, before the pool has threads

    def __enter__(self) -> ReadingProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)

    def batches(self, files: Iterator[File]) -> Iterator[tuple[list[File], NDArray[np.uint8], list[Result]]]:
        """Files, their pixels (B, h, w, 3), which are good until the next batch is asked for, and sizes or errors."""
        begun: deque[tuple[list[File], int, list[Future[list[Result]]]]] = deque()
        number = 0
        while True:
            while len(begun) < self.num_slots and (batch := list(islice(files, self.batch_size))):
                slot = number % self.num_slots
                parts = range(0, len(batch), AT_ONCE)
                reading = [self.pool.submit(_read, batch[i : i + AT_ONCE], slot, i) for i in parts]
                begun.append((batch, slot, reading))
                number += 1
            if not begun:
                return
            batch, slot, reading = begun[0]
            results = [result for part in reading for result in part.result()]
            yield batch, self.pixels[slot, : len(batch)], results
            begun.popleft()


def _begin(*work: Any) -> None:
    global _work
    _work = work[0], work[1], work[2]
    prepare_worker(0)


def _read(files: list[File], slot: int, first: int) -> list[Result]:
    read, pixels, interpolation = _work
    results: list[Result] = []
    for place, file in zip(pixels[slot, first:], files):
        try:
            image = read(file)
        except DataError as error:
            results.append(error)
            continue
        resize(image, (place.shape[0], place.shape[1]), interpolation, place)
        results.append((image.shape[0], image.shape[1]))
    return results
