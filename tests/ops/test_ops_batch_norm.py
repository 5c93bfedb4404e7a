"""Batch norm, sum and activation by the kernels, against torch's modules in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.ops.fused import batch_norm
from rtdetr.ops.fused.batch_norm import KINDS, BiasSilu, norm_activation, why_not

# Of the largest number; measured on an H200: 2e-6, 8e-3 and 1e-3.
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
SHAPES = ((2, 32, 17, 13), (4, 256, 20, 20), (2, 40, 7, 5), (1, 2048, 4, 4), (3, 8, 1, 2))


def random_norm(channels: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(channels)
    nn.init.normal_(norm.weight, 1.0, 0.3)
    nn.init.normal_(norm.bias)
    return norm


def results(norm: nn.Module, x: Tensor, plus: Tensor | None, grad: Tensor, call: Callable[..., Tensor]) -> list[Tensor]:
    """Output, gradients and running statistics."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    plus = None if plus is None else plus.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = call(norm, x, plus)
    y.backward(grad.to(y.dtype))
    found = [y, x.grad, None if plus is None else plus.grad, norm.weight.grad, norm.bias.grad]
    return [each for each in (*found, norm.running_mean, norm.running_var) if each is not None]


@pytest.mark.parametrize("activation", list(KINDS))
def test_without_kernels_it_is_the_modules_one_after_another(activation: Callable[[Tensor], Tensor] | None) -> None:
    norm, x, plus = random_norm(8), torch.randn(2, 8, 5, 4), torch.randn(2, 8, 5, 4)
    assert why_not(norm, x, activation) is not None
    y = norm(x) + plus
    norm.reset_running_stats()
    assert torch.equal(norm_activation(norm, x, activation, plus), y if activation is None else activation(y))


@pytest.mark.gpu
def test_one_value_to_a_channel_is_left_to_the_module_which_refuses_it() -> None:
    norm, x = random_norm(8).cuda(), torch.randn(1, 8, 1, 1, device="cuda").to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_activation(norm, x, F.relu)
    assert norm.running_var.isfinite().all()


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, nn.SyncBatchNorm])
def test_the_kernels_refuse_one_value_to_a_channel(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    """In one process, where the statistics are those of this value alone."""
    monkeypatch.setattr(batch_norm, "_why_not_map", lambda _: None)
    assert why_not(kind(8), torch.rand(1, 8, 1, 2), F.relu) is None
    assert "no variance" in (why_not(kind(8), torch.rand(1, 8, 1, 1), F.relu) or "")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_numbers_and_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for shape, activation, with_plus in itertools.product(SHAPES, KINDS, (False, True)):
        x = torch.randn(shape, device="cuda") * 2 + torch.randn(1, shape[1], 1, 1, device="cuda") * 5
        x = x.to(dtype).contiguous(memory_format=torch.channels_last)
        plus, grad = torch.randn_like(x) if with_plus else None, torch.randn_like(x)
        mine = random_norm(shape[1]).cuda()
        exact = nn.BatchNorm2d(shape[1]).cuda().double()
        exact.load_state_dict(mine.state_dict())
        if activation is F.relu:  # whose edge rounding may cross
            before = F.batch_norm(x.double(), None, None, exact.weight, exact.bias, training=True)
            grad = grad * ((before if plus is None else before + plus).abs() > 1e-3)
        assert why_not(mine, x, activation) is None

        def plain(norm: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor:
            y = norm(x) if plus is None else norm(x) + plus
            return y if activation is None else activation(y)  # noqa: B023

        def fused(norm: nn.Module, x: Tensor, plus: Tensor | None) -> Tensor:
            return norm_activation(norm, x, activation, plus)  # noqa: B023

        wanted = results(exact, x.double(), None if plus is None else plus.double(), grad.double(), plain)
        for found, want in zip(results(mine, x, plus, grad, fused), wanted, strict=True):
            error = (found.double() - want).abs().max() / want.abs().max().clamp(min=1e-3)
            assert error < TOLERANCE[dtype], (shape, activation, with_plus, found.shape, float(error))
        assert mine.num_batches_tracked == 1


@pytest.mark.gpu
def test_statistics_of_several_processes_are_those_of_all_images() -> None:
    ops, rows, norm = torch.ops.rtdetr, torch.randn(1000, 64, device="cuda") * 3 + 7, random_norm(64).cuda()
    rows[:300] += 4
    parts = torch.cat([ops.channel_statistics(part) for part in rows.split((300, 600, 100))])
    kept = [(norm.running_mean.clone(), norm.running_var.clone()) for _ in range(2)]
    ends = []
    for statistics, running in zip((parts, ops.channel_statistics(rows)), kept):
        learnt, numbers = (statistics, norm.weight, norm.bias), (1e-5, 2)
        y = ops.channel_norm(rows, None, *learnt, *running, 0.1, *numbers)
        sums, _ = ops.channel_norm_sums(rows, y, None, *learnt, *numbers)
        mean = sums / len(statistics)  # of the processes
        ends.append((y, *running, sums, ops.channel_norm_backward(rows, y, mean, *learnt, *numbers)))
    for found, wanted in zip(*ends, strict=True):
        assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_processes_gather_statistics_and_average_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels take what all processes have; process 1 has ten times as much."""
    taken: dict[str, Tensor] = {}

    def norm(rows: Tensor, added: Tensor | None, statistics: Tensor, *_: object) -> Tensor:
        taken["statistics"] = statistics
        return rows.clone()

    def backward(rows: Tensor, above: Tensor, sums: Tensor, *_: object) -> Tensor:
        taken["sums"] = sums
        return above.clone()

    kernels = {
        "channel_statistics": lambda rows: torch.stack((rows.sum(0), rows.pow(2).sum(0))).view(1, -1),
        "channel_norm": norm,
        "channel_norm_sums": lambda rows, above, *_: (torch.stack((above.sum(0), (above * rows).sum(0))), above),
        "channel_norm_backward": backward,
    }
    processes = {
        "get_world_size": lambda: 2,
        "all_gather_into_tensor": lambda result, own: result.copy_(torch.cat((own, own * 10))),
        "all_reduce": lambda sums, op: sums.mul_(5.5 if op == "mean" else 11),
        "ReduceOp": SimpleNamespace(AVG="mean"),
    }
    monkeypatch.setattr(batch_norm.torch.ops, "rtdetr", SimpleNamespace(**kernels))
    monkeypatch.setattr(batch_norm, "dist", SimpleNamespace(**processes))
    x, weight, bias = (torch.rand(shape, requires_grad=True) for shape in ((2, 8, 3, 3), (8,), (8,)))
    batch_norm.NormActivation.apply(x, weight, bias, None, None, None, 0.1, 1e-5, 0, True).sum().backward()
    own = torch.stack((x.sum((0, 2, 3)), x.pow(2).sum((0, 2, 3)))).view(1, -1)
    torch.testing.assert_close(taken["statistics"], torch.cat((own, own * 10)))
    wanted = 5.5 * torch.stack((torch.full((8,), 18.0), x.sum((0, 2, 3))))
    torch.testing.assert_close(taken["sums"], wanted)
    torch.testing.assert_close(torch.stack((bias.grad, weight.grad)), wanted)


@pytest.mark.gpu
def test_not_a_number_stays_one_and_frozen_weights_get_no_gradient() -> None:
    norm = random_norm(16).cuda().requires_grad_(False)
    x = torch.randn(2, 16, 8, 8, device="cuda").contiguous(memory_format=torch.channels_last)
    x[1, 3, 4, 5] = torch.nan
    y = norm_activation(norm, x.requires_grad_(), F.relu)
    assert y[:, 3].isnan().all() and not y[:, 4].isnan().any()
    y.sum().backward()
    assert norm.weight.grad is None and x.grad is not None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_bias_and_silu(shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = (4 * torch.randn(shape, device="cuda")).to(dtype).contiguous(memory_format=torch.channels_last)
    module = BiasSilu(torch.randn(shape[1])).cuda()
    expected = F.silu(x.double() + module.exact.double().view(-1, 1, 1))
    module.bias.data = module.bias.data.to(dtype)
    torch.testing.assert_close(module(x).double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    called: list[Tensor] = []
    monkeypatch.setattr(batch_norm, "_maps", lambda y, like: called.append(y) or like)
    module(x)
    assert called  # by the kernel
    module(x.new_ones(2, shape[1], 3, 3))  # channels first
    assert len(called) == 1


def test_bias_and_silu_without_kernels() -> None:
    x, module = torch.randn(2, 8, 5, 4), BiasSilu(torch.randn(8))
    assert torch.equal(module(x), F.silu(x + module.exact.view(-1, 1, 1)))
