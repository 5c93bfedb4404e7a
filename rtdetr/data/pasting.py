"""Copy-paste: objects of one training image put into another, rectangle by rectangle.

Objects appear in surroundings and beside neighbours that their own image does not have; a model overfits to those if
images are few. After Ghiasi et al., arXiv 2012.07177, with boxes instead of masks.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from rtdetr.data.pixels import Pixels
from rtdetr.data.transforms import Boxes, Labels

MOST_PASTED = 4  # objects put into an image
TRIED = 12  # objects for which one place each is drawn
THINNEST = 6  # pixels of a side; below, there is nothing to see
WIDEST = 0.7  # of the image's side
HIDDEN = 0.3  # share of an object's box that another one may cover


def paste(
    pixels: Pixels, boxes: Boxes, labels: Labels, others: tuple[Pixels, Boxes, Labels], rng: Generator
) -> tuple[Pixels, Boxes, Labels]:
    """An image with its boxes and some objects of another one, `others`, of the same size (h, w, 3), at random places.

    Boxes under a new object are kept if no more than HIDDEN of their area is covered.
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
    """The share (n,) of each box (n, 4) that is under the box `new` (4,)."""
    sides = np.minimum(boxes[:, 2:], new[2:]) - np.maximum(boxes[:, :2], new[:2])
    covered: Boxes = sides.clip(min=0).prod(axis=1) / (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    return covered
