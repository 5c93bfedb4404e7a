"""`auto` in a config becomes a number: how many epochs, how many pictures in a batch, and what of the backbone moves.

Epochs: 72, as on COCO, but no fewer than make 1,500 iterations and no more than make 6,000; in any case 12.
Batch: what fits into the GPU with a tenth to spare (rtdetr/engine/rehearsal.py), but at most 32 pictures, and an eighth
of the training pictures where that is more than 4, so that an epoch has some steps; on a CPU 4. The learning rate is
meant for `optimizer.lr_batch` pictures, and then follows the batch linearly.
Backbone: from random weights all of it learns at the full rate, and so it does from the checkpoint of a run in which it
did: a few hundred pictures teach nothing that another set has to keep. Of other weights it is kept in part.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rtdetr.config import Config, settled
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import open_train_set
from rtdetr.engine import distributed
from rtdetr.engine.rehearsal import rehearse
from rtdetr.weights.checkpoint import load_checkpoint
from rtdetr.weights.load import stored_config

EPOCHS, LEAST_EPOCHS = 72, 12
LEAST_STEPS, MOST_STEPS = 1500, 6000
ON_CPU, SMALL = 4, 4
MOST_PICTURES = 32  # of a batch on one device: at 16 a rate of 8e-4 was measured to be harmless, and no higher one
STEPS_OF_EPOCH = 8
FROZEN, SLOWLY = 2, 0.1  # stages and rate of a backbone that has learnt more than this set can teach


def settle(
    cfg: Config, device: torch.device, resume: Path | None = None, tuning: Path | None = None
) -> tuple[Config, list[str]]:
    """The config without any `auto`, and a line on each that was replaced. A resumed run keeps what it had.

    Raises DataError or CheckpointError when data or checkpoint cannot be read."""
    sizes = cfg.data.train_batch_size, cfg.train.epochs
    if "auto" not in (*sizes, cfg.model.backbone.freeze_stages, cfg.optimizer.backbone_lr_multiplier):
        return cfg, []
    stored = load_checkpoint(resume)["config"] if resume is not None else None
    cfg, lines = _settle_backbone(cfg, tuning, stored)
    if "auto" not in sizes:
        return cfg, lines
    source = open_train_set(cfg)
    if cfg.data.train_batch_size == "auto":
        size = stored["data"]["train_batch_size"] if stored else _batch_size(cfg, source, device)
        cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, train_batch_size=size))
        total = size * distributed.world_size() * cfg.train.accumulate
        lr = min(cfg.optimizer.lr * total / cfg.optimizer.lr_batch, 0.1)
        lines.append(
            f"data.train_batch_size: auto is {size}; optimizer.lr {cfg.optimizer.lr:g}, meant for "
            f"{cfg.optimizer.lr_batch} pictures a step, is {lr:g} for {total}"
        )
        cfg = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, lr=lr))
    if cfg.train.epochs == "auto":
        batches = len(source) // (settled(cfg.data.train_batch_size) * distributed.world_size())
        steps = max(1, math.ceil(batches / cfg.train.accumulate))  # no batch at all is refused with the loader
        epochs = stored["train"]["epochs"] if stored else epochs_for(steps)
        cfg = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, epochs=epochs))
        lines.append(f"train.epochs: auto is {epochs}, {epochs * steps} iterations")
    return cfg, lines


def _settle_backbone(cfg: Config, tuning: Path | None, stored: Any) -> tuple[Config, list[str]]:
    backbone, optimizer = cfg.model.backbone, cfg.optimizer
    learnt = bool(backbone.weights) or (tuning is not None and not _learnt_in_full(tuning))
    why = "the weights it starts from" if backbone.weights or tuning is not None else "random weights"
    lines = []
    if backbone.freeze_stages == "auto":
        stages = stored["model"]["backbone"]["freeze_stages"] if stored else FROZEN if learnt else 0
        backbone = dataclasses.replace(backbone, freeze_stages=stages)
        lines.append(f"model.backbone.freeze_stages: auto is {stages}, for {why}")
    if optimizer.backbone_lr_multiplier == "auto":
        multiplier = stored["optimizer"]["backbone_lr_multiplier"] if stored else SLOWLY if learnt else 1.0
        optimizer = dataclasses.replace(optimizer, backbone_lr_multiplier=multiplier)
        lines.append(f"optimizer.backbone_lr_multiplier: auto is {multiplier:g}, for {why}")
    model = dataclasses.replace(cfg.model, backbone=backbone)
    return dataclasses.replace(cfg, model=model, optimizer=optimizer), lines


def _learnt_in_full(weights: Path) -> bool:
    """Whether the backbone in a weight file comes from a run that started without one and kept nothing back."""
    stored = stored_config(weights)
    if stored is None or stored["model"]["backbone"].get("weights"):
        return False
    return bool(stored["optimizer"].get("backbone_lr_multiplier", SLOWLY) >= 1)


def epochs_for(steps: int) -> int:
    """Epochs of so many steps each."""
    return max(LEAST_EPOCHS, min(max(EPOCHS, math.ceil(LEAST_STEPS / steps)), max(1, MOST_STEPS // steps)))


def _batch_size(cfg: Config, source: DetectionSet, device: torch.device) -> int:
    """The same in every process: the smallest that one of them finds."""
    share = len(source) // distributed.world_size()
    most = max(1, min(MOST_PICTURES, max(SMALL, share // STEPS_OF_EPOCH), share))
    if device.type != "cuda":
        return min(ON_CPU, most)
    return min(distributed.gather_objects(largest(most, rehearse(cfg, source, device))))


def largest(most: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `most` that fits, by doubling and then bisecting; 1 is not asked for."""
    good, bad = 1, most + 1
    while good + 1 < bad:
        number = min(2 * good, most) if bad == most + 1 and good < most else (good + bad) // 2
        if fits(number):
            good = number
        else:
            bad = number
    return good
