"""Measures `rtdetr.ops.ms_deform_attn`: time, memory and error of every backend on the cases of docs/op.md.

Times are medians in microseconds per call. On a GPU they are device times of replaying a CUDA graph of the call over
several input sets. The sets are at least 220 MB together, so that inputs are never in the cache, except with one image,
where a network's previous layer has just written them. On a CPU they are wall-clock times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rtdetr.benchmarks.timing import median_time
from rtdetr.ops import Backend, ms_deform_attn, why_not_compiled

Maps = tuple[tuple[int, int], ...]
Row = dict[str, Any]
Inputs = tuple[Tensor, ...]  # value, locations, weights, gradient of the output

RTDETR_MAPS: Maps = ((80, 80), (40, 40), (20, 20))
ENCODER_MAPS: Maps = ((100, 134), (50, 67), (25, 34), (13, 17))
PIXEL_DECODER_MAPS: Maps = ((16, 16), (32, 32), (64, 64))  # Mask2Former at 512; at 1024 twice as many a side
COLD_BYTES = 220_000_000
# Measured rate of random 128-byte rows from L2 on an NVIDIA H200: the second upper bound besides the device copy.
GATHER_BYTES_PER_SECOND = 9.2e12


@dataclass(frozen=True)
class OpCase:
    name: str
    batch: int
    queries: int
    maps: Maps
    places: str = "boxes"  # locations: in a random box per query, "local" to the query's pixel, or "anywhere"
    heads: int = 8
    channels: int = 32
    points: int = 4


CASES = (
    OpCase("R1", 1, 300, RTDETR_MAPS),
    OpCase("R16", 16, 300, RTDETR_MAPS),
    OpCase("T1850", 16, 1850, RTDETR_MAPS),
    OpCase("T2450", 16, 2450, RTDETR_MAPS),
    OpCase("E-local", 2, 17821, ENCODER_MAPS, "local"),
    OpCase("E-uniform", 2, 17821, ENCODER_MAPS, "anywhere"),
    OpCase("RF-8", 16, 300, ((40, 40),), heads=8, points=2),
    OpCase("RF-16", 16, 300, ((40, 40),), heads=16, channels=16, points=2),
    OpCase("M-512", 2, 5376, PIXEL_DECODER_MAPS, "local"),
    OpCase("M-1024", 2, 21504, tuple((2 * h, 2 * w) for h, w in PIXEL_DECODER_MAPS), "local"),
    OpCase("D64", 16, 300, RTDETR_MAPS, heads=4, channels=64),
    OpCase("R1280", 1, 300, tuple((2 * h, 2 * w) for h, w in RTDETR_MAPS)),
)


def make_inputs(case: OpCase, dtype: torch.dtype, device: torch.device, seed: int) -> Inputs:
    """Random inputs of a case; the weights sum to 1 over the points of a head."""
    generator = torch.Generator(device).manual_seed(seed)
    cells, levels = sum(h * w for h, w in case.maps), len(case.maps)
    kind: dict[str, Any] = {"generator": generator, "device": device}
    value = torch.randn(case.batch, cells, case.heads, case.channels, **kind).to(dtype)
    gradient = torch.randn(case.batch, case.queries, case.heads * case.channels, **kind).to(dtype)
    shape = (case.batch, case.queries, case.heads, levels, case.points, 2)
    maps = torch.tensor([[w, h] for h, w in case.maps], device=device, dtype=torch.float32).view(1, 1, 1, levels, 1, 2)
    if case.places == "boxes":
        one_box = (case.batch, case.queries, 1, 1, 1, 2)
        centres, sizes = torch.rand(one_box, **kind), 0.05 + 0.4 * torch.rand(one_box, **kind)
        locations = centres + sizes * (torch.rand(shape, **kind) - 0.5)
    elif case.places == "local":
        centres = torch.cat([_pixel_centres(h, w, device) for h, w in case.maps])[: case.queries]
        locations = centres.view(1, -1, 1, 1, 1, 2) + 2.0 * torch.randn(shape, **kind) / maps
    else:
        locations = torch.rand(shape, **kind)
    weights = torch.randn(*shape[:3], levels * case.points, **kind).softmax(-1).view(shape[:-1])
    return value, _off_borders(locations, maps), weights, gradient


def _off_borders(locations: Tensor, maps: Tensor) -> Tensor:
    """Moves points away from the borders of cells, where the location gradient is discontinuous: float32 rounding would
    decide the side of a point, and dominate the error of the gradients."""
    pixel = locations * maps - 0.5
    nearest = pixel.round()
    return torch.where((pixel - nearest).abs() < 1e-3, nearest + 0.01, pixel).add(0.5).div(maps)


def _pixel_centres(height: int, width: int, device: torch.device) -> Tensor:
    y, x = torch.meshgrid(torch.arange(height, device=device), torch.arange(width, device=device), indexing="ij")
    return torch.stack([(x + 0.5) / width, (y + 0.5) / height], -1).view(-1, 2)


def backends_for(device: torch.device) -> list[Backend]:
    """The backends that can run on the device, the compiled one first."""
    probe = torch.empty(1, 1, 1, 8, device=device)
    compiled: list[Backend] = ["cuda" if device.type == "cuda" else "cpu"]
    return (compiled if why_not_compiled(probe) is None else []) + ["torch"]


def measure(case: OpCase, backend: Backend, dtype: torch.dtype, device: torch.device, copy_rate: float | None) -> Row:
    """Times in microseconds, memory in MiB beyond the inputs and results, errors relative to float64. What a CPU cannot
    measure is None. copy_rate: from `copy_speed`."""
    first = make_inputs(case, dtype, device, 0)
    size = sum(t.numel() * t.element_size() for t in first)
    cold = device.type == "cuda" and case.batch > 1
    number = max(2, -(-COLD_BYTES // size)) if cold else 1
    sets = [first, *(make_inputs(case, dtype, device, i) for i in range(1, number))]
    forward_us = _time([partial(_forward, case, each, backend) for each in sets], device)
    both_us = _time([_step(case, each, backend) for each in sets], device)
    (output,), forward_mib = _with_peak(lambda: (_forward(case, first, backend),), device)
    gradients, backward_mib = _with_peak(_step(case, first, backend), device)
    exact_output, exact_gradients = _exact(case, first)
    value, _, weights, _ = first
    gathered = 4 * weights.numel() * case.channels * value.element_size()  # four cells a point
    return {
        "case": case.name,
        "backend": backend,
        "dtype": str(dtype).removeprefix("torch."),
        "forward_us": forward_us,
        "backward_us": both_us - forward_us,  # gradients of value, locations and weights
        "forward_mib": forward_mib,
        "backward_mib": backward_mib,
        "output_error": _error(output, exact_output),
        "gradient_error": max(map(_error, gradients, exact_gradients)),  # the worst of the three
        # Time of forward at the speed of a device copy, and of gathering its rows out of L2, over its time.
        "share_of_copy": size / copy_rate * 1e6 / forward_us if copy_rate else None,
        "share_of_gather": gathered / GATHER_BYTES_PER_SECOND * 1e6 / forward_us if copy_rate else None,
    }


def _forward(case: OpCase, inputs: Inputs, backend: Backend) -> Tensor:
    value, locations, weights, _ = inputs
    return ms_deform_attn(value, case.maps, None, locations, weights, backend=backend)


def _step(case: OpCase, inputs: Inputs, backend: Backend) -> Callable[[], tuple[Tensor, ...]]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]

    def step() -> tuple[Tensor, ...]:
        output = ms_deform_attn(leaves[0], case.maps, None, leaves[1], leaves[2], backend=backend)
        return torch.autograd.grad(output, leaves, inputs[3])

    return step


def _time(calls: list[Callable[[], Any]], device: torch.device, repeats: int = 20) -> float:
    if device.type != "cuda":
        return 1e3 * median_time(calls[0], False, repeats)
    stream, rounds = torch.cuda.Stream(device), 20 if len(calls) == 1 else 1
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls * rounds:
                call()
        return 1e3 * median_time(graph.replay, True, repeats) / (len(calls) * rounds)


def _with_peak(call: Callable[[], Any], device: torch.device) -> tuple[Any, float | None]:
    """The tensors that a call returns, and its peak memory beyond them in MiB, None on a CPU."""
    if device.type != "cuda":
        return call(), None
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = call()
    returned = sum(t.numel() * t.element_size() for t in results)
    return results, (torch.cuda.max_memory_allocated(device) - before - returned) / 2**20


def _exact(case: OpCase, inputs: Inputs) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Float64 results of the plain backend, one batch item at a time."""
    outputs, gradients = [], []
    for b in range(case.batch):
        single = tuple(t[b : b + 1].double() for t in inputs)
        outputs.append(_forward(case, single, "torch"))
        gradients.append(_step(case, single, "torch")())
    return torch.cat(outputs), tuple(torch.cat(parts) for parts in zip(*gradients))


def _error(result: Tensor, exact: Tensor) -> float:
    return float((result.double() - exact).norm() / exact.norm())


def copy_speed(device: torch.device) -> float | None:
    """Bytes per second that a large copy reads and writes; None on a CPU."""
    if device.type != "cuda":
        return None
    source = torch.randn(2**28, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / _time([lambda: torch.mul(source, 1.0, out=target)] * 2, device) * 1e6


def environment(device: torch.device) -> dict[str, str]:
    """Device and versions, on which the results depend."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {"device": name, "torch": torch.__version__, "cuda": torch.version.cuda or "none"}


def table(rows: list[Row]) -> str:
    """The measurements as a Markdown table."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(_show(name, value) for name, value in row.items()) + " |" for row in rows]
    return "\n".join(lines)


def _show(name: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "-"
    return f"{value:.1e}" if name.endswith("error") else f"{value:.2f}" if name.startswith("share") else f"{value:.1f}"
