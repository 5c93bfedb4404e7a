"""Weights & Biases: rows and config of a run. Settings come from W&B's own variables, such as WANDB_PROJECT."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from typing import Any

from rtdetr.engine.callbacks import Outcome, Run
from rtdetr.engine.run_files.remote_logger import RemoteLogger, Row

# Seconds after which W&B's own process has a row on disk. By default it takes 15, and loses them when a run is killed;
# where W&B is online, the server tells a resumed run which rows have arrived. Old versions have no such setting.
FLUSH, FLUSH_SETTING = 0.01, "x_transaction_log_flush_interval"


class WandbLogger(RemoteLogger):
    name = "wandb"

    def __init__(self, wandb: Any) -> None:
        self._wandb = wandb

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
