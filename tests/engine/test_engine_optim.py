"""Groups, rates, clipping and AdamW against what was measured in the official run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from golden_files import golden_dir
from torch import nn

from rtdetr.config import OptimizerConfig, load_config
from rtdetr.engine.muon import MuonAdamW
from rtdetr.engine.optim import (
    build_optimizer,
    clip_grad_norm,
    load_optimizer,
    lr_at,
    parameter_groups,
    set_lr,
    skips_on_device,
)
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.official_names import official_names

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def golden(name: str) -> Any:
    return json.loads((golden_dir() / name).read_text())


def test_multipliers_and_decay_of_every_r18_parameter() -> None:
    cfg = load_config(CONFIGS / "rtdetrv3_r18vd_6x_coco.yml")
    model = build_model(cfg.model, 80)
    settings: dict[int, tuple[float, float]] = {}
    for group in parameter_groups(model.named_parameters(), cfg.optimizer):
        for parameter in group["params"]:  # type: ignore[attr-defined]
            assert id(parameter) not in settings
            settings[id(parameter)] = (group["lr_multiplier"], group["weight_decay"])  # type: ignore[assignment]
    measured = {name: entry for name, entry in golden("optim_r18.json").items() if entry["in_optimizer"]}
    official = official_names(model.state_dict())
    ours = {official[name]: settings[id(p)] for name, p in model.named_parameters() if id(p) in settings}
    assert ours.keys() == measured.keys()
    for name, (multiplier, decay) in ours.items():
        assert multiplier == pytest.approx(measured[name]["measured_lr_mult"], abs=1e-7), name
        assert decay == pytest.approx(measured[name]["measured_weight_decay"], abs=1e-7), name


def test_frozen_parameters_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    (group,) = parameter_groups(model.named_parameters(), OptimizerConfig())
    assert len(group["params"]) == 2  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig())


def test_rates_of_the_official_schedule() -> None:
    schedule = golden("schedule_ema.json")["lr_schedule"]
    total = 72 * schedule["steps_per_epoch_used"]
    for step, rate in schedule["lr_at_step"].items():
        iteration = total - 1 if step == "last_iter_of_72_epochs" else int(step)
        assert lr_at(iteration, total, OptimizerConfig()) == pytest.approx(rate, rel=1e-7), step


def test_cosines_start_high_and_end_at_the_floor() -> None:
    cfg = OptimizerConfig(lr=1.0, warmup_iterations=10, flat_ratio=0, min_lr_ratio=0.1)
    assert lr_at(10, 110, cfg) == pytest.approx(1.0)
    assert lr_at(60, 110, cfg) == pytest.approx(0.55)
    assert lr_at(110, 110, cfg) == pytest.approx(0.1)
    flat = OptimizerConfig(lr=1.0, warmup_iterations=10, flat_ratio=0.5)
    assert [lr_at(i, 100, flat) for i in (10, 30, 50)] == [1.0, 1.0, 1.0]
    assert lr_at(75, 100, flat) == pytest.approx(0.5)
    assert lr_at(100, 100, flat) == pytest.approx(0.0)


def test_five_clipped_steps_of_adamw() -> None:
    probe = golden("schedule_ema.json")["adamw_probe"]
    weight = nn.Parameter(torch.tensor(probe["init"]))
    cfg = OptimizerConfig(lr=probe["lr"], weight_decay=probe["weight_decay"], clip_grad_norm=probe["clip_global_norm"])
    optimizer = build_optimizer(nn.ParameterList([weight]), cfg)
    set_lr(optimizer, cfg.lr)
    for gradient, after in zip(probe["grads"], probe["after"]):
        weight.grad = torch.tensor(gradient)
        clip_grad_norm([weight], cfg.clip_grad_norm)
        optimizer.step()
        torch.testing.assert_close(weight.detach(), torch.tensor(after), rtol=0, atol=2e-7)  # one float32 step at 2


@pytest.mark.parametrize("norm", [0.03, 0.1, 7.0])
def test_clipping_has_no_epsilon(norm: float) -> None:
    first, second = (nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2))
    first.grad, second.grad = torch.tensor([0.6, 0.0]).double() * norm, torch.tensor([0.0, 0.8]).double() * norm
    assert float(clip_grad_norm([first, second], 0.1)) == pytest.approx(norm, rel=1e-7)
    after = math.hypot(float(first.grad.norm()), float(second.grad.norm()))
    assert after == pytest.approx(min(norm, 0.1), rel=1e-7)


def test_rate_reaches_each_group_with_its_multiplier() -> None:
    model = nn.ModuleDict({"backbone": nn.ModuleDict({"stages": nn.Linear(2, 2), "stem": nn.Linear(2, 2)})})
    optimizer = build_optimizer(model, OptimizerConfig(backbone_lr_multiplier=0.01))
    set_lr(optimizer, 3e-3)
    rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert rates[id(model["backbone"]["stages"].weight)] == pytest.approx(3e-5)
    assert rates[id(model["backbone"]["stem"].weight)] == pytest.approx(3e-3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, MuonAdamW])
def test_a_fused_optimiser_skips_the_step_when_told_of_a_non_finite_gradient(kind: Callable[..., Any]) -> None:
    """The trainer relies on this on GPUs, where it learns of a NaN one step late."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = kind([weight], lr=0.1, fused=True)
    assert skips_on_device(optimizer) and not skips_on_device(kind([weight], lr=0.1, fused=False))
    weight.grad = torch.full((3,), math.nan)
    optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    optimizer.step()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    weight.grad = torch.ones(3)
    optimizer.found_inf = torch.zeros(())  # type: ignore[attr-defined]
    optimizer.step()
    assert all(value < 1.0 for value in weight.tolist())


def stepped(device: str, fused: bool) -> torch.optim.AdamW:
    """After one step on a parameter of ones."""
    parameter = nn.Parameter(torch.ones(3, device=device))
    parameter.grad = torch.ones(3, device=device)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.5, fused=fused, foreach=False)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("fused", "device"), [(True, "meta"), (False, "cpu")])
def test_the_file_does_not_decide_where_step_counts_live(fused: bool, device: str) -> None:
    """A fused optimiser keeps them on its device, for which "meta" stands here; a plain one keeps them on the host."""
    saved = stepped("cpu", fused=False).state_dict()
    saved["param_groups"][0]["fused"] = not fused
    parameter = nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.AdamW([parameter], lr=0.2, weight_decay=0.25, fused=fused, foreach=False)
    load_optimizer(optimizer, saved)
    assert optimizer.state[parameter]["step"].device.type == device
    group = optimizer.param_groups[0]
    assert (group["fused"], group["lr"], group["weight_decay"]) == (fused, 0.2, 0.25)


def test_an_optimiser_of_other_parameters_is_refused() -> None:
    saved = stepped("cpu", fused=False).state_dict()
    fewer = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(3))]}, {"params": [nn.Parameter(torch.ones(3))]}])
    with pytest.raises(ValueError, match="parameter groups"):
        load_optimizer(fewer, saved)
    saved["param_groups"].append({"params": [1]})
    with pytest.raises(ValueError, match="parameter groups"):
        load_optimizer(stepped("cpu", fused=False), saved)


@pytest.mark.gpu
@pytest.mark.parametrize(("before", "after"), [("cpu", "cuda"), ("cuda", "cpu")])
def test_an_optimiser_moves_between_cpu_and_gpu(before: str, after: str, tmp_path: Path) -> None:
    """A second step after a change of device equals a second step without one."""
    source = stepped(before, fused=before == "cuda")
    torch.save(source.state_dict(), tmp_path / "optimizer.pth")
    moved = stepped(after, fused=after == "cuda")
    load_optimizer(moved, torch.load(tmp_path / "optimizer.pth", map_location="cpu", weights_only=True))
    moved.param_groups[0]["params"][0].grad.mul_(-2)
    source.param_groups[0]["params"][0].grad.mul_(-2)
    moved.step()
    source.step()
    theirs, ours = (each.param_groups[0]["params"][0].detach().cpu() for each in (source, moved))
    assert torch.allclose(ours, theirs, rtol=0, atol=1e-6)
