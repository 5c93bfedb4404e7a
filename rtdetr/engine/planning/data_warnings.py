"""Warnings about data and settings that are valid but often make a training fail."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from rtdetr.config import Config, settled
from rtdetr.data.classes import some
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.doctor.files import in_both
from rtdetr.wording import counted

LARGE = 480  # sides from which a CPU needs minutes for a step of the default batch size
FEW_BOXES = 10  # per class; fewer are too few to learn from
NOTHING = 0.0005  # an AP below this prints as .000


def on_data(train: DetectionSet, val: DetectionSet) -> Iterator[str]:
    """Yields warnings about images in both sets or listed twice, missing boxes, and classes with few boxes."""
    shared = in_both(train, val)
    if shared:
        yield (
            f"warning: {len(shared)} of {len(val)} validation images are in the training set too ({some(shared)}): "
            "AP is better than it would be on new images; take them out of one of the two"
        )
    twice = [name for name, times in Counter(each.file_name for each in train.infos()).items() if times > 1]
    if twice:
        yield (
            f"warning: {counted(len(twice), 'training image')} listed more than once ({some(twice)}): boxes of one "
            "entry are background in the others; merge the entries, unless each has all boxes of its image"
        )
    if not val.num_boxes:
        yield (
            "warning: the validation images have no box: there will be no AP, and best.pth will be the latest weights; "
            "label them, or take some of the training images out for validation"
        )
    counts = train.boxes_per_class()
    rare = [f"{name} {count}" for name, count in zip(train.classes.names, counts) if count < FEW_BOXES]
    if rare:
        yield (
            f"warning: classes of fewer than {FEW_BOXES} training boxes: {len(rare)} of {len(counts)} ({some(rare)});"
            " they will hardly be found, label more of them or leave them out"
        )


def on_sizes(cfg: Config, device: torch.device, batches: int) -> Iterator[str]:
    """Yields warnings about image sizes (other ones in evaluation than in training, and large ones on a CPU), and
    about steps of more batches than an epoch has."""
    sizes, (height, width) = cfg.data.augment.batch_sizes, cfg.data.image_size
    if not all(min(sizes) <= side <= max(sizes) for side in (height, width)):
        yield (
            f"warning: training sizes are {min(sizes)} to {max(sizes)} (data.augment.batch_sizes), but evaluation and "
            f"detection use {height} x {width} (data.image_size): AP is lower at a size that was not trained"
        )
    if device.type == "cpu" and max(sizes) >= LARGE:
        yield (
            f"warning: on a CPU, a step with images of up to {max(sizes)} x {max(sizes)} takes minutes; "
            "-c rtdetrv3_nano_shapes is a smaller model with smaller images, for any data"
        )
    if (accumulate := settled(cfg.train.accumulate)) > batches:
        yield (
            f"warning: train.accumulate={accumulate}, but an epoch has only {counted(batches, 'batch')}: "
            "a step takes no more than these"
        )


def on_no_ap(best_ap: float, iteration: int, total: int) -> list[str]:
    """Returns a warning with the likely causes if AP is still about 0 after a tenth of the run.

    best_ap: over all evaluations so far; below 0 if the set has no boxes."""
    if not 0 <= best_ap < NOTHING or 10 * iteration < total:
        return []
    return [
        f"warning: AP is still {best_ap:.2g} after {iteration} of {total} iterations; likely "
        "causes: class ids or names of training and validation do not match; optimizer.lr is too high, or the "
        "iterations are too few; boxes are wrong. `rtdetr doctor` checks the data, `rtdetr train --overfit 8` "
        "whether training fits a few images at all"
    ]
