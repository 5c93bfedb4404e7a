"""Captures forward pass, losses and gradients of a training step as CUDA graphs: one launch instead of thousands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.config import ConfigError, Kernels, TrainConfig, settled
from rtdetr.engine import distributed
from rtdetr.engine.acceleration.gradient_buffer import GradientBuffer
from rtdetr.engine.step import BatchPosition, Losses, Step
from rtdetr.ops.assignment import MAX_COLUMNS
from rtdetr.ops.backend import why_not_compiled
from rtdetr.types import Targets

MAX_GRAPHS = 96  # kept at a time; 13 image sizes with 7 slot counts each need 91
RUNS_BEFORE = 2  # plain steps of a kind before capture: they do the work that must not happen in a graph


def why_not_capture(cfg: TrainConfig, device: torch.device, kernels: Kernels = "auto") -> str | None:
    """Returns why steps are not captured, or None if they are. Raises ConfigError if the config demands it."""
    if cfg.graphs == "off":
        return "train.graphs=off"
    reason = None
    if kernels == "plain":
        reason = "kernels=plain"
    elif device.type != "cuda":
        reason = "there is no GPU"
    elif settled(cfg.accumulate) > 1:
        reason = "train.accumulate adds up the gradients of several batches"
    elif why_not := why_no_kernels(device):
        reason = f"boxes are matched on the host: {why_not}"
    if reason is not None and cfg.graphs == "on":
        raise ConfigError(f"train.graphs=on is not possible: {reason}; set it to auto")
    return reason


def why_no_kernels(device: torch.device) -> str | None:
    return why_not_compiled(torch.empty(0, device=device))


class Captured(NamedTuple):
    """A CUDA graph with its input and output tensors."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    targets: Targets
    losses: Losses
    gradients: list[Tensor | None]  # one per parameter; None if it has no gradient


class StepGraphs:
    """Runs `step`, which leaves its gradients in `gradients`, as CUDA graphs: one per image size, number of slots and
    `kind`, captured at the third occurrence; the least recently used graph is evicted.

    The plain call is the twin, and handles images with more boxes than the GPU matches (one-to-many repeats those of
    a crowd once). kind: any other property of a BatchPosition that needs a separate graph. All graphs share their
    memory, the tensor that holds images of their size, and the gradients they end in. With several processes these are
    averaged after the graph; what the graph itself exchanges (statistics of batch norm, numbers of boxes) comes in the
    same order from every one, captured there or not.
    """

    def __init__(self, step: Step, gradients: GradientBuffer, kind: Callable[[BatchPosition], Hashable]) -> None:
        self.step, self.gradients, self.kind = step, gradients, kind
        self.images: dict[Hashable, Tensor] = {}  # what graphs read
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        self.pool = torch.cuda.graph_pool_handle()
        # NCCL waits for graphs that use it before it shuts down, forever if they are kept.
        distributed.before_the_end(self, self.captured.clear)

    def __call__(self, images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
        losses = self._run(images, targets, position)
        if distributed.world_size() > 1:
            self.gradients.average()
        return losses

    def _run(self, images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
        key = (images.shape, images.dtype, targets.labels.shape, self.kind(position))
        if key in self.captured:
            self.captured.move_to_end(key)
        elif self.seen.get(key, 0) < RUNS_BEFORE or targets.labels.shape[1] > MAX_COLUMNS:
            self.seen[key] = self.seen.get(key, 0) + 1
            return self.step(images, targets, position)
        else:
            self.captured[key] = self._capture(images, targets, position)
            if len(self.captured) > MAX_GRAPHS:
                self.captured.popitem(last=False)
        captured = self.captured[key]
        captured.images.copy_(images, non_blocking=True)
        for static, tensor in zip(captured.targets[:4], targets[:4]):
            static.copy_(tensor, non_blocking=True)
        captured.graph.replay()
        for parameter, gradient in zip(self.gradients.parameters, captured.gradients):
            parameter.grad = gradient
        return Losses(captured.losses.names, captured.losses.values.clone())

    def clear(self) -> None:
        """Frees all graphs and their memory."""
        self.captured.clear()
        self.seen.clear()
        self.images.clear()

    def _capture(self, images: Tensor, targets: Targets, position: BatchPosition) -> Captured:
        labels, boxes, boxes_pixel, mask = (tensor.clone() for tensor in targets[:4])
        own = self.images.setdefault((images.shape, images.dtype), torch.empty_like(images))
        static = own, Targets(labels, boxes, boxes_pixel, mask, counts=())
        torch.cuda.empty_cache()  # memory that plain steps have used; graphs have their own
        graph = torch.cuda.CUDAGraph()
        # Other threads may continue: the one that pins the memory of the next batch calls the driver, too.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            losses = self.step(*static, position)
        kept = [parameter.grad for parameter in self.gradients.parameters]
        return Captured(graph, *static, losses, kept)
