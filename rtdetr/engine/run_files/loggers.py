"""The loggers that `train.loggers` names. W&B and MLflow read their own variables, such as WANDB_PROJECT and
MLFLOW_TRACKING_URI."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rtdetr.config import flat
from rtdetr.engine.callbacks import Callback, Outcome, Run
from rtdetr.extras import optional
from rtdetr.outputs import atomic_write
from rtdetr.weights.checkpoint import LAST

if TYPE_CHECKING:
    from PIL import Image

NOTES = "loggers.json"  # in the run folder
# Seconds after which W&B's own process has a row on disk. By default it takes 15, and loses them when a run is killed;
# where W&B is online, the server tells a resumed run which rows have arrived. Old versions have no such setting.
FLUSH, FLUSH_SETTING = 0.01, "x_transaction_log_flush_interval"
STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}  # of MLflow
ROOM = 1 << 20  # bytes that a disk needs for rows and images of TensorBoard
MOST_PARAMETERS, MOST_METRICS, LONGEST = 100, 1000, 500  # of one request to MLflow, and characters of a parameter


def make_loggers(names: Sequence[str]) -> dict[str, Callback]:
    """Creates loggers by name. Raises MissingPackage if the package of one is not installed."""
    kinds = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}
    return {name: kinds[name]() for name in names}


class TensorBoardLogger(Callback):
    """Event files in FOLDER/tensorboard, complete after every event. A full disk raises OSError here; later it would
    end the thread of torch's SummaryWriter, with a traceback."""

    def on_start(self, run: Run) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow

        self._folder = run.folder / "tensorboard"
        # TensorBoard ignores older events of the steps that a resumed run repeats; of all, if steps are numbered anew.
        first = 1 if run.renumbered else run.iteration + 1
        self._writer = SummaryWriter(str(self._folder), purge_step=first if run.iteration else None)
        self._add(map(_from_csv, run.rows if run.renumbered else ()))

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        self._add([_row("train", iteration, epoch, values)])

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        self._add([_row("eval", iteration, epoch, figures)])

    def on_images(self, iteration: int, images: Mapping[str, Image.Image]) -> None:
        with self._written():
            for tag, image in images.items():
                self._writer.add_image(tag, np.asarray(image), iteration, dataformats="HWC")

    def on_end(self, outcome: Outcome) -> None:
        self._writer.close()

    def _add(self, rows: Iterable[Row]) -> None:
        with self._written():
            for row in rows:
                for name, value in row.values.items():
                    self._writer.add_scalar(name, value, row.iteration)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Context manager: on exit, everything added inside is in the file."""
        with tempfile.TemporaryFile(dir=self._folder) as probe:
            probe.write(bytes(ROOM))
        yield
        self._writer.flush()


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


class WandbLogger(RemoteLogger):
    name = "wandb"

    def __init__(self) -> None:
        self._wandb: Any = optional("wandb", "wandb", "train.loggers: wandb")

    def begin(self, run: Run, known: str | None) -> str:
        settings = self._wandb.Settings
        flush = {FLUSH_SETTING: FLUSH} if FLUSH_SETTING in settings.model_fields else {}
        self._run = self._wandb.init(
            id=known or secrets.token_hex(4),
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "rtdetr"),
            name=os.environ.get("WANDB_NAME", run.folder.resolve().name),
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.config),
            settings=settings(**flush),
        )
        if known is not None and not self._run.offline:
            self.sent = int(self._run.starting_step)
        self._run.define_metric("iteration")
        self._run.define_metric("*", step_metric="iteration")
        return str(self._run.id)

    def send(self, first: int, rows: Sequence[Row]) -> None:
        for number, row in enumerate(rows, start=first):
            self._run.log({**row.values, "iteration": row.iteration, "epoch": row.epoch}, step=number, commit=True)
        if self._run.offline:
            time.sleep(5 * FLUSH)

    def on_end(self, outcome: Outcome) -> None:
        self._run.finish(exit_code=int(outcome == "failed"))


class MlflowLogger(RemoteLogger):
    name = "mlflow"

    def __init__(self) -> None:
        self._mlflow: Any = optional("mlflow", "mlflow", "train.loggers: mlflow")
        self._client = self._mlflow.MlflowClient()

    def begin(self, run: Run, known: str | None) -> str:
        self._resumed = known is not None
        if known is not None:
            self._client.update_run(known, status="RUNNING")
            self._run, self.sent = known, 0  # the server tells which rows it has
            return known
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "rtdetr")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._run = str(self._client.create_run(number, run_name=run.folder.resolve().name).info.run_id)
        parameter = self._mlflow.entities.Param
        parameters = [parameter(key, str(value)[:LONGEST]) for key, value in flat(run.config).items()]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + MOST_PARAMETERS])
        return self._run

    def send(self, first: int, rows: Sequence[Row]) -> None:
        names = {name for row in rows for name in row.values} if self._resumed else ()  # the server has some of them
        history = self._client.get_metric_history
        there = {name: {each.step for each in history(self._run, name)} for name in names}
        self._resumed = False
        now, metric = int(time.time() * 1000), self._mlflow.entities.Metric
        metrics = [
            metric(name, value, now, row.iteration)
            for row in rows
            for name, value in row.values.items()
            if row.iteration not in there.get(name, ())
        ]
        for start in range(0, len(metrics), MOST_METRICS):
            self._client.log_batch(self._run, metrics=metrics[start : start + MOST_METRICS])

    def on_end(self, outcome: Outcome) -> None:
        self._client.set_terminated(self._run, STATUS[outcome])


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _row(kind: str, iteration: int, epoch: int, values: Mapping[str, float]) -> Row:
    return Row(iteration, epoch, {f"{kind}/{name}": float(f"{value:.6g}") for name, value in values.items()})


def _from_csv(row: Mapping[str, str]) -> Row:
    values = {name: float(text) for name, text in row.items() if text and name not in ("kind", "iteration", "epoch")}
    return _row(row["kind"], int(row["iteration"]), int(row["epoch"]), values)
