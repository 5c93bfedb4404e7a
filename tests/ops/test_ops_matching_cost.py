"""The kernel of the costs of matching against torch's twin on the processor."""

from __future__ import annotations

import pytest
import torch
from messages import message
from torch import Tensor

from rtdetr.config import LossConfig
from rtdetr.losses.matcher import match_together, matching_cost, plain_matching_cost
from rtdetr.ops.compiled import WHY_NOT
from rtdetr.ops.fused import matching_cost as kernel
from rtdetr.ops.kernels import using
from rtdetr.types import QueryOutputs, Targets

CONFIG = LossConfig(match_costs=(2.0, 5.0, 3.0))
COUNTS = (3, 0, 7, 0, 1)
# Of costs up to 40. A logit of 4 leaves 1 - sigmoid five digits in float32.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-5, torch.float16: 4e-5, torch.bfloat16: 4e-5}


def problems(
    counts: tuple[int, ...] = COUNTS, queries: int = 150, classes: int = 6, dtype: torch.dtype = torch.float64
) -> tuple[QueryOutputs, Targets]:
    """Some logits are where the sigmoid ends; some boxes are a target's, have its centre, or are empty."""
    generator = torch.Generator().manual_seed(queries)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    wanted = [torch.cat((0.2 + 0.6 * rand(n, 2), 0.05 + 0.3 * rand(n, 2)), dim=-1) for n in counts]
    labels = [torch.randint(classes, (n,), generator=generator) for n in counts]
    size = (2, 3, len(counts), queries)
    logits, boxes = 8 * rand(*size, classes) - 4, torch.cat((rand(*size, 2), 0.02 + 0.4 * rand(*size, 2)), dim=-1)
    logits[0, 0, :, 3:9] += 50 * logits[0, 0, :, 3:9].sign()
    for image, own in enumerate(wanted):
        room = min(len(own), queries)
        boxes[0, 0, image, :room], boxes[0, 1, image, :room, :2] = own[:room], own[:room, :2]
    boxes[1, 2, :, 0, 2:] = 0
    exact = torch.float64 if dtype == torch.float64 else torch.float32
    targets = Targets.stack(labels, [each.to(exact) for each in wanted], wanted)
    return QueryOutputs(logits.to(dtype), boxes.to(exact)), targets


def by_kernel(outputs: QueryOutputs, targets: Targets) -> Tensor:
    """The costs of outputs that do not lie side by side."""
    if kernel.why_not(outputs.logits.cuda(), targets.counts) is not None:
        pytest.skip("no kernel")
    apart = QueryOutputs(*(torch.stack([each.cuda()] * 2, dim=-1)[..., 1] for each in outputs))
    return matching_cost(apart, targets.to("cuda"), CONFIG).cpu()


def test_where_the_kernel_cannot_run_torch_does() -> None:
    outputs, targets = problems()
    assert "needs a GPU" in str(kernel.why_not(outputs.logits, targets.counts))
    assert torch.equal(matching_cost(outputs, targets, CONFIG), plain_matching_cost(outputs, targets, CONFIG))


@pytest.mark.skipif(WHY_NOT["cpu"] is not None, reason=str(WHY_NOT["cpu"]))
@pytest.mark.parametrize(("counts", "rows"), [(COUNTS, 11), ((), 35)])
def test_the_operator_has_a_shape_without_a_kernel(counts: tuple[int, ...], rows: int) -> None:
    outputs, targets = problems(dtype=torch.bfloat16)
    moved = [each.to("meta") for each in (*outputs, targets.labels, targets.boxes)]
    cost = torch.ops.rtdetr.matching_cost(*moved, list(counts), 1.0, 2.0, 3.0)
    assert cost.shape == (2, 3, rows, 150) and cost.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [COUNTS, (0, 0), (1,), (200, 3)])
@pytest.mark.parametrize(("queries", "classes"), [(150, 6), (1, 1), (300, 80)])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_costs_are_those_of_torch(dtype: torch.dtype, queries: int, classes: int, counts: tuple[int, ...]) -> None:
    outputs, targets = problems(counts, queries, classes, dtype)
    for given in (targets, targets._replace(counts=())):  # and where the host does not know the counts
        found, wanted = by_kernel(outputs, given), plain_matching_cost(outputs, given, CONFIG)
        torch.testing.assert_close(found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.gpu
def test_float64_on_one_side_is_kept() -> None:
    outputs, targets = problems()
    for given in (outputs._replace(logits=outputs.logits.float()), outputs._replace(boxes=outputs.boxes.float())):
        found, wanted = by_kernel(given, targets), plain_matching_cost(given, targets, CONFIG)
        assert found.dtype == wanted.dtype == torch.float64
        torch.testing.assert_close(found, wanted, rtol=4e-5, atol=4e-5)  # torch computes the classes in their type


@pytest.mark.gpu
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["logits", "boxes", "targets"])
def test_what_is_not_finite_stays_so_where_it_is(where: str, bad: float) -> None:
    outputs, targets = problems(dtype=torch.float32)
    image = {"logits": outputs.logits[1, 1], "boxes": outputs.boxes[1, 1], "targets": targets.boxes}[where][2]
    image[0] = bad
    found, wanted = by_kernel(outputs, targets), plain_matching_cost(outputs, targets, CONFIG)
    assert torch.equal(found.isfinite(), wanted.isfinite())
    torch.testing.assert_close(found, wanted, rtol=4e-5, atol=4e-5, equal_nan=True)
    _, non_finite = match_together([(QueryOutputs(*(each.cuda() for each in outputs)), 1)], targets.to("cuda"), CONFIG)
    seen = [False, False, not wanted.isfinite().all(), False, False]
    assert (
        non_finite is not None and non_finite.tolist() == seen and (where == "logits" or seen[2])
    )  # a logit's infinity ends as a finite cost


@pytest.mark.gpu
def test_a_label_that_is_no_class_spoils_its_image_alone() -> None:
    outputs, targets = problems()
    for label in (-1, 6):
        targets.labels[2, 4] = label
        assert by_kernel(outputs, targets).isnan().any(-1)[0, 0].nonzero().flatten().tolist() == [7]


@pytest.mark.gpu
def test_the_same_queries_get_the_same_boxes() -> None:
    outputs, targets = problems(queries=60, dtype=torch.float32)
    if kernel.why_not(outputs.logits.cuda(), targets.counts) is not None:
        pytest.skip("no kernel")
    moved, on_device = QueryOutputs(*(each.cuda() for each in outputs)), targets.to("cuda")
    pair = [(moved, 1), (moved, 4)]
    found, non_finite = match_together(pair, on_device, LossConfig())
    with using("plain"):
        wanted, _ = match_together(pair, on_device, LossConfig())
    assert (
        all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        and non_finite is not None
        and not non_finite.any()
    )
    padded, _ = match_together(pair, on_device.padded(12)._replace(counts=()), LossConfig())
    assert all(torch.equal(a, b) for a, b in zip(padded, wanted, strict=True))


@pytest.mark.gpu
def test_a_graph_captures_it_and_reads_what_lies_there_then() -> None:
    outputs, targets = problems(dtype=torch.float16)
    other = QueryOutputs(*(each.flip(0, 3) for each in outputs))
    moved, on_device = QueryOutputs(*(each.cuda() for each in outputs)), targets.to("cuda")
    if kernel.why_not(moved.logits, targets.counts) is not None:
        pytest.skip("no kernel")
    matching_cost(moved, on_device, CONFIG)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = matching_cost(moved, on_device, CONFIG)
    for mine, new in zip(moved, other, strict=True):
        mine.copy_(new)
    graph.replay()
    torch.testing.assert_close(captured.cpu(), plain_matching_cost(other, targets, CONFIG), rtol=4e-5, atol=4e-5)


@pytest.mark.gpu
def test_the_operator_is_registered_as_pytorch_wants_it() -> None:
    outputs, targets = problems(dtype=torch.float16)
    if kernel.why_not(outputs.logits.cuda(), targets.counts) is not None:
        pytest.skip("no kernel")
    moved = [each.cuda() for each in (*outputs, targets.labels, targets.boxes)]
    for counts in (list(COUNTS), []):
        torch.library.opcheck(torch.ops.rtdetr.matching_cost.default, (*moved, counts, 1.0, 2.0, 3.0))
    with pytest.raises(RuntimeError, match=message("expected", "counts", "5 images")):
        torch.ops.rtdetr.matching_cost(*moved, [1, 2], 1.0, 2.0, 3.0)
    with pytest.raises(RuntimeError, match="counts: expected 0 to 7, got 8"):
        torch.ops.rtdetr.matching_cost(*moved, [8, 0, 0, 0, 0], 1.0, 2.0, 3.0)
    with pytest.raises(RuntimeError, match=r"boxes: expected shape \(2, 3, 5, 150, 4\)"):
        torch.ops.rtdetr.matching_cost(moved[0], moved[1][:, :, :1], *moved[2:], [], 1.0, 2.0, 3.0)
