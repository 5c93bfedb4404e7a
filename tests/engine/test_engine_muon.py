"""Muon: its steps, whose parameters they are, and what a refused step and a resumed run make of them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from messages import message
from torch import nn

from rtdetr.config import OptimizerConfig
from rtdetr.engine.muon import MuonAdamW, orthogonal
from rtdetr.engine.optim import build_optimizer, load_optimizer, parameter_groups, set_lr
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, save_checkpoint


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16), (1, 24, 24)])
def test_orthogonal_keeps_the_directions_and_evens_out_their_lengths(shape: tuple[int, int, int]) -> None:
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    found = orthogonal(matrices)
    assert found.dtype == torch.float32
    u, _, v = torch.linalg.svd(matrices, full_matrices=False)
    lengths = u.mT @ found @ v.mT  # diagonal where the directions are the same ones
    assert float(lengths.diagonal(dim1=1, dim2=2).min()) > 0.6 and float(lengths.abs().max()) < 1.3
    assert float((lengths - torch.diag_embed(lengths.diagonal(dim1=1, dim2=2))).abs().max()) < 0.1


def test_a_processor_does_not_round_to_sixteen_bits() -> None:
    """Few multiply them; on the others a step of R18 took a minute and a half."""
    matrices = torch.randn((2, 24, 60), generator=torch.Generator().manual_seed(0))
    exact = orthogonal(matrices)
    nearby = orthogonal(matrices * (1 + 1e-4))  # the length does not matter, but for rounding
    assert float((nearby - exact).abs().max()) < 1e-5


def muon_model() -> nn.ModuleDict:
    torch.manual_seed(0)
    parts = {"conv": nn.Conv2d(4, 8, 3), "linear": nn.Linear(6, 5), "score_head": nn.Linear(5, 3)}
    return nn.ModuleDict(parts)


def with_gradients(model: nn.Module, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_steps_matrices_and_adamw_the_rest() -> None:
    cfg = OptimizerConfig(lr=1e-3, weight_decay=0.0, muon_lr_multiplier=2.0)
    model, twin = muon_model(), muon_model()
    optimizer, plain = (
        build_optimizer(model, cfg),
        build_optimizer(twin, dataclasses.replace(cfg, muon_lr_multiplier=0)),
    )
    for each, stepper in ((model, optimizer), (twin, plain)):
        with_gradients(each)
        set_lr(stepper, cfg.lr)
        stepper.step()
    start, by_adamw = muon_model().state_dict(), twin.state_dict()
    for name, after in model.state_dict().items():
        if name in ("conv.weight", "linear.weight"):
            length = (after - start[name]).square().mean().sqrt()
            assert float(length) == pytest.approx(2e-3 * 0.2, rel=0.3), name
        else:
            torch.testing.assert_close(after, by_adamw[name], rtol=0, atol=1e-7)


def test_muon_passes_over_a_step_that_is_refused() -> None:
    model, start = muon_model(), muon_model().state_dict()
    cfg = OptimizerConfig(muon_lr_multiplier=2.0, weight_decay=0.5)
    optimizer = MuonAdamW(parameter_groups(model.named_parameters(), cfg), lr=cfg.lr, fused=True)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(after, start[name]) for name, after in model.state_dict().items())
    assert not any(state["momentum"].any() for state in optimizer.state.values() if "momentum" in state)


def test_muon_goes_on_from_a_saved_state() -> None:
    cfg = OptimizerConfig(muon_lr_multiplier=2.0)
    straight, first, second = muon_model(), muon_model(), muon_model()
    before, after = build_optimizer(first, cfg), build_optimizer(second, cfg)
    optimizer = build_optimizer(straight, cfg)
    for seed in (1, 2):
        with_gradients(straight, seed)
        optimizer.step()
    with_gradients(first, 1)
    before.step()
    second.load_state_dict(first.state_dict())
    load_optimizer(after, before.state_dict())
    with_gradients(second, 2)
    after.step()
    for a, b in zip(straight.parameters(), second.parameters()):
        assert torch.equal(a, b)


def test_a_resumed_run_ends_in_the_same_weights_and_asks_for_muon(tmp_path: Path) -> None:
    data, cpu = tiny_data(tmp_path / "data"), torch.device("cpu")
    one, two = (tiny_config(data, "optimizer.muon_lr_multiplier=3", f"train.max_iterations={n}") for n in (1, 2))
    Trainer(two, tmp_path / "straight", cpu).run()
    Trainer(one, tmp_path / "halved", cpu).run()
    last = tmp_path / "halved" / "last.pth"
    with pytest.raises(CheckpointError, match=message("other optimiser", "optimizer.muon_lr_multiplier 3.0 -> 0.0")):
        Trainer(tiny_config(data), tmp_path, cpu, resume=last)
    for kind in ("SGD", "AdamW"):  # the state of another optimiser of the same parameters
        content = load_checkpoint(last)
        content["training"]["optimizer_type"] = kind
        save_checkpoint(tmp_path / "other" / "last.pth", content)
        with pytest.raises(CheckpointError, match=message("other optimiser", f"that of {kind}, not of MuonAdamW")):
            Trainer(two, tmp_path, cpu, resume=tmp_path / "other" / "last.pth")
    Trainer(two, tmp_path / "halved", cpu, resume=last).run()
    straight, halved = (load_checkpoint(tmp_path / name / "last.pth")["model"] for name in ("straight", "halved"))
    assert all(torch.equal(straight[name], halved[name]) for name in straight)
