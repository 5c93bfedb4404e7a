"""The loggers that `train.loggers` names: TensorBoard here, and what those that keep a run elsewhere have in common."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rtdetr.engine.callbacks import Callback, Run
from rtdetr.engine.log import say
from rtdetr.extras import optional
from rtdetr.weights.checkpoint import LAST

if TYPE_CHECKING:
    from PIL import Image

NOTES = "loggers.json"  # in the run folder


def make_loggers(names: Sequence[str]) -> dict[str, Callback]:
    """By name. Raises MissingPackage for one whose package is not installed."""
    made: dict[str, Callback] = {}
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            made[name] = TensorBoardLogger()
        elif name == "wandb":
            from rtdetr.engine.wandb_logger import WandbLogger

            made[name] = WandbLogger(optional("wandb", "wandb", "train.loggers: wandb"))
        else:
            from rtdetr.engine.mlflow_logger import MlflowLogger

            made[name] = MlflowLogger(optional("mlflow", "mlflow", "train.loggers: mlflow"))
    return made


class TensorBoardLogger(Callback):
    """Files of events in FOLDER/tensorboard. On a full disk they get a gap, and go on when there is room."""

    def __init__(self) -> None:
        self._has_gap = False

    def on_start(self, run: Run) -> None:
        from rtdetr.engine.run_files.tensorboard import EventFile

        self._board = EventFile(run.folder / "tensorboard", run.iteration + 1 if run.iteration else None)

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        self._add(iteration, "train", values)

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        self._add(iteration, "eval", figures)

    def on_images(self, iteration: int, images: Mapping[str, Image.Image]) -> None:
        with self._gaps():
            for tag, image in images.items():
                self._board.add_image(iteration, tag, image)

    def _add(self, iteration: int, kind: str, values: Mapping[str, float]) -> None:
        with self._gaps():
            self._board.add_numbers(iteration, {f"{kind}/{name}": value for name, value in values.items()})

    @contextmanager
    def _gaps(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_gap:
                say(f"{self._board.path.parent}: cannot be written ({error.strerror or error}); TensorBoard has a gap")
            self._has_gap = True


class Row(NamedTuple):
    """A row of metrics.csv."""

    iteration: int
    epoch: int
    values: dict[str, float]  # by names such as train/loss and eval/AP, with the digits of metrics.csv


class RemoteLogger(Callback):
    """A logger that cannot take a row back. It gets a row when last.pth covers it: what a killed run does again is not
    there twice. FOLDER/loggers.json keeps the run's id there, and how many rows it has, which is noted before they are
    sent: a kill in between costs rows, unless the other side can be asked for them, and doubles none.

    A run that is resumed from an older state than the rows that were sent, or with steps of another size, becomes a new
    run there, with all rows of metrics.csv.
    """

    name = ""

    def begin(self, run: Run, known: str | None) -> str:
        """Opens the run of that id, or a new one; its id. Sets `sent` where the other side knows what it has."""
        raise NotImplementedError

    def send(self, first: int, rows: Sequence[Row]) -> None:
        """first: the number of the first of these rows, from 0."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        self._notes = run.folder / NOTES
        self._waiting: list[Row] = []
        rows = [_from_csv(row) for row in run.rows]
        mine = _read(self._notes).get(self.name, {"id": None, "rows": 0})
        if run.renumbered or mine["rows"] > len(rows):
            mine = {"id": None, "rows": 0}
        self.sent = mine["rows"]
        self._id = self.begin(run, mine["id"])
        self._keep_notes()
        self._deliver(rows[self.sent :])

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        self._waiting.append(_row("train", iteration, epoch, values))

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        self._waiting.append(_row("eval", iteration, epoch, figures))

    def on_save(self, path: Path, iteration: int) -> None:
        if path.name != LAST:
            return
        covered = [row for row in self._waiting if row.iteration <= iteration]
        self._waiting = self._waiting[len(covered) :]
        self._deliver(covered)

    def _deliver(self, rows: Sequence[Row]) -> None:
        if rows:
            first, self.sent = self.sent, self.sent + len(rows)
            self._keep_notes()
            self.send(first, rows)

    def _keep_notes(self) -> None:
        notes = _read(self._notes) | {self.name: {"id": self._id, "rows": self.sent}}
        beside = self._notes.with_suffix(".json.part")  # whoever is killed in here leaves the old file
        beside.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")
        os.replace(beside, self._notes)


def _read(path: Path) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return notes


def _row(kind: str, iteration: int, epoch: int, values: Mapping[str, float]) -> Row:
    return Row(iteration, epoch, {f"{kind}/{name}": float(f"{value:.6g}") for name, value in values.items()})


def _from_csv(row: Mapping[str, str]) -> Row:
    values = {name: float(text) for name, text in row.items() if text and name not in ("kind", "iteration", "epoch")}
    return _row(row["kind"], int(row["iteration"]), int(row["epoch"]), values)
