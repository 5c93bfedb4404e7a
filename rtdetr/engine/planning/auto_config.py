"""Replaces `auto` in a config by numbers: `settle`. All of its rules:

data.train_batch_size   what fits on the GPU with a tenth to spare (memory_estimate.py), but at most 32 images, and at
                        most an eighth of the training images if that is more than 4, so that an epoch has some steps;
                        4 on a CPU. `optimizer.lr` is meant for `optimizer.lr_batch` images and scales linearly.
train.epochs            72, as on COCO, but at least 1,500 and at most 6,000 iterations, and at least 12 epochs.
others                  BY_WEIGHTS, with a column for each kind of initial weights.

Several batches per step, as in BY_WEIGHTS, count as one for epochs, batch and rate: the run takes about as long.
Backbone: from random weights, all of it learns at the full rate, and so it does from the checkpoint of such a run: a
few hundred images teach nothing that another set has to keep. Other weights are kept in part.
From such a checkpoint a run is short: light augmentation first, short ramps, and larger steps: one update moves large
weights less, so two batches at the rate of one make a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch

from rtdetr.config import Config, config_from_dict, settled, with_values
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import open_train_set
from rtdetr.data.sampling import epoch_length
from rtdetr.engine import distributed
from rtdetr.engine.planning.memory_estimate import fits
from rtdetr.weights.catalogue import is_hub_name
from rtdetr.weights.checkpoint import load_checkpoint
from rtdetr.weights.load import stored_content

EPOCHS, LEAST_EPOCHS = 72, 12
LEAST_STEPS, MOST_STEPS = 1500, 6000
ON_CPU, SMALL = 4, 4
MOST_IMAGES = 32  # of a batch on one device: at 16 a rate of 8e-4 was measured to be harmless, and no higher one
STEPS_OF_EPOCH = 8
FROZEN, SLOWLY = 2, 0.1  # frozen stages and rate of a pretrained backbone
# Columns of the table: a run from random weights, from pretrained ones, and from the checkpoint of a run that itself
# started from random weights and had nothing frozen. docs/finetuning.md has it, too.
RANDOM, KNOWING, LIKE_THIS = range(3)
BY_WEIGHTS = {
    "model.backbone.freeze_stages": (0, FROZEN, 0),
    "optimizer.backbone_lr_multiplier": (1.0, SLOWLY, 1.0),
    "optimizer.muon_lr_multiplier": (3.0, 3.0, 8.0),
    "optimizer.warmup_iterations": (50, 50, 20),
    "ema.warmup": (100.0, 100.0, 50.0),
    "data.augment.zoom_ramp": (0, 0, 30),
    "data.augment.turn_after": (30, 30, 60),
    "train.accumulate": (1, 1, 2),
}


def settle(
    cfg: Config, device: torch.device, resume: Path | None = None, tuning: Path | None = None
) -> tuple[Config, list[str]]:
    """The config without any `auto`, and lines on the replaced values. A resumed run keeps its values; settling `auto`
    again in a settled config finds the same numbers.

    Raises DataError or CheckpointError if data or checkpoint cannot be read.
    """
    sizes = cfg.data.train_batch_size, cfg.train.epochs
    if "auto" not in (*sizes, *(attrgetter(key)(cfg) for key in BY_WEIGHTS)):
        return cfg, []
    stored: Config | None = None
    if resume is None:
        began: Mapping[str, Any] = {"weights": tuning, "in_full": tuning and _learnt_in_full(tuning)}
    else:
        content = load_checkpoint(resume)
        stored = config_from_dict(content["config"], str(resume))
        began = content.get("began") or {}  # see `how_it_began`; older files lack it
    column = (LIKE_THIS if began.get("in_full") else KNOWING) if began.get("weights") else RANDOM
    cfg, lines = _settle_by_weights(cfg, column, stored)
    if "auto" not in sizes:
        return cfg, lines
    accumulate = settled(cfg.train.accumulate)
    given = 1 if accumulate == BY_WEIGHTS["train.accumulate"][column] else accumulate  # for rate and epochs
    source = open_train_set(cfg)
    if cfg.data.train_batch_size == "auto":
        most = MOST_IMAGES * given // accumulate
        size = settled(stored.data.train_batch_size) if stored else _batch_size(cfg, source, device, most)
        cfg = with_values(cfg, {"data.train_batch_size": size})
        cfg, rate = _with_rate(cfg, size * given, stored)
        lines.append(f"data.train_batch_size: auto is {size}; optimizer.lr {rate}")
    if cfg.train.epochs == "auto":
        samples = epoch_length(source, cfg.data)
        # No batch at all is refused with the loader.
        batches = max(1, samples // (settled(cfg.data.train_batch_size) * distributed.world_size()))
        epochs = settled(stored.train.epochs) if stored else epochs_for(math.ceil(batches / given))
        cfg = with_values(cfg, {"train.epochs": epochs})
        steps = epochs * math.ceil(batches / accumulate)
        lines.append(f"train.epochs: auto is {epochs}, {steps} iterations")
    return cfg, lines


def _with_rate(cfg: Config, images: int, stored: Config | None) -> tuple[Config, str]:
    """The config with the rate for that many images per step and process, and a sentence about it."""
    lr, meant_for, total = cfg.optimizer.lr, cfg.optimizer.lr_batch, images * distributed.world_size()
    if stored and (lr, meant_for) == (stored.optimizer.lr, stored.optimizer.lr_batch):
        return cfg, f"{lr:g}, as in the run that is resumed"
    scaled = min(lr * (total / meant_for), 0.1)
    cfg = with_values(cfg, {"optimizer.lr": scaled, "optimizer.lr_batch": total})
    return cfg, f"{lr:g}, meant for {meant_for} images a step, is {scaled:g} for {total}"


def _settle_by_weights(cfg: Config, column: int, stored: Config | None) -> tuple[Config, list[str]]:
    start = "random weights" if column == RANDOM else "the weights it starts from"
    if stored:
        start = "the run that is resumed"
    keys = [key for key in BY_WEIGHTS if attrgetter(key)(cfg) == "auto"]
    values = {key: attrgetter(key)(stored) if stored else BY_WEIGHTS[key][column] for key in keys}
    found = ", ".join(f"{key} {value:g}" for key, value in values.items())
    return with_values(cfg, values), [f"auto, for {start}: {found}"] if found else []


def _learnt_in_full(weights: Path) -> bool:
    """Whether a weight file comes, by one run or several, from random weights, with nothing of the backbone frozen."""
    content = stored_content(weights)
    if content is None:
        return False
    if content.get("began") is not None:
        return bool(content["began"].get("in_full"))
    config = content["config"]  # older files have no more than that
    rate = config["optimizer"].get("backbone_lr_multiplier", SLOWLY)
    return not config["model"]["backbone"].get("weights") and isinstance(rate, (int, float)) and rate >= 1


def how_it_began(cfg: Config, tuning: Path | None, images: int) -> dict[str, Any]:
    """The start of a run, for its checkpoints: `weights`, a file's name, empty for random ones; their `licence` if the
    file has one; `in_full`, see `_learnt_in_full`; `images`, of the training set."""
    free = settled(cfg.optimizer.backbone_lr_multiplier) >= 1 and not settled(cfg.model.backbone.freeze_stages)
    in_full = free and (tuning is None or _learnt_in_full(tuning))
    licence = _licence(tuning) if tuning is not None else None
    weights = "" if tuning is None else str(tuning) if is_hub_name(str(tuning)) else tuning.name
    began = {"weights": weights, "in_full": in_full, "images": images}
    return began | ({"licence": licence} if licence else {})


def _licence(weights: Path) -> str | None:
    """Licence of a weight file, or of the weights from which its run started."""
    content = stored_content(weights) or {}
    parts = [content.get(part) or {} for part in ("source", "began")]
    return next((part["licence"] for part in parts if part.get("licence")), None)


def epochs_for(steps: int) -> int:
    """Number of epochs, given the steps per epoch."""
    return max(LEAST_EPOCHS, min(max(EPOCHS, math.ceil(LEAST_STEPS / steps)), max(1, MOST_STEPS // steps)))


def _batch_size(cfg: Config, source: DetectionSet, device: torch.device, limit: int) -> int:
    """Batch size, equal in every process: the smallest that any of them finds."""
    share = len(source) // distributed.world_size()
    most = max(1, min(limit, max(SMALL, share // STEPS_OF_EPOCH), share))
    if device.type != "cuda":
        return min(ON_CPU, most)
    return min(distributed.gather_objects(largest(most, lambda size: fits(cfg, source, size, device))))


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by doubling and then bisecting; 1 is not tried."""
    good, bad = 1, most + 1
    while good + 1 < bad:
        number = min(2 * good, most) if bad == most + 1 and good < most else (good + bad) // 2
        if fits(number):
            good = number
        else:
            bad = number
    return good
