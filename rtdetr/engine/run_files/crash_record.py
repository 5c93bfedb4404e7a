"""failed_batch.pth: everything that determines a failed step, and the first module with non-finite output."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from rtdetr.config import config_to_dict
from rtdetr.engine import distributed
from rtdetr.engine.failures import StepFailed, writing
from rtdetr.engine.run_files.replay import FailedStep, diagnose
from rtdetr.engine.run_files.run_state import RunState
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import save_checkpoint


def fail_step(
    state: RunState,
    output_dir: Path,
    device: torch.device,
    iteration: int,
    what: str,
    losses: dict[str, float],
    batches: list[Batch],
    random: list[Tensor],
) -> NoReturn:
    """Saves the step, finds the first module with non-finite output and raises StepFailed. what: the defect; random:
    state of the generators before the step."""
    rank = distributed.rank()
    path = output_dir / (f"failed_batch_rank{rank}.pth" if rank else "failed_batch.pth")
    model = state.model.state_dict()
    step = FailedStep(state.cfg, len(state.classes), state.epoch, random, batches, model)
    infos = [info for batch in batches for info in batch.infos]
    content = {
        "config": config_to_dict(state.cfg),
        "num_classes": step.num_classes,
        "iteration": iteration,
        "epoch": step.epoch,
        "losses": losses,
        "random": random,
        "pictures": [tuple(info) for info in infos],
        "batches": [(batch.images, tuple(batch.targets)) for batch in batches],
        "model": model,
    }
    with writing(path):
        save_checkpoint(path, content)
    try:
        found = diagnose(step, device)
    except torch.cuda.OutOfMemoryError:
        closer = "the GPU has no room to look for the module here"
    else:
        closer = found.text()
        with writing(path):
            save_checkpoint(path, {**content, "module": found.module})
    names = ", ".join(info.file_name for info in infos)
    raise StepFailed(
        f"iteration {iteration} (epoch {state.epoch}): {what.rstrip('.')}; {closer}; images {names}; "
        f"`rtdetr train --replay {path}` repeats the step",
        losses,
    )
