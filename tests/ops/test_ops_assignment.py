"""Linear assignment: every backend against brute force and scipy, and a sentence for what does not fit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from messages import message
from torch import Tensor

from rtdetr.ops import compiled
from rtdetr.ops.assignment import (
    MAX_COLUMNS,
    linear_assignment,
    linear_assignment_checked,
    linear_assignment_padded,
    resolve_assignment_backend,
)

needs_cpu = pytest.mark.skipif(compiled.WHY_NOT["cpu"] is not None, reason=str(compiled.WHY_NOT["cpu"]))
BACKENDS = [
    pytest.param("scipy"),
    pytest.param("cpu", marks=needs_cpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
KINDS = ("uniform", "ties", "all equal", "huge", "tiny", "negative", "steep", "float64")


def device_of(backend: str) -> str:
    return "cuda" if backend == "cuda" else "cpu"


def random_cost(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Tensor:
    values = rng.random(shape)
    if kind == "ties":
        values = np.floor(4 * values)
    elif kind == "all equal":
        values = np.zeros(shape)
    elif kind == "huge":
        values = 1e35 * values
    elif kind == "tiny":
        values = 1e-35 * (values - 0.5)
    elif kind == "negative":
        values = -10 * values
    elif kind == "steep":
        values = values * np.exp(5 * rng.normal(size=shape))
    return torch.tensor(values, dtype=torch.float64 if kind == "float64" else torch.float32)


def total(cost: Tensor, index: Tensor) -> float:
    """Cost of one image's assignment, (n, Q) and (Q,), summed in float64."""
    queries = torch.nonzero(index >= 0).flatten()
    return float(cost.double()[index[queries], queries].sum())


def assert_valid(cost: Tensor, index: Tensor, repeats: int) -> None:
    """As many pairs as there can be, and no box more often than it was offered."""
    boxes, queries = cost.shape
    assert int((index >= 0).sum()) == min(boxes * repeats, queries)
    assert index.numel() == 0 or -1 <= int(index.min()) <= int(index.max()) < max(boxes, 1)
    if boxes:
        assert int(torch.bincount(index[index >= 0], minlength=boxes).max()) <= repeats


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_other_assignment_is_cheaper(backend: str) -> None:
    """Brute force over every way to give each of three boxes a query, and each of four queries a box."""
    cost = torch.rand(5, 3, 4, generator=torch.Generator().manual_seed(0))
    index = linear_assignment(cost.to(device_of(backend)), (3,), backend=backend).cpu()[:, 0]
    for own, found in zip(cost, index):
        ways = itertools.permutations(range(4), 3)
        assert total(own, found) == pytest.approx(min(float(own[range(3), way].sum()) for way in ways))
    index = linear_assignment(cost.to(device_of(backend)), (3,), repeats=2, backend=backend).cpu()[:, 0]
    for own, found in zip(cost, index):
        ways = (way for way in itertools.product(range(3), repeat=4) if max(map(way.count, way)) <= 2)
        assert total(own, found) == pytest.approx(min(float(own[way, range(4)].sum()) for way in ways))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_total_cost_equals_scipys(backend: str, kind: str) -> None:
    rng = np.random.default_rng(KINDS.index(kind))
    for _ in range(40):
        queries, repeats = int(rng.choice([1, 2, 17, 64, 150])), int(rng.choice([1, 2, 4]))
        counts = [int(n) for n in rng.choice([0, 1, 2, 7, 40], size=3)]
        cost = random_cost(kind, (2, sum(counts), queries), rng)
        found, bad = linear_assignment_checked(cost.to(device_of(backend)), counts, repeats, backend=backend)
        expected = linear_assignment(cost, counts, repeats, backend="scipy")
        assert not bad.any() and found.shape == expected.shape
        for g, b in np.ndindex(2, 3):
            own, index = cost[g].split(counts)[b], found[g, b].cpu()
            assert_valid(own, index, repeats)
            scale = float(own.abs().max()) * queries if own.numel() else 0.0
            assert total(own, index) == pytest.approx(total(own, expected[g, b]), rel=1e-12, abs=1e-12 * scale)
            if kind in ("uniform", "negative", "float64"):  # a single best assignment: the same one
                assert torch.equal(index, expected[g, b])


@pytest.mark.parametrize("backend", BACKENDS)
def test_costs_that_are_not_finite_are_named_and_harm_no_other_image(backend: str) -> None:
    cost = torch.rand(2, 9, 6, generator=torch.Generator().manual_seed(0))
    clean = linear_assignment(cost.to(device_of(backend)), (4, 0, 5), backend=backend).cpu()
    for value in (float("nan"), float("inf"), -float("inf")):
        broken = cost.clone()
        broken[1, 6, 2] = value  # the third image of the second set
        index, bad = linear_assignment_checked(broken.to(device_of(backend)), (4, 0, 5), backend=backend)
        assert bad.cpu().tolist() == [[False, False, False], [False, False, True]]
        assert (index[1, 2] == -1).all()
        assert torch.equal(index.cpu()[0], clean[0]) and torch.equal(index.cpu()[1, :2], clean[1, :2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_empty_problems_and_strides(backend: str) -> None:
    device = device_of(backend)
    assert (
        linear_assignment(torch.empty(3, 0, 7, device=device), (0, 0), backend=backend).tolist() == [[[-1] * 7] * 2] * 3
    )
    assert linear_assignment(torch.empty(0, 2, 7, device=device), (2,), backend=backend).shape == (0, 1, 7)
    assert linear_assignment(torch.empty(2, 0, device=device), (2,), backend=backend).shape == (1, 0)
    cost = torch.rand(8, 5, generator=torch.Generator().manual_seed(0)).to(device)
    apart = linear_assignment(cost.t(), (5,), backend=backend)
    assert torch.equal(apart, linear_assignment(cost.t().contiguous(), (5,), backend=backend))


@needs_cpu
def test_the_number_of_threads_changes_nothing() -> None:
    cost = torch.rand(4, 60, 80, generator=torch.Generator().manual_seed(0))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(linear_assignment(cost, (20, 0, 40), 2, backend="cpu"))
    torch.set_num_threads(before)
    assert torch.equal(*results)


@needs_cpu
def test_the_operator_is_registered_as_pytorch_wants_it() -> None:
    cost = torch.rand(2, 6, 9)
    torch.library.opcheck(torch.ops.rtdetr.linear_assignment.default, (cost, [2, 4], 2))
    compiled_call = torch.compile(lambda c: linear_assignment(c, (2, 4), 2), fullgraph=True, backend="eager")
    assert torch.equal(compiled_call(cost), linear_assignment(cost, (2, 4), 2))


def test_what_does_not_fit_is_refused() -> None:
    cost = torch.rand(3, 5)
    with pytest.raises(ValueError, match=message("expected", "counts", "T = 3", "[1, 1]")):
        linear_assignment(cost, (1, 1))
    with pytest.raises(ValueError, match="counts"):
        linear_assignment(cost, (4, -1))
    with pytest.raises(ValueError, match=message("expected", "repeats", "whole number", "1")):
        linear_assignment(cost, (3,), 0)
    with pytest.raises(ValueError, match=message("expected", "repeats", "whole number", "1", "2.0")):
        linear_assignment(cost, (3,), 2.0)  # type: ignore[arg-type]
    for counts in (3, (1.5, 1.5), torch.tensor([1.0, 2.0]), torch.tensor(3), [[3]], "3"):
        with pytest.raises(ValueError, match=message("expected", "counts", "whole number", "image")):
            linear_assignment(cost, counts)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=message("expected", "cost", "(..., T, Q)", "floating point", "(3, 5)", "torch.int64")
    ):
        linear_assignment(cost.long(), (3,))
    with pytest.raises(ValueError, match="cost: expected"):
        linear_assignment(cost[0], (5,))
    for name, given in (
        ("cost: expected a tensor, got ndarray", (cost.numpy(), (3,))),
        ("cost: expected a tensor, got list", (cost.tolist(), (3,))),
        ("cost: expected a tensor that holds numbers, got one on the meta device", (cost.to("meta"), (3,))),
        ("counts: expected a tensor that holds numbers", (cost, torch.tensor([3], device="meta"))),
    ):
        for backend in ("auto", "scipy", "cpu"):
            with pytest.raises(ValueError, match=name):
                linear_assignment(*given, backend=backend)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="counts: expected a tensor, got ndarray"):
        linear_assignment_padded(cost, np.array([3]))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="backend: expected one of"):
        linear_assignment(cost, (3,), backend="gpu")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="needs costs on cuda"):
        linear_assignment(cost, (3,), backend="cuda")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("repeats", [6, 1000, 2**31, 2**62, 2**65])
def test_more_repeats_than_queries_are_as_many(backend: str, repeats: int) -> None:
    device = "cuda" if backend == "cuda" else "cpu"
    cost = torch.rand(2, 3, 5, generator=torch.Generator().manual_seed(0)).to(device)
    index = linear_assignment(cost, (2, 1), repeats, backend=backend)  # type: ignore[arg-type]
    wanted = torch.stack((cost[:, :2].argmin(1), torch.zeros(2, 5, dtype=torch.int64, device=device)), 1)
    assert torch.equal(index, wanted)  # each query has the box it likes best
    padded = linear_assignment_padded(cost, torch.tensor([3], device=device), repeats, backend=backend)[0]  # type: ignore[arg-type]
    assert torch.equal(padded[:, 0], cost.argmin(1))


def test_auto_takes_a_kernel_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = torch.rand(3, 5)
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", None)
    assert resolve_assignment_backend("auto", cost, (3,), 1) == "cpu"
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", "not built")
    assert resolve_assignment_backend("auto", cost, (3,), 1) == "scipy"
    with pytest.raises(RuntimeError, match="backend='cpu' cannot run: not built"):
        linear_assignment(cost, (3,), backend="cpu")


@pytest.mark.gpu
def test_a_problem_too_wide_for_the_gpu_goes_to_scipy() -> None:
    cost = torch.rand(2, MAX_COLUMNS + 1, device="cuda")
    assert (linear_assignment(cost, (2,)) >= 0).sum() == 2
    with pytest.raises(RuntimeError, match=f"up to {MAX_COLUMNS}"):
        linear_assignment(cost, (2,), backend="cuda")


@pytest.mark.gpu
def test_the_gpu_does_not_wait_and_graphs_capture() -> None:
    cost = torch.rand(4, 600, 300, device="cuda")
    counts = (300,) * 2
    expected = linear_assignment(cost, counts, backend="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = linear_assignment(cost, counts, backend="cuda")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = linear_assignment(cost, counts, backend="cuda")
    graph.replay()
    assert torch.equal(again, expected) and torch.equal(captured, expected)


@pytest.mark.gpu
def test_more_images_than_one_launch_takes() -> None:
    counts = [i % 3 for i in range(1100)]
    cost = torch.rand(sum(counts), 8, generator=torch.Generator().manual_seed(0))
    found = linear_assignment(cost.cuda(), counts, backend="cuda").cpu()
    assert torch.equal(found, linear_assignment(cost, counts, backend="scipy"))


@pytest.mark.gpu
def test_more_sets_than_a_grid_is_high() -> None:
    cost = torch.rand(70_000, 3, 4, generator=torch.Generator().manual_seed(0))
    found = linear_assignment(cost.cuda(), (1, 2), backend="cuda").cpu()
    assert torch.equal(found, linear_assignment(cost, (1, 2)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_of_every_kind_mean_the_same(backend: str) -> None:
    """Also where each image could have as many rows as any other."""
    cost = torch.rand(2, 1, 3, 4, 6, generator=torch.Generator().manual_seed(0)).to(device_of(backend))
    wanted = linear_assignment(cost, [1, 3], 2, backend=backend)
    assert wanted.shape == (2, 1, 3, 2, 6) and wanted[..., 0, :].max() == 0 and wanted[..., 1, :].max() == 2
    for counts in ((1, 3), np.array([1, 3]), torch.tensor([1, 3]), torch.tensor([1, 3], dtype=torch.int32)):
        assert torch.equal(linear_assignment(cost, counts, np.int64(2), backend=backend), wanted)  # type: ignore[arg-type]
    assert torch.equal(linear_assignment(cost, torch.tensor([1, 3], device=cost.device), 2, backend=backend), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_costs_of_16_bits_are_taken_as_they_are(backend: str, dtype: torch.dtype) -> None:
    """A detector under autocast has them. Whole numbers below 256 have no other value in either type."""
    cost = torch.randperm(200, generator=torch.Generator().manual_seed(0)).view(2, 10, 10).to(dtype).requires_grad_()
    found = linear_assignment(cost.to(device_of(backend)), (4, 0, 6), backend=backend)
    assert not found.requires_grad
    assert torch.equal(found.cpu(), linear_assignment(cost.double(), (4, 0, 6), backend="scipy"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_counts_on_the_device(backend: str) -> None:
    """Every image has the same number of rows; those after its boxes mean nothing."""
    device = "cuda" if backend == "cuda" else "cpu"
    counts, slots = [3, 0, 7, 1], 7
    cost = torch.rand(2, 5, len(counts) * slots, 12, generator=torch.Generator().manual_seed(0)).to(device)
    used = [b * slots + i for b, count in enumerate(counts) for i in range(count)]
    for repeats in (1, 2):
        found, bad = linear_assignment_padded(cost, torch.tensor(counts, device=device), repeats, backend=backend)
        wanted = linear_assignment(cost[..., used, :], counts, repeats, backend=backend)
        assert torch.equal(found, wanted) and bad.shape == (2, 5, 4) and not bad.any()
    with pytest.raises(ValueError, match="counts: expected"):
        linear_assignment_padded(cost, torch.tensor([1, 2, 3], device=device), backend=backend)
