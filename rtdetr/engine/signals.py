"""Stops a run on SIGINT or SIGTERM. Imports nothing slow, so that a command can listen before it imports torch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from rtdetr.wording import signal_name


class StopSignal:
    """Records the first SIGINT or SIGTERM that arrives while it listens.

    Repeated SIGTERMs count as one request: a scheduler sends it to every process of a group, and torchrun passes it
    on as well. A second Ctrl-C ends the program at once.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._remembers = False
        self._promise = ""
        self._interrupts = 0

    def asked(self) -> bool:
        return self.received is not None

    def agreed(self) -> int | None:
        """Returns on every process the signal that one of them received; every process must call this."""
        from rtdetr.engine import distributed

        return next((number for number in distributed.gather_objects(self.received) if number is not None), None)

    def setting_up(self) -> AbstractContextManager[None]:
        """Context manager: inside, a signal ends the program with one line and exit code 128 + n. One of several
        processes continues instead until all of them can stop together; otherwise the others would hang or fail."""
        return self._handling(os.environ.get("WORLD_SIZE", "1") != "1", "stopping when everything is set up")

    def listening(self, promise: str = "") -> AbstractContextManager[None]:
        """Context manager: a signal is recorded, and `promise`, if given, is printed: "stopping after this step"."""
        return self._handling(True, promise)

    @contextmanager
    def _handling(self, remembers: bool, promise: str) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python delivers signals to the main thread only
            return
        outer = self._remembers, self._promise
        self._remembers, self._promise = remembers, promise
        before = {number: signal.signal(number, self._receive) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._remembers, self._promise = outer

    def _receive(self, number: int, frame: object) -> None:
        first, interrupt = self.received is None, number == signal.SIGINT
        self._interrupts += interrupt
        if not first and not interrupt:
            return
        if self._remembers and self._interrupts < 2:
            self.received = self.received or number
            if self._promise:
                again = "; press Ctrl-C again to stop now" if interrupt else ""
                _tell(f"{signal_name(number)}: {self._promise}{again}")
            return
        self.received = number
        _tell(f"stopped by {signal_name(number)}")
        raise SystemExit(128 + number)


def _tell(line: str) -> None:
    """Writes without print: a signal may interrupt a print, whose buffer is then locked."""
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"\n{line}\n".encode())
