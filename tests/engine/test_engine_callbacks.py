"""Callbacks and loggers are told all of a run, once, and a logger that fails costs a warning."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import NANO, tiny_config, tiny_updates
from messages import message
from run_cases import rows_of, without_gaps

from rtdetr import Callback, cli
from rtdetr.config import ConfigError
from rtdetr.engine import distributed
from rtdetr.engine.callbacks import CallbackFailed, Outcome, Run
from rtdetr.engine.run_files.loggers import NOTES, RemoteLogger, Row
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import load_checkpoint

CPU = torch.device("cpu")
EVERY_STEP = "train.save_seconds=0"


class Notes(Callback):
    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.rows: list[tuple[str, int, int, dict[str, float]]] = []
        self.run: Run | None = None

    def on_start(self, run: Run) -> None:
        self.run = run
        self.events.append(("start", run.iteration, run.total_iterations))

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        self.events.append(("step", iteration))
        self.rows.append(("train", iteration, epoch, dict(values)))

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        self.events.append(("evaluation", iteration))
        self.rows.append(("eval", iteration, epoch, dict(figures)))

    def on_save(self, path: Path, iteration: int) -> None:
        assert path.is_file()
        self.events.append(("save", path.name, iteration))

    def on_end(self, outcome: str) -> None:
        self.events.append(("end", outcome))


def as_in_csv(rows: Sequence[tuple[str, int, int, Mapping[str, float]]]) -> list[dict[str, str]]:
    written = [{"kind": kind, "iteration": str(iteration), "epoch": str(epoch)} for kind, iteration, epoch, _ in rows]
    return [row | {name: f"{value:.6g}" for name, value in values[3].items()} for row, values in zip(written, rows)]


def test_a_callback_is_told_everything_in_order(data: Path, tmp_path: Path) -> None:
    notes = Notes()
    Trainer(tiny_config(data, "train.max_iterations=4"), tmp_path, CPU, callbacks=[notes]).run()
    assert notes.run is not None and notes.run.folder == tmp_path and notes.run.rows == []
    assert notes.run.config["train"]["max_iterations"] == 4 and "circle" in " ".join(notes.run.classes)
    steps = [("step", i) for i in range(1, 5)]
    best = [("save", "best.pth", 4)] if (tmp_path / "best.pth").is_file() else []
    saved, end = ("save", "last.pth", 4), ("end", "finished")
    assert notes.events == [("start", 0, 4), *steps, saved, ("evaluation", 4), *best, saved, end]
    assert as_in_csv(notes.rows) == without_gaps(tmp_path)


def test_it_hears_of_saves_in_the_background_and_of_a_resumed_run(data: Path, tmp_path: Path) -> None:
    notes = Notes()
    trainer = Trainer(tiny_config(data, EVERY_STEP), tmp_path, CPU, callbacks=[notes])
    notes.on_step = lambda iteration, *_: trainer.signals.__setattr__("received", 15 if iteration == 4 else None)  # type: ignore
    train_step = trainer.train_step

    def slow_enough(batches: Any) -> Any:
        wait([trainer.saver._job] if trainer.saver._job else [])  # else the next save would come some steps later
        return train_step(batches)

    trainer.train_step = slow_enough  # type: ignore[method-assign]
    assert trainer.run() == 15
    saves = [event[2] for event in notes.events if event[0] == "save"]
    assert saves == [1, 2, 3, 4] and notes.events[-1] == ("end", "stopped")
    again = Notes()
    Trainer(tiny_config(data), tmp_path, CPU, resume=tmp_path / "last.pth", callbacks=[again]).run()
    assert again.events[0] == ("start", 4, 6) and again.run is not None and not again.run.renumbered
    assert [row["iteration"] for row in again.run.rows] == ["1", "2", "3", "4"]


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_evaluation", "on_save", "on_images"])
def test_a_failing_logger_is_off_and_the_run_goes_on(
    data: Path, tmp_path: Path, event: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise ConnectionError("no route\nto host")

    broken = type("Broken", (Callback,), {event: fail})()
    monkeypatch.setattr("rtdetr.engine.trainer.make_loggers", lambda names: {"wandb": broken})
    notes = Notes()
    assert Trainer(tiny_config(data), tmp_path, CPU, callbacks=[notes]).run() is None
    said = capsys.readouterr().out
    sentence = f"train.loggers: wandb: {event} failed (ConnectionError: no route to host); it is off for the rest"
    assert said.count(sentence) == 1 and said.count("ConnectionError") == 1
    assert notes.events[-1] == ("end", "finished") and len(read_rows(tmp_path / "metrics.csv")) == 7


@pytest.mark.parametrize("event", ["on_start", "on_step", "on_evaluation", "on_save", "on_end"])
def test_a_failing_callback_ends_the_run_by_name(data: Path, tmp_path: Path, event: str) -> None:
    class Bad(Callback):
        pass

    def fail(*_: Any) -> None:
        raise KeyError("who")

    setattr(Bad, event, fail)
    notes = Notes()
    trainer = Trainer(tiny_config(data), tmp_path, CPU, callbacks=[notes, Bad()])
    with pytest.raises(CallbackFailed, match=rf"^Bad: {event} failed \(KeyError: 'who'\)$") as caught:
        trainer.run()
    assert isinstance(caught.value.__cause__, KeyError)
    assert notes.events[-1] == ("end", "finished" if event == "on_end" else "failed")
    assert trainer.saver._job is None and trainer.train_loader._iterator is None


def test_one_that_fails_at_the_end_keeps_nothing_from_the_others(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bad(Callback):
        def on_end(self, outcome: Outcome) -> None:
            raise KeyError("who")

    notes, drawn = Notes(), []
    monkeypatch.setattr("rtdetr.engine.trainer.draw_curves", lambda _, image: drawn.append(image.name))
    trainer = Trainer(tiny_config(data, "train.max_iterations=1"), tmp_path, CPU, callbacks=[Bad(), notes])
    with pytest.raises(CallbackFailed, match=r"^Bad: on_end failed"):
        trainer.run()
    assert notes.events[-1] == ("end", "finished") and drawn == ["curves.png"]


def test_what_is_no_callback_is_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=message("no such method", "Typo.on_epoch", "on_start", "on_step")):
        type("Typo", (Callback,), {"on_epoch": print})
    with pytest.raises(ConfigError, match=message("expected", "callbacks", "rtdetr.Callback")):
        Trainer(tiny_config(data), tmp_path, CPU, callbacks=[Notes])  # type: ignore[list-item]


def test_only_the_main_process_tells(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "is_main", lambda: False)
    told = Trainer(tiny_config(data), tmp_path, CPU, callbacks=[Notes()]).listeners
    assert told.callbacks == [] and told.loggers == {}


def test_loggers_of_the_config(data: Path, tmp_path: Path) -> None:
    Trainer(tiny_config(data, "train.loggers=[]", "train.max_iterations=1"), tmp_path, CPU).run()
    assert not (tmp_path / "tensorboard").exists() and len(read_rows(tmp_path / "metrics.csv")) == 2
    with pytest.raises(
        ConfigError, match=message("expected", "train.loggers[1]", "tensorboard, wandb, mlflow", "'tb'")
    ):
        tiny_config(data, "train.loggers=[tensorboard, tb]")
    with pytest.raises(ConfigError, match=message("expected", "train.loggers", "list", "[tensorboard]", "'wandb'")):
        tiny_config(data, "train.loggers=wandb")


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_one_sentence_before_the_run(
    data: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    given = [*tiny_updates(data), f"train.loggers=[{name}]"]
    out = tmp_path / "run"
    code = cli.main(["train", "-c", str(NANO), "--device", "cpu", "--output-dir", str(out), "-u", *given])
    said = (
        f'error: train.loggers: {name} needs the package {name}, which is not installed: pip install "rtdetr[{name}]"'
    )
    assert code == 2 and capsys.readouterr().err == said + "\n" and not out.exists()


class Elsewhere(RemoteLogger):
    """Keeps what it gets in a file, as a server would."""

    name = "elsewhere"

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, run: Run, known: str | None) -> str:
        runs = json.loads(self.file.read_text()) if self.file.is_file() else {}
        self.own = known or f"run{len(runs)}"
        runs.setdefault(self.own, [])
        self.file.write_text(json.dumps(runs))
        return self.own

    def send(self, first: int, rows: Sequence[Row]) -> None:
        runs = json.loads(self.file.read_text())
        assert len(runs[self.own]) == first
        runs[self.own] += [[row.iteration, row.values] for row in rows]
        self.file.write_text(json.dumps(runs))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "elsewhere.json"
    monkeypatch.setattr("rtdetr.engine.trainer.make_loggers", lambda names: {"elsewhere": Elsewhere(file)})
    return file


def dying(trainer: Trainer, save: int, before: bool) -> None:
    """Makes the run die at the n-th save: before it, or after it and before anybody is told."""
    number, write = [0], trainer.saver._write

    def counted(*arguments: Any) -> Any:
        number[0] += 1
        if number[0] == save and before:
            raise InterruptedError
        written = write(*arguments)
        if number[0] == save:
            raise InterruptedError
        return written

    trainer.saver._write = counted  # type: ignore[method-assign]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("save", [2, 3, 4, 5])
def test_a_row_gets_elsewhere_once(data: Path, tmp_path: Path, elsewhere: Path, save: int, before: bool) -> None:
    cfg = tiny_config(data, EVERY_STEP, "train.eval_every=1", "train.epochs=3")
    trainer = Trainer(cfg, tmp_path / "run", CPU)
    dying(trainer, save, before)
    with pytest.raises(InterruptedError):
        trainer.run()
    Trainer(cfg, tmp_path / "run", CPU, resume=tmp_path / "run" / "last.pth").run()
    assert json.loads(elsewhere.read_text()) == {"run0": rows_of(tmp_path / "run")}


def test_a_run_of_older_rows_or_other_steps_is_a_new_one(data: Path, tmp_path: Path, elsewhere: Path) -> None:
    folder = tmp_path / "run"
    trainer = Trainer(tiny_config(data, EVERY_STEP), folder, CPU)
    trainer.run()
    assert list(json.loads(elsewhere.read_text())) == ["run0"]
    (folder / "last.pth").unlink()
    behind = load_checkpoint(folder / "last-1.pth")["training"]["iteration"]
    cfg = tiny_config(data, "train.epochs=3", "train.eval_every=1")
    Trainer(cfg, folder, CPU, resume=folder / "last-1.pth").run()
    runs = json.loads(elsewhere.read_text())
    assert behind == 6 and list(runs) == ["run0", "run1"] and runs["run1"] == rows_of(folder)
    cfg = tiny_config(data, "train.epochs=4", "train.accumulate=2")
    Trainer(cfg, folder, CPU, resume=folder / "last.pth").run()
    runs = json.loads(elsewhere.read_text())
    assert list(runs) == ["run0", "run1", "run2"] and runs["run2"] == rows_of(folder)
    assert json.loads((folder / NOTES).read_text())["elsewhere"] == {"id": "run2", "rows": len(runs["run2"])}
