"""Runs that end by kill -9, at a step or at any stage of a save, and go on to the weights of the undisturbed run."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_helpers import NUM_TRAIN, tiny_config
from run_cases import NEVER, SCRIPT, assert_ends_like, environment, first, going_on

from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer

REPEATED = ("data.sampling=1.0",)  # 16 or so samples of 12 images
EVENTS = range(12, 60)  # of kill_at, from after the first save to before the last one
pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="counts processes in /proc")


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, which saves nothing before its end."""
    folder = tmp_path_factory.mktemp("whole")
    assert Trainer(tiny_config(data, "train.epochs=3"), folder, torch.device("cpu")).run() is None
    return folder


@pytest.fixture(scope="module")
def whole_repeated(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repeated")
    trainer = Trainer(tiny_config(data, "train.epochs=3", *REPEATED), folder, torch.device("cpu"))
    assert trainer.run() is None and trainer.state.pace.num_images > NUM_TRAIN
    return folder


def assert_killed_and_finished(data: Path, whole: Path, out: Path, events: list[int], *updates: str) -> None:
    """Each kill hits a run of its own, in one process that imports once."""
    commands: list[str] = []
    for event in events:
        folder = out / f"run{event}"
        commands += [f"kill{event}", *first(data, folder, *updates), "--", NEVER, *going_on(folder), "--"]
    subprocess.run([sys.executable, SCRIPT, out, *commands[:-1]], env=environment(), check=True, timeout=600)
    for event in events:
        result = json.loads((out / f"kill{event}.json").read_text())
        assert (result["code"], result["left"]) == (-signal.SIGKILL, 0), result["said"]
        assert_ends_like(out / f"run{event}", whole)
        assert not list((out / f"run{event}").glob(".*.part"))
        ours, theirs = (read_rows(folder / "metrics.csv") for folder in (out / f"run{event}", whole))
        assert [(row["kind"], row["loss"]) for row in ours] == [(row["kind"], row["loss"]) for row in theirs]


@pytest.mark.parametrize("seed", [0])
def test_killed_anywhere_it_goes_on_to_the_same_weights(data: Path, whole: Path, tmp_path: Path, seed: int) -> None:
    assert_killed_and_finished(data, whole, tmp_path, random.Random(seed).sample(EVENTS, 2))


@pytest.mark.parametrize("number", [2, pytest.param(5, marks=pytest.mark.heavy)])
def test_repeated_images_survive_kills(data: Path, whole_repeated: Path, tmp_path: Path, number: int) -> None:
    assert_killed_and_finished(data, whole_repeated, tmp_path, random.Random(5).sample(EVENTS, number), *REPEATED)


@pytest.mark.heavy
def test_twenty_kills(data: Path, whole: Path, tmp_path: Path) -> None:
    assert_killed_and_finished(data, whole, tmp_path, random.Random(1).sample(EVENTS, 20))


@pytest.mark.heavy  # three starts of torchrun
@pytest.mark.parametrize("sampling", [pytest.param((), id="uniform"), pytest.param(REPEATED, id="repeat_factor")])
def test_two_processes(data: Path, tmp_path: Path, sampling: tuple[str, ...]) -> None:
    """One of the two is killed, torchrun ends the other, and both go on."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", SCRIPT]
    settings = ("data.train_batch_size=2", *sampling)

    def run(moment: str, command: list[str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*launch, moment, *command], env=environment(), capture_output=True, text=True, timeout=120
        )

    assert run(NEVER, first(data, tmp_path / "whole", *settings)).returncode == 0
    done = run("kill26", first(data, tmp_path / "killed", *settings))
    assert done.returncode != 0 and "Signal 9" in done.stderr, done.stderr
    assert run(NEVER, going_on(tmp_path / "killed")).returncode == 0
    assert_ends_like(tmp_path / "killed", tmp_path / "whole")
