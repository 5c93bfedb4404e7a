"""OpenMP threads yield the CPU on a crowded machine, unless the user has decided how they wait."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

from rtdetr import cli, openmp_threads

TEAM = """
import os, torch
from rtdetr.openmp_threads import _sleep, _thread, seconds_queued
torch.ones(2**20).add_(1)
def tasks(): return len(os.listdir("/proc/self/task"))
before = tasks()
with _thread('team', _sleep):
    while tasks() < before + 2: pass  # a Python thread, and the second thread of its team
while tasks() > before: pass
assert seconds_queued() > 0
"""


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    """Any system, a look every millisecond, and threads that queue as much as the list says."""
    shares = [0.0]
    for name in openmp_threads.CHOICES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(openmp_threads, "TASKS", tmp_path / "task")
    (tmp_path / "schedstat").touch()
    monkeypatch.setattr(openmp_threads, "INTERVAL", 0.001)
    monkeypatch.setattr(openmp_threads, "seconds_queued", lambda: shares[0] * time.monotonic())
    yield shares


def test_crowded_at_once_and_quiet_with_patience() -> None:
    shares = [0.1, 0.25, 0.9, 0.25, 0.1, 0.1, 0.1, 0.25, 0.1, 0.1, 0.1, 0.1, 0.25, 0.4]
    assert list(openmp_threads.crowded(shares)) == [False] * 2 + [True] * 9 + [False] * 2 + [True]


def test_a_team_sleeps_while_the_machine_is_crowded(looks: list[float]) -> None:
    with openmp_threads.yielding_cpu():
        wait_for(lambda: "yielding_cpu" in names())
        assert "sleeping_team" not in names()
        looks[0] = 1.0
        wait_for(lambda: "sleeping_team" in names())
        looks[0] = 0.0
        wait_for(lambda: "sleeping_team" not in names())
        looks[0] = 1.0
        wait_for(lambda: "sleeping_team" in names())
    assert not {"yielding_cpu", "sleeping_team"} & set(names())


def test_no_team_while_torch_is_being_imported(looks: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", ModuleType("torch"))
    looks[0] = 1.0
    asked: list[float] = []
    monkeypatch.setattr(openmp_threads, "seconds_queued", lambda: asked.append(1.0) or len(asked) * 10.0)
    with openmp_threads.yielding_cpu():
        wait_for(lambda: len(asked) > 5)
        assert "sleeping_team" not in names()


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"])
def test_the_users_choice_wins(looks: list[float], monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "active")
    with openmp_threads.yielding_cpu():
        assert "yielding_cpu" not in names()


def test_systems_that_do_not_count_queueing(looks: list[float], tmp_path: Path) -> None:
    (tmp_path / "schedstat").unlink()
    with openmp_threads.yielding_cpu():
        assert "yielding_cpu" not in names()


def test_commands_yield_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    entered = []

    @contextmanager
    def noted() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(cli, "yielding_cpu", noted)
    assert cli.main(["eval", "-w", str(tmp_path / "missing.pth"), "--device", "cpu"]) == 2
    assert entered == [True]


@pytest.mark.skipif(not openmp_threads.TASKS.is_dir(), reason="needs Linux")
def test_the_team_is_one_of_openmp_threads() -> None:
    environment = {"OMP_NUM_THREADS": "2", "PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    subprocess.run([sys.executable, "-c", TEAM], env=environment, check=True, timeout=120)
