"""Whether a batch fits into a GPU, found out by training on the worst one that the set can make."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from rtdetr.boxes import xyxy_to_cxcywh
from rtdetr.config import Config
from rtdetr.data.dataset import DetectionSet
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.graphs import why_not_capture
from rtdetr.engine.optim import build_optimizer
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import Targets

RESERVE = 0.1  # of the free memory, for what a rehearsal does not see
STEPS = 2  # the second has the optimiser's moments from the start
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def rehearse(cfg: Config, source: DetectionSet, device: torch.device) -> Callable[[int], bool]:
    """A function that tells whether a batch of so many pictures fits into the memory of the GPU that is free now."""
    # Graphs have memory of their own, beside that of the plain steps that come before the next one is captured.
    times = 2 if why_not_capture(cfg.train, device, cfg.loss.match_backend) is None else 1

    def fits(batch_size: int) -> bool:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        room = (1.0 - RESERVE) * torch.cuda.mem_get_info(device)[0]
        before = torch.cuda.memory_reserved(device)
        try:
            train_on_worst(cfg, source, batch_size, device)
        except torch.cuda.OutOfMemoryError:
            return False
        finally:
            gc.collect()
            torch.cuda.empty_cache()
        return times * (torch.cuda.max_memory_reserved(device) - before) <= room

    return fits


def train_on_worst(cfg: Config, source: DetectionSet, batch_size: int, device: torch.device) -> None:
    """Training steps of a new model, optimiser and average, on the worst batch."""
    model = build_model(cfg.model, len(source.classes)).to(device).train()
    criterion, optimizer, _average = (
        build_criterion(cfg, len(source.classes)),
        build_optimizer(model, cfg.optimizer),
        ModelEma(model, cfg.ema),
    )
    model.decoder.recompute = cfg.train.checkpoint_activations
    dtype = AUTOCAST.get(cfg.train.precision)
    images, targets = worst_batch(source, batch_size, max(cfg.data.augment.batch_sizes))
    images, targets = images.to(device), targets.to(device)
    for _ in range(STEPS):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            outputs = model(images, targets, None)
        criterion(outputs, targets, 0)["loss"].backward()
        optimizer.step()


def worst_batch(source: DetectionSet, batch_size: int, side: int) -> tuple[torch.Tensor, Targets]:
    """Pictures (B, 3, side, side), each with the boxes of the fullest picture of the set."""
    fullest = max(range(len(source)), key=lambda index: len(source.targets(index)[0]))
    corners, labels = (torch.from_numpy(each) for each in source.targets(fullest))
    info = source.info(fullest)
    normalised = corners / torch.tensor([info.width, info.height, info.width, info.height])
    targets = Targets.stack(
        [labels] * batch_size, [xyxy_to_cxcywh(normalised)] * batch_size, [normalised * side] * batch_size
    )
    return torch.rand(batch_size, 3, side, side), targets
