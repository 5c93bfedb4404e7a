"""MLflow: rows and config of a run. Settings come from MLflow's own variables, such as MLFLOW_TRACKING_URI."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rtdetr.engine.callbacks import Outcome, Run
from rtdetr.engine.run_files.remote_logger import RemoteLogger, Row

STATUS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
MOST_PARAMETERS, MOST_METRICS, LONGEST = 100, 1000, 500  # of one request, and characters of a parameter


class MlflowLogger(RemoteLogger):
    name = "mlflow"

    def __init__(self, mlflow: Any) -> None:
        self._mlflow, self._client = mlflow, mlflow.MlflowClient()

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
        parameters = [parameter(key, str(value)[:LONGEST]) for key, value in _flat(run.config)]
        for start in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[start : start + MOST_PARAMETERS])
        return self._run

    def send(self, first: int, rows: Sequence[Row]) -> None:
        there = self._steps_there({name for row in rows for name in row.values}) if self._resumed else {}
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

    def _steps_there(self, names: set[str]) -> dict[str, set[int]]:
        """Steps already stored in a resumed run."""
        return {name: {each.step for each in self._client.get_metric_history(self._run, name)} for name in names}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
