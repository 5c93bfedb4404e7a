"""The largest values of rows: the kernel against a stable sort, which takes the first of equal values, as it does."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rtdetr.ops.fused.top_k import MAX_K, MAX_ROW, top_k, why_not


def expected(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    best, index = values.sort(dim=1, descending=True, stable=True)
    return best[:, :k], index[:, :k]


def rows(kind: str, number: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(number, length, generator=generator)
    if kind == "ties":
        return values.round()
    if kind == "equal":
        return torch.zeros(number, length)
    if kind == "extreme":
        values[:, ::3], values[:, 1::7], values[0, length // 2] = -torch.inf, torch.inf, torch.nan
        return values
    return values.sigmoid() if kind == "scores" else values


def test_without_a_kernel() -> None:
    values = rows("normal", 3, 40)
    assert why_not(values, 5) is not None
    for found, wanted in zip(top_k(values, 5), expected(values, 5)):
        assert torch.equal(found, wanted)
    assert top_k(values, 0)[1].shape == (3, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "scores", "ties", "equal", "extreme"])
def test_the_kernel_takes_what_a_stable_sort_takes(kind: str, dtype: torch.dtype) -> None:
    for number, length, k in ((1, 24000, 300), (3, 8400, 300), (40, 2100, 1), (2, 1, 1), (2, 700, 700), (2, 5000, 513),
                              (1, MAX_ROW, MAX_K), (5, 100, 0)):  # fmt: skip
        values = rows(kind, number, length).to("cuda", dtype)
        assert why_not(values, k) is None
        (best, index), (wanted, places) = top_k(values, k), expected(values, k)
        torch.testing.assert_close(best, wanted, atol=0, rtol=0, equal_nan=True)
        assert torch.equal(index, places), (kind, length, k)


@pytest.mark.gpu
def test_what_the_kernel_leaves_to_torch() -> None:
    values = torch.randn(2, MAX_ROW + 1, device="cuda")
    for each, k in (
        (values, 3),
        (values[:, :2000], MAX_K + 1),
        (values.double(), 3),
        (values[:, :9].requires_grad_(), 3),
    ):
        assert why_not(each, k) is not None
        assert torch.equal(top_k(each, k)[0], each.topk(k, dim=1)[0])
    view = values[:, 1:4001:2]
    assert torch.equal(top_k(view, 7)[1], expected(view, 7)[1])
    compiled = torch.compile(lambda x: top_k(x * 2, 5), fullgraph=True)(values[:, :50])
    assert torch.equal(compiled[1], expected(values[:, :50], 5)[1])
