"""Parameter groups, learning rate and gradient clipping, as measured in the official run."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rtdetr.config import OptimizerConfig, settled
from rtdetr.engine.muon import MuonAdamW

# Stages res2 to res5. The stem belongs to the backbone too, but trains at the full rate
# (official repo: ppdet/modeling/backbones/resnet.py; optimizer state measured on R18).
BACKBONE_STAGES = re.compile(r"^backbone\.stages\.")
# The first layer, embeddings, and last layers, which start at 0 or have a row per class: AdamW updates them, not Muon.
NOT_MATRICES = re.compile(
    r"embedding|score_head|class_head|box_head|sampling_offsets|attention_weights|backbone\.stem\.0"
)

WARMUP_FACTOR = 0.001  # initial fraction of the learning rate during warm-up


def parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], cfg: OptimizerConfig
) -> list[dict[str, object]]:
    """Groups trained parameters by learning-rate multiplier and optimiser; each group has its `lr_multiplier`.
    Weight decay applies to norms and biases too: it does in the official run, although its code intends otherwise."""
    muon = settled(cfg.muon_lr_multiplier)
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in named_parameters:
        if not parameter.requires_grad:
            continue
        multiplier = settled(cfg.backbone_lr_multiplier) if BACKBONE_STAGES.match(name) else 1.0
        by_muon = muon > 0 and parameter.ndim in (2, 4) and not NOT_MATRICES.search(name)
        multiplier *= muon if by_muon else 1.0
        groups.setdefault((multiplier, by_muon), []).append(parameter)
    return [
        {"params": parameters, "lr_multiplier": multiplier, "weight_decay": cfg.weight_decay, "lr": cfg.lr * multiplier}
        | ({"muon": True} if by_muon else {})
        for (multiplier, by_muon), parameters in groups.items()
    ]


def build_optimizer(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
    """Builds the optimiser; it uses a fused kernel on a GPU, torch's plain loop elsewhere."""
    groups = parameter_groups(model.named_parameters(), cfg)
    if not groups:
        raise ValueError("the model has no parameter to train: everything is frozen")
    on_cuda = next(model.parameters()).is_cuda
    kind = MuonAdamW if settled(cfg.muon_lr_multiplier) > 0 else torch.optim.AdamW
    return kind(groups, lr=cfg.lr, betas=cfg.betas, eps=1e-8, fused=on_cuda, foreach=False)


def skips_on_device(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its step does nothing if the tensor `found_inf` is not 0: torch's fused optimisers."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Restores the moments and step counts of a saved optimiser of the same parameters.

    Rates, decay and multipliers keep the values of the current config. So does `fused`, by which torch decides on
    loading whether step counts are on the device: the file may come from another kind of device. Raises ValueError if
    the parameters differ.
    """
    own = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    theirs = saved["param_groups"]
    groups = [{**group, **settings} for group, settings in zip(theirs, own)] + theirs[len(own) :]
    optimizer.load_state_dict({**saved, "param_groups": groups})


def lr_at(iteration: int, total_iterations: int, cfg: OptimizerConfig) -> float:
    """Base rate at `iteration` (from 0) of `total_iterations`: linear warm-up, then constant or half a cosine."""
    warmup = settled(cfg.warmup_iterations)
    if iteration < warmup:
        return cfg.lr * (WARMUP_FACTOR + (1.0 - WARMUP_FACTOR) * iteration / warmup)
    if cfg.flat_ratio == 1:
        return cfg.lr
    start = max(float(warmup), cfg.flat_ratio * total_iterations)
    progress = min(max(iteration - start, 0.0) / max(total_iterations - start, 1.0), 1.0)
    return cfg.lr * (cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_multiplier"]


def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scales the gradients in place by max_norm / max(norm, max_norm) and returns their old norm (). 0: no scaling.

    torch's clip_grad_norm_ adds 1e-6 to the norm; the official code does not.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if max_norm > 0:
        torch._foreach_mul_(gradients, max_norm / norm.clamp(min=max_norm))
    return norm
