"""uvicorn with features that it has no setting for: deadlines for headers and for reading an answer, and fewer
connections than descriptors."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import time
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0  # from the connection, or the first byte after an answer, to the end of a request's headers
WRITE_SECONDS = 30.0  # for a client to read what the system does not buffer for it
KEEP_ALIVE = 30  # seconds without a byte after an answer
BACKLOG = 2048  # connections that the system keeps until they are accepted
FULL = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

logger = logging.getLogger("uvicorn.error")


class _Protocol(H11Protocol):
    """Closes connections beyond the limit, and those whose next headers are late or whose answers are not read.
    uvicorn's own timer ends with the first byte, and its own limit refuses requests, not connections."""

    head_deadline: asyncio.TimerHandle | None = None
    write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # closing waits for the last byte, so writing pauses at the first
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.connections.discard(self)
            transport.write(FULL)
            transport.close()
            return
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._forget_head()
        elif self.head_deadline is None:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._forget_write()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        self._forget_write()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self.head_deadline = self.loop.call_later(HEAD_SECONDS, self.transport.abort)

    def _forget_head(self) -> None:
        if self.head_deadline is not None:
            self.head_deadline.cancel()
            self.head_deadline = None

    def _forget_write(self) -> None:
        if self.write_deadline is not None:
            self.write_deadline.cancel()
            self.write_deadline = None


class _Server(uvicorn.Server):
    refused = -1.0  # when it last logged that no connection can be accepted

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._handle_error)
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)  # asyncio uses one number for this and for how many it accepts in a row

    def _handle_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Logs once a second that no connection can be accepted; asyncio logs every failure, with a traceback."""
        error = context.get("exception")
        if "socket" not in context or not isinstance(error, OSError) or error.errno not in NO_DESCRIPTOR:
            loop.default_exception_handler(context)
        elif time.monotonic() >= self.refused + 1:
            self.refused = time.monotonic()
            logger.error(f"connections are waiting, none can be accepted ({error.strerror}); raise `ulimit -n`")


def build_server(app: Any, log_level: str = "warning") -> uvicorn.Server:
    """Returns the server of an application. Half of the descriptors that this process may have are for connections; a
    sixteenth is accepted in a row, before those beyond the limit are closed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = limit if limit != resource.RLIM_INFINITY else 2**20
    config = uvicorn.Config(
        app,
        http=_Protocol,
        ws="none",  # it would take connections over from the protocol
        log_level=log_level,
        timeout_keep_alive=KEEP_ALIVE,
        limit_concurrency=max(2, descriptors // 2),
        backlog=max(1, min(BACKLOG, descriptors // 16)),
    )
    return _Server(config)
