"""Threads that read the next items and write the finished ones while the network runs."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar, cast

import cv2

Item = TypeVar("Item")
END = object()


def ahead(items: Iterator[Item], number: int) -> Generator[Item, None, None]:
    """Yields the same items. A thread prefetches up to `number` of them; an exception of it is raised in its turn."""
    pool = ThreadPoolExecutor(1, "rtdetr-ahead")
    waiting = deque(pool.submit(next, items, END) for _ in range(number))
    try:
        while (item := waiting.popleft().result()) is not END:
            waiting.append(pool.submit(next, items, END))
            yield cast(Item, item)
    finally:
        pool.shutdown(cancel_futures=True)


def delayed(items: Iterable[Item], number: int) -> Iterator[Item]:
    """Yields the same items, each once `number` later ones, whose work has begun then, are taken."""
    waiting: deque[Item] = deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > number:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


def in_order(items: Iterable[Item], begin: Callable[[Item], Any], number: int) -> Iterator[Item]:
    """Yields each item once the work on it is done, in the order of the items. begin: starts the work and returns its
    future. number: items that may wait for their work; an exception of it is raised in its turn."""
    waiting: deque[tuple[Item, Any]] = deque()
    for item in items:
        waiting.append((item, begin(item)))
        while waiting and (len(waiting) > number or waiting[0][1].done()):
            first, work = waiting.popleft()
            work.result()
            yield first
    while waiting:
        first, work = waiting.popleft()
        work.result()
        yield first


def batches(items: Iterator[Item], size: int) -> Iterator[list[Item]]:
    """Yields lists of `size` items, the last one shorter. An error is raised once the items before it were yielded."""
    batch: list[Item] = []
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except Exception:  # raised again, after the items that came before it
        if batch:
            yield batch
        raise
    if batch:
        yield batch


_opencv = threading.Lock()
_readers: list[int] = []  # the number of OpenCV's threads before the first of them began


@contextlib.contextmanager
def one_opencv_thread() -> Iterator[None]:
    """Context manager: inside, OpenCV uses only the calling thread. Its own threads, one team per process, spin while
    they wait, and take the CPUs from threads that read images in parallel."""
    with _opencv:
        _readers.append(_readers[0] if _readers else cv2.getNumThreads())
        cv2.setNumThreads(1)
    try:
        yield
    finally:
        with _opencv:
            before = _readers.pop()
            if not _readers:
                cv2.setNumThreads(before)


class BackgroundCalls:
    """Runs calls in order in a thread; at most `number` of them wait. An exception of one is raised by a later call, or
    at the end, and cancels those after it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.pool = ThreadPoolExecutor(1, "rtdetr-behind")
        self.waiting: deque[Future[Any]] = deque()

    def call(self, work: Callable[..., Any], *arguments: Any) -> None:
        self.waiting.append(self.pool.submit(work, *arguments))
        while len(self.waiting) > self.number:
            self.waiting.popleft().result()

    def __enter__(self) -> BackgroundCalls:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            while self.waiting:
                self.waiting.popleft().result()
        finally:
            self.pool.shutdown(cancel_futures=True)
