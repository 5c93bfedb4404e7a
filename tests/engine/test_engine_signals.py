"""Requests to stop as schedulers send them: to every process of a group, at any moment, more than once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from engine_helpers import NANO, tiny_config, tiny_updates
from run_cases import ROOT, assert_ends_like, environment
from signal_runs import GRACE, send
from torch.utils.data import DataLoader

from rtdetr import cli
from rtdetr.data.workers import prepare_worker, signals_held_back
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.signals import StopSignal
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import load_checkpoint

IN_TRAINING = ("first_worker", "worker_init", "step", "while_saving", "evaluation", "scoring")
ON_CPU = ("--device", "cpu")
WORKERS = ("data.num_workers=2", "train.eval_every=1")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="counts processes in /proc"),
]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    assert Trainer(tiny_config(data, *WORKERS), folder, torch.device("cpu")).run() is None
    return folder


def training(data: Path, folder: Path) -> list[str]:
    updates = [*tiny_updates(data), *WORKERS]
    return ["train", "-c", str(NANO), *ON_CPU, "--output-dir", str(folder), "-u", *updates]


@pytest.fixture(scope="module")
def runs(data: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with MOMENT.json and, of trainings, the folder MOMENT."""
    folder = tmp_path_factory.mktemp("runs")
    arguments: list[str] = []
    for moment in (*IN_TRAINING, "setup", "interrupted_twice", "killed"):
        arguments += [moment, *training(data, folder / moment), "--"]
    for moment in ("eval_setup", "eval_detecting"):
        saved = ["--save-json", str(folder / f"{moment}_found.json")]
        arguments += [
            moment,
            "eval",
            "-w",
            str(whole / "best.pth"),
            *ON_CPU,
            *saved,
            "-u",
            "data.train_batch_size=2",
            "--",
        ]
    script = ROOT / "tests" / "support" / "signal_runs.py"
    subprocess.run([sys.executable, script, folder, *arguments[:-1]], env=environment(), check=True, timeout=300)
    return folder


def result_of(runs: Path, moment: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((runs / f"{moment}.json").read_text())
    return result


@pytest.mark.parametrize("moment", IN_TRAINING)
def test_a_group_signal_saves_and_the_run_goes_on(runs: Path, whole: Path, moment: str) -> None:
    result = result_of(runs, moment)
    assert result["code"] == 128 + signal.SIGTERM, result["said"]
    assert "Traceback" not in result["said"] and "stopped by signal 15" in result["said"]
    assert result["left"] == 0
    assert not list((runs / moment).glob(".*.part"))
    assert load_checkpoint(runs / moment / "last.pth")["training"]["iteration"] < 6
    assert cli.main(["train", "-r", str(runs / moment / "last.pth"), *ON_CPU]) == 0
    assert_ends_like(runs / moment, whole)
    assert [row["kind"] for row in read_rows(runs / moment / "metrics.csv")] == (["train"] * 3 + ["eval"]) * 2


@pytest.mark.parametrize("moment", ["setup", "eval_setup"])
def test_before_there_is_something_to_save_it_ends_in_one_line(runs: Path, moment: str) -> None:
    result = result_of(runs, moment)
    lines = [line for line in result["said"].splitlines() if line and " images [" not in line]  # no progress
    assert result["code"] == 128 + signal.SIGTERM and result["left"] == 0, result["said"]
    assert len(lines) == 1 and "signal 15" in lines[0], result["said"]
    assert not (runs / moment).exists() and not (runs / f"{moment}_found.json").exists()


def test_a_stopped_evaluation_keeps_what_it_found(runs: Path, data: Path) -> None:
    """The signal came as the first batch began, which is still finished."""
    result = result_of(runs, "eval_detecting")
    lines = [line for line in result["said"].splitlines() if line and " images [" not in line]  # no progress
    assert result["code"] == 128 + signal.SIGTERM and result["left"] == 0, result["said"]
    assert len(lines) == 1 and lines[0].startswith("stopped by signal 15 after "), result["said"]
    found = json.loads((runs / "eval_detecting_found.json").read_text())
    images = {each["image_id"] for each in found}
    known = json.loads((data / "annotations" / "instances_val.json").read_text())["images"]
    assert 0 < len(images) < len(known)
    assert f"after {len(images)} of {len(known)} images; {len(found)} detections written to" in lines[0]


def test_a_second_ctrl_c_ends_at_once(runs: Path) -> None:
    result = result_of(runs, "interrupted_twice")
    assert result["code"] == 130 and result["left"] == 0 and "Traceback" not in result["said"], result["said"]
    assert "press Ctrl-C again to stop now" in result["said"] and "stopped by Ctrl-C" in result["said"]
    assert not (runs / "interrupted_twice" / "last.pth").exists()


def test_workers_do_not_outlive_a_killed_main_process(runs: Path) -> None:
    result = result_of(runs, "killed")
    assert (result["code"], result["left"]) == (-signal.SIGKILL, 0)


def test_two_processes_under_torchrun(data: Path, tmp_path: Path) -> None:
    """The signal comes to torchrun and to both of its processes, and torchrun passes it on to them once more."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [
        str(ROOT / "tests" / "support" / "signal_runs.py"),
        "torchrun",
        *training(data, tmp_path),
        "data.train_batch_size=2",
    ]
    done = subprocess.run(
        [sys.executable, *launch, *script], env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0 and "stopped by signal 15; resume with" in done.stderr, done.stderr
    ranks = done.stderr.split("torch/distributed/")[0]  # what follows is torchrun's own traceback
    assert "Traceback" not in ranks, done.stderr
    state = load_checkpoint(tmp_path / "last.pth")["training"]
    assert (state["iteration"], len(state["rng"])) == (2, 2)


class Stuck(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        time.sleep(600)
        return index


def test_a_stuck_worker_obeys_its_main_process_only() -> None:
    with signals_held_back():
        iterator = iter(DataLoader(Stuck(), num_workers=1, worker_init_fn=prepare_worker))
    worker = iterator._workers[0]  # type: ignore[attr-defined]
    send(to=worker.pid)
    worker.join(timeout=1.5)
    assert worker.is_alive()
    started = time.monotonic()
    del iterator  # asks the worker to end, and terminates it after five seconds
    worker.join(timeout=5)
    assert not worker.is_alive() and time.monotonic() - started < GRACE


def test_sigterm_asks_once_and_ctrl_c_twice() -> None:
    before = signal.getsignal(signal.SIGINT)  # a shell starts what runs in the background with SIGINT ignored
    signals = StopSignal()
    with signals.listening("stopping"):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert signals.received == signal.SIGTERM
        with pytest.raises(SystemExit) as end:
            signal.raise_signal(signal.SIGINT)
    assert end.value.code == 130
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("command", ["train", "learning-curve"])
def test_a_signal_during_the_imports_ends_in_one_line(
    command: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Slow(ModuleType):
        def __getattr__(self, name: str) -> None:
            if not name.startswith("__"):
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(sys.modules, "rtdetr.config", Slow("rtdetr.config"))
    with pytest.raises((SystemExit, KeyboardInterrupt)) as ended:
        cli.run(command, ["-c", "my.yml"])
    assert ended.type is SystemExit and ended.value.code == 130 and "stopped by Ctrl-C" in capfd.readouterr().err
