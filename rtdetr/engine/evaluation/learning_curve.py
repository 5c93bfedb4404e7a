"""Estimates the gain of more labels: compares AP from half of the training images with AP from all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import torch

from rtdetr.config import Config, settled, with_values
from rtdetr.data.classes import DataError
from rtdetr.data.loader import build_val_loader, open_train_set
from rtdetr.data.sampling import epoch_length
from rtdetr.data.subset import spread, write_subset
from rtdetr.engine import distributed
from rtdetr.engine.failures import writing_run_file
from rtdetr.engine.log import say
from rtdetr.engine.planning.auto_config import settle
from rtdetr.engine.run_files.run_state import Pace
from rtdetr.engine.signals import StopSignal
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.load import read_weights

LEARNT = 0.05  # AP below which a run has not learnt enough for an estimate
NOISE = 0.012  # by which the AP of two seeds of one setting differ, as measured on BCCD (docs/measurements/training.md)


class Point(NamedTuple):
    images: int
    ap: float  # the best of the run; below 0: there was nothing to measure


def learning_curve(
    cfg: Config, folder: Path, device: torch.device, tuning: Path | None = None, signals: StopSignal | None = None
) -> int | None:
    """Trains on every other image, then on all, for the same number of iterations, in FOLDER/half and FOLDER/whole;
    prints both AP and an estimate, and writes them to FOLDER/learning_curve.json.

    Returns the signal that stopped it, if any. Raises what Trainer raises.
    """
    distributed.refuse_several("a learning curve")
    cfg, automatic = settle(cfg, device, tuning=tuning)
    say(*automatic)
    source = open_train_set(cfg)
    total, samples = len(source), epoch_length(source, cfg.data)
    iterations = Pace.of(cfg, samples).total(cfg.train.max_iterations)
    if total < 2:
        raise DataError(f"{source.annotation_file}: a learning curve needs 2 images or more, got {total}")
    if total // 2 < settled(cfg.data.train_batch_size):
        raise DataError(
            f"{source.annotation_file}: half of {total} images does not fill a batch of {cfg.data.train_batch_size}; "
            "lower data.train_batch_size"
        )
    build_val_loader(cfg, source.classes)  # raises before anything is written
    if tuning is not None:
        read_weights(tuning)
    with writing_run_file(folder):
        folder.mkdir(parents=True, exist_ok=True)
        half = write_subset(source, spread(range(total), total // 2), folder / "half.json")
    points = []
    for name, split, number in (("half", half, total // 2), ("whole", cfg.data.train, total)):
        own = with_values(cfg, {"data.train": split})
        own = _for_as_long(own, iterations, epoch_length(open_train_set(own), own.data), samples)
        trainer = Trainer(own, folder / name, device, tuning=tuning, signals=signals)
        trainer.advise = name == "whole"
        stopped_by = trainer.run()
        if stopped_by is not None:
            return stopped_by
        points.append(Point(number, trainer.state.best_ap))
        del trainer  # its memory, before the next one estimates what is free
    sentence = estimate(*points)
    content = {"iterations": iterations, "points": [each._asdict() for each in points], "estimate": sentence}
    with writing_run_file(folder / "learning_curve.json"):
        (folder / "learning_curve.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    say(*(f"AP {each.ap:.3f} from {each.images} images" for each in points), sentence)
    return None


def estimate(half: Point, whole: Point) -> str:
    """Extrapolates the two points: the next doubling divides the distance to 1 as this one did."""
    if min(half.ap, whole.ap) < 0:
        return "no estimate: the validation set has no boxes, so there is no AP"
    if max(half.ap, whole.ap) < LEARNT:
        return (
            f"no estimate: both runs were too short to learn anything (AP below {LEARNT}); raise train.epochs or "
            "train.max_iterations, and where that does not help, try `rtdetr train --overfit 8`"
        )
    gain = whole.ap - half.ap
    if gain < NOISE:
        return (
            f"labelling more images of this kind would hardly pay: the second half brought {gain:+.3f}, and two "
            f"seeds differ by up to {NOISE}; look at the labels (`rtdetr doctor`), more iterations or a larger model"
        )
    missing = 1.0 - whole.ap
    following = missing - missing**2 / (1.0 - half.ap)
    pays = "would pay" if following >= NOISE else "would pay little"
    return (
        f"labelling more {pays}: the second half brought {gain:+.3f}; twice as many images ({2 * whole.images}) "
        f"might bring {following:+.3f} more, to about {whole.ap + following:.3f} (one seed each: +- {NOISE})"
    )


def _for_as_long(cfg: Config, iterations: int, samples: int, of: int) -> Config:
    """The config for that many iterations with `samples` images per epoch, not `of`; what counts in epochs keeps its
    iterations."""
    per_epoch = max(1, Pace.of(cfg, samples).steps(1, 0))
    times = round(of / max(1, samples))
    values = {
        "train.epochs": -(-iterations // per_epoch),
        "train.max_iterations": iterations,
        "train.eval_every": cfg.train.eval_every * times,
        "train.patience": 0,
        "loss.atss_epochs": cfg.loss.atss_epochs * times,
    }
    return with_values(cfg, values)
