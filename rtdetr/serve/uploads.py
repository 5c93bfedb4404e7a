"""Reads the file of a request, limited in size, or raises an error with the status that fits it."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fastapi import HTTPException, Request
from starlette.datastructures import UploadFile
from starlette.types import Message

SECONDS = 30  # for a file to arrive
DRAIN = 200 * 2**20  # bytes of a refused file that are read and dropped
OVERHEAD = 64 * 1024  # bytes that a form may add to its file
# Content types that may be images all the same; curl uses the last one for every file.
OPAQUE = ("", "application/octet-stream", "application/x-www-form-urlencoded")


class Upload:
    """The file of a request, of `megabytes` at most. Use it as a context manager, which drains a refused file.

    Most clients read an answer after they have sent everything, and would report a broken connection instead.
    """

    def __init__(self, request: Request, megabytes: float) -> None:
        self.request, self.megabytes = request, megabytes
        self.kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.is_form = self.kind == "multipart/form-data"
        self.limit = int(megabytes * 1e6) + (OVERHEAD if self.is_form else 0)
        self.received = 0
        self.ended = self.late = False

    async def __aenter__(self) -> Upload:
        return self

    async def __aexit__(self, *_: object) -> None:
        # A client that asked first (Expect: 100-continue) is answered at once, as is one that was too slow already; one
        # that is too slow now is disconnected.
        if "expect" not in self.request.headers and not self.late:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drain(), SECONDS)

    async def read(self) -> bytes:
        """Returns the body, or the file in the form. Raises HTTPException: 400 no file, 408 too slow, 413 too large,
        415 not the type of an image."""
        if not self.is_form and self.kind not in OPAQUE and not self.kind.startswith("image/"):
            raise HTTPException(415, f"expected an image, as the body or in a form, got the type {self.kind!r}")
        if int(self.request.headers.get("content-length", 0)) > self.limit:
            raise self._too_large()
        limited = Request(self.request.scope, self._receive_limited)
        try:
            data = await asyncio.wait_for(file_of_form(limited) if self.is_form else limited.body(), SECONDS)
        except asyncio.TimeoutError as error:
            self.late = True
            raise HTTPException(408, f"the upload took longer than {SECONDS} s; send it again") from error
        if not data:
            raise HTTPException(400, "the request has no image; send its bytes as the body, or a form with a file")
        if len(data) > self.megabytes * 1e6:
            raise self._too_large()
        return data

    async def _receive(self) -> Message:
        message = await self.request.receive()
        self.received += len(message.get("body", b""))
        self.ended = not message.get("more_body", False)
        return message

    async def _receive_limited(self) -> Message:
        message = await self._receive()
        if self.received > self.limit:
            raise self._too_large()
        return message

    async def _drain(self) -> None:
        while not self.ended and self.received < DRAIN:
            await self._receive()

    def _too_large(self) -> HTTPException:
        return HTTPException(
            413, f"the file is larger than {self.megabytes:g} MB, the most that this server takes; send a smaller one"
        )


async def file_of_form(request: Request) -> bytes:
    """Returns the first file in a form, whatever the name of its field; empty if there is none."""
    async with request.form(max_files=1, max_fields=8) as form:
        for value in form.values():
            if isinstance(value, UploadFile):
                return await value.read()
    return b""
