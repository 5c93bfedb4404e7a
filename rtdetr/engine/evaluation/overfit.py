"""A sanity check: overfits a few images of the training set. A model that fails here will not learn the whole set."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from rtdetr.config import Config, SplitConfig, with_values
from rtdetr.data.classes import DataError
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import open_train_set
from rtdetr.data.subset import spread, with_boxes, write_subset
from rtdetr.engine import distributed
from rtdetr.engine.signals import StopSignal
from rtdetr.engine.trainer import Trainer
from rtdetr.wording import counted

GOAL = 0.9  # AP50 on the images it was trained on; 16 images of COCO reach 1.0 in 700 iterations
MOST_ITERATIONS, BETWEEN = 700, 50  # all, and between evaluations
WARMUP = 50  # iterations
MOST_IMAGES = 8  # of a batch


class Verdict(NamedTuple):
    passed: bool
    stopped_by: int | None  # the signal that came before a verdict
    sentence: str


def open_images(cfg: Config) -> tuple[DetectionSet, list[int]]:
    """Returns the training set and the indices of images with boxes. Raises DataError if none has."""
    distributed.refuse_several("--overfit")
    source = open_train_set(cfg)
    if not (useful := with_boxes(source)):
        raise DataError(f"{source.annotation_file}: no box to learn from; is it the right file?")
    return source, useful


def overfit(
    cfg: Config,
    number: int,
    folder: Path,
    device: torch.device,
    tuning: Path | None = None,
    signals: StopSignal | None = None,
) -> Verdict:
    """Trains on `number` images that have boxes and evaluates on the same ones, until AP50 is .9 or 700 iterations are
    done (train.max_iterations if that is less). The folder exists already, and gets a run and images.json.

    Raises what Trainer raises.
    """
    source, useful = open_images(cfg)
    chosen = spread(useful, number)
    split = write_subset(source, chosen, folder / "images.json")
    own = overfit_config(cfg, split, len(chosen), tuning is None)
    trainer = Trainer(own, folder, device, tuning=tuning, signals=signals)
    trainer.state.early_stop.goal, trainer.advise = GOAL, False
    stopped_by = trainer.run()
    state = trainer.state
    if stopped_by is not None:
        return Verdict(False, stopped_by, f"overfit: stopped at iteration {state.iteration}, without a verdict")
    passed, ap50 = state.early_stop.reached, state.early_stop.ap50
    images = counted(len(chosen), "image")
    what = f"AP50 {ap50:.2f} on the {images} it was trained on, at iteration {state.iteration}"
    if passed:
        return Verdict(True, None, f"overfit: passed, {what}: images, boxes, classes and model fit together")
    advice = "boxes or classes may be wrong (`rtdetr doctor`), optimizer.lr too high or too low, or too much frozen"
    return Verdict(False, None, f"overfit: failed, {what} (expected {GOAL:.2f}): {advice}")


def overfit_config(cfg: Config, images: SplitConfig, number: int, from_random: bool) -> Config:
    """The config of the check: no augmentation, one size, constant rate, short ramps, evaluation on the same images."""
    side, batch_size = max(cfg.data.image_size), min(number, MOST_IMAGES)
    steps = min(cfg.train.max_iterations or MOST_ITERATIONS, MOST_ITERATIONS)
    batches = number // batch_size
    values = {
        "data.train": images,
        "data.val": images,
        "data.image_size": (side, side),
        "data.train_batch_size": batch_size,
        "data.augment.custom": "",
        "data.augment.batch_sizes": (side,),
        "data.augment.interpolations": ("cubic",),
        "optimizer.flat_ratio": 1.0,
        "optimizer.warmup_iterations": WARMUP,
        "ema.decay": 0.99,
        "ema.warmup": WARMUP,
        "train.epochs": -(-steps // batches),
        "train.max_iterations": steps,
        "train.accumulate": 1,
        "train.eval_every": max(1, BETWEEN // batches),
        "train.patience": 0,
    }
    values |= {f"data.augment.{kind}_prob": 0.0 for kind in ("distort", "expand", "crop", "flip", "turn", "paste")}
    return with_values(cfg, values | ({"optimizer.backbone_lr_multiplier": 1.0} if from_random else {}))
