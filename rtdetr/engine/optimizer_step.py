"""The optimiser part of a training step: sets the learning rate, clips gradients, updates weights and EMA."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.engine.optim import clip_grad_norm, lr_at, set_lr
from rtdetr.engine.run_files.run_state import RunState


class OptimizerStep:
    """Updates the weights of a run, which are on `device`.

    If `skip_unless_finite` finds a non-finite value, the device skips that step and all later ones: the host, which
    checks losses one step later, finds the weights from which the failed step started.
    """

    def __init__(self, state: RunState, device: torch.device) -> None:
        self.state = state
        self.parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
        self._nan_if_skipped = torch.ones((), device=device)  # 1, and NaN from the first skipped step on

    def begin(self) -> float:
        """Clears the gradients, sets the learning rate of the step, and returns it."""
        lr = lr_at(self.state.iteration, self.state.total_iterations, self.state.cfg.optimizer)
        set_lr(self.state.optimizer, lr)
        self.state.optimizer.zero_grad(set_to_none=True)
        return lr

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the scaled loss for the backward pass. A scaler skips steps with non-finite gradients."""
        scaler = self.state.scaler
        return scaler.scale(loss * self._nan_if_skipped) if scaler.is_enabled() else loss

    def clip(self) -> Tensor:
        """Clips the gradients and returns their norm () before clipping."""
        self.state.scaler.unscale_(self.state.optimizer)
        return clip_grad_norm(self.parameters, self.state.cfg.optimizer.clip_grad_norm)

    def skip_unless_finite(self, values: Tensor) -> None:
        """Skips this and all later steps if a value is not finite. values: losses, gradient norm and, with a scaler,
        its scale. A fused optimiser skips if found_inf is not 0; if float16 gradients overflow, the scaler skips."""
        scaled = self.state.scaler.is_enabled()
        finite = torch.isfinite(values[:-2] if scaled else values).all()
        self._nan_if_skipped.copy_(torch.where(finite, self._nan_if_skipped, torch.nan))
        if not scaled:
            self.state.optimizer.found_inf = (~torch.isfinite(self._nan_if_skipped)).float()  # type: ignore[attr-defined]

    def step(self) -> None:
        self.state.scaler.step(self.state.optimizer)
        self.state.scaler.update()
        self.state.ema.update()
        self.state.iteration += 1
