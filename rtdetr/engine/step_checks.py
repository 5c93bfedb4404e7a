"""Checks the losses and gradients of every step.

On a GPU the losses of a step are copied to the host asynchronously and checked one step later, so that the GPU never
waits. On a CPU, and with an optimiser that is not fused, they are checked before the weights change.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from rtdetr.config import config_to_dict
from rtdetr.engine import distributed
from rtdetr.engine.failures import StepFailed, TrainingFailed, writing_run_file
from rtdetr.engine.optim import skips_on_device
from rtdetr.engine.run_files.replay import diagnose, random_state
from rtdetr.engine.run_files.run_state import RunState
from rtdetr.losses.matcher import NON_FINITE
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import save_checkpoint
from rtdetr.wording import counted

MIN_LOSS_SCALE, MAX_SKIPPED = 2.0**-10, 50  # limits beyond which float16 training has failed


class StepRecord(NamedTuple):
    """One optimiser step, for checks and logs."""

    iteration: int  # from 0
    lr: float
    names: tuple[str, ...]  # losses, grad_norm, in float16 loss_scale
    values: Tensor  # (len(names),) on the host, valid once `ready` has passed
    ready: torch.cuda.Event | None
    batches: list[Batch]
    random: list[Tensor]  # state of the generators before the step


class StepChecks:
    """Checks the steps of a run, in every process."""

    def __init__(self, state: RunState, output_dir: Path, device: torch.device) -> None:
        self.state, self.output_dir, self.device = state, output_dir, device
        # Steps between a step and its check. A step that may be skipped, or that the device cannot skip by itself, is
        # checked before the weights change.
        later = device.type == "cuda" and state.cfg.train.max_skips == 0 and skips_on_device(state.optimizer)
        self.lag = 1 if later else 0
        self._moved = state.iteration - 1  # the last step that was not skipped
        self._skipped = 0  # steps
        self.begin()

    def begin(self) -> None:
        """Saves the state of the random generators at the start of a step."""
        self._random = random_state(self.device)

    def record(self, lr: float, names: tuple[str, ...], values: Tensor, batches: list[Batch]) -> StepRecord:
        """Returns the record of the current step; its values may not be on the host yet."""
        values = values.to("cpu", non_blocking=True)
        ready = torch.cuda.current_stream().record_event() if self.device.type == "cuda" else None
        return StepRecord(self.state.iteration, lr, names, values, ready, batches, self._random)

    def check(self, record: StepRecord) -> dict[str, float]:
        """Returns the losses of the step by name. Saves the batch and raises TrainingFailed if one is NaN or infinite,
        or if float16 gradients have been for too long."""
        if record.ready is not None:
            record.ready.synchronize()
        values = dict(zip(record.names, record.values.tolist()))
        non_finite = values.pop("non_finite_image", 0.0)
        # float16 gradients may overflow: the scaler skips the step and scales down
        may_overflow = ("grad_norm",) if self.state.scaler.is_enabled() else ()
        wrong = {name: value for name, value in values.items() if not math.isfinite(value)}
        what = ", ".join(f"{name} = {value}" for name, value in wrong.items() if name not in may_overflow)
        if what and non_finite and len(record.batches) == 1:
            what = f"{record.batches[0].infos[int(non_finite) - 1].file_name}: {NON_FINITE}"
        if not what:
            self._moved = self._moved if wrong else record.iteration
            skipped, scale = record.iteration - self._moved, values.get("loss_scale", 1.0)
            if skipped >= MAX_SKIPPED or scale < MIN_LOSS_SCALE:
                what = (
                    f"the float16 gradients were not finite in {skipped} steps in a row, with a loss scale down to "
                    f"{scale:g}; use train.precision=bf16 or fp32"
                )
        if what:
            self.fail(record, what, values)
        return values

    def fail(self, record: StepRecord, what: str, losses: dict[str, float]) -> NoReturn:
        """Writes failed_batch.pth, which determines the step, finds the first module with non-finite output and raises
        StepFailed. what: the defect."""
        state, rank = self.state, distributed.rank()
        path = self.output_dir / (f"failed_batch_rank{rank}.pth" if rank else "failed_batch.pth")
        infos = [info for batch in record.batches for info in batch.infos]
        content = {
            "config": config_to_dict(state.cfg),
            "num_classes": len(state.classes),
            "iteration": record.iteration,
            "epoch": state.epoch,
            "losses": losses,
            "random": record.random,
            "pictures": [tuple(info) for info in infos],
            "batches": [(batch.images, tuple(batch.targets)) for batch in record.batches],
            "model": state.model.state_dict(),
        }
        with writing_run_file(path):
            save_checkpoint(path, content)
        try:
            found = diagnose(content, state.cfg, self.device)
        except torch.cuda.OutOfMemoryError:
            closer = "the GPU has no room to look for the module here"
        else:
            closer = found.text()
            with writing_run_file(path):
                save_checkpoint(path, {**content, "module": found.module})
        names = ", ".join(info.file_name for info in infos)
        raise StepFailed(
            f"iteration {record.iteration} (epoch {state.epoch}): {what.rstrip('.')}; {closer}; images {names}; "
            f"`rtdetr train --replay {path}` repeats the step",
            losses,
        )

    def skip(self, error: StepFailed, batches: list[Batch]) -> StepRecord:
        """Returns the record of a failed step that is skipped. Raises TrainingFailed if there have been too many."""
        most, self._skipped = self.state.cfg.train.max_skips, self._skipped + 1
        if self._skipped > most:
            raise TrainingFailed(f"{error}; {counted(most, 'step')} were skipped before (train.max_skips)") from error
        if distributed.world_size() > 1 and not error.losses:  # the other processes wait for its gradients
            raise error
        tqdm.write(f"{error}; step skipped, number {self._skipped} of at most {most}")
        return self.record(0.0, (), torch.zeros(0), batches)
