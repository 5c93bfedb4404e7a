"""A model whose weights are random and whose statistics are those of some images."""

from __future__ import annotations

import torch
from engine_helpers import NANO, tiny_updates
from torch import nn

from rtdetr.config import load_config
from rtdetr.models.layers import FrozenBatchNorm2d
from rtdetr.models.rtdetrv3 import Network, build_model


def made_up(*updates: str) -> Network:
    """A tiny model in eval mode in which nothing is as at the start: statistics, affine values, box heads."""
    cfg = load_config(NANO, [each for each in tiny_updates(NANO.parent) if each.startswith("model")] + [*updates])
    torch.manual_seed(0)
    model = build_model(cfg.model, num_classes=5).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | FrozenBatchNorm2d):
            for values in (module.weight, module.running_var):
                nn.init.uniform_(values, 0.7, 1.4)
            for values in (module.bias, module.running_mean):
                nn.init.normal_(values, std=0.3)
    for head in (model.decoder.selector.box_head, *model.decoder.box_heads):
        nn.init.normal_(head.linears()[-1].weight, std=0.3)
    return model.requires_grad_(False)
