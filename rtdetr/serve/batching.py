"""Detects single images in batches: the next batch is read while the current one is processed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeVar

from PIL import Image

from rtdetr.data.images import read_bytes
from rtdetr.inference.draw import Detection

Returned = TypeVar("Returned")
Detect = Callable[[list[Image.Image]], list[list[Detection]]]
Read = Image.Image | BaseException  # or why it cannot be read
READERS = 4  # images that are decoded at once
PATIENCE = 0.002  # seconds between two looks for another file while the detector works


class Answer(NamedTuple):
    """The size of an image in pixels, upright, and its detections."""

    width: int
    height: int
    detections: list[Detection]  # best first, of every score


class Batcher:
    """Detects in files, in the order of arrival and up to `max_batch` images at a time, within one event loop.

    A batch takes all waiting files; it waits for more only while the previous batch is processed, so a single image is
    detected immediately. At most two batches of decoded images exist; the others wait as files.
    detect: images to detections, called from one thread. seen: receives the size of every batch.
    """

    def __init__(self, detect: Detect, max_batch: int, max_megapixels: float, seen: Callable[[int], None]) -> None:
        self.detect, self.max_batch, self.max_megapixels, self.seen = detect, max_batch, max_megapixels, seen
        self.files: asyncio.Queue[tuple[bytes, asyncio.Future[Answer]]] = asyncio.Queue()  # in no batch yet
        self.readers = ThreadPoolExecutor(min(READERS, max_batch), "rtdetr-read")
        self.detector = ThreadPoolExecutor(1, "rtdetr-detect")

    async def answer(self, data: bytes) -> Answer:
        """Returns the answer for a file, while `running`. Raises DataError if the image cannot be read."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.files.put_nowait((data, answer))
        return await asyncio.shield(answer)  # it gets its result even if nobody waits for it any more

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Context manager: until the block ends, files are answered."""
        batches = asyncio.create_task(self._run())
        try:
            yield
        finally:
            batches.cancel()
            self.readers.shutdown()
            self.detector.shutdown()

    async def _run(self) -> None:
        at_work = asyncio.create_task(self._detect([], []))
        while True:
            batch = [await self._next()]
            while len(batch) < self.max_batch and not (self.files.empty() and at_work.done()):
                if self.files.empty():
                    await asyncio.wait([at_work], timeout=PATIENCE)
                else:
                    batch.append(await self._next())
            answers, images = zip(*batch)
            read = await asyncio.gather(*images, return_exceptions=True)
            await at_work
            at_work = asyncio.create_task(self._detect(answers, read))

    async def _next(self) -> tuple[asyncio.Future[Answer], asyncio.Task[Image.Image]]:
        """Takes the next file; returns its future answer, and its image, which is being read."""
        data, answer = await self.files.get()
        return answer, asyncio.create_task(_in_thread(self.readers, read_bytes, data, self.max_megapixels))

    async def _detect(self, answers: Sequence[asyncio.Future[Answer]], read: Sequence[Read]) -> None:
        """Answers a batch whose images have been read."""
        batch = []
        for answer, image in zip(answers, read):
            if isinstance(image, BaseException):
                answer.set_exception(image)
            else:
                batch.append((answer, image))
        if not batch:
            return
        self.seen(len(batch))
        try:
            found = await _in_thread(self.detector, self.detect, [image for _, image in batch])
        except Exception as error:  # each request reports it
            for answer, _ in batch:
                answer.set_exception(error)
        else:
            for (answer, image), detections in zip(batch, found):
                answer.set_result(Answer(*image.size, detections))


async def _in_thread(pool: ThreadPoolExecutor, call: Callable[..., Returned], *arguments: Any) -> Returned:
    """The result of a call. Raises its error, and that of a system that has no more threads for the pool."""
    return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)
