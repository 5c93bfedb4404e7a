"""Batches on their device: the layout of images, and room for boxes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.types import Batch, Targets


def layout_of(device: torch.device) -> torch.memory_format:
    """Memory format of images and weights. Channels last is faster on GPUs, at least with 16 bits."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def on_device(batch: Batch, device: torch.device, num_denoising: int) -> tuple[Tensor, Targets]:
    """Moves images and boxes of a batch to `device`; the step itself converts bytes to floats."""
    images = batch.images.to(device, non_blocking=True).contiguous(memory_format=layout_of(device))
    targets = batch.targets.to(device, non_blocking=True)
    if device.type == "cuda":  # with and without graphs, so that they draw the same random numbers
        targets = targets.padded(slots_for(max(batch.targets.counts, default=0), num_denoising))
    return images, targets


def slots_for(num_boxes: int, num_denoising: int) -> int:
    """Number of slots for boxes per image: as many as possible with the same number of denoising copies, so that few
    sizes serve all batches; with a single copy, two thirds of that if they suffice. Beyond the number of denoising
    queries, multiples of 50."""
    num_boxes = max(1, num_boxes)
    if num_boxes > num_denoising:
        return -(-num_boxes // 50) * 50
    copies, two_thirds = num_denoising // num_boxes, 2 * num_denoising // 3
    return two_thirds if copies == 1 and num_boxes <= two_thirds else num_denoising // copies
