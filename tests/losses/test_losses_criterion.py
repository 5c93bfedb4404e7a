"""rtdetr.losses.criterion against a naive implementation in float64, on one process and on two."""

from __future__ import annotations

import itertools
import socket
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from losses_naive import dense_entries, set_entries
from messages import message
from torch import Tensor

from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.config import Config, LossConfig
from rtdetr.losses import dense_criterion, matcher
from rtdetr.losses.criterion import Criterion, build_criterion
from rtdetr.types import DenoisingOutputs, DenseOutputs, QueryOutputs, Targets, TrainingOutputs

NUM_CLASSES = 4
REPEATS = 3
COPIES = 2
SIZE = 64
CRITERION = Criterion(LossConfig(), NUM_CLASSES, REPEATS)


def _problem(counts: tuple[int, ...], seed: int = 0, layers: int = 3, groups: int = 2) -> tuple:
    """Outputs of every part and targets, in float64, with gradients required."""
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    def query(cls: Callable, *shape: int, **more: int) -> QueryOutputs | DenoisingOutputs:
        boxes = torch.cat((0.2 + 0.6 * rand(*shape, 2), 0.05 + 0.4 * rand(*shape, 2)), dim=-1)
        return cls((6 * rand(*shape, NUM_CLASSES) - 4).requires_grad_(), boxes.requires_grad_(), *more.values())

    # Large enough to stick out of the squares of ATSS, which would all overlap a small box alike.
    wanted = [torch.cat((0.3 + 0.4 * rand(n, 2), 0.35 + 0.3 * rand(n, 2)), dim=-1) for n in counts]
    labels = [torch.randint(0, NUM_CLASSES, (n,), generator=generator) for n in counts]
    targets = Targets.stack(labels, wanted, [SIZE * cxcywh_to_xyxy(each) for each in wanted])
    batch, m = targets.mask.shape
    stride = 8
    grid = (torch.arange(SIZE // stride, dtype=torch.float64) + 0.5) * stride
    points = torch.cartesian_prod(grid, grid).flip(-1)
    dense = DenseOutputs(
        (4 * rand(batch, len(points), NUM_CLASSES) - 3).requires_grad_(),
        rand(batch, len(points), 4, 5).requires_grad_(),
        points,
        torch.full((len(points), 1), float(stride), dtype=torch.float64),
        (len(points),),
    )
    outputs = TrainingOutputs(
        query(QueryOutputs, layers, groups, batch, 7),
        query(QueryOutputs, layers, 1, batch, 11),
        query(DenoisingOutputs, layers - 1, groups, batch, COPIES * 2 * m, num_copies=COPIES),
        dense,
    )
    return outputs, targets


def _leaves(outputs: TrainingOutputs) -> list[Tensor]:
    return [each for part in outputs if part is not None for each in part if getattr(each, "requires_grad", False)]


def _naive(outputs: TrainingOutputs, targets: Targets, task_aligned: bool) -> dict[str, Tensor]:
    groups, total = outputs.one_to_one.logits.shape[1], sum(targets.counts)
    entries = set_entries(outputs.one_to_one, targets, 1, max(total, 1) * groups, "")
    entries |= set_entries(outputs.one_to_many, targets, REPEATS, max(REPEATS * total, 1), "_o2m_branch")
    entries |= set_entries(outputs.denoising, targets, 0, max(total, 1) * COPIES * groups, "_dn")
    dense = dense_entries(outputs.dense, targets, task_aligned)
    loss = sum(entries.values()) + dense["loss_aux_o2m"]
    return entries | dense | {"loss": loss}


@pytest.mark.parametrize(("counts", "epoch"), [((2, 3), 0), ((2, 3), 30), ((4, 0), 29), ((0, 1, 2), 40)])
def test_entries_and_gradients_equal_naive_loops(counts: tuple[int, ...], epoch: int) -> None:
    outputs, targets = _problem(counts, seed=epoch)
    ours = CRITERION(outputs, targets, epoch)
    naive = _naive(outputs, targets, task_aligned=epoch >= 30)
    assert set(ours) == set(naive)
    for name, value in naive.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: name + text)
    leaves = _leaves(outputs)
    assert len(leaves) == 8
    gradients = torch.autograd.grad(ours["loss"], leaves)
    for gradient, expected in zip(gradients, torch.autograd.grad(naive["loss"], leaves), strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-13)


def test_one_to_many_with_fewer_queries_than_copies_counts_all_copies() -> None:
    outputs, targets = _problem((5, 1))  # 15 copies, 11 queries
    ours = CRITERION(outputs, targets, 0)
    naive = set_entries(outputs.one_to_many, targets, REPEATS, REPEATS * 6, "_o2m_branch")
    for name, value in naive.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("absent", ["one_to_many", "denoising", "dense"])
def test_part_that_is_switched_off_leaves_no_entry(absent: str) -> None:
    outputs, targets = _problem((2, 3))
    suffix = {"one_to_many": "_o2m_branch", "denoising": "_dn", "dense": "_aux_o2m"}[absent]
    complete = CRITERION(outputs, targets, 0)
    ours = CRITERION(outputs._replace(**{absent: None}), targets, 0)
    missing = {name for name in complete if name.endswith(suffix)}
    assert missing and set(ours) == set(complete) - missing
    parts = [complete["loss_aux_o2m"]] if absent == "dense" else [complete[name] for name in missing]
    torch.testing.assert_close(ours["loss"], complete["loss"] - sum(parts))


@pytest.mark.parametrize("epoch", [0, 40])
def test_batch_without_boxes_trains_every_part(epoch: int) -> None:
    outputs, targets = _problem((0, 0))
    losses = CRITERION(outputs, targets, epoch)
    for suffix in ("", "_aux", "_o2m_branch", "_aux_o2m_branch"):
        assert losses[f"loss_bbox{suffix}"] == losses[f"loss_giou{suffix}"] == 0
    assert all(value == 0 for name, value in losses.items() if name.endswith("_dn"))
    # The official code falls back to focal loss, which is the same number without positives.
    logits = outputs.one_to_one.logits
    focal = 0.75 * logits.sigmoid() ** 2 * F.softplus(logits)
    torch.testing.assert_close(losses["loss_class"], focal[-1].sum() / logits.shape[1])
    torch.testing.assert_close(losses["loss_class_aux"], focal[:-1].sum() / logits.shape[1])
    for gradient in torch.autograd.grad(losses["loss"], _leaves(outputs)):  # raises for a leaf outside the graph
        assert gradient.isfinite().all()


@pytest.mark.parametrize("counts", [(0, 0), (3, 0)])
@pytest.mark.parametrize("what", ["logits", "boxes"])
@pytest.mark.parametrize("queries", ["one_to_one", "one_to_many"])
def test_a_non_finite_image_without_boxes_is_named(counts: tuple[int, int], what: str, queries: str) -> None:
    """It has no cost in which it would show."""
    outputs, targets = _problem(counts)
    assert CRITERION(outputs, targets, 0)["loss"].isfinite()
    with torch.no_grad():
        getattr(getattr(outputs, queries), what)[0, 0, 1, 2, 3] = torch.nan
    with pytest.raises(FloatingPointError, match=message("non-finite", "layer 0", "group 0", "image 1")):
        CRITERION(outputs, targets, 0)


def test_unmatched_and_degenerate_predictions_have_finite_gradients() -> None:
    outputs, targets = _problem((1, 0))
    with torch.no_grad():
        outputs.one_to_one.boxes[:, :, :, :3] = 0.0
        outputs.one_to_one.boxes[:, :, :, 3:5] = 1.0
        outputs.denoising.boxes[..., :2, :] = 0.0
        outputs.one_to_one.logits[..., 0, :] = -80.0
        outputs.dense.logits[:, :4] = -800.0
        outputs.dense.logits[:, 4:8] = 800.0
    for epoch in (0, 40):
        for gradient in torch.autograd.grad(CRITERION(outputs, targets, epoch)["loss"], _leaves(outputs)):
            assert gradient.isfinite().all()


def test_low_precision_predictions_are_computed_in_float32() -> None:
    outputs, targets = _problem((2, 3))

    def cast(dtype: torch.dtype) -> TrainingOutputs:
        half = (torch.bfloat16, torch.float32)  # the values of bfloat16, in either type

        def one(x: object) -> object:
            return x.detach().to(half[0]).to(dtype) if isinstance(x, Tensor) and x.requires_grad else x

        return TrainingOutputs(*(type(part)(*map(one, part)) for part in outputs))

    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = CRITERION(cast(torch.bfloat16), targets, 0)
    plain = CRITERION(cast(torch.float32), targets, 0)
    for name, value in plain.items():
        assert low[name].dtype == value.dtype == torch.float32
        assert torch.equal(low[name], value), name


def test_outputs_that_do_not_fit_are_named() -> None:
    outputs, targets = _problem((2, 3))
    with pytest.raises(ValueError, match=r"logits \(K, G, 2, Q, 9\).*num_classes"):
        Criterion(LossConfig(), 9, REPEATS)(outputs, targets, 0)
    _, others = _problem((2, 4))
    with pytest.raises(ValueError, match="num_copies"):
        CRITERION(outputs, others, 0)


def test_build_criterion_takes_the_repeats_of_the_model() -> None:
    criterion = build_criterion(Config(), 7)
    assert (criterion.num_classes, criterion.one_to_many_repeats) == (7, 4)


def _worker(rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    outputs, targets = _problem(((2, 3), (0, 0))[rank], seed=rank)
    losses = CRITERION(outputs, targets, 0)
    torch.save({name: value.detach() for name, value in losses.items()}, Path(folder) / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_normalisers_are_averaged_over_processes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_worker, (port, str(tmp_path)), nprocs=2)
    alone = [CRITERION(*_problem(counts, seed=rank), 0) for rank, counts in enumerate(((2, 3), (0, 0)))]
    together = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    mean, mean_repeated = 2.5, 2.5 * REPEATS  # boxes: 5 and none
    for name, own in (("loss_class_aux", 5.0), ("loss_bbox", 5.0), ("loss_giou_aux_dn", 5.0)):
        torch.testing.assert_close(together[0][name], alone[0][name].detach() * own / mean)
    torch.testing.assert_close(
        together[0]["loss_bbox_o2m_branch"], alone[0]["loss_bbox_o2m_branch"].detach() * 5 * REPEATS / mean_repeated
    )
    for name in ("loss_cls_aux_o2m", "loss_iou_aux_o2m", "loss_dfl_aux_o2m"):  # the scores of the other process are 0
        torch.testing.assert_close(together[0][name], alone[0][name].detach() * 2)
    torch.testing.assert_close(together[1]["loss_class"], alone[1]["loss_class"].detach() / mean)
    torch.testing.assert_close(
        together[1]["loss_class_o2m_branch"], alone[1]["loss_class_o2m_branch"].detach() / mean_repeated
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("counts", "epoch"), list(itertools.product([(2, 3), (0, 0)], [0, 40])))
def test_cuda_equals_cpu_and_never_waits(counts: tuple[int, ...], epoch: int) -> None:
    outputs, targets = _problem(counts)
    moved = TrainingOutputs(
        *(type(part)(*(x.cuda() if isinstance(x, Tensor) else x for x in part)) for part in outputs)
    )
    on_device = targets.to("cuda")
    CRITERION(moved, on_device, epoch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            losses = CRITERION(moved, on_device, epoch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [each for each in caught if "synchroniz" in str(each.message)]
    assert not waits, [str(each.message) for each in waits]
    assert losses.pop("non_finite_image") == 0
    for name, value in CRITERION(outputs, targets, epoch).items():
        torch.testing.assert_close(losses[name].cpu(), value, rtol=1e-9, atol=1e-12)


def test_a_crowd_in_whatever_order_has_the_loss_of_all_its_boxes() -> None:
    outputs, targets = _problem((3, 2))
    plain = CRITERION(outputs, targets, 0)
    order = torch.tensor([[2, 0, 1], [1, 0, 2]])
    denoising = outputs.denoising
    slots = (torch.arange(COPIES * 2)[:, None, None] * 3 + order).movedim(1, 0).flatten(1)  # (B, N)
    index = slots[None, None, ..., None]
    logits = denoising.logits.gather(3, index.expand(denoising.logits.shape))
    boxes = denoising.boxes.gather(3, index.expand(denoising.boxes.shape))
    turned = outputs._replace(denoising=DenoisingOutputs(logits, boxes, COPIES, order))
    for name, value in CRITERION(turned, targets, 0).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-12, atol=1e-12)


def test_boxes_that_are_denoised_speak_for_the_others() -> None:
    """Four equal boxes of which two are denoised: the loss is that of all four."""
    outputs, targets = _problem((4,))
    for each in targets[:3]:
        each[:] = each[:, :1]
    logits, boxes = (each[:, :, :, :1].expand(-1, -1, -1, COPIES * 2 * 4, -1) for each in outputs.denoising[:2])
    whole = outputs._replace(denoising=DenoisingOutputs(logits, boxes, COPIES))
    few = DenoisingOutputs(logits[:, :, :, : COPIES * 4], boxes[:, :, :, : COPIES * 4], COPIES, torch.tensor([[3, 1]]))
    wanted, found = CRITERION(whole, targets, 0), CRITERION(outputs._replace(denoising=few), targets, 0)
    for name in ("loss_class_dn", "loss_bbox_dn", "loss_giou_dn", "loss_bbox_aux_dn"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("limit", "repeats"), [(5, 3), (4, 2), (2, 1), (1, 1)])
def test_boxes_of_a_crowd_are_repeated_less_often(limit: int, repeats: int) -> None:
    outputs, targets = _problem((5, 1))
    limited = Criterion(LossConfig(), NUM_CLASSES, REPEATS, limit)(outputs, targets, 0)
    plain = Criterion(LossConfig(), NUM_CLASSES, repeats)(outputs, targets, 0)
    assert all(torch.equal(value, limited[name]) for name, value in plain.items())


@pytest.mark.parametrize("task_aligned", [False, True])
def test_a_crowded_batch_is_matched_and_assigned_in_parts(monkeypatch: pytest.MonkeyPatch, task_aligned: bool) -> None:
    epoch = 99 if task_aligned else 0
    outputs, targets = _problem((3, 0, 5))
    together = CRITERION(outputs, targets, epoch)
    for module in (matcher, dense_criterion):
        monkeypatch.setattr(module, "MOST_PAIRS", 1)
    for name, value in CRITERION(outputs, targets, epoch).items():
        assert torch.equal(value, together[name]), name
