"""Optimisation and initialisation against the official ones, for every optim_*.json and init_*.json of the folder."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import CONFIGS, Checks, as_float64, config_of, deviation, golden_json, golden_names
from tolerances import COMPONENTS
from torch import nn

from rtdetr.config import EmaConfig, OptimizerConfig
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.optim import build_optimizer, clip_grad_norm, lr_at, set_lr
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.official_names import official_names

OPTIM = golden_names("optim_*.json")
INIT = golden_names("init_*.json")


def checks(where: str) -> Checks:
    return Checks("optimisation", where, COMPONENTS)


@pytest.mark.parametrize("name", OPTIM)
def test_rate_and_decay_of_every_parameter(name: str) -> None:
    """Measured as in the reference: one step of the real optimizer without gradient leaves the decay alone."""
    model_name = name.removeprefix("optim_").removesuffix(".json")
    config = config_of(model_name)
    model = build_model(config.model, 80).double()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    optimizer = build_optimizer(model, config.optimizer)
    set_lr(optimizer, 0.1)
    optimizer.step()
    rates = {id(p): group["lr"] / 0.1 for group in optimizer.param_groups for p in group["params"]}

    golden, names, check = golden_json(name), official_names(model.state_dict()), checks(name)
    parameters = dict(model.named_parameters())
    assert sorted(names.values()) == sorted(golden)
    for ours, official in names.items():
        entry, parameter = golden[official], parameters.get(ours)
        trained = parameter is not None and parameter.requires_grad
        assert trained == entry["trainable"] == entry["in_optimizer"], official
        if parameter is None or not trained:
            continue
        assert parameter.numel() == entry["numel"], official
        rate = rates[id(parameter)]
        decay = (1 - as_float64(parameter)) / (0.1 * rate)
        check.near("optimiser", abs(rate - entry["measured_lr_mult"]), official)
        check.near("optimiser", deviation(decay, np.full(decay.shape, entry["measured_weight_decay"])), official)
    check.done()


def test_rates_of_the_schedule() -> None:
    schedule, config, check = golden_json("schedule_ema.json")["lr_schedule"], OptimizerConfig(), checks("schedule")
    total = 72 * schedule["steps_per_epoch_used"]
    for step, rate in schedule["lr_at_step"].items():
        iteration = total - 1 if step == "last_iter_of_72_epochs" else int(step)
        check.near("optimiser", abs(lr_at(iteration, total, config) / rate - 1), f"iteration {step}")
    check.done()


def test_average_of_a_scalar() -> None:
    """In float32 as the reference, relative: half a unit in the last place is up to 6e-8."""
    golden, check = golden_json("schedule_ema.json")["ema"], checks("EMA")
    model = nn.Linear(1, 1, bias=False)
    average = ModelEma(model, EmaConfig())
    nn.init.zeros_(average.model.weight)  # as the official one starts
    for update, decay in golden["decay_at_update_index"].items():
        check.near("optimiser", abs(average.decay_at(int(update)) - decay), f"decay of update {update}")
    for value, expected in zip(golden["trajectory_inputs"], golden["trajectory_ema"], strict=True):
        nn.init.constant_(model.weight, value)
        average.update()
        check.near("optimiser", abs(float(average.model.weight) / expected - 1), f"average after {value}")
    check.done()


def test_clipped_steps_of_adamw() -> None:
    """In float32 as the reference, relative."""
    probe, check = golden_json("schedule_ema.json")["adamw_probe"], checks("AdamW")
    weight = nn.Parameter(torch.tensor(probe["init"]))
    config = OptimizerConfig(
        lr=probe["lr"], weight_decay=probe["weight_decay"], clip_grad_norm=probe["clip_global_norm"]
    )
    optimizer = build_optimizer(nn.ParameterList([weight]), config)
    set_lr(optimizer, config.lr)
    for gradient, after in zip(probe["grads"], probe["after"], strict=True):
        weight.grad = torch.tensor(gradient)
        clip_grad_norm([weight], config.clip_grad_norm)
        optimizer.step()
        check.near("optimiser", float(np.abs(as_float64(weight) / np.array(after) - 1).max()))
    check.done()


def test_running_variance_differs_by_the_known_factor() -> None:
    """O13: Paddle keeps the biased variance on the CPU, torch the unbiased one. The train goldens rely on this."""
    probe, check = golden_json("schedule_ema.json")["batchnorm_probe"], checks("batch norm")
    norm = nn.BatchNorm2d(1, eps=probe["epsilon"]).double()
    norm(torch.tensor(probe["x"], dtype=torch.float64).view(1, 1, 2, 4))
    assert norm.running_mean is not None and norm.running_var is not None
    check.near(
        "optimiser", abs(float(norm.running_mean) / probe["mean_after"] - 1) / 10, "mean over 10: float32 momentum"
    )
    n = len(probe["x"])
    biased = 0.9 + (float(norm.running_var) - 0.9) * (n - 1) / n
    check.near("optimiser", abs(biased / probe["var_after"] - 1) / 10, "variance: float32 momentum, / 10")
    check.done()


@pytest.mark.parametrize("name", INIT)
def test_fresh_weights_have_the_official_distribution(name: str) -> None:
    """Constants exactly; random entries by mean, deviation and bound, within six standard errors of two samples."""
    torch.manual_seed(0)
    model = build_model(config_of(name.removeprefix("init_").removesuffix(".json")).model, 80)
    own, golden = model.state_dict(), golden_json(name)
    names = official_names(own)
    assert sorted(names.values()) == sorted(golden)
    off = []
    for ours, official in names.items():
        values, entry = as_float64(own[ours]), golden[official]
        n, std = values.size, entry["std"]
        assert n == int(np.prod(entry["shape"])), official
        if std < 1e-7:
            if not (abs(values - entry["mean"]) < 1e-6).all():
                off.append(f"{official}: expected {entry['mean']} everywhere")
            continue
        if abs(values.mean() - entry["mean"]) > 6 * std * np.sqrt(2 / n):
            off.append(f"{official}: mean {values.mean():.3g}, expected {entry['mean']:.3g}")
        if abs(values.std() / std - 1) > 6 / np.sqrt(n):
            off.append(f"{official}: deviation {values.std():.3g}, expected {std:.3g}")
        bound, golden_bound = np.abs(values).max(), max(abs(entry["min"]), abs(entry["max"]))
        uniform = golden_bound < 2.2 * std  # 1.73 of a uniform distribution, 2.8 or more of 200 normal numbers
        if n >= 200 and uniform and abs(bound / golden_bound - 1) > 20 / n:
            off.append(f"{official}: bound {bound:.4g}, expected {golden_bound:.4g} of a uniform distribution")
        if n >= 200 and not uniform and bound < 2.2 * std:
            off.append(f"{official}: bound {bound:.3g}, expected a normal distribution of deviation {std:.3g}")
    assert not off, "; ".join(off)


def test_the_folder_holds_files_to_run() -> None:
    """An empty parametrisation would pass in silence."""
    found = [golden_names(pattern) for pattern in ("eval_*.npz", "train_*.npz", "optim_*.json", "init_*.json")]
    assert any(found), f"no golden files; set RTDETR_GOLDEN to a folder with eval_*.npz ({CONFIGS.parent})"
