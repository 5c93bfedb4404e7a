"""The loggers that `train.loggers` names; TensorBoard's here, each other one in its own file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from rtdetr.engine.callbacks import Callback, Outcome, Run
from rtdetr.engine.log import say
from rtdetr.extras import optional

if TYPE_CHECKING:
    from PIL import Image


def make_loggers(names: Sequence[str]) -> dict[str, Callback]:
    """Creates loggers by name. Raises MissingPackage if the package of one is not installed."""
    made: dict[str, Callback] = {}
    for name in dict.fromkeys(names):
        if name == "tensorboard":
            made[name] = TensorBoardLogger()
        elif name == "wandb":
            from rtdetr.engine.run_files.wandb_logger import WandbLogger

            made[name] = WandbLogger(optional("wandb", "wandb", "train.loggers: wandb"))
        else:
            from rtdetr.engine.run_files.mlflow_logger import MlflowLogger

            made[name] = MlflowLogger(optional("mlflow", "mlflow", "train.loggers: mlflow"))
    return made


class TensorBoardLogger(Callback):
    """Event files in FOLDER/tensorboard. While the disk is full, rows and images are lost."""

    def __init__(self) -> None:
        self._has_gap = False

    def on_start(self, run: Run) -> None:
        from rtdetr.engine.run_files.tensorboard import TensorBoard

        self._folder = run.folder / "tensorboard"
        self._board = TensorBoard(self._folder, run.iteration + 1 if run.iteration else None)

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        self._add(iteration, "train", values)

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        self._add(iteration, "eval", figures)

    def on_images(self, iteration: int, images: Mapping[str, Image.Image]) -> None:
        with self._gaps(), self._board.writing() as writer:
            for tag, image in images.items():
                writer.add_image(tag, np.asarray(image), iteration, dataformats="HWC")

    def on_end(self, outcome: Outcome) -> None:
        with self._gaps():
            self._board.close()

    def _add(self, iteration: int, kind: str, values: Mapping[str, float]) -> None:
        with self._gaps(), self._board.writing() as writer:
            for name, value in values.items():
                writer.add_scalar(f"{kind}/{name}", value, iteration)

    @contextmanager
    def _gaps(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_gap:
                say(f"{self._folder}: cannot be written ({error.strerror or error}); rows are missing in TensorBoard")
            self._has_gap = True
