"""The state of a run: weights, EMA, optimiser, and its position."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from rtdetr.config import Config, config_to_dict, flat, settled, with_values
from rtdetr.data.classes import Classes
from rtdetr.engine import distributed
from rtdetr.engine.early_stop import EarlyStop
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.optim import build_optimizer, load_optimizer
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, make_checkpoint
from rtdetr.weights.load import load_exactly
from rtdetr.wording import option

PACE_NAMES = ("data.train_batch_size", "processes", "train.accumulate", "training images", "train.epochs")


class Pace(NamedTuple):
    """The settings that convert a position in the data into a number of optimiser steps."""

    batch_size: int  # images per process
    num_processes: int
    accumulate: int
    num_images: int
    epochs: int

    @classmethod
    def of(cls, cfg: Config, num_images: int) -> Pace:
        """The pace of a run of the present processes."""
        batch_size, accumulate = settled(cfg.data.train_batch_size), settled(cfg.train.accumulate)
        return cls(batch_size, distributed.world_size(), accumulate, num_images, settled(cfg.train.epochs))

    @property
    def global_batch(self) -> int:
        return self.batch_size * self.num_processes

    @property
    def batches(self) -> int:
        """Batches per epoch and process."""
        return self.num_images // self.global_batch

    def steps(self, epoch: int, start_batch: int) -> int:
        """Optimiser steps before that batch. An epoch ends with a step, even if it has fewer batches."""
        per_epoch = math.ceil(self.batches / self.accumulate)
        return (epoch + 1) * per_epoch - math.ceil((self.batches - start_batch) / self.accumulate)

    def total(self, most: int) -> int:
        """Optimiser steps of the run; at most `most`, unless that is 0."""
        steps = self.steps(self.epochs, 0)
        return min(steps, most or steps)

    def changes(self, before: Pace) -> str:
        return ", ".join(f"{name} {old} -> {new}" for name, old, new in zip(PACE_NAMES, before, self) if old != new)


class RunState:
    """The state of a run of `model`, at first that before its first step; `content` returns it and `load` restores it.

    A run is at batch `start_batch` of `epoch`; `iteration` follows from that and the present settings. validation:
    digest of the validation boxes, as `best_ap` holds for these alone.
    """

    def __init__(self, cfg: Config, classes: Classes, model: nn.Module, num_images: int, validation: str) -> None:
        self.cfg, self.classes, self.model, self.validation = cfg, classes, model, validation
        self.pace = Pace.of(cfg, num_images)
        self.total_iterations = self.pace.total(cfg.train.max_iterations)
        self.optimizer = build_optimizer(model, cfg.optimizer)
        device = next(model.parameters()).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.train.precision == "fp16")
        self.ema = ModelEma(model, cfg.ema)
        self.iteration = self.epoch = self.start_batch = 0
        self.saved_iteration = 0  # iteration stored in the resumed checkpoint
        self.best_ap, self.evaluation_due = -math.inf, False  # COCO's AP is -1 without boxes
        self.warned = False  # that AP is still about 0
        self.early_stop = EarlyStop(cfg.train.patience)
        self.began: dict[str, Any] | None = None  # see how_it_began() in auto_config.py

    @property
    def finished(self) -> bool:
        return self.iteration >= self.total_iterations

    def to_be_evaluated(self) -> bool:
        """Whether an evaluation is due after an epoch that ends here."""
        every = self.cfg.train.eval_every
        return self.finished or (every > 0 and self.epoch % every == 0)

    def content(self) -> dict[str, Any] | None:
        """Returns the content of a checkpoint, with the run's tensors; None except on the main process. Every process
        must call it."""
        generators = distributed.gather_objects(rng_state())
        if not distributed.is_main():
            return None
        training = {
            "optimizer": self.optimizer.state_dict(),
            "optimizer_type": type(self.optimizer).__name__,
            "scaler": self.scaler.state_dict(),
            "iteration": self.iteration,
            "epoch": self.epoch,
            "pictures": self.start_batch * self.pace.global_batch,  # of this epoch, by all processes
            "num_pictures": self.pace.num_images,
            "ema_updates": self.ema.num_updates,
            "best_ap": self.best_ap,
            "validation": self.validation,
            "evaluation_due": self.evaluation_due,
            "warned": self.warned,
            "early_stop": self.early_stop.state(),
            "rng": generators,
        }
        ema = self.ema.model.state_dict()
        return make_checkpoint(self.cfg, self.classes, self.model.state_dict(), ema, training, began=self.began)

    def load(self, path: Path) -> list[str]:
        """Restores the run in a checkpoint, random generators included. Returns a sentence on the settings that
        changed, one on where the run continues if that changed, and one if the validation data changed. Raises
        CheckpointError if it does not fit."""
        content = load_checkpoint(path)
        state = content["training"]
        if state is None:
            raise CheckpointError(
                f"{path}: holds weights but no training state; "
                + option("start from them with -t", "train() the model that from_pretrained() makes of them")
                + ", or resume last.pth"
            )
        classes = Classes.of(content["classes"])
        if (classes.category_ids, classes.names) != (self.classes.category_ids, self.classes.names):
            raise CheckpointError(
                f"{path}: trained for other classes than those in {self.cfg.data.train.annotations}: "
                f"{classes.listed()}, not {self.classes.listed()}; "
                + option("start from its weights with -t", "train() the model that from_pretrained() makes of it")
            )
        before, now = flat(content["config"]), flat(config_to_dict(self.cfg))
        differing = [key for key in before if key not in PACE_NAMES and now.get(key, before[key]) != before[key]]
        changed = ", ".join(f"{key} {before[key]} -> {now[key]}" for key in differing)
        told = [f"{path}: {changed}"] if changed else []
        load_exactly(self.model, content["model"], path)
        load_exactly(self.ema.model, content["ema"], path)
        own = type(self.optimizer).__name__
        try:
            if (kind := state.get("optimizer_type", own)) != own:  # older files do not say
                raise ValueError(f"that of {kind}, not of {own}")
            load_optimizer(self.optimizer, state["optimizer"])
        except ValueError as error:
            since = f"changed since then: {changed}" if changed else "were other layers frozen?"
            raise CheckpointError(f"{path}: the optimiser state does not fit ({error}); {since}") from error
        if self.scaler.is_enabled() and state["scaler"]:  # empty when the run had another precision
            self.scaler.load_state_dict(state["scaler"])
        self.ema.num_updates = state["ema_updates"]
        self.evaluation_due, self.began = state["evaluation_due"], content.get("began")
        self.warned = state.get("warned", False)  # older files do not say
        same_validation = state.get("validation", self.validation) == self.validation
        if same_validation:
            self.best_ap = state["best_ap"]
            if "early_stop" in state:  # older files have none
                self.early_stop.load(state["early_stop"])
        if distributed.rank() < len(state["rng"]):
            set_rng_state(state["rng"][distributed.rank()])
        told += self._find_position(content["config"], state, path)
        if not same_validation:
            told.append(
                f"{path}: was evaluated on other validation data; the next evaluation counts as the best so far"
            )
        return told

    def _find_position(self, config: Mapping[str, Any], state: Mapping[str, Any], path: Path) -> list[str]:
        """Sets the position at which the run in a checkpoint stopped, in whole batches of the present size. Returns a
        sentence on it if its settings changed."""
        batch_size, num_processes = config["data"]["train_batch_size"], len(state["rng"])
        images = state.get("pictures")
        if images is None:  # older files counted batches
            images = state["start_batch"] * batch_size * num_processes
        batches = images // self.pace.global_batch
        ended = batches >= self.pace.batches  # an epoch has fewer batches than before
        self.epoch, self.start_batch = (state["epoch"] + 1, 0) if ended else (state["epoch"], batches)
        self.iteration = self.pace.steps(self.epoch, self.start_batch)
        self.evaluation_due |= ended and self.to_be_evaluated()
        self.saved_iteration = state["iteration"]
        stop, saved = self.early_stop, max(1, self.saved_iteration)
        stop.best_iteration = math.ceil(stop.best_iteration * self.iteration / saved)  # as metrics.csv is renumbered
        num_images = state.get("num_pictures", self.pace.num_images)
        train = config["train"]
        before = Pace(batch_size, num_processes, train["accumulate"], num_images, train["epochs"])
        if before == self.pace:
            return []
        if self.finished:
            return [f"{path}: {self.pace.changes(before)}"]
        return [
            f"{path}: {self.pace.changes(before)}; continues in epoch {self.epoch + 1} after "
            f"{self.start_batch * self.pace.global_batch} of {self.pace.num_images} images, at iteration "
            f"{self.iteration} of {self.total_iterations}"
        ]


def with_absolute_paths(cfg: Config) -> Config:
    """The config as a run stores it: a resumed run finds its data from any directory."""
    keys = [f"data.{split}.{key}" for split in ("train", "val") for key in ("images", "annotations")]
    paths = {key: attrgetter(key)(cfg) for key in keys}
    return with_values(cfg, {key: os.path.abspath(path) for key, path in paths.items() if path})


def seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def be_deterministic() -> None:
    """Makes torch replace non-deterministic GPU kernels by slower ones, or raise."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a GPU's first matrices are multiplied
    torch.use_deterministic_algorithms(True)


def rng_state() -> dict[str, Any]:
    """The state of Python's, NumPy's and torch's generators, in types that a weights-only load accepts."""
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
