"""Forward pass, losses and gradients of a training step as CUDA graphs: the host launches one thing, not thousands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rtdetr.config import ConfigError, TrainConfig
from rtdetr.engine import distributed
from rtdetr.ops.assignment import MAX_COLUMNS
from rtdetr.ops.backend import why_not_compiled
from rtdetr.types import Batch, Targets

MAX_GRAPHS = 96  # kept at a time: 13 picture sizes with 7 numbers of slots each
RUNS_BEFORE = 2  # plain steps of a kind before it is captured: they warm up what must not happen in a graph

Values = tuple[tuple[str, ...], Tensor]
Backward = Callable[[Tensor, Targets], Values]


def why_not_capture(cfg: TrainConfig, device: torch.device, match_backend: str) -> str | None:
    """Why steps are launched kernel by kernel; None: they shall be captured. Raises ConfigError if they cannot be."""
    if cfg.graphs == "off":
        return "train.graphs=off"
    reason = None
    if device.type != "cuda":
        reason = "there is no GPU"
    elif distributed.world_size() > 1:
        reason = "gradients are exchanged between processes while they are computed"
    elif cfg.accumulate > 1:
        reason = "train.accumulate adds up the gradients of several batches"
    elif match_backend in ("scipy", "cpu"):
        reason = f"loss.match_backend={match_backend} works on the host"
    elif match_backend == "auto" and (why_not := why_no_kernels(device)):
        reason = f"boxes are matched on the host: {why_not}"
    if reason is not None and cfg.graphs == "on":
        raise ConfigError(f"train.graphs=on cannot be: {reason}; set it to auto")
    return reason


def why_no_kernels(device: torch.device) -> str | None:
    return why_not_compiled(torch.empty(0, device=device))


def slots_for(num_boxes: int, num_denoising: int) -> int:
    """Slots for the boxes of a picture: as many as there may be without another number of denoising copies, so that
    a few sizes serve all batches. Beyond the denoising queries, multiples of 50."""
    num_boxes = max(1, num_boxes)
    if num_boxes > num_denoising:
        return -(-num_boxes // 50) * 50
    return num_denoising // (num_denoising // num_boxes)


def layout_of(device: torch.device) -> torch.memory_format:
    """Of pictures and weights. Channels last is how GPUs like them, at least in 16 bits."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def on_device(batch: Batch, device: torch.device, num_denoising: int) -> tuple[Tensor, Targets]:
    """Pictures and boxes of a batch as a step takes them."""
    images = batch.images_on(device).contiguous(memory_format=layout_of(device))
    targets = batch.targets.to(device, non_blocking=True)
    if device.type == "cuda":  # with and without graphs, so that they draw the same random numbers
        targets = targets.padded(slots_for(max(batch.targets.counts, default=0), num_denoising))
    return images, targets


class Captured(NamedTuple):
    """A graph, what it reads and what it leaves behind."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    targets: Targets
    names: tuple[str, ...]
    values: Tensor
    gradients: list[Tensor | None]  # of the parameters; None: it has none


class StepGraphs:
    """Runs `backward(images, targets)`, which leaves gradients in `parameters` and returns named values, by graphs: one
    for each size of pictures and number of slots, captured when it comes for the third time, the oldest given up.

    The plain call is the twin, and takes pictures with more boxes than the GPU can match when each is offered
    `repeats` times. All graphs share their memory and end in the same gradients.
    """

    def __init__(self, backward: Backward, parameters: Sequence[nn.Parameter], repeats: int) -> None:
        self.backward, self.parameters, self.max_slots = backward, parameters, MAX_COLUMNS // repeats
        self.gradients = [torch.zeros_like(parameter) for parameter in parameters]
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, images: Tensor, targets: Targets, kind: Hashable = None) -> Values:
        """kind: whatever else makes a graph another one."""
        key = (images.shape, targets.labels.shape, kind)
        if key in self.captured:
            self.captured.move_to_end(key)
        elif self.seen.get(key, 0) < RUNS_BEFORE or targets.labels.shape[1] > self.max_slots:
            self.seen[key] = self.seen.get(key, 0) + 1
            return self.backward(images, targets)
        else:
            self.captured[key] = self._capture(images, targets)
            if len(self.captured) > MAX_GRAPHS:
                self.captured.popitem(last=False)
        step = self.captured[key]
        step.images.copy_(images, non_blocking=True)
        for static, tensor in zip(step.targets[:4], targets[:4]):
            static.copy_(tensor, non_blocking=True)
        step.graph.replay()
        for parameter, gradient in zip(self.parameters, step.gradients):
            parameter.grad = gradient
        return step.names, step.values.clone()

    def clear(self) -> None:
        """Gives up all graphs and their memory."""
        self.captured.clear()
        self.seen.clear()

    def _capture(self, images: Tensor, targets: Targets) -> Captured:
        labels, boxes, boxes_pixel, mask = (tensor.clone() for tensor in targets[:4])
        static = images.clone(), Targets(labels, boxes, boxes_pixel, mask, counts=())
        torch.cuda.empty_cache()  # what plain steps have used; graphs have memory of their own
        graph = torch.cuda.CUDAGraph()
        for parameter in self.parameters:
            parameter.grad = None
        # Other threads may go on: the one that pins the memory of the next batch asks the driver, too.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            names, values = self.backward(*static)
            found = [parameter.grad for parameter in self.parameters]
            kept = [mine if grad is not None else None for mine, grad in zip(self.gradients, found)]
            torch._foreach_copy_([g for g in kept if g is not None], [g for g in found if g is not None])
            for parameter in self.parameters:
                parameter.grad = None
            del found
        return Captured(graph, *static, names, values, kept)
