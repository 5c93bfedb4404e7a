"""Work beside the network keeps its order, its bounds and its errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from rtdetr.data.classes import DataError
from rtdetr.inference.prefetch import BackgroundCalls, ahead, batches


def counted(taken: list[int], stop: int) -> Iterator[int]:
    for number in range(stop):
        taken.append(number)
        yield number
    raise DataError("cut off")


def test_items_are_taken_ahead_and_no_further() -> None:
    taken: list[int] = []
    items = ahead(counted(taken, 10), 3)
    assert next(items) == 0
    deadline = time.monotonic() + 10
    while len(taken) < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.01)
    assert taken == [0, 1, 2, 3]
    items.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("rtdetr-ahead")]


def test_an_error_comes_after_what_was_there_before_it() -> None:
    whole = batches(ahead(counted([], 5), 3), 2)
    assert [next(whole), next(whole), next(whole)] == [[0, 1], [2, 3], [4]]
    with pytest.raises(DataError, match="cut off"):
        next(whole)
    assert list(ahead(iter("abc"), 2)) == ["a", "b", "c"] and list(batches(iter("abc"), 3)) == [["a", "b", "c"]]


def test_writing_behind_is_done_at_the_end_and_says_what_failed() -> None:
    written: list[int] = []
    with BackgroundCalls(2) as behind:
        for number in range(20):
            behind.call(written.append, number)
            assert len(behind.waiting) <= 2
    assert written == [*range(20)]
    with pytest.raises(ZeroDivisionError), BackgroundCalls(5) as behind:
        behind.call(lambda: 1 / 0)
    with pytest.raises(OSError), BackgroundCalls(0) as behind:
        for _ in range(2):
            behind.call(open, "/nowhere/at/all")
