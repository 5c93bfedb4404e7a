"""The moving average against the official numbers and against a plain loop."""

from __future__ import annotations

import json

import pytest
import torch
from golden_files import golden_dir
from torch import Tensor, nn

from rtdetr.config import EmaConfig
from rtdetr.engine.ema import ModelEma
from rtdetr.models.layers import FrozenBatchNorm2d

GOLDEN = json.loads((golden_dir() / "schedule_ema.json").read_text())["ema"]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), FrozenBatchNorm2d(4), nn.Conv2d(4, 4, 1))
    model[3].requires_grad_(False)
    return model


def change(model: nn.Module) -> None:
    """Other weights, in place, and statistics of a random batch."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    model.train()(torch.randn(2, 3, 4, 4))


def test_decay_of_every_recorded_update() -> None:
    ema = ModelEma(nn.Linear(1, 1), EmaConfig())
    for update, decay in GOLDEN["decay_at_update_index"].items():
        assert ema.decay_at(int(update)) == pytest.approx(decay, abs=1e-7), update


def test_trajectory_from_zeros() -> None:
    model = nn.Linear(1, 1, bias=False)
    ema = ModelEma(model, EmaConfig())
    nn.init.zeros_(ema.model.weight)  # as the official one starts
    for value, expected in zip(GOLDEN["trajectory_inputs"], GOLDEN["trajectory_ema"]):
        nn.init.constant_(model.weight, value)
        ema.update()
        assert float(ema.model.weight) == pytest.approx(expected, abs=2e-7)  # float32 at 1.5


def test_equals_a_plain_loop_over_parameters_and_statistics() -> None:
    model = small_model()
    ema = ModelEma(model, EmaConfig(decay=0.9, warmup=3))
    expected: dict[str, Tensor] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for update in range(5):
        change(model)
        ema.update()
        decay = ema.decay_at(update)
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                expected[name] = decay * expected[name] + (1 - decay) * tensor
            else:
                expected[name] = tensor.clone()
    assert float((model[1].running_var - 1).abs().max()) > 0.01  # the statistics did move
    for name, tensor in ema.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-5, atol=1e-6)


def test_frozen_parts_are_copied_once() -> None:
    model = small_model()
    ema = ModelEma(model, EmaConfig())
    with torch.no_grad():  # what is averaged starts elsewhere, and moves
        ema.model[0].weight.zero_()
    for _ in range(2):
        assert torch.equal(ema.model[3].weight, model[3].weight)
        assert torch.equal(ema.model[2].running_var, model[2].running_var)
        ema.update()


def test_average_of_a_half_precision_model_is_kept_in_float32() -> None:
    model = nn.Linear(2, 2).bfloat16()
    ema = ModelEma(model, EmaConfig(decay=0.9999, warmup=0))
    nn.init.constant_(model.weight, 2.0)
    before = ema.model.weight.clone()
    ema.update()
    assert ema.model.weight.dtype == torch.float32
    assert not torch.equal(before, ema.model.weight)


def test_model_and_average_share_nothing() -> None:
    model = small_model()
    ema = ModelEma(model, EmaConfig())
    before = {name: tensor.clone() for name, tensor in ema.model.state_dict().items()}
    change(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ema.model.state_dict().items())
    assert not any(p.requires_grad for p in ema.model.parameters()) and not ema.model.training
