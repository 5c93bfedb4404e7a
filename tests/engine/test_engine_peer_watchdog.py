"""When one of several processes dies, the others end with a sentence, whatever they are waiting for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rtdetr.engine import peer_watchdog

ROOT = Path(__file__).resolve().parents[2]
# argv: what rank 1 does in the third round, and what the others do then
SCRIPT = """
import os, signal, sys, time
from rtdetr import cli
from rtdetr.commands import train
from rtdetr.engine import distributed, peer_watchdog
peer_watchdog.GRACE = 3.0 if sys.argv[2] == "stuck" else 20.0
def run(_):
    with distributed.process_group("cpu"):
        for number in range(5):
            distributed.any_process(False)
            if number == 2 and distributed.rank() == 1:
                if sys.argv[1] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if sys.argv[1] == "fail":
                    raise ValueError("mine alone")
                return 0
            if number == 2 and sys.argv[2] == "stuck":
                time.sleep(60)
            if sys.argv[2] == "alone":
                return 0
    return 0
train.run = run
print("ends with", cli.main(["train"]))
"""


def run(first: str, others: str, world_size: int = 3) -> tuple[list[int], list[str], float]:
    """Exit codes, what each said, and seconds until the last of them ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command = [sys.executable, "-c", SCRIPT, first, others]
    processes = [
        subprocess.Popen(
            command,
            env={**env, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    processes[1].wait(120)
    started = time.monotonic()
    said = [process.communicate(timeout=60)[0] for process in processes]
    return [process.returncode for process in processes], said, time.monotonic() - started


@pytest.mark.parametrize("others", ["waiting", "stuck"])
def test_the_others_end_with_a_sentence(others: str) -> None:
    codes, said, seconds = run("kill", others)
    assert codes[1] == -signal.SIGKILL and seconds < 40
    for rank in (0, 2):
        sentence = f"error: process 1 of 3 has died, so process {rank} ends, too"
        assert said[rank].count(sentence) == 1 and "Traceback" not in said[rank], said[rank]
        assert codes[rank] == 1 if others == "stuck" else "ends with 1" in said[rank]


def test_a_process_that_fails_takes_the_others_along() -> None:
    codes, said, _ = run("fail", "waiting")
    assert codes[1] == 1 and "ValueError: mine alone" in said[1]
    assert "process 1 of 3 has died" in said[0] and "process 1 of 3 has died" in said[2]


def test_who_ends_well_is_not_missed() -> None:
    codes, said, _ = run("return", "alone")
    assert codes == [0, 0, 0] and said == ["ends with 0\n"] * 3


class Late(threading.Thread):
    """Begins when it is waited for."""

    def start(self) -> None:
        pass

    def join(self, timeout: float | None = None) -> None:
        if self.ident is None:
            super().start()
        super().join(20)
        assert not self.is_alive()


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[peer_watchdog.PeerWatchdog]]:
    """Of three processes, here in one, none of which watches before it is waited for."""
    monkeypatch.setattr(peer_watchdog, "threading", SimpleNamespace(Event=threading.Event, Thread=Late))
    monkeypatch.setattr(peer_watchdog.faulthandler, "dump_traceback_later", lambda *_, **__: None)
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_value))
    errors: list[Any] = []
    said: list[Any] = [None] * 3
    all_said = threading.Barrier(3, timeout=20)

    def line(rank: int) -> peer_watchdog.PeerWatchdog:
        def gather(value: Any) -> list[Any]:
            said[rank] = value
            all_said.wait()
            return said

        return peer_watchdog.PeerWatchdog(rank, 3, gather)

    with ThreadPoolExecutor(3) as pool:
        three = list(pool.map(line, range(3)))
    yield three
    for each in three:
        each.close(well=True)
    assert not errors and not any(each.why_not for each in three)


def test_the_watch_may_begin_after_the_end(lines: list[peer_watchdog.PeerWatchdog]) -> None:
    for each in lines:
        each.close(well=True)
    assert [each.lost(0) for each in lines] == [None] * 3


def test_a_goodbye_hides_no_loss(lines: list[peer_watchdog.PeerWatchdog]) -> None:
    """Both are heard at once, whichever comes first."""
    first, second, third = lines
    second.close(well=False)
    third.close(well=True)
    first._watcher.join()
    first._nowhere.close()
    assert "process 1 of 3 has died" in str(first.lost(0))


def test_the_sentence_waits_for_no_import() -> None:
    """Who has lost another process is ended after a while; on a busy machine importing takes as long."""
    script = (
        "import sys; from rtdetr import cli; from rtdetr.engine.peer_watchdog import ProcessLost\n"
        "def lost(*_): raise ProcessLost('1')\n"
        "cli.run = lost; assert cli.main(['train']) == 1\n"
        "print([each for each in sys.modules if each in ('torch', 'rtdetr.export', 'rtdetr.engine.failures')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout == "[]\n", done.stderr
