"""rtdetr.losses.matcher against golden matches of the official code, brute force and its own plain loop."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from golden_files import golden_dir
from torch import Tensor

from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.config import LossConfig
from rtdetr.losses.matcher import match_together, matching_cost
from rtdetr.ops.kernels import Kernels, using
from rtdetr.types import QueryOutputs, Targets

CONFIG = LossConfig()


def match(outputs: QueryOutputs, targets: Targets, cfg: LossConfig, repeats: int = 1) -> Tensor:
    return match_together([(outputs, repeats)], targets, cfg)[0][0]


def _targets(labels: list[Tensor], boxes: list[Tensor]) -> Targets:
    return Targets.stack(labels, boxes, [cxcywh_to_xyxy(each) * 64 for each in boxes])


def _random(counts: tuple[int, ...], shape: tuple[int, ...] = (2, 3), num_queries: int = 9) -> tuple:
    generator = torch.Generator().manual_seed(sum(counts) + num_queries)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64)

    boxes = [torch.cat((0.3 + 0.4 * rand(n, 2), 0.1 + 0.2 * rand(n, 2)), dim=-1) for n in counts]
    labels = [torch.randint(0, 5, (n,), generator=generator) for n in counts]
    size = (*shape, len(counts), num_queries)
    outputs = QueryOutputs(4 * rand(*size, 5) - 2, torch.cat((rand(*size, 2), 0.3 * rand(*size, 2)), dim=-1))
    return outputs, _targets(labels, boxes)


def test_equals_official_matches() -> None:
    golden = np.load(golden_dir() / "components.npz")
    get = {key: torch.from_numpy(golden[f"match/{key}"]) for key in ("box", "logit")}
    targets = _targets(
        [torch.from_numpy(golden[f"match/gt_class{i}"])[:, 0] for i in (0, 1)],
        [torch.from_numpy(golden[f"match/gt_box{i}"]) for i in (0, 1)],
    )
    index = match(QueryOutputs(get["logit"][None, None], get["box"][None, None]), targets, CONFIG)
    assert index.shape == (1, 1, 2, 12) and index.dtype == torch.int64
    for i in (0, 1):
        queries, boxes = golden[f"match/pair{i}"]
        expected = torch.full((12,), -1)
        expected[torch.from_numpy(queries)] = torch.from_numpy(boxes)
        assert index[0, 0, i].tolist() == expected.tolist()


def test_total_cost_is_the_least_of_all_assignments() -> None:
    outputs, targets = _random((3, 2), shape=(2, 2), num_queries=5)
    cost = matching_cost(outputs, targets, CONFIG)  # (K, G, T, Q)
    index = match(outputs, targets, CONFIG)
    for k, g, (b, first) in itertools.product(range(2), range(2), enumerate((0, 3))):
        n = targets.counts[b]
        own = cost[k, g, first : first + n]
        least = min(sum(own[i, q] for i, q in enumerate(chosen)) for chosen in itertools.permutations(range(5), n))
        matched = index[k, g, b]
        assert sorted(matched[matched >= 0].tolist()) == list(range(n))
        total = sum(own[matched[q], q] for q in range(5) if matched[q] >= 0)
        torch.testing.assert_close(total, least, rtol=1e-12, atol=0)


def test_one_to_many_offers_every_box_several_times() -> None:
    outputs, targets = _random((2, 1, 0), num_queries=20)
    index = match(outputs, targets, CONFIG, repeats=4)
    for b, n in enumerate(targets.counts):
        for each in index[:, :, b].flatten(0, 1):
            assert [int((each == i).sum()) for i in range(n)] == [4] * n
            assert int((each >= 0).sum()) == 4 * n


def test_more_boxes_than_queries_uses_every_query() -> None:
    outputs, targets = _random((7,), num_queries=4)
    assert (match(outputs, targets, CONFIG) >= 0).all()
    outputs, targets = _random((3,), num_queries=9)
    assert (match(outputs, targets, CONFIG, repeats=4) >= 0).all()


def test_every_backend_gives_what_scipy_gives() -> None:
    (outputs, targets), (others, _) = _random((4, 0, 3, 1)), _random((4, 0, 3, 1), shape=(2, 1), num_queries=25)
    with using("plain"):
        expected = [match(outputs, targets, CONFIG), match(others, targets, CONFIG, repeats=3)]
    fast, non_finite = match_together([(outputs, 1), (others, 3)], targets, CONFIG)
    assert all(torch.equal(a, b) for a, b in zip(expected, fast, strict=True)) and non_finite is None


def test_images_and_batches_without_boxes_match_nothing() -> None:
    outputs, targets = _random((0, 2))
    assert (match(outputs, targets, CONFIG)[:, :, 0] == -1).all()
    outputs, targets = _random((0, 0))
    index = match(outputs, targets, CONFIG)
    assert index.shape == (2, 3, 2, 9) and (index == -1).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_non_finite_prediction_is_named(bad: float, kernels: Kernels) -> None:
    outputs, targets = _random((2, 3))
    outputs.boxes[1, 2, 1, 4, 0] = bad
    with using(kernels), pytest.raises(FloatingPointError, match="layer 1, group 2, image 1 "):
        match(outputs, targets, CONFIG)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_cost_is_computed_in_float32_at_least(dtype: torch.dtype, expected: torch.dtype) -> None:
    outputs, targets = _random((2, 3))
    cost = matching_cost(QueryOutputs(*(each.to(dtype) for each in outputs)), targets, CONFIG)
    assert cost.dtype == expected and cost.shape == (2, 3, 5, 9)


@pytest.mark.gpu
def test_on_a_gpu_a_non_finite_image_is_flagged_and_matches_nothing() -> None:
    outputs, targets = _random((2, 3))
    expected = match(outputs, targets, CONFIG)
    outputs.boxes[1, 2, 1, 4, 0] = float("nan")
    moved = QueryOutputs(outputs.logits.cuda(), outputs.boxes.cuda())
    (index,), non_finite = match_together([(moved, 1)], targets.to("cuda"), CONFIG)
    assert non_finite is not None and non_finite.tolist() == [False, True]
    assert (index[1, 2, 1] == -1).all()
    assert torch.equal(index[:, :, 0].cpu(), expected[:, :, 0]) and torch.equal(index[0].cpu(), expected[0])
