"""From a batch to gradients: plain or captured, compiled or not, alone or averaged with other processes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rtdetr.config import Config
from rtdetr.engine import distributed
from rtdetr.engine.casts import autocast_type, call_cast, copies_in, hand_over
from rtdetr.engine.compile import compile_step, why_not_compile
from rtdetr.engine.flat_gradients import FlatGradients
from rtdetr.engine.graphs import StepGraphs, Values, on_device, repeats_in_crowds, why_not_capture
from rtdetr.engine.run_state import RunState
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.denoising import Draws
from rtdetr.models.rtdetrv3 import RTDETRv3
from rtdetr.types import Batch, Targets, as_floats


class Gradients:
    """Adds the gradients of batches to the parameters of a model, which is on `device` and as it will stay.

    draws: replayed random numbers. Raises ConfigError when the step cannot run as the config asks.
    """

    def __init__(
        self,
        cfg: Config,
        model: nn.Module,
        num_classes: int,
        state: RunState,
        device: torch.device,
        draws: Draws | None,
    ) -> None:
        self.cfg, self.model, self.state, self.device, self.draws = cfg, model, state, device, draws
        self.criterion = build_criterion(cfg, num_classes)
        self.dtype = autocast_type(device, cfg.train.precision)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.why_not_captured = why_not_capture(cfg.train, device, cfg.loss.match_backend)
        repeats = repeats_in_crowds(cfg.model.supervision)
        self.flat = None if self.why_not_captured else FlatGradients(self.parameters)
        self.graphs = None if self.flat is None else StepGraphs(self.backward, self.flat, repeats)
        self.parallel: nn.Module = model
        if self.flat is not None:  # which averages gradients itself
            distributed.take_from_main(model.state_dict().values())
        elif distributed.world_size() > 1:
            unused = cfg.train.find_unused_parameters
            self.parallel = DistributedDataParallel(model, find_unused_parameters=unused, gradient_as_bucket_view=True)
        left, sizes = state.total_iterations - state.iteration, len(set(cfg.data.augment.batch_sizes))
        self.why_not_compiled = why_not_compile(cfg.train, device, left, sizes)
        if self.why_not_compiled is None:
            compile_step(cast(RTDETRv3, model))
        # The compiler casts as it likes; layers that are done again in the backward pass find the weights as they are.
        again = self.why_not_compiled is None or cfg.train.checkpoint_activations
        self.cast = device.type == "cuda" and self.parallel is model and not again
        self._sound = torch.ones((), device=device)  # NaN from the first step on that a check will refuse

    def add(self, batch: Batch, group: Sequence[int], more: bool) -> Values:
        """The losses of the batch by name. group: see Criterion; more: batches of the same step follow.

        Raises FloatingPointError where a CPU finds a prediction that is not finite.
        """
        images, targets = on_device(batch, self.device, self.cfg.model.supervision.num_denoising)
        if self.graphs is not None:
            return self.graphs(images, targets, self.state.epoch >= self.cfg.loss.atss_epochs)
        alone = more and isinstance(self.parallel, DistributedDataParallel)
        with self.parallel.no_sync() if alone else nullcontext():  # type: ignore[operator]
            return self.backward(images, targets, group)

    def backward(self, images: Tensor, targets: Targets, group: Sequence[int] = ()) -> Values:
        """One forward and backward pass, as they are launched or captured."""
        share = max(1, len(group))
        copies = copies_in(self.dtype, self.model) if self.dtype and self.cast else {}
        leaves = [copies.get(parameter, parameter) for parameter in self.parameters]
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            inputs = (as_floats(images).to(self.dtype or torch.float32), targets, self.draws)
            outputs = call_cast(self.model, copies, *inputs) if copies else self.parallel(*inputs)
        losses = self.criterion(outputs, targets, self.state.epoch, group)
        self.state.scaler.scale(losses["loss"] * self._sound / share).backward()
        if self.flat is not None:
            self.flat.collect(leaves)
        else:
            hand_over(self.parameters, leaves)
        return tuple(losses), torch.stack([value.detach().float() for value in losses.values()]) / share

    def doubt(self, values: Tensor) -> None:
        """Where checks come late, makes nothing of a step whose `values` will be refused, and of those until its check.
        A scaler skips steps with NaN gradients; without one the fused AdamW leaves the weights alone when found_inf is
        not 0."""
        scaled = self.state.scaler.is_enabled()
        finite = torch.isfinite(values[:-2] if scaled else values).all()  # float16 gradients may overflow
        self._sound.copy_(torch.where(finite, self._sound, torch.nan))
        if not scaled:
            self.state.optimizer.found_inf = (~torch.isfinite(self._sound)).float()  # type: ignore[attr-defined]

    def clear(self) -> None:
        """Gives back the memory of graphs."""
        if self.graphs is not None:
            self.graphs.clear()
