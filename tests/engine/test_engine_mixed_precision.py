"""Weights cast together: the bits that autocast makes, one weight after another."""

from __future__ import annotations

from pathlib import Path

import torch
from engine_helpers import made_up_batch, tiny_config, tiny_data
from torch import Tensor

from rtdetr.config import TrainConfig
from rtdetr.engine.acceleration.mixed_precision import (
    autocast_type,
    call_cast,
    cast_by_autocast,
    copies_in,
    hand_over,
    precision_on,
)
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import as_floats

BF16 = torch.bfloat16
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_auto_is_what_suits_the_device() -> None:
    auto = TrainConfig().precision
    assert (precision_on(CPU, auto), precision_on(GPU, auto)) == ("fp32", "bf16")
    assert (autocast_type(CPU, auto), autocast_type(GPU, auto)) == (None, BF16)
    for device in (CPU, GPU):
        assert (precision_on(device, "bf16"), autocast_type(device, "bf16")) == ("bf16", BF16)
        assert (precision_on(device, "fp16"), autocast_type(device, "fp16")) == ("fp16", torch.float16)
        assert (precision_on(device, "fp32"), autocast_type(device, "fp32")) == ("fp32", None)


def test_losses_and_gradients_are_those_of_autocast(tmp_path: Path) -> None:
    cfg, batch = tiny_config(tiny_data(tmp_path)), made_up_batch((3, 2), 1)
    model, criterion = build_model(cfg.model, 5).train(), build_criterion(cfg, 5)
    model.backbone.stem[0].requires_grad_(False)
    ends: list[dict[str, Tensor]] = []
    for together in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        with torch.autocast("cpu", BF16):
            inputs = (as_floats(batch.images).to(BF16), batch.targets, None)
            copies = copies_in(BF16, model) if together else {}
            outputs = call_cast(model, copies, *inputs) if together else model(*inputs)
        loss = criterion(outputs, batch.targets, 0)["loss"]
        loss.backward()
        parameters = [*model.parameters()]
        hand_over(parameters, [copies.get(each, each) for each in parameters])
        ends.append({"loss": loss} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert ends[0].keys() == ends[1].keys()
    for name, wanted in ends[0].items():
        assert torch.equal(ends[1][name], wanted), name


def test_what_computes_in_float32_is_left_alone(tmp_path: Path) -> None:
    model = build_model(tiny_config(tiny_data(tmp_path)).model, 5)
    names = set(cast_by_autocast(model))
    assert "backbone.stem.0.conv.weight" in names and "decoder.layers.0.self_attn.in_proj_bias" in names
    assert "dense_head.class_heads.0.weight" in names and "dense_head.box_heads.0.weight" in names
    for left in ("norm", "score_head", "decoder.box_heads", "selector.box_head", "label_embedding"):
        assert not any(left in name for name in names), left
