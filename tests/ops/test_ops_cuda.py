"""What only the CUDA kernels have: several backward algorithms, wide offsets, tables for the map sizes.

That they compute the right thing is checked in test_ops.py, which runs on CUDA too; here every algorithm is compared
with the plain backend in float64 at sizes where it is the one that is chosen, and the limits of each are crossed.
"""

from __future__ import annotations

import threading

import pytest
import torch
from messages import message
from ops_cases import misaligned, off_borders
from torch import Tensor

from rtdetr.ops import ms_deform_attn, ms_deform_attn_fused, resolve_backend, why_not_compiled

pytestmark = pytest.mark.gpu

MAPS = ((24, 31), (12, 16), (5, 7))
# Error allowed for output and each gradient: norm of the difference over norm. The 16-bit rows are what rounding the
# result once leaves (2.1e-4 and 1.7e-3, on an H200) times 2.3; float32 measured 2.5e-6 at most.
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-12, torch.float16: 5e-4, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def _needs_cuda() -> None:
    reason = why_not_compiled(torch.empty(1, 1, 1, 8, device="cuda"))
    if reason is not None:
        pytest.skip(reason)


def _inputs(
    batch: int, queries: int, maps: tuple[tuple[int, int], ...], dtype: torch.dtype, heads: int = 8, channels: int = 32,
    points: int = 4,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Value, locations (a fifth of them outside the map), weights and a gradient of the output."""
    torch.manual_seed(batch * 1000 + queries)
    cells, wide = sum(h * w for h, w in maps), torch.float64 if dtype == torch.float64 else torch.float32
    value = torch.randn(batch, cells, heads, channels, device="cuda").to(dtype)
    locations = torch.rand(batch, queries, heads, len(maps), points, 2, device="cuda", dtype=wide) * 1.2 - 0.1
    weights = torch.randn(batch, queries, heads, len(maps) * points, device="cuda", dtype=wide).softmax(-1)
    gradient = torch.randn(batch, queries, heads * channels, device="cuda").to(dtype)
    return value, off_borders(locations, maps), weights.view(locations.shape[:-1]), gradient


def _run(inputs: tuple[Tensor, ...], maps: tuple[tuple[int, int], ...] | Tensor, backend: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]  # where they lie, aligned or not
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic and backend != "torch")  # grid_sample has no such gradient
    try:
        output = ms_deform_attn(leaves[0], maps, None, leaves[1], leaves[2], backend=backend)  # type: ignore[arg-type]
        return [output, *torch.autograd.grad(output, leaves, inputs[3])]
    finally:
        torch.use_deterministic_algorithms(deterministic)


def _compare(results: list[Tensor], inputs: tuple[Tensor, ...], maps: tuple[tuple[int, int], ...]) -> None:
    exact = _run(tuple(t.double() for t in inputs), maps, "torch")
    for name, result, expected in zip(("output", "value", "locations", "weights"), results, exact):
        error = float((result.detach().double() - expected.detach()).norm() / expected.detach().norm())
        assert error <= LIMITS[inputs[0].dtype], f"{name}: {error:.2e}"


@pytest.fixture(params=["fast", "deterministic"])
def mode(request: pytest.FixtureRequest) -> object:
    torch.use_deterministic_algorithms(request.param == "deterministic")
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize(
    "size", [(1, 20), (1, 50), (1, 500), (4, 3000)], ids=["tiles", "split tiles", "reductions", "sorted"]
)
@pytest.mark.parametrize(
    "channels, heads, points", [(32, 8, 4), (64, 2, 4), (16, 4, 4), (24, 3, 4), (5, 2, 4), (24, 3, 3), (5, 2, 1)]
)
def test_every_algorithm(
    dtype: torch.dtype, size: tuple[int, int], channels: int, heads: int, points: int, mode: str
) -> None:
    inputs = _inputs(*size, MAPS, dtype, heads, channels, points)
    _compare(_run(inputs, MAPS, "cuda"), inputs, MAPS)


@pytest.mark.parametrize("size", [(1, 50), (4, 3000)], ids=["small", "large"])
def test_map_sizes_in_device_memory(size: tuple[int, int], mode: str) -> None:
    inputs = _inputs(*size, MAPS, torch.float32)
    _compare(_run(inputs, torch.tensor(MAPS, device="cuda"), "cuda"), inputs, MAPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_deterministic_is_bitwise_equal(dtype: torch.dtype) -> None:
    inputs = _inputs(4, 3000, MAPS, dtype)
    inputs[1].copy_(inputs[1].round(decimals=1))  # many points in one cell, many of them equal
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = [_run(inputs, MAPS, "cuda") for _ in range(20)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [50, 400, 4000], ids=["tiles", "reductions", "sorted"])
def test_all_points_in_one_cell(dtype: torch.dtype, queries: int, mode: str) -> None:
    value, locations, weights, gradient = _inputs(2, queries, MAPS, dtype)
    locations = locations * 1e-3 + 0.5
    _compare(_run((value, locations, weights, gradient), MAPS, "cuda"), (value, locations, weights, gradient), MAPS)


def test_backward_in_a_graph_without_a_call_before_it() -> None:
    """The sorted algorithm has a second stream, made on first use by each thread."""
    inputs = _inputs(4, 3000, MAPS, torch.float32)
    results: list[Tensor] = []

    def capture() -> None:
        operator, points = torch.ops.rtdetr.ms_deform_attn_backward, (inputs[1], inputs[2])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            hw = [size for pair in MAPS for size in pair]
            grads = operator(inputs[3], inputs[0], hw, None, None, *points, True, True, True, False)
        graph.replay()
        results.extend(grads)

    thread = threading.Thread(target=capture)
    thread.start()
    thread.join()
    _compare([ms_deform_attn(inputs[0], MAPS, None, *inputs[1:3]), *results], inputs, MAPS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [20, 500, 4000], ids=["tiles", "reductions", "sorted"])
def test_points_outside_touch_nothing(dtype: torch.dtype, queries: int) -> None:
    value, locations, weights, gradient = _inputs(2, queries, MAPS, dtype)
    value.fill_(float("inf"))
    far = locations.sign() * 1e30 - 5
    output, *gradients = _run((value, far, weights, gradient), MAPS, "cuda")
    assert not output.any() and not any(g.any() for g in gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("queries", [20, 500, 4000], ids=["tiles", "reductions", "sorted"])
def test_nan_stays_with_its_item(dtype: torch.dtype, queries: int) -> None:
    value, locations, weights, gradient = _inputs(2, queries, MAPS, dtype)
    locations[1, 7, 2, 1, 3, 0] = float("nan")
    output, by_value, by_location, by_weight = _run((value, locations, weights, gradient), MAPS, "cuda")
    wrong = output.view(2, queries, 8, 32).isnan()
    assert wrong[1, 7, 2].all() and wrong.sum() == 32
    assert by_location[1, 7, 2, 1, 3].isnan().all() and by_location.isnan().sum() == 2
    assert by_weight[1, 7, 2, 1, 3].isnan() and by_weight.isnan().sum() == 1
    assert by_value.isfinite().all()


@pytest.mark.parametrize("dtype", list(LIMITS), ids=str)
@pytest.mark.parametrize("size", [(1, 50), (1, 500), (4, 3000)], ids=["tiles", "reductions", "sorted"])
@pytest.mark.parametrize("channels", [32, 8])
def test_every_tensor_may_be_misaligned(dtype: torch.dtype, size: tuple[int, int], channels: int, mode: str) -> None:
    inputs = _inputs(*size, MAPS, dtype, channels=channels)
    for odd in range(4):
        moved = tuple(misaligned(t) if i == odd else t for i, t in enumerate(inputs))
        assert moved[odd].is_contiguous() and moved[odd].data_ptr() % 16
        _compare(_run(moved, MAPS, "cuda"), inputs, MAPS)
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradient_out_of_a_concatenation(dtype: torch.dtype) -> None:
    """What torch.cat hands back for a batch of one is a contiguous view at the offset of its part."""
    inputs = _inputs(1, 50, MAPS, dtype)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    output = ms_deform_attn(leaves[0], MAPS, None, leaves[1], leaves[2], backend="cuda")
    joined = torch.cat([output.new_zeros(1, 3), output.flatten(1)], dim=1)
    weights = torch.cat([output.new_zeros(1, 3), inputs[3].flatten(1)], dim=1)
    _compare([output, *torch.autograd.grad(joined, leaves, weights)], inputs, MAPS)


def test_a_captured_graph_follows_misaligned_inputs() -> None:
    inputs = _inputs(1, 50, MAPS, torch.float16)
    moved = [misaligned(t) for t in inputs[:3]]
    ms_deform_attn(moved[0], MAPS, None, moved[1], moved[2], backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = ms_deform_attn(moved[0], MAPS, None, moved[1], moved[2], backend="cuda")
    moved[0].mul_(-1)
    graph.replay()
    expected = ms_deform_attn(-inputs[0], MAPS, None, inputs[1], inputs[2], backend="cuda")
    assert torch.equal(output, expected)


def test_aligned_inputs_are_not_copied() -> None:
    inputs = _inputs(4, 3000, MAPS, torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # a block of the allocator may be larger
    output = ms_deform_attn(inputs[0], MAPS, None, inputs[1], inputs[2], backend="cuda")
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peak - before == output.numel() * output.element_size()


LIES = [
    [[2**32, 2**32], [12, 16], [5, 7]],  # no cell at all in 64 bits
    [[2**32 + 24, 31], [12, 16], [5, 7]],  # the right size in 32 bits
    [[-24, -31], [12, 16], [5, 7]],
    [[0, 31], [12, 16], [5, 7]],
    [[25, 31], [12, 16], [5, 7]],  # a row more than value has
    [[24, 31], [12, 16], [2**20, 2**20]],
    [[2**62, 2**62], [2**63 - 1, 2**63 - 1], [-(2**63), 2]],
]


@pytest.mark.parametrize("queries", [20, 4000], ids=["small", "large"])
@pytest.mark.parametrize("lie", LIES, ids=str)
def test_wrong_sizes_in_device_memory_make_nan(lie: list[list[int]], queries: int, mode: str) -> None:
    """Nothing can be raised without waiting for the device; no address outside value may be touched."""
    inputs = _inputs(2, queries, MAPS, torch.float32)
    output, by_value, *_ = _run(inputs, torch.tensor(lie, device="cuda"), "cuda")
    assert output.isnan().all() and by_value.isfinite().all()
    reference = torch.rand(2, queries, 1, 2, device="cuda")
    logits, offsets = inputs[2].flatten(3).requires_grad_(), inputs[1].requires_grad_()
    fused = ms_deform_attn_fused(inputs[0], torch.tensor(lie, device="cuda"), reference, offsets, logits)
    fused.sum().backward()
    assert fused.isnan().all()
    torch.cuda.synchronize()


def test_cells_that_no_level_in_device_memory_holds_get_no_gradient(mode: str) -> None:
    inputs = _inputs(2, 4000, MAPS, torch.float32)
    fewer = torch.tensor([[24, 31], [12, 16], [5, 6]], device="cuda")
    by_value = _run(inputs, fewer, "cuda")[1]
    assert by_value[:, :-5].any() and not by_value[:, -5:].any()


def test_levels_in_device_memory_that_overlap_stay_within_the_scratch(mode: str) -> None:
    value, locations, weights, gradient = _inputs(2, 4000, MAPS, torch.float32, channels=8)
    maps, starts = torch.tensor([[24, 31]] * 3, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")
    leaves = [t.requires_grad_() for t in (value, locations, weights)]
    output = ms_deform_attn(leaves[0], maps, starts, leaves[1], leaves[2], backend="cuda")
    grads = torch.autograd.grad(output, leaves, gradient)
    torch.cuda.synchronize()
    assert all(g.isfinite().all() for g in (output, *grads))


def test_more_levels_than_a_kernel_argument_holds() -> None:
    """Pairs: `auto` falls back, `cuda` says why not. A tensor: the kernels run."""
    maps = ((3, 2),) * 40
    inputs = _inputs(2, 10, maps, torch.float32)
    assert resolve_backend("auto", inputs[0], 32) == "cuda" and resolve_backend("auto", inputs[0], 40) == "torch"
    for given, backend in ((maps, "auto"), (torch.tensor(maps, device="cuda"), "cuda")):
        _compare(_run(inputs, given, backend), inputs, maps)
    reference = torch.rand(2, 10, 1, 4, device="cuda")
    fused = [inputs[0], maps, reference, inputs[1], inputs[2]]
    assert ms_deform_attn_fused(*fused).shape == (2, 10, 256)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=message("too many levels", "backend='cuda'", "32", "40")):
        ms_deform_attn(inputs[0], maps, None, inputs[1], inputs[2], backend="cuda")
    with pytest.raises(RuntimeError, match=message("too many levels", "backend='cuda'", "32", "40")):
        ms_deform_attn_fused(*fused, backend="cuda")  # type: ignore[arg-type]


def test_more_batch_items_than_one_launch_takes(mode: str) -> None:
    maps = ((3, 2), (1, 2))
    inputs = _inputs(65_600, 1, maps, torch.float32, heads=1, channels=4, points=1)
    _compare(_run(inputs, maps, "cuda"), inputs, maps)


@pytest.mark.slow
def test_more_than_2_to_the_31_elements(mode: str) -> None:
    maps = ((1024, 1024),)
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    value, locations, weights, gradient = _inputs(9, 500, maps, torch.float16)
    assert value.numel() > 2**31
    whole = _run((value, locations, weights, gradient), maps, "cuda")
    last = _run((value[-1:], locations[-1:], weights[-1:], gradient[-1:]), maps, "torch")
    for name, result, expected in zip(("output", "value", "locations", "weights"), whole, last):
        error = float((result[-1:].double() - expected.double()).norm() / expected.double().norm())
        assert error <= 4 * LIMITS[torch.float16], f"{name}: {error:.2e}"
