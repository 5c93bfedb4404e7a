"""Saves inside an epoch, in the background, and what becomes of those that fail."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import NANO, tiny_config, tiny_updates
from full_disk import small_files

from rtdetr import cli
from rtdetr.config import ConfigError
from rtdetr.engine.failures import CannotWrite
from rtdetr.engine.run_files import saving
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.run_files.run_lock import run_lock
from rtdetr.engine.step_checks import StepRecord
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
OFTEN = "train.save_seconds=0"


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    Trainer(tiny_config(data), folder, CPU).run()
    return folder


def iteration(path: Path) -> int:
    found: int = load_checkpoint(path)["training"]["iteration"]
    return found


def assert_same_weights(folder: Path, other: Path) -> None:
    ours, theirs = (load_checkpoint(each / "last.pth") for each in (folder, other))
    for part in ("model", "ema"):
        assert all(torch.equal(ours[part][name], tensor) for name, tensor in theirs[part].items())


def test_the_state_is_saved_inside_an_epoch_and_the_one_before_is_kept(data: Path, whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, OFTEN), tmp_path, CPU)
    train_step = trainer.train_step

    def last_step(batches: list[Any]) -> Any:
        trainer.saver.wait()
        if trainer.state.iteration == 2:  # in the middle of the first epoch, without a chance to save
            raise KeyboardInterrupt
        return train_step(batches)

    trainer.train_step = last_step  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    assert [iteration(tmp_path / name) for name in ("last.pth", "last-1.pth")] == [2, 1]
    (tmp_path / ".last.pth.1.part").write_bytes(b"half")
    Trainer(tiny_config(data, OFTEN), tmp_path, CPU, resume=tmp_path / "last-1.pth").run()
    assert_same_weights(tmp_path, whole)
    assert not list(tmp_path.glob(".*.part"))


def test_a_step_waits_for_the_copy_and_not_for_the_disk(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes nothing until the run is three steps further; what it gets is the state of the first step."""
    trainer = Trainer(tiny_config(data, OFTEN, "train.epochs=3"), tmp_path, CPU)
    train_step, free, saved = trainer.train_step, threading.Event(), []

    def slow(path: Path, content: dict[str, Any], before: Path | None = None) -> None:
        assert threading.current_thread() is threading.main_thread() or free.wait(60)
        if path.name == "last.pth":
            saved.append((content["training"]["iteration"], content["model"]))
        save_checkpoint(path, content, before)

    weights: list[dict[str, torch.Tensor]] = []

    def step(batches: list[Any]) -> Any:
        weights.append({name: tensor.clone() for name, tensor in trainer.model.state_dict().items()})
        if trainer.state.iteration == 4:
            free.set()
            trainer.saver.wait()
        return train_step(batches)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    trainer.train_step = step  # type: ignore[method-assign]
    trainer.run()
    assert [number for number, _ in saved[:2]] == [1, 5]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in saved[0][1].items())


@contextmanager
def full_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        yield


@contextmanager
def read_only() -> Iterator[None]:
    """Root may write everywhere; what the system would say is said for it."""
    with pytest.MonkeyPatch.context() as patch:
        error = OSError(errno.EROFS, os.strerror(errno.EROFS))
        patch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(error))
        patch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(error))
        yield


TROUBLES = pytest.mark.parametrize(
    ("trouble", "reason"),
    [(small_files, "File too large"), (full_disk, "No space left on device"), (read_only, "Read-only file system")],
)


@TROUBLES
def test_a_disk_that_is_full_from_the_start_promises_nothing(
    data: Path, tmp_path: Path, trouble: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    capsys.readouterr()
    with trouble():
        trainer.saver.save()
        with pytest.raises(CannotWrite, match=rf"{reason}\); nothing of this run is saved yet; .* start again"):
            trainer.saver.save(final=True)
    assert "training continues, nothing of this run is saved yet" in capsys.readouterr().out


@TROUBLES
@pytest.mark.parametrize("background", [True, False])
def test_a_save_that_fails_is_said_and_the_next_one_succeeds(
    data: Path, tmp_path: Path, trouble: Any, reason: str, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    trainer.saver.save()
    before = (tmp_path / "last.pth").read_bytes()
    capsys.readouterr()
    trainer.state.best_ap = 0.5
    trainer.saver.keep_best()
    with trouble():
        trainer.saver.save(background=background)
        trainer.saver.wait()
        with pytest.raises(CannotWrite, match=rf"best\.pth: cannot be written \({reason}\).*continue with resume"):
            trainer.saver.save(final=True)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{tmp_path}/best.pth: cannot be written ({reason}); training continues, ")
    assert (tmp_path / "last.pth").read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["last.pth"]
    trainer.saver.save(background=background)
    trainer.saver.wait()
    assert load_checkpoint(tmp_path / "best.pth")["training"] is None
    assert load_checkpoint(tmp_path / "last.pth")["training"]["best_ap"] == 0.5


def test_a_run_outlives_a_disk_that_is_full_for_a_while(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_config(data, OFTEN, "train.eval_every=1"), tmp_path, CPU)

    def full(path: Path, content: dict[str, Any], before: Path | None = None) -> None:
        if 2 <= trainer.state.iteration < 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_checkpoint(path, content, before)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    assert trainer.run() is None
    said = capsys.readouterr().out
    assert said.count("training continues") >= 2 and f"{tmp_path}/best.pth: cannot be written" in said
    assert_same_weights(tmp_path, whole)
    assert (tmp_path / "best.pth").is_file()


def test_rows_of_the_log_wait_for_room(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second and third step meet a disk that takes half a row; the fourth brings three rows."""
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    train_step = trainer.train_step
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def step(batches: list[Any]) -> Any:
        size = (tmp_path / "metrics.csv").stat().st_size + 20 if trainer.state.iteration in (1, 2) else before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        return train_step(batches)

    trainer.train_step = step  # type: ignore[method-assign]
    try:
        assert trainer.run() is None
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    rows = read_rows(tmp_path / "metrics.csv")
    assert [(row["kind"], row["iteration"]) for row in rows] == [("train", str(n)) for n in range(1, 7)] + [
        ("eval", "6")
    ]
    said = capsys.readouterr().out
    assert (
        said.count(f"{tmp_path}/metrics.csv: cannot be written (File too large); rows are kept until there is room")
        == 1
    )


def test_what_is_no_disk_error_ends_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr(saving, "save_checkpoint", broken)
    with pytest.raises(ZeroDivisionError, match="a fault of ours"):
        Trainer(tiny_config(data, OFTEN), tmp_path, CPU).run()


@pytest.mark.parametrize(("damaged", "other"), [("last.pth", "last-1.pth"), ("last-1.pth", "last.pth")])
def test_a_damaged_state_names_the_other_one(
    data: Path, tmp_path: Path, damaged: str, other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(tiny_config(data, "train.max_iterations=2"), tmp_path, CPU)
    trainer.saver.save()
    trainer.saver.save()
    good = (tmp_path / other).read_bytes()
    (tmp_path / damaged).write_bytes(good[: len(good) // 2])
    assert cli.main(["train", "-r", str(tmp_path / damaged), "--device", "cpu"]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and f"; or resume from {tmp_path / other}, the run's " in line
    assert cli.main(["train", "-r", str(tmp_path / other), "--device", "cpu"]) == 0
    assert iteration(tmp_path / "last.pth") == 2
    if other == "last-1.pth":  # the state it came from was not replaced by the damaged one in the first save
        assert iteration(tmp_path / "last-1.pth") > 0
    (tmp_path / "last.pth").unlink()
    (tmp_path / "last-1.pth").unlink()
    with pytest.raises(CheckpointError, match=r"no such weight file$"):
        load_checkpoint(tmp_path / "last.pth")


def test_a_file_system_without_links(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    Trainer(tiny_config(data, OFTEN, "train.max_iterations=2"), tmp_path, CPU).run()
    assert iteration(tmp_path / "last.pth") == iteration(tmp_path / "last-1.pth") == 2


def test_one_training_at_a_time(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is started again while it still goes on would write over its own state."""
    monkeypatch.setattr("rtdetr.engine.run_files.run_lock.GRACE", 0.2)
    folder = shutil.copytree(whole, tmp_path / "run")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    new = ["-c", str(NANO), "--output-dir", str(folder), "--overwrite", "-u", *tiny_updates(data)]
    with run_lock(folder):
        for arguments in (["-r", str(folder / "last.pth")], new):
            assert cli.main(["train", "--device", "cpu", *arguments]) == 2
            assert f"{folder}: another training is running in it" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    trainer = Trainer(tiny_config(data, "train.epochs=1"), folder, CPU)
    step = trainer.train_step

    def looking(batches: list[Batch]) -> StepRecord:
        with pytest.raises(ConfigError, match="another training is running in it"), run_lock(folder):
            pass
        return step(batches)

    trainer.train_step = looking  # type: ignore[method-assign]
    assert trainer.run() is None
    place = ExitStack()
    place.enter_context(run_lock(folder))
    threading.Timer(0.1, place.close).start()
    with run_lock(folder):  # as soon as the workers of a killed run have ended
        pass


def test_a_run_started_at_the_same_time_replaces_none(data: Path, tmp_path: Path) -> None:
    place = ExitStack()
    place.enter_context(run_lock(tmp_path))
    threading.Timer(1.0, place.close).start()  # a run that ends at once
    with pytest.raises(ConfigError, match="another training is running in it"):
        Trainer(tiny_config(data), tmp_path, CPU).saver.begin()
