"""rtdetr.losses.assigners and dense_criterion against golden assignments and a naive implementation in float64."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from golden_files import shared_golden
from losses_naive import assign, dense_entries
from torch import Tensor

from rtdetr.losses.assigners import assign_atss, assign_task_aligned
from rtdetr.losses.dense_criterion import dense_losses
from rtdetr.types import DenseOutputs, Targets


def _cells(height: int, width: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """points (A, 2), strides (A, 1) and cells per level of strides 8, 16, 32."""
    points, strides, cells = [], [], []
    for stride in (8, 16, 32):
        rows, columns = torch.meshgrid(torch.arange(height // stride), torch.arange(width // stride), indexing="ij")
        points.append((torch.stack((columns, rows), dim=-1).reshape(-1, 2).double() + 0.5) * stride)
        cells.append(len(points[-1]))
        strides.append(torch.full((cells[-1], 1), float(stride), dtype=torch.float64))
    return torch.cat(points), torch.cat(strides), tuple(cells)


def _problem(counts: tuple[int, ...], seed: int, size: int = 96, bins: int = 9) -> tuple[DenseOutputs, Targets]:
    """Predictions near enough to the boxes to make contested cells likely; the boxes overlap each other."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    points, strides, cells = _cells(size, size)
    pixel = []
    for n in counts:
        centre, side = size * (0.35 + 0.3 * rand(n, 2)), size * (0.2 + 0.4 * rand(n, 2))
        pixel.append(torch.cat((centre - side / 2, centre + side / 2), dim=-1))
    labels = [torch.randint(0, 3, (n,), generator=generator) for n in counts]
    targets = Targets.stack(labels, pixel, pixel)
    shape = (len(counts), len(points))
    outputs = DenseOutputs(3 * rand(*shape, 3) - 2, 3 * rand(*shape, 4, bins), points, strides, cells)
    return outputs, targets


def _predicted(outputs: DenseOutputs) -> Tensor:
    bins = torch.arange(outputs.distances.shape[-1], dtype=torch.float64)
    distance = (outputs.distances.softmax(-1) * bins).sum(-1) * outputs.strides
    return torch.cat((outputs.points - distance[..., :2], outputs.points + distance[..., 2:]), dim=-1)


@pytest.mark.parametrize("case", ["sq_atss", "rect_atss", "empty1_atss"])
def test_atss_chooses_the_cells_and_boxes_of_the_official_code(case: str) -> None:
    golden = np.load(shared_golden(f"train_r18_f64_{case}.npz"))
    about = json.loads(shared_golden(f"train_r18_f64_{case}.json").read_text())
    points, strides, cells = _cells(about["height"], about["width"])
    pixel = [torch.from_numpy(golden[f"gt{i}.box_xyxy"]).double().reshape(-1, 4) for i in (0, 1)]
    labels = [torch.from_numpy(golden[f"gt{i}.class"]).long().reshape(-1) for i in (0, 1)]
    targets = Targets.stack(labels, pixel, pixel)
    predicted = torch.cat((points - strides, points + strides), dim=-1).expand(2, -1, -1)  # scores are not compared

    positive, ours, boxes, _ = assign_atss(points, strides, cells, predicted, targets)

    assert positive.nonzero().tolist() == golden["assign.pos_bn"].tolist()
    assert torch.where(positive, ours, 80).tolist() == golden["assign.labels"].tolist()
    # In pixels, whatever the README of the golden data says of strides.
    assert boxes[positive].tolist() == golden["assign.pos_box"].tolist()


@pytest.mark.parametrize("task_aligned", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_assignment_equals_naive_loops(task_aligned: bool, seed: int) -> None:
    outputs, targets = _problem((4, 0, 1, 6), seed)
    predicted = _predicted(outputs)
    if task_aligned:
        ours = assign_task_aligned(outputs.points, outputs.logits.sigmoid(), predicted, targets)
    else:
        ours = assign_atss(outputs.points, outputs.strides, outputs.level_cells, predicted, targets)
    assert ours.positive.sum() > 20
    for b, n in enumerate(targets.counts):
        labels, boxes = targets.labels[b, :n].tolist(), list(targets.boxes_pixel[b, :n])
        expected = assign(outputs, labels, boxes, b, list(predicted[b]), task_aligned)
        assert ours.positive[b].nonzero()[:, 0].tolist() == sorted(expected)
        for cell, (box, score) in expected.items():
            assert int(ours.labels[b, cell]) == labels[box]
            assert torch.equal(ours.boxes[b, cell], boxes[box])
            assert float(ours.scores[b, cell]) == pytest.approx(score, rel=1e-11)
        assert (ours.scores[b][~ours.positive[b]] == 0).all()


def test_contested_cell_goes_to_the_best_box_even_if_that_did_not_claim_it() -> None:
    found = 0
    for seed in range(40):
        outputs, targets = _problem((6,), seed)
        ours = assign_atss(outputs.points, outputs.strides, outputs.level_cells, _predicted(outputs), targets)
        boxes = targets.boxes_pixel[0]
        alone = []
        for box in boxes:  # what each box claims when no other box is there
            single = Targets.stack([torch.zeros(1, dtype=torch.int64)], [box[None]], [box[None]])
            own = assign_atss(outputs.points, outputs.strides, outputs.level_cells, _predicted(outputs), single)
            alone.append(own.positive[0])
        claims = torch.stack(alone)
        for cell in ours.positive[0].nonzero()[:, 0].tolist():
            owner = next(g for g in range(6) if torch.equal(boxes[g], ours.boxes[0, cell]))
            found += not claims[owner, cell]
    assert found > 0


def test_maps_smaller_than_the_number_of_candidates() -> None:
    points, strides, cells = _cells(32, 32)  # 16, 4 and 1 cells
    box = torch.tensor([[3.0, 4.0, 27.0, 25.0]], dtype=torch.float64)
    targets = Targets.stack([torch.tensor([1])], [box], [box])
    outputs = DenseOutputs(
        torch.zeros(1, 21, 3, dtype=torch.float64),
        torch.ones(1, 21, 4, 9, dtype=torch.float64),
        points,
        strides,
        cells,
    )
    for task_aligned in (False, True):
        losses = dense_losses(outputs, targets, task_aligned, 2.5, 0.5)
        for name, value in dense_entries(outputs, targets, task_aligned).items():
            torch.testing.assert_close(losses[name], value, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("task_aligned", [False, True])
def test_losses_and_gradients_equal_naive_loops(task_aligned: bool) -> None:
    outputs, targets = _problem((3, 0, 2), seed=11, size=64, bins=4)  # some sides are farther than 2.99 strides
    outputs.logits[0, 3, 1] = 12.0
    leaves = [outputs.logits.requires_grad_(), outputs.distances.requires_grad_()]
    ours = dense_losses(outputs, targets, task_aligned, 2.5, 0.5)
    naive = dense_entries(outputs, targets, task_aligned)
    assert set(ours) == set(naive)
    for name, value in naive.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-14)
    gradients = torch.autograd.grad(ours["loss_aux_o2m"], leaves)
    expected = torch.autograd.grad(naive["loss_aux_o2m"], leaves)
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("task_aligned", [False, True])
def test_batch_without_boxes(task_aligned: bool) -> None:
    outputs, targets = _problem((0, 0), seed=3)
    leaves = [outputs.logits.requires_grad_(), outputs.distances.requires_grad_()]
    losses = dense_losses(outputs, targets, task_aligned, 2.5, 0.5)
    assert losses["loss_iou_aux_o2m"] == losses["loss_dfl_aux_o2m"] == losses["loss_l1_aux_o2m"] == 0
    logits_gradient, distances_gradient = torch.autograd.grad(losses["loss_aux_o2m"], leaves)  # both in the graph
    assert (logits_gradient != 0).all() and (distances_gradient == 0).all()


def test_nan_prediction_becomes_a_nan_loss() -> None:
    outputs, targets = _problem((2,), seed=4)
    outputs.distances[0, 5] = float("nan")
    outputs.logits[0, 5] = float("nan")
    for task_aligned in (False, True):
        assert dense_losses(outputs, targets, task_aligned, 2.5, 0.5)["loss_aux_o2m"].isnan()
