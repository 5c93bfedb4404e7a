"""Estimates peak GPU memory by training on the worst-case batch of the data set."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from rtdetr.config import Config, ConfigError, settled
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import LoadedImage, collate, evaluated_together
from rtdetr.data.pasting import MOST_PASTED
from rtdetr.engine import distributed
from rtdetr.engine.acceleration.graphs import why_not_capture
from rtdetr.engine.acceleration.mixed_precision import autocast_type
from rtdetr.engine.acceleration.placement import layout_of, on_device, slots_for
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.failures import TrainingFailed
from rtdetr.engine.optim import build_optimizer, clip_grad_norm
from rtdetr.engine.step import training_step
from rtdetr.losses.criterion import build_criterion
from rtdetr.losses.functional import without_averaging
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.ops.assignment import MAX_COLUMNS
from rtdetr.ops.kernels import using
from rtdetr.types import Batch
from rtdetr.wording import option

RESERVE = 0.1  # fraction of the free memory kept for what the estimate does not include
STEPS = 2  # at the second one the optimiser's moments exist from the start
GIB = 2**30


class MemoryNeed(NamedTuple):
    """Peak GPU memory in bytes."""

    kept: int  # weights, their average, gradients and optimiser state
    step: int  # peak of a training step in addition to `kept`
    evaluation: int  # peak of an evaluation in addition to `kept`

    def total(self, graphs: int) -> int:
        """Returns the peak of the run. graphs: 0 without capture; 1 for a single kind of batch; 2 for several."""
        return self.kept + max(self.step * max(1, graphs), self.step * min(1, graphs) + self.evaluation)


def estimate_memory(cfg: Config, source: DetectionSet, device: torch.device) -> list[str]:
    """Trains on the worst-case batch of the set on a GPU and returns a line with the estimated memory, and a warning if
    less is free. Every process must call it. Raises ConfigError if the batch does not fit on every GPU."""
    size, side = settled(cfg.data.train_batch_size), max(cfg.data.augment.batch_sizes)
    boxes = int(source.boxes_per_image().max())
    batch = f"the worst batch of the set ({size} images of {side} x {side}, up to {boxes} boxes in one)"
    needs = distributed.gather_objects((measure(cfg, source, size, device), _free(device)))
    captured = why_not_capture(cfg.train, device, cfg.kernels) is None
    advice, graphs = what_to_lower(cfg, captured), graphs_of(cfg, source) if captured else 0
    if any(need is None for need, _ in needs):
        free = min(free for _, free in needs) / GIB
        raise ConfigError(
            f"{batch} does not fit into the {free:.1f} GiB that are free on {device}; {advice}, stop what else uses "
            "the GPU, or train without this estimate with train.estimate_memory=false"
        )
    totals = ((need.total(graphs), free) for need, free in needs if need is not None)
    need, free = max(totals, key=lambda pair: pair[0] - pair[1])  # of the GPU with the least to spare
    line = f"memory     up to {need / GIB:.1f} of the {free / GIB:.1f} GiB free on {device}, estimated on {batch}"
    if need <= free:
        return [line]
    return [line, f"warning: the run may end for lack of memory; {advice}"]


def what_to_lower(cfg: Config, captured: bool) -> str:
    """Returns advice on the settings that reduce GPU memory, with their values. captured: as CUDA graphs."""
    accumulated = f"{cfg.data.train_batch_size}; with train.accumulate a step keeps its images"
    advice = [
        f"data.train_batch_size ({accumulated})",
        f"the sizes in data.augment.batch_sizes (up to {max(cfg.data.augment.batch_sizes)})",
        f"model.supervision.num_noise_groups ({cfg.model.supervision.num_noise_groups})",
    ]
    settings = [] if cfg.train.checkpoint_activations else ["train.checkpoint_activations=true"]
    settings += ["train.graphs=off"] if captured else []
    return (f"set {' and '.join(settings)}, or " if settings else "") + f"lower {', '.join(advice)}"


def out_of_memory(cfg: Config, iteration: int, last: Path, evaluating: bool, captured: bool) -> TrainingFailed:
    """Builds the error for CUDA running out of memory, with advice on settings and on resuming."""
    what = what_to_lower(cfg, captured)
    if evaluating:
        most = f"the {evaluated_together(cfg.data)} images that evaluation takes at a time"
        what = f"lower data.train_batch_size ({cfg.data.train_batch_size}) below {most}"
    resume = f"; continue with {option(f'-r {last}', f'resume={str(last)!r}')}" if last.is_file() else ""
    return TrainingFailed(
        f"iteration {iteration}: CUDA out of memory{' in the evaluation' if evaluating else ''}; {what}, or stop what "
        f"else uses the GPU{resume}"
    )


def graphs_of(cfg: Config, source: DetectionSet) -> int:
    """Returns 1 if all batches are of one kind, 2 if there are several, 0 if every image has too many boxes. Graphs
    share and keep their memory; the plain steps before the next kind is captured need memory in addition."""
    counts, num_denoising = source.boxes_per_image(), cfg.model.supervision.num_denoising
    pasted = MOST_PASTED if cfg.data.augment.paste_prob > 0 else 0
    fewest, most = (slots_for(n, num_denoising) for n in (int(counts.min()), int(counts.max()) + pasted))
    if fewest > MAX_COLUMNS:
        return 0
    return 1 if fewest == most and len(set(cfg.data.augment.batch_sizes)) == 1 else 2


def fits(cfg: Config, source: DetectionSet, batch_size: int, device: torch.device) -> bool:
    """Checks whether training on batches of that many images fits into the free memory of the GPU."""
    captured = why_not_capture(cfg.train, device, cfg.kernels) is None
    room = (1.0 - RESERVE) * _free(device)
    need = measure(cfg, source, batch_size, device)
    return need is not None and need.total(graphs_of(cfg, source) if captured else 0) <= room


def measure(cfg: Config, source: DetectionSet, batch_size: int, device: torch.device) -> MemoryNeed | None:
    """Measures the memory for training on the worst batch of `batch_size` images; None if it does not fit."""
    _free(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_reserved(device)
    try:
        with without_averaging(), using(cfg.kernels):
            kept, model = train_on_worst(cfg, source, batch_size, device)
        step = torch.cuda.max_memory_reserved(device) - before - kept
        _free(device)
        torch.cuda.reset_peak_memory_stats(device)
        between = torch.cuda.memory_reserved(device)
        with using(cfg.kernels):
            _detect(cfg, model, device)
        del model
        return MemoryNeed(kept, step, torch.cuda.max_memory_reserved(device) - between)
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        _free(device)
        torch.cuda.reset_peak_memory_stats(device)  # so that the run reports its own peak


@torch.inference_mode()
def _detect(cfg: Config, model: nn.Module, device: torch.device) -> None:
    model.eval()(torch.rand(evaluated_together(cfg.data), 3, *cfg.data.image_size, device=device))


def _free(device: torch.device) -> int:
    """Frees unused cached memory and returns the free bytes of the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def train_on_worst(cfg: Config, source: DetectionSet, batch_size: int, device: torch.device) -> tuple[int, nn.Module]:
    """Trains a new model on the worst batch. Returns the bytes held by model, optimiser, weight average and
    gradients, and the averaged model."""
    start = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model = build_model(cfg.model, len(source.classes)).to(device).to(memory_format=layout_of(device)).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    criterion, optimizer = build_criterion(cfg, len(source.classes)), build_optimizer(model, cfg.optimizer)
    average = ModelEma(model, cfg.ema)
    model.decoder.recompute = cfg.train.checkpoint_activations
    dtype = autocast_type(device, cfg.train.precision)
    batch = worst_batch(source, batch_size, max(cfg.data.augment.batch_sizes))
    for _ in range(STEPS):
        images, targets = on_device(batch, device, cfg.model.supervision.num_denoising)
        training_step(model, images, targets, criterion=criterion, dtype=dtype)
        clip_grad_norm(parameters, cfg.optimizer.clip_grad_norm)
        optimizer.step()
        average.update()
        del images, targets
    kept = torch.cuda.memory_allocated(device) - start if device.type == "cuda" else 0
    return kept, average.model


def worst_batch(source: DetectionSet, batch_size: int, side: int) -> Batch:
    """Returns a batch with the boxes of the images that have most, and noise of side x side pixels as images."""
    order = np.argsort(-source.boxes_per_image(), kind="stable")
    items = []
    for index in np.resize(order, batch_size).tolist():
        info, (boxes, labels) = source.info(index), map(torch.from_numpy, source.targets(index))
        scaled = boxes / torch.tensor([info.width, info.height, info.width, info.height]) * side
        noise = torch.randint(256, (3, side, side), dtype=torch.uint8)
        items.append(LoadedImage(noise, scaled, labels, info._replace(height=side, width=side)))
    return collate(items)
