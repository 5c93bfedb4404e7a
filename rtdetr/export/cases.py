"""The images on which an exported file is compared with the model."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rtdetr.config import Config, Resize
from rtdetr.data.classes import DataError
from rtdetr.data.images import read_image
from rtdetr.data.resize import as_rgb_array, resize
from rtdetr.data.shapes import draw_image
from rtdetr.export.graph import fitting
from rtdetr.inference.files import find_images
from rtdetr.wording import counted

MOST = 8  # number of images used from a folder
GENERATED = "generated images; --images takes real ones"


class ExampleImages(NamedTuple):
    images: list[Image.Image]
    says: str  # description of the images
    interpolation: Resize = "cubic"


class Case(NamedTuple):
    kind: str  # "images" or "random"
    pixels: Tensor  # (B, 3, H, W) uint8
    sizes: Tensor  # (B, 2) int64 height, width of the originals


def example_images(folder: str | Path | None, cfg: Config) -> ExampleImages:
    """Returns the first images of a folder, or generated ones. Raises DataError."""
    how = cfg.data.interpolation
    if folder is None:
        drawn = [draw_image(320, np.random.default_rng(seed))[0] for seed in range(3)]
        return ExampleImages([Image.fromarray(each) for each in drawn], GENERATED, how)
    files = list(find_images([str(folder)]).images)[:MOST]
    images = [read_image(file, max_megapixels=cfg.data.max_megapixels) for file in files]
    return ExampleImages(images, f"{counted(len(images), 'image')} of {folder}", how)


def cases(images: ExampleImages, size: tuple[int, int], num_queries: int, fixed: bool = False) -> Iterator[Case]:
    """Batches of 1, 3 and 8 of the model's own size and of rectangles, from images and from noise. fixed: only batches
    of the own size."""
    height, width = size
    own, wide, flat = (fitting(height * h, width * w, num_queries) for h, w in ((1, 1), (0.8, 1.2), (0.5, 1.6)))
    if fixed:
        wide = flat = own
    endless = cycle(images.images)
    for batch, sides in ((1, own), (3, wide), (1, flat), (8, own)):
        chosen = list(islice(endless, batch))
        sizes = torch.tensor([(each.height, each.width) for each in chosen])
        yield Case("images", stack(chosen, sides, images.interpolation), sizes)
    for seed, (batch, sides) in enumerate(((3, own), (1, own if fixed else wide[::-1]))):
        pixels = torch.randint(0, 256, (batch, 3, *sides), generator=torch.Generator().manual_seed(seed))
        yield Case("random", pixels.to(torch.uint8), torch.tensor([sides] * batch))


def stack(images: list[Image.Image], size: tuple[int, int], interpolation: Resize = "cubic") -> Tensor:
    """Network input (B, 3, H, W) uint8 of images. size: H, W."""
    resized = [resize(as_rgb_array(each), size, interpolation).transpose(2, 0, 1) for each in images]
    return torch.from_numpy(np.stack(resized))


def calibration_images(folder: str | Path, cfg: Config, most: int = 64) -> list[Image.Image]:
    """Returns up to `most` images, evenly spaced in the list of a folder's files. Raises DataError."""
    files = list(find_images([str(folder)]).images)
    chosen = files[:: max(1, len(files) // most)][:most]
    if len(chosen) < 2:
        raise DataError(f"{folder}: calibration needs at least 2 images, some 100 are better; got {len(chosen)}")
    return [read_image(file, max_megapixels=cfg.data.max_megapixels) for file in chosen]
