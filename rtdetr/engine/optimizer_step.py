"""The optimiser's part of a training step: learning rate, unscaled and clipped gradients, weights and EMA."""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.engine.optim import clip_grad_norm, lr_at, set_lr
from rtdetr.engine.run_files.run_state import RunState


class OptimizerStep:
    """Updates the weights of a run, which are on `device`.

    A step that `skip_unless_finite` refuses is skipped on the device, and so are all later ones: the host checks losses
    one step later and then still finds the weights from which the failed step started.
    """

    def __init__(self, state: RunState, device: torch.device) -> None:
        self.state = state
        self.parameters = [parameter for parameter in state.model.parameters() if parameter.requires_grad]
        self._sound = torch.ones((), device=device)  # NaN from the first refused step on

    def begin(self) -> float:
        """Clears the gradients, sets the learning rate of the step, and returns it."""
        lr = lr_at(self.state.iteration, self.state.total_iterations, self.state.cfg.optimizer)
        set_lr(self.state.optimizer, lr)
        self.state.optimizer.zero_grad(set_to_none=True)
        return lr

    def scale(self, loss: Tensor) -> Tensor:
        """The loss from which the backward pass starts. A scaler skips steps whose gradients are NaN."""
        scaler = self.state.scaler
        return scaler.scale(loss * self._sound) if scaler.is_enabled() else loss

    def clip(self) -> Tensor:
        """Clips the gradients; returns their norm () before."""
        self.state.scaler.unscale_(self.state.optimizer)
        return clip_grad_norm(self.parameters, self.state.cfg.optimizer.clip_grad_norm)

    def skip_unless_finite(self, values: Tensor) -> None:
        """values: losses, the gradient norm and, with a scaler, its scale, as the check reads them. The fused AdamW
        leaves the weights unchanged if found_inf is not 0. Overflows of float16 gradients are skipped by the scaler."""
        scaled = self.state.scaler.is_enabled()
        finite = torch.isfinite(values[:-2] if scaled else values).all()
        self._sound.copy_(torch.where(finite, self._sound, torch.nan))
        if not scaled:
            self.state.optimizer.found_inf = (~torch.isfinite(self._sound)).float()  # type: ignore[attr-defined]

    def take(self) -> None:
        self.state.scaler.step(self.state.optimizer)
        self.state.scaler.update()
        self.state.ema.update()
        self.state.iteration += 1
