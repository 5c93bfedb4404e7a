"""Gradients side by side: pieces in the order of the backward pass, values and layout of the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rtdetr.config import ConfigError
from rtdetr.engine import distributed
from rtdetr.engine.flat_gradients import FlatGradients


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.Flatten(), nn.Linear(64, 2))
    return layers.to(memory_format=torch.channels_last)


def test_flat_gradients_have_the_values_and_the_layout_of_the_weights() -> None:
    model, x = network(), torch.rand(2, 3, 8, 8)
    parameters = [*model.parameters()]
    model(x).square().sum().backward()
    wanted = [each.grad.clone() for each in parameters if each.grad is not None]
    for piece in (1, 150, 10**9):
        flat = FlatGradients(parameters, piece)
        for _ in range(2):
            model.zero_grad()
            flat.expect(parameters)
            model(x).square().sum().backward()
            flat.collect()
            for parameter, before in zip(parameters, wanted, strict=True):
                assert parameter.grad is not None and parameter.grad.stride() == parameter.stride()
                assert torch.equal(parameter.grad, before)
                assert parameter.grad.untyped_storage().data_ptr() == flat.flat.untyped_storage().data_ptr()


def test_pieces_are_averaged_from_the_last_to_the_first_as_soon_as_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, sent = network(), []
    parameters = [*model.parameters()]
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "another_group", lambda: None)

    def average(piece: Tensor, group: object) -> None:
        sent.append((piece.data_ptr(), piece.numel(), bool(piece.any())))

    monkeypatch.setattr(distributed, "average", average)
    flat = FlatGradients(parameters, piece=1)
    flat.expect(parameters)
    model(torch.rand(2, 3, 8, 8)).square().sum().backward()
    assert len(sent) == len(parameters), "all of them within the backward pass"
    flat.collect()
    places = [place for place, _, _ in sent]
    assert len(sent) == len(parameters) and places == sorted(places, reverse=True)
    assert sum(numel for _, numel, _ in sent) == flat.flat.numel() and all(there for _, _, there in sent)


def test_a_parameter_without_a_gradient_is_left_alone_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    parameters = [*model.parameters(), nn.Parameter(torch.ones(3))]
    flat = FlatGradients(parameters, piece=1)
    flat.expect(parameters)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    flat.collect()
    assert [each.grad is None for each in parameters] == [False] * 6 + [True]
    flat.several = True
    model.zero_grad()
    flat.expect(parameters)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    with pytest.raises(ConfigError, match=r"1 parameter\(s\) got no gradient"):
        flat.collect()


def test_gradients_of_16_bit_copies_end_in_float32_in_their_place() -> None:
    model = network()
    parameters = [*model.parameters()]
    copies = [each.detach().bfloat16().requires_grad_() for each in parameters]
    flat = FlatGradients(parameters, piece=150)
    flat.expect(copies)
    sum((copy * 1.1).square().sum() for copy in copies).backward()  # type: ignore[union-attr]
    flat.collect()
    for parameter, copy in zip(parameters, copies, strict=True):
        own = copy.detach().requires_grad_()
        (own * 1.1).square().sum().backward()
        assert copy.grad is None and parameter.grad is not None and own.grad is not None
        assert parameter.grad.dtype == torch.float32 and torch.equal(parameter.grad, own.grad.float())
