"""The common part of loggers that store a run on a server and cannot delete rows there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.atomic_write import atomic_write
from rtdetr.engine.callbacks import Callback, Run
from rtdetr.weights.checkpoint import LAST

NOTES = "loggers.json"  # in the run folder


class Row(NamedTuple):
    """A row of metrics.csv."""

    iteration: int
    epoch: int
    values: dict[str, float]  # by names such as train/loss and eval/AP, with the digits of metrics.csv


class RemoteLogger(Callback):
    """Sends rows once last.pth covers them, so that steps repeated after a kill are not duplicated. FOLDER/loggers.json
    keeps the run's id and the number of rows, updated before they are sent: a kill in between loses rows if the server
    cannot be asked for them, and duplicates none.

    A run that resumes from a state older than the sent rows, or with another number of images per step, becomes a new
    run on the server, with all rows of metrics.csv.
    """

    name = ""

    def begin(self, run: Run, known: str | None) -> str:
        """Opens the run with that id, or a new one; returns its id. Sets `sent` if the server knows what it has."""
        raise NotImplementedError

    def send(self, first: int, rows: Sequence[Row]) -> None:
        """first: the number of the first of these rows, from 0."""
        raise NotImplementedError

    def on_start(self, run: Run) -> None:
        self._notes = run.folder / NOTES
        self._waiting: list[Row] = []
        rows = [_from_csv(row) for row in run.rows]
        mine = _read(self._notes).get(self.name)
        if mine is None or run.renumbered or mine["rows"] > len(rows):
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
        with atomic_write(self._notes) as beside:
            beside.write_text(json.dumps(notes, indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    notes: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return notes


def _row(kind: str, iteration: int, epoch: int, values: Mapping[str, float]) -> Row:
    return Row(iteration, epoch, {f"{kind}/{name}": float(f"{value:.6g}") for name, value in values.items()})


def _from_csv(row: Mapping[str, str]) -> Row:
    values = {name: float(text) for name, text in row.items() if text and name not in ("kind", "iteration", "epoch")}
    return _row(row["kind"], int(row["iteration"]), int(row["epoch"]), values)
