"""What the processes of `processes` run: they read images for the network, and work on those that they keep. They do
not import torch, so they start within a third of a second."""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import cv2
import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import DataError
from rtdetr.data.images import read_pixels
from rtdetr.data.resize import resize

if TYPE_CHECKING:
    from rtdetr.config import Resize


class Task(NamedTuple):
    """How images are read."""

    size: tuple[int, int]  # (h, w) of the resized images
    interpolation: Resize
    max_megapixels: float
    keep: bool  # the images, until they are released
    folder: str  # base of relative paths


def working_folder() -> str:
    """Returns the working directory, or "" if it was deleted; no path can be relative to it then."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


_kept: dict[int, NDArray[np.uint8]] = {}
_memory: int  # descriptor of a file that the main process maps, too
_mapped: NDArray[np.uint8] = np.empty(0, np.uint8)


def serve(memory: int, *connections: int) -> NoReturn:
    """Forks a process for each connection, which is faster than starting each. Ends when all have ended, or one has
    failed. The arguments are file descriptors."""
    global _memory
    _memory = memory
    cv2.setNumThreads(0)
    logging.disable()  # the main process logs warnings about fonts
    import rtdetr.inference.draw  # noqa: F401 - here, so that none imports it after the fork

    for connection in connections:
        if os.fork() == 0:
            _answer_all(connection, {*connections} - {connection})
    for each in connections:
        os.close(each)
    status = 0
    with contextlib.suppress(ChildProcessError):  # all have ended
        while status == 0:
            _, status = os.wait()
    os._exit(status != 0)


def _answer_all(connection: int, others: set[int]) -> NoReturn:
    """Answers requests in their order until the connection is closed."""
    for each in others:
        os.close(each)
    here: Connection[Any, Any] = Connection(connection)
    with contextlib.suppress(EOFError, ConnectionError):  # the main process has ended
        while True:
            work, arguments, forgotten = here.recv()
            for key in forgotten:
                _kept.pop(key, None)
            here.send(_answer(work, arguments))
    os._exit(0)


def _answer(work: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    try:
        return work(*arguments)
    except (DataError, OSError) as error:
        return error


def read(file: str, slot: int, key: int, task: Task) -> tuple[int, int]:
    """Writes the resized pixels of an image to its slot, returns its height and width. Raises DataError."""
    if task.folder:
        os.chdir(task.folder)
    image = read_pixels(Path(file), max_megapixels=task.max_megapixels)
    resize(image, task.size, task.interpolation, _place(slot, task.size))
    if task.keep:
        _kept[key] = image
    return image.shape[0], image.shape[1]


def on_kept(key: int, work: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of `work` on an image that is kept here."""
    return work(_kept[key], *arguments)


def _place(slot: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """Returns a slot (h, w, 3) of the memory, which is mapped again if it has grown."""
    global _mapped
    length = math.prod(size) * 3
    if (slot + 1) * length > len(_mapped):
        _mapped = np.frombuffer(mmap.mmap(_memory, 0), np.uint8)
    return _mapped[slot * length : (slot + 1) * length].reshape(*size, 3)
