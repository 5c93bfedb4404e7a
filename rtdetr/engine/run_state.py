"""What a run is besides its data: weights, their average, the optimiser, and how far it has come."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from rtdetr.config import Config
from rtdetr.data.classes import Classes
from rtdetr.engine import distributed
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.optim import build_optimizer
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, make_checkpoint, save_checkpoint
from rtdetr.weights.load import load_exactly


class RunState:
    """The state of a run of `model`, which `save` writes and `load` takes back. Nothing has been trained at first."""

    def __init__(self, cfg: Config, classes: Classes, model: nn.Module) -> None:
        self.cfg, self.classes, self.model = cfg, classes, model
        self.optimizer = build_optimizer(model, cfg.optimizer)
        device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.train.precision == "fp16")
        self.ema = ModelEma(model, cfg.ema)
        self.iteration = self.epoch = self.start_batch = 0
        self.best_ap, self.evaluation_due = -1.0, False

    def save(self, path: Path) -> None:
        """Writes a checkpoint on the main process; every process has to call it."""
        generators = distributed.gather_objects(rng_state())
        if not distributed.is_main():
            return
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "iteration": self.iteration,
            "epoch": self.epoch,
            "start_batch": self.start_batch,
            "batch_size": self.cfg.data.train_batch_size,
            "ema_updates": self.ema.num_updates,
            "best_ap": self.best_ap,
            "evaluation_due": self.evaluation_due,
            "rng": generators,
        }
        ema = self.ema.model.state_dict()
        save_checkpoint(path, make_checkpoint(self.cfg, self.classes, self.model.state_dict(), ema, training))

    def load(self, path: Path) -> str | None:
        """Takes over the run in a checkpoint, random generators included. Returns a sentence when it cannot go on
        where that one stopped. Raises CheckpointError."""
        content = load_checkpoint(path)
        state = content["training"]
        if state is None:
            raise CheckpointError(
                f"{path}: holds weights but no training state; start from them with -t, or resume last.pth"
            )
        if tuple(content["classes"]["category_ids"]) != self.classes.category_ids:
            raise CheckpointError(
                f"{path}: trained for other category ids than those in {self.cfg.data.train.annotations}"
            )
        load_exactly(self.model, content["model"], path)
        load_exactly(self.ema.model, content["ema"], path)
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the optimiser state does not fit ({error}); was something else frozen?"
            ) from error
        for group, settings in zip(self.optimizer.param_groups, own):
            group.update(settings)  # the config decides on decay and multipliers, not the file
        if self.scaler.is_enabled() and state["scaler"]:  # empty when the run had another precision
            self.scaler.load_state_dict(state["scaler"])
        self.iteration, self.epoch, self.start_batch = state["iteration"], state["epoch"], state["start_batch"]
        self.ema.num_updates, self.best_ap = state["ema_updates"], state["best_ap"]
        self.evaluation_due = state["evaluation_due"]
        if len(state["rng"]) == distributed.world_size() and state["batch_size"] == self.cfg.data.train_batch_size:
            set_rng_state(state["rng"][distributed.rank()])
            return None
        self.start_batch = 0  # counted batches of another size
        return f"{path}: other batch size or number of processes; epoch {self.epoch} starts anew"


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, in types that a weights-only load accepts."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
