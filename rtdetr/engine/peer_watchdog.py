"""A watchdog between the processes of a run: if one dies, the others exit with a sentence instead of hanging.

Each process holds a connection to the first one. The OS closes it when the process ends, for whatever reason; a
process that succeeds sends GOODBYE first. TCP keep-alive detects a lost machine after 40 seconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import hmac
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any, cast

GOODBYE = 0xFFFF  # sent instead of the rank that was lost
GRACE = 20.0  # seconds for a process to end by itself; its GPU may wait for the process that died
CONNECTING = 30.0  # seconds
KEY, NUMBER = 16, 2  # bytes


class ProcessLost(RuntimeError):
    """Another process of the run has died; the message is one sentence."""

    exit_code = 1


class PeerWatchdog:
    """gather: returns the values of all processes in rank order. If no connection is possible, as behind some
    firewalls, there is no watchdog, and `why_not` contains the reason."""

    def __init__(self, rank: int, world_size: int, gather: Callable[[Any], list[Any]]) -> None:
        self.rank, self.world_size, self.why_not = rank, world_size, ""
        self._lost: int | None = None
        self._found, self._told, self._closed = threading.Event(), threading.Event(), threading.Event()
        self._lines: dict[socket.socket, int] = {}  # connections, and the rank at the other end
        self._selector = selectors.DefaultSelector()
        server = _server(world_size) if rank == 0 else None
        port, key = gather((server.getsockname()[1], secrets.token_bytes(KEY)) if server else None)[0]
        try:
            if server is not None:
                self._accept(server, key)
            else:
                line = socket.create_connection((os.environ.get("MASTER_ADDR", "127.0.0.1"), port), CONNECTING)
                line.sendall(key + rank.to_bytes(NUMBER, "big"))
                self._keep(line, 0)
        except OSError as error:
            self.why_not = f"no line to the first process ({error}): when one dies, others may wait for minutes"
        self._watcher = threading.Thread(target=self._watch, name="peer_watchdog", daemon=True)
        self._watcher.start()

    def lost(self, seconds: float) -> str | None:
        """Returns a sentence on a process that has died or dies within that time; None if all are alive."""
        if not self._found.wait(seconds):
            return None
        self._told.set()
        return self._sentence()

    def close(self, well: bool) -> None:
        """well: this process has finished; the others ignore its end."""
        self._closed.set()
        for line in self._lines:
            with contextlib.suppress(OSError):
                if well:
                    line.sendall(GOODBYE.to_bytes(NUMBER, "big"))
                line.shutdown(socket.SHUT_RDWR)  # which ends the watchdog
        self._watcher.join()
        for line in self._lines:
            line.close()

    def _accept(self, server: socket.socket, key: bytes) -> None:
        """Accepts connections from all other processes; unknown clients are refused."""
        server.settimeout(CONNECTING)
        with server:
            while len(self._lines) < self.world_size - 1:
                line, _ = server.accept()
                line.settimeout(CONNECTING)
                said = line.recv(KEY + NUMBER, socket.MSG_WAITALL)
                if hmac.compare_digest(said[:KEY], key):
                    self._keep(line, int.from_bytes(said[KEY:], "big"))
                else:
                    line.close()

    def _keep(self, line: socket.socket, rank: int) -> None:
        line.settimeout(None)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._lines[line] = rank
        self._selector.register(line, selectors.EVENT_READ)

    def _watch(self) -> None:
        """Waits for the first broken connection, informs the others, and kills this process unless it exits."""
        with self._selector as selector:
            while selector.get_map() and self._lost is None:
                heard = [cast(socket.socket, key.fileobj) for key, _ in selector.select()]
                for line in heard:
                    selector.unregister(line)
                self._lost = next((rank for rank in map(self._news, heard) if rank is not None), None)
        if self._lost is None or self._closed.is_set():
            return
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.sendall(self._lost.to_bytes(NUMBER, "big"))
        self._found.set()
        if not self._told.wait(0.5) and not self._closed.is_set():  # waiting threads learn of it, too
            print(f"error: {self._sentence()}", file=sys.stderr, flush=True)
        # Not a Python thread: a library that waits for the other process may hold the interpreter, even at its end.
        self._nowhere = open(os.devnull, "w")  # noqa: SIM115, for as long as the process lives
        faulthandler.dump_traceback_later(GRACE, exit=True, file=self._nowhere)

    def _news(self, line: socket.socket) -> int | None:
        """Returns the rank of the lost process, if any."""
        try:
            said = line.recv(NUMBER, socket.MSG_WAITALL)
        except OSError:
            said = b""
        if len(said) < NUMBER:
            return self._lines[line]
        number = int.from_bytes(said, "big")
        return None if number == GOODBYE else number

    def _sentence(self) -> str:
        return (
            f"process {self._lost} of {self.world_size} has died, so process {self.rank} ends, too; its own message or "
            "the system's log (out of memory?) says why; resume from the run's last.pth"
        )


def _server(backlog: int) -> socket.socket:
    """A listening socket on any port, for IPv4 and IPv6."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)
