"""Wraps the training step for speed. Each wrapper holds the step that it wraps, never its own wrapper."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from rtdetr.config import Config
from rtdetr.engine import distributed
from rtdetr.engine.acceleration.compile import compile_step, why_not_compile
from rtdetr.engine.acceleration.gradient_buffer import GradientBuffer
from rtdetr.engine.acceleration.graphs import StepGraphs, why_not_capture
from rtdetr.engine.acceleration.mixed_precision import autocast_type, cast_together, hand_over
from rtdetr.engine.step import BatchPosition, Losses, Step, training_step
from rtdetr.losses.criterion import Criterion
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Targets


def accelerate(
    cfg: Config,
    model: Network,
    criterion: Criterion,
    device: torch.device,
    iterations: int,
    scale: Callable[[Tensor], Tensor],
) -> tuple[Step, StepGraphs | None, str | None]:
    """Wraps `training_step` as configured: in CUDA graphs or DistributedDataParallel, compiled or with weights cast
    together, or not at all. Returns the step, its CUDA graphs if it has any, and why it is not compiled if it is not.

    The model must be on `device` in its final form. iterations: those left in the run; scale: see training_step.
    Raises ConfigError if the step cannot run as configured.
    """
    dtype = autocast_type(device, cfg.train.precision)
    plain = partial(training_step, criterion=criterion, dtype=dtype, scale=scale)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = GradientBuffer(parameters) if why_not_capture(cfg.train, device, cfg.kernels) is None else None
    parallel = distributed.world_size() > 1 and gradients is None
    step: Step = partial(plain, model)
    if gradients is not None:
        distributed.take_from_main(model.state_dict().values())
    elif parallel:
        together = DistributedDataParallel(model, gradient_as_bucket_view=True)
        step = averaged_last(partial(plain, together), together)
    sizes = len(set(cfg.data.augment.batch_sizes))
    why_not_compiled = why_not_compile(cfg.train, device, iterations, sizes, cfg.kernels)
    if why_not_compiled is None:
        compile_step(model)
    # Compiled code and layers recomputed in the backward pass rely on autocast.
    by_autocast = cfg.kernels == "plain" or why_not_compiled is None or cfg.train.checkpoint_activations
    if dtype is not None and device.type == "cuda" and not parallel and not by_autocast:
        gather = partial(hand_over, parameters) if gradients is None else gradients.collect
        step = cast_together(plain, model, dtype, gather)
    elif gradients is not None:
        step = gradients.behind(step)
    graphs = None
    if gradients is not None:
        turn = cfg.loss.atss_epochs
        step = graphs = StepGraphs(step, gradients, lambda position: position.epoch >= turn)
    return step, graphs, why_not_compiled


def averaged_last(step: Step, model: DistributedDataParallel) -> Step:
    """Wraps `step` so that gradients are averaged once per optimiser step, in the backward pass of its last batch."""

    def averaged(images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
        with nullcontext() if position.last else model.no_sync():
            return step(images, targets, position)

    return averaged
