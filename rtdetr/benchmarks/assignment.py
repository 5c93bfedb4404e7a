"""Measures `rtdetr.ops.linear_assignment` and its cost matrices at the size of RT-DETRv3-R18's training step.

The problems are 16 images in four prediction layers: four one-to-one groups of 300 queries, and one group of 450 in
which each box is matched four times. Times are medians in milliseconds; on a GPU by events.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from rtdetr.benchmarks.timing import median_time, work_of
from rtdetr.config import LossConfig, SupervisionConfig
from rtdetr.engine.acceleration.placement import slots_for
from rtdetr.losses.matcher import match_together, matching_cost
from rtdetr.ops.assignment import AssignmentBackend, linear_assignment
from rtdetr.ops.backend import why_not_compiled
from rtdetr.ops.kernels import Kernels, using
from rtdetr.types import QueryOutputs, Targets

LAYERS, CLASSES = 4, 80
GROUPS = ((4, 300, 1), (1, 450, 4))  # groups, queries, repeats
# 221 boxes in 16 images, as in COCO; and images with a hundred boxes each.
COUNTS = {"221 boxes": (5, 2, 8, 60, 1, 3, 10, 4, 36, 7, 2, 22, 6, 14, 30, 11), "16 x 100 boxes": (100,) * 16}


@dataclass(frozen=True)
class AssignmentMeasurement:
    case: str
    costs: str  # random, or as from a trained model: most queries near a box
    backend: str
    cost_ms: float  # computing the cost matrices: by one kernel on a GPU, for scipy by torch
    assignment_ms: float
    both_ms: float  # both in sequence
    same_as_scipy: float  # share of images, over all layers and groups
    graph_ms: float = 0.0  # both as a CUDA graph, with counts on the device and padding, as in training
    apart_ms: tuple[float, ...] = ()  # one-to-one problems, one-to-many problems; (): not profiled
    kernels: float = 0.0
    busy_ms: float = 0.0  # GPU time
    waits: float = 0.0  # number of times the host waits for the GPU
    mib: float = 0.0  # peak GPU memory, costs included


def backends_for(device: torch.device) -> list[AssignmentBackend]:
    """Returns the backends that run on the device; prints the reason if there is only one."""
    why_not = why_not_compiled(torch.empty(0, device=device))
    if why_not is not None:
        print(why_not)
        return ["scipy"]
    return ["scipy", "cuda" if device.type == "cuda" else "cpu"]


def predictions(counts: tuple[int, ...], trained: bool) -> tuple[Targets, list[tuple[QueryOutputs, int]]]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    boxes = [torch.cat((rand(n, 2) * 0.8 + 0.1, rand(n, 2) * 0.3 + 0.02), dim=1) for n in counts]
    labels = [torch.randint(CLASSES, (n,), generator=generator) for n in counts]
    outputs = []
    for groups, queries, repeats in GROUPS:
        shape = (LAYERS, groups, len(counts), queries)
        found = torch.cat((rand(*shape, 2), rand(*shape, 2) * 0.4 + 0.02), dim=-1)
        logits = torch.randn(*shape, CLASSES, generator=generator) - 4
        for b, n in enumerate(counts if trained else ()):
            near = torch.randint(n, (LAYERS, groups, queries * 3 // 4), generator=generator)
            noise = 1 + 0.08 * torch.randn(*near.shape, 4, generator=generator)
            found[:, :, b, : near.shape[2]] = boxes[b][near] * noise
            logits[:, :, b, : near.shape[2]].scatter_add_(-1, labels[b][near][..., None], torch.full_like(noise, 4))
        outputs.append((QueryOutputs(logits, found.clamp(1e-3, 1)), repeats))
    return Targets.stack(labels, boxes, boxes), outputs


@torch.no_grad()
def measure(
    case: str, trained: bool, backends: list[AssignmentBackend], device: torch.device, profiled: bool = False
) -> list[AssignmentMeasurement]:
    counts, on_gpu = COUNTS[case], device.type == "cuda"
    targets, outputs = predictions(counts, trained)
    targets = targets.to(device)
    on_device = [(QueryOutputs(*(tensor.to(device) for tensor in each)), repeats) for each, repeats in outputs]

    def make_costs(kernels: Kernels) -> list[tuple[Tensor, int]]:
        with using(kernels):
            return [(matching_cost(each, targets, LossConfig()), repeats) for each, repeats in on_device]

    costs = make_costs("plain")
    expected = [linear_assignment(cost, counts, repeats, backend="scipy") for cost, repeats in costs]

    def row(backend: AssignmentBackend) -> AssignmentMeasurement:
        make = partial(make_costs, "plain" if backend == "scipy" else "auto")

        def solve(problems: list[tuple[Tensor, int]] = costs) -> list[Tensor]:
            return [linear_assignment(cost, counts, repeats, backend=backend) for cost, repeats in problems]

        same = torch.cat([(a == b).all(-1).flatten() for a, b in zip(solve(), expected)])
        times = 3 if backend == "scipy" else 9
        measured = AssignmentMeasurement(
            case,
            "trained" if trained else "random",
            backend,
            cost_ms=median_time(make, on_gpu, 9),
            assignment_ms=median_time(solve, on_gpu, times),
            both_ms=median_time(lambda: solve(make()), on_gpu, times),
            same_as_scipy=float(same.float().mean()),
            graph_ms=median_time(captured(on_device, targets), on_gpu, 9) if backend == "cuda" else 0.0,
        )
        return with_profile(measured, solve, costs, on_gpu, times) if profiled else measured

    return [row(backend) for backend in backends]


def captured(outputs: list[tuple[QueryOutputs, int]], targets: Targets) -> Callable[[], object]:
    """Captures the matching of a training step as a CUDA graph; returns the function that replays it."""
    padded = targets.padded(slots_for(max(targets.counts), SupervisionConfig().num_denoising))._replace(counts=())
    graph = torch.cuda.CUDAGraph()
    match_together(outputs, padded, LossConfig())
    with torch.cuda.graph(graph):
        match_together(outputs, padded, LossConfig())

    def replay(inputs: object = (outputs, padded)) -> None:  # keeps the tensors alive, as the graph reads them
        graph.replay()

    return replay


def with_profile(
    row: AssignmentMeasurement, solve: Callable[..., object], costs: list[tuple[Tensor, int]], on_gpu: bool, times: int
) -> AssignmentMeasurement:
    apart = tuple(median_time(partial(solve, [each]), on_gpu, times) for each in costs)
    if not on_gpu:
        return replace(row, apart_ms=apart)
    torch.cuda.reset_peak_memory_stats()
    solve()
    mib, work = torch.cuda.max_memory_allocated() / 2**20, work_of(solve, number=3)
    return replace(row, apart_ms=apart, kernels=work.kernels, busy_ms=work.busy_ms, waits=work.waits, mib=mib)


def table(rows: list[AssignmentMeasurement], profiled: bool = False) -> str:
    columns = [("case", "<16"), ("costs", "<8"), ("backend", "<8"), ("cost ms", ">8"), ("assignment ms", ">14")]
    columns += [("both ms", ">8"), ("as a graph", ">11"), ("same as scipy", ">14")]
    if profiled:
        columns += [("one-to-one", ">11"), ("one-to-many", ">12"), ("kernels", ">8"), ("busy ms", ">8")]
        columns += [("waits", ">6"), ("MiB", ">6")]
    lines = [" ".join(f"{name:{width}s}" for name, width in columns)]
    for row in rows:
        numbers = f"{row.cost_ms:8.2f} {row.assignment_ms:14.2f} {row.both_ms:8.2f} "
        numbers += f"{row.graph_ms:11.2f} {row.same_as_scipy:14.2%}"
        if profiled:
            one, many = row.apart_ms
            numbers += (
                f" {one:11.2f} {many:12.2f} {row.kernels:8.0f} {row.busy_ms:8.2f} {row.waits:6.1f} {row.mib:6.0f}"
            )
        lines.append(f"{row.case:16s} {row.costs:8s} {row.backend:8s} {numbers}")
    return "\n".join(lines)
