"""Forward pass, losses and gradients of a training step as CUDA graphs: the host launches one thing, not thousands."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.config import ConfigError, SupervisionConfig, TrainConfig, settled
from rtdetr.engine import distributed
from rtdetr.engine.flat_gradients import FlatGradients
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
    elif distributed.world_size() > 1 and cfg.find_unused_parameters:
        reason = "train.find_unused_parameters is done by DistributedDataParallel"
    elif settled(cfg.accumulate) > 1:
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
    a few sizes serve all batches; with a single copy, two thirds of that where they do. Beyond the denoising queries,
    multiples of 50."""
    num_boxes = max(1, num_boxes)
    if num_boxes > num_denoising:
        return -(-num_boxes // 50) * 50
    copies, two_thirds = num_denoising // num_boxes, 2 * num_denoising // 3
    return two_thirds if copies == 1 and num_boxes <= two_thirds else num_denoising // copies


def repeats_in_crowds(cfg: SupervisionConfig) -> int:
    """How often each box of the fullest picture is offered at least; see SupervisionConfig.crowd_limit."""
    return 1 if cfg.one_to_many_repeats * cfg.crowd_limit <= MAX_COLUMNS else cfg.one_to_many_repeats


def layout_of(device: torch.device) -> torch.memory_format:
    """Of pictures and weights. Channels last is how GPUs like them, at least in 16 bits."""
    return torch.channels_last if device.type == "cuda" else torch.contiguous_format


def on_device(batch: Batch, device: torch.device, num_denoising: int) -> tuple[Tensor, Targets]:
    """Pictures and boxes of a batch there: bytes are made floats where the step begins."""
    images = batch.images.to(device, non_blocking=True).contiguous(memory_format=layout_of(device))
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
    """Runs `backward(images, targets)`, which leaves its gradients in `gradients` and returns named values, by graphs:
    one for each size of pictures and number of slots, captured when it comes for the third time, the oldest given up.

    The plain call is the twin, and takes pictures with more boxes than the GPU can match when each is offered
    `repeats` times. All graphs share their memory, the tensor that holds pictures of their size, and the gradients they
    end in. With several processes these are averaged after the graph; what the graph itself exchanges (statistics of
    batch norm, numbers of boxes) comes in the same order from every one, captured there or not.
    """

    def __init__(self, backward: Backward, gradients: FlatGradients, repeats: int) -> None:
        self.backward, self.gradients, self.max_slots = backward, gradients, MAX_COLUMNS // repeats
        self.images: dict[Hashable, Tensor] = {}  # what graphs read
        self.captured: OrderedDict[Hashable, Captured] = OrderedDict()
        self.seen: dict[Hashable, int] = {}
        self.pool = torch.cuda.graph_pool_handle()
        # NCCL waits for the end of graphs that use it before it ends itself, for ever if somebody keeps them.
        distributed.before_the_end(self, self.captured.clear)

    def __call__(self, images: Tensor, targets: Targets, kind: Hashable = None) -> Values:
        """kind: whatever else makes a graph another one."""
        values = self._run(images, targets, kind)
        if distributed.world_size() > 1:
            self.gradients.average()
        return values

    def _run(self, images: Tensor, targets: Targets, kind: Hashable) -> Values:
        key = (images.shape, images.dtype, targets.labels.shape, kind)
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
        for parameter, gradient in zip(self.gradients.parameters, step.gradients):
            parameter.grad = gradient
        return step.names, step.values.clone()

    def clear(self) -> None:
        """Gives up all graphs and their memory."""
        self.captured.clear()
        self.seen.clear()
        self.images.clear()

    def _capture(self, images: Tensor, targets: Targets) -> Captured:
        labels, boxes, boxes_pixel, mask = (tensor.clone() for tensor in targets[:4])
        pictures = self.images.setdefault((images.shape, images.dtype), torch.empty_like(images))
        static = pictures, Targets(labels, boxes, boxes_pixel, mask, counts=())
        torch.cuda.empty_cache()  # what plain steps have used; graphs have memory of their own
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on: the one that pins the memory of the next batch asks the driver, too.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            names, values = self.backward(*static)
        kept = [parameter.grad for parameter in self.gradients.parameters]
        return Captured(graph, *static, names, values, kept)
