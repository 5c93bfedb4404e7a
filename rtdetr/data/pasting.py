"""Copy-paste augmentation: rectangles around objects of one training image are pasted into another.

Objects then appear in surroundings and beside neighbours that their own image lacks, which reduces overfitting on small
data sets. After Ghiasi et al., arXiv 2012.07177, with boxes instead of masks.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from rtdetr.data.pixels import Pixels
from rtdetr.data.transforms import Boxes, Labels

MOST_PASTED = 4  # objects pasted into an image, at most
TRIED = 12  # objects to try, each at one random place
THINNEST = 6  # pixels; objects with a shorter side show too little
WIDEST = 0.7  # share of the image's side; larger objects are not pasted
HIDDEN = 0.3  # share of an object's box that a pasted one may cover


def paste(
    pixels: Pixels, boxes: Boxes, labels: Labels, others: tuple[Pixels, Boxes, Labels], rng: Generator
) -> tuple[Pixels, Boxes, Labels]:
    """Pastes objects of another image, `others`, of the same size (h, w, 3), at random places; returns all boxes, too.

    Objects under a pasted one keep their boxes; at most HIDDEN of each box may be covered.
    """
    donor, theirs, classes = others
    pixels = pixels.copy()
    height, width = pixels.shape[:2]
    pasted = 0
    for i in rng.permutation(len(theirs))[:TRIED]:
        x1, y1, x2, y2 = np.rint(theirs[i]).astype(int).tolist()
        wide, high = x2 - x1, y2 - y1
        if min(wide, high) < THINNEST or wide > WIDEST * width or high > WIDEST * height:
            continue
        x, y = int(rng.integers(width - wide)), int(rng.integers(height - high))
        new = np.array([x, y, x + wide, y + high], np.float32)
        if _covered(boxes, new).max(initial=0) > HIDDEN:
            continue
        pixels[y : y + high, x : x + wide] = donor[y1:y2, x1:x2]
        boxes, labels = np.concatenate((boxes, new[None])), np.append(labels, classes[i])
        pasted += 1
        if pasted == MOST_PASTED:
            break
    return pixels, boxes, labels


def _covered(boxes: Boxes, new: Boxes) -> Boxes:
    """Share (n,) of each box (n, 4) that the box `new` (4,) covers."""
    sides = np.minimum(boxes[:, 2:], new[2:]) - np.maximum(boxes[:, :2], new[:2])
    return sides.clip(min=0).prod(axis=1) / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
