"""EMA: the moving average of the weights, which is evaluated and saved."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from rtdetr.config import EmaConfig, settled


class ModelEma:
    """A copy of a model whose trained parameters and batch norm statistics are moving averages over the updates.

    Update t (from 0) keeps decay * (1 - exp(-(t + 1) / warmup)) of the average. Frozen tensors are copied once. The
    official average starts from zeros, which makes a difference for less than an epoch.
    """

    def __init__(self, model: nn.Module, cfg: EmaConfig) -> None:
        self.cfg = cfg
        self.num_updates = 0
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if tensor.dtype in (torch.float16, torch.bfloat16):  # 1 - decay is below their resolution
                tensor.data = tensor.data.float()
        average, source, names = self.model.state_dict(), model.state_dict(), _averaged_names(model)
        self._averaged, self._source = [average[name] for name in names], [source[name] for name in names]
        self._copied = [buffer for buffer in self.model.buffers() if not buffer.is_floating_point()]
        self._copied_source = [buffer for buffer in model.buffers() if not buffer.is_floating_point()]

    def decay_at(self, update: int) -> float:
        warmup = settled(self.cfg.warmup)
        if warmup <= 0:
            return self.cfg.decay
        return self.cfg.decay * (1.0 - math.exp(-(update + 1) / warmup))

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average from the current state of the model."""
        source = [s.to(a.dtype) for s, a in zip(self._source, self._averaged)]
        torch._foreach_lerp_(self._averaged, source, 1.0 - self.decay_at(self.num_updates))
        if self._copied:
            torch._foreach_copy_(self._copied, self._copied_source)
        self.num_updates += 1


def _averaged_names(model: nn.Module) -> list[str]:
    """Names of the trained parameters and of the running statistics of batch norms that are not frozen."""
    names = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    for prefix, module in model.named_modules():
        if isinstance(module, _BatchNorm) and module.track_running_stats:
            names += [f"{prefix}.running_mean", f"{prefix}.running_var"]
    return names
