"""Repeat-factor sampling, as LVIS defines it: images with rare classes are sampled several times per epoch.

f(c): the share of the images that contain class c. r(c) = max(1, sqrt(threshold / f(c))). r(image): the largest r(c) of
its classes, 1 for an image without boxes. https://arxiv.org/abs/1908.03195, appendix B.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from rtdetr.config import DataConfig
from rtdetr.data.dataset import DetectionSet

LVIS_THRESHOLD = 0.001
# The LVIS threshold is 100 of 100,000 images. Smaller sets need as many images per class, not the same share: 100 of
# 5,000 is 0.02. A threshold above 0.1 would repeat nearly every image of a set with ten balanced classes.
ENOUGH_IMAGES, LARGEST_THRESHOLD = 100, 0.1
EXACT = 2**20  # factors are multiples of 1 / EXACT, so that their sum does not depend on the order


def auto_threshold(num_images: int) -> float:
    return min(max(LVIS_THRESHOLD, ENOUGH_IMAGES / num_images), LARGEST_THRESHOLD)


def class_factors(images_per_class: NDArray[np.int64], num_images: int, threshold: float) -> NDArray[np.float64]:
    """r(c) for each class; 1 for classes without images."""
    share = np.maximum(images_per_class, 1) / num_images
    factors = np.maximum(1.0, np.sqrt(threshold / share))
    return np.where(images_per_class > 0, factors, 1.0)


def repeat_factors(source: DetectionSet, data: DataConfig) -> NDArray[np.float64] | None:
    """r(image) for each image of the set (N,), or None if each image is sampled once."""
    if data.sampling == "uniform":
        return None
    num_images = len(source)
    threshold = auto_threshold(num_images) if data.sampling == "repeat_factor" else data.sampling
    images, labels = source.images_and_classes()
    per_class = np.bincount(labels, minlength=len(source.classes))
    factors = np.ones(num_images)
    np.maximum.at(factors, images, class_factors(per_class, num_images, threshold)[labels])
    return np.round(factors * EXACT) / EXACT


def samples_per_epoch(factors: NDArray[np.float64] | None, num_images: int) -> int:
    """Samples per epoch over all processes, the same in each epoch."""
    return num_images if factors is None else math.floor(factors.sum())


def epoch_length(source: DetectionSet, data: DataConfig) -> int:
    """`samples_per_epoch` of a set."""
    return samples_per_epoch(repeat_factors(source, data), len(source))


def repeated_order(rng: Generator, factors: NDArray[np.float64]) -> NDArray[np.int64]:
    """The samples of an epoch (n, 2) in random order: image index, and how many earlier samples of the epoch show it.

    An image with factor 2.3 comes three times with probability 0.3, else twice. One draw rounds all factors (systematic
    sampling), so that the epoch has the expected length; a random sample is left out if there is one too many.
    """
    order = rng.permutation(len(factors))
    ends = np.floor(np.cumsum(factors[order]) + rng.random()).astype(np.int64)
    times = np.diff(ends, prepend=0)
    before = np.arange(ends[-1]) - np.repeat(ends - times, times)
    samples = np.stack([np.repeat(order, times), before], axis=1)
    return rng.permutation(samples)[: samples_per_epoch(factors, len(factors))]
