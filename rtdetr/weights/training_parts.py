"""Adds v3's training parts to weights that only detect: RT-DETR v1, v2 and files of transformers.

The selectors of the other query groups start as copies of the main group's; the rest is new.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rtdetr.config import STRIDES, ModelConfig
from rtdetr.models.dense_head import DenseHead
from rtdetr.models.query_groups import QueryGroups

OTHER_SELECTOR = re.compile(r"^query_groups\.selectors\.\d+\.")


def spread_selector(weights: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """The weights; if they have only one selector, its entries are copied to every selector among the names `own`."""
    if any(OTHER_SELECTOR.match(name) for name in weights):
        return dict(weights)
    sources = {name: OTHER_SELECTOR.sub("decoder.selector.", name) for name in own if OTHER_SELECTOR.match(name)}
    return {**weights, **{name: weights[source] for name, source in sources.items() if source in weights}}


def with_training_parts(weights: Mapping[str, Tensor], cfg: ModelConfig, num_classes: int) -> dict[str, Tensor]:
    """The weights of a detector with all training parts, initialised to the same numbers every time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        groups = QueryGroups(cfg.supervision, cfg.decoder.hidden_dim, num_classes, cfg.decoder.num_queries)
        modules = nn.ModuleDict({"query_groups": groups})
        if cfg.supervision.dense_head:
            modules["dense_head"] = DenseHead(cfg.encoder.hidden_dim, num_classes, STRIDES)
    parts = modules.state_dict()
    return {**parts, **spread_selector(weights, parts)}
