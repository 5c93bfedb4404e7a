"""Summarises a set in a few lines: classes, box sizes, crowded images."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rtdetr.data.classes import some
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import one_line
from rtdetr.data.sampling import auto_threshold, class_factors
from rtdetr.wording import counted

SMALL, MEDIUM = 32**2, 96**2  # area limits in pixels, as in COCO
CROWDED = 100  # boxes per image; the cost of denoising and matching grows with them
IMBALANCED = 20  # ratio of boxes between the most and the least frequent class
MOST_CLASSES = 100  # classes listed, at most
WORTH_REPEATING = 1.5  # repeat factor of a class from which sampling makes a difference


def describe(data: DetectionSet) -> Iterator[str]:
    """Lines about the set for the terminal."""
    if not data.num_boxes:
        return
    boxes = np.concatenate([data.targets(i)[0] for i in range(len(data))])
    per_image, counts = data.boxes_per_image(), np.array(data.boxes_per_class())
    names = [one_line(name) for name in data.classes.names]
    width = max(5, *map(len, names))
    yield f"  {'class':{width}s} {'id':>6s} {'boxes':>8s} {'share':>6s}"
    for i in np.argsort(-counts, kind="stable")[:MOST_CLASSES].tolist():
        share = counts[i] / len(boxes)
        yield f"  {names[i]:{width}s} {data.classes.category_ids[i]:6d} {counts[i]:8d} {share:6.1%}"
    if len(counts) > MOST_CLASSES:
        yield f"  ... and {counted(len(counts) - MOST_CLASSES, 'more class')}"
    if not counts.all():
        yield f"  classes without a box: {(counts == 0).sum()} of {len(counts)}"
    least = counts[counts > 0].min()
    if counts.max() > IMBALANCED * least:
        yield f"  class imbalance: the most frequent has {counts.max() / least:.0f} times the boxes of the rarest"
    sides = boxes[:, 2:] - boxes[:, :2]
    area = sides.prod(axis=1)
    small, large = (area < SMALL).mean(), (area >= MEDIUM).mean()
    medium = ((area >= SMALL) & (area < MEDIUM)).mean()
    middle = np.median(sides, axis=0)
    yield (
        f"  boxes: {small:.0%} small (below 32 x 32 pixels), {medium:.0%} medium, {large:.0%} large "
        f"(from 96 x 96); median {middle[0]:.0f} x {middle[1]:.0f}, from {sides.min():.1f} to {sides.max():.0f} a side"
    )
    fullest, crowded, empty = int(per_image.argmax()), int((per_image > CROWDED).sum()), int((per_image == 0).sum())
    rest = [f"{counted(crowded, 'crowded image')} (more than {CROWDED} boxes)"] if crowded else []
    rest += [f"{counted(empty, 'image')} without boxes"] if empty else []
    yield (
        f"  boxes per image: {per_image.mean():.1f} on average, most in {one_line(data.info(fullest).file_name)}: "
        f"{per_image[fullest]}" + "".join(f"; {each}" for each in rest)
    )


def advise_sampling(data: DetectionSet) -> Iterator[str]:
    """A line if repeat-factor sampling would change training. Counts images, not boxes: a class with few boxes that is
    in every image is seen often enough."""
    if not len(data):
        return
    counts = np.bincount(data.images_and_classes()[1], minlength=len(data.classes))
    factors = class_factors(counts, len(data), auto_threshold(len(data)))
    rare = [i for i in np.argsort(counts, kind="stable").tolist() if factors[i] >= WORTH_REPEATING]
    if rare:
        names = [f"{one_line(data.classes.names[i])} in {counts[i]}" for i in rare]
        yield (
            f"  rare classes, by images of {len(data)}: {some(names)}; data.sampling=repeat_factor would show images "
            f"with them up to {factors.max():.1f} times an epoch"
        )
