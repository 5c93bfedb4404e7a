"""Measures `rtdetr.ops.linear_assignment` and its cost matrices at the size of RT-DETRv3-R18's training step.

The problems are 16 images in four prediction layers: four one-to-one groups of 300 queries, and one group of 450 in
which each box is matched four times. Times are medians in milliseconds; on a GPU by events.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

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
) -> list[dict[str, Any]]:
    """One row per backend. Without --profile, and on a CPU, what is profiled is 0 or empty."""
    counts, on_gpu = COUNTS[case], device.type == "cuda"
    targets, outputs = predictions(counts, trained)
    targets = targets.to(device)
    on_device = [(QueryOutputs(*(tensor.to(device) for tensor in each)), repeats) for each, repeats in outputs]

    def make_costs(kernels: Kernels) -> list[tuple[Tensor, int]]:
        with using(kernels):
            return [(matching_cost(each, targets, LossConfig()), repeats) for each, repeats in on_device]

    costs = make_costs("plain")
    expected = [linear_assignment(cost, counts, repeats, backend="scipy") for cost, repeats in costs]

    def row(backend: AssignmentBackend) -> dict[str, Any]:
        make = partial(make_costs, "plain" if backend == "scipy" else "auto")
        times = 3 if backend == "scipy" else 9

        def solve(problems: list[tuple[Tensor, int]] = costs) -> list[Tensor]:
            return [linear_assignment(cost, counts, repeats, backend=backend) for cost, repeats in problems]

        same = torch.cat([(a == b).all(-1).flatten() for a, b in zip(solve(), expected)])
        return {
            "case": case,
            "costs": "trained" if trained else "random",  # trained: most queries are near a box
            "backend": backend,
            "cost_ms": median_time(make, on_gpu, 9),  # of the cost matrices: by one kernel on a GPU, for scipy by torch
            "assignment_ms": median_time(solve, on_gpu, times),
            "both_ms": median_time(lambda: solve(make()), on_gpu, times),  # in sequence
            "same_as_scipy": float(same.float().mean()),  # share of images, over all layers and groups
            # Both as a CUDA graph, with counts on the device and padding, as in training.
            "graph_ms": median_time(captured(on_device, targets), on_gpu, 9) if backend == "cuda" else 0.0,
            # One-to-one problems, one-to-many problems.
            "apart_ms": [median_time(partial(solve, [each]), on_gpu, times) for each in costs if profiled],
            **work_on_gpu(solve, profiled and on_gpu),
        }

    return [row(backend) for backend in backends]


def work_on_gpu(solve: Callable[[], object], profiled: bool) -> dict[str, float]:
    """Kernels, milliseconds that they take, waits of the host for the GPU, and peak MiB, costs included."""
    if not profiled:
        return {"kernels": 0.0, "busy_ms": 0.0, "waits": 0.0, "mib": 0.0}
    torch.cuda.reset_peak_memory_stats()
    solve()
    mib, work = torch.cuda.max_memory_allocated() / 2**20, work_of(solve, number=3)
    return {"kernels": work.kernels, "busy_ms": work.busy_ms, "waits": work.waits, "mib": mib}


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


TITLES = "case             costs    backend   cost ms  assignment ms  both ms  as a graph  same as scipy"
ROW = (
    "{case:16s} {costs:8s} {backend:8s} {cost_ms:8.2f} {assignment_ms:14.2f} {both_ms:8.2f} {graph_ms:11.2f} "
    "{same_as_scipy:14.2%}"
)
PROFILE_TITLES = "  one-to-one  one-to-many  kernels  busy ms  waits    MiB"
PROFILE = " {apart_ms[0]:11.2f} {apart_ms[1]:12.2f} {kernels:8.0f} {busy_ms:8.2f} {waits:6.1f} {mib:6.0f}"


def table(rows: list[dict[str, Any]], profiled: bool = False) -> str:
    row = ROW + PROFILE * profiled
    return "\n".join([TITLES + PROFILE_TITLES * profiled, *(row.format(**each) for each in rows)])
