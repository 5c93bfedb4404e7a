"""Gradients side by side: the values and the layout of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rtdetr.config import ConfigError
from rtdetr.engine.acceleration.gradient_buffer import GradientBuffer


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    return layers.to(memory_format=torch.channels_last)


def test_flat_gradients_have_the_values_and_the_layout_of_the_weights() -> None:
    model, x = network(), torch.rand(2, 3, 8, 8)
    parameters = [*model.parameters()]
    model(x).square().sum().backward()
    wanted = [each.grad.clone() for each in parameters if each.grad is not None]
    flat = GradientBuffer(parameters)
    for _ in range(2):
        model.zero_grad()
        model(x).square().sum().backward()
        flat.collect(parameters)
        flat.average()
        for parameter, before in zip(parameters, wanted, strict=True):
            assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, before)
            assert parameter.grad.untyped_storage().data_ptr() == flat.flat.untyped_storage().data_ptr()


def test_a_parameter_without_a_gradient_is_left_alone_and_not_averaged() -> None:
    model = network()
    parameters = [*model.parameters(), nn.Parameter(torch.ones(3))]
    flat = GradientBuffer(parameters)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    flat.collect(parameters)
    assert [each.grad is None for each in parameters] == [False] * 6 + [True]
    with pytest.raises(ConfigError, match=r"1 parameter got no gradient"):
        flat.average()


def test_gradients_of_16_bit_copies_end_in_float32_in_their_place() -> None:
    parameters = [*network().parameters()]
    copies = [each.detach().bfloat16().requires_grad_() for each in parameters]
    flat = GradientBuffer(parameters)
    sum((copy * 1.1).square().sum() for copy in copies).backward()  # type: ignore[union-attr]
    flat.collect(copies)
    for parameter, copy in zip(parameters, copies, strict=True):
        own = copy.detach().requires_grad_()
        (own * 1.1).square().sum().backward()
        assert copy.grad is None and parameter.grad is not None and own.grad is not None
        assert parameter.grad.dtype == torch.float32 and torch.equal(parameter.grad, own.grad.float())
