"""Looking at the steps of a run: checks, the batch that failed, the log.

On a GPU the losses of a step travel to the host in the background and are looked at one step later, so that watching
them never makes the GPU wait. On a CPU they are looked at before the weights change.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from rtdetr.data.loader import DetectionLoader
from rtdetr.engine import distributed
from rtdetr.engine.metrics import MetricsLog
from rtdetr.engine.run_state import RunState
from rtdetr.losses.matcher import SPOILT
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import save_checkpoint

MIN_LOSS_SCALE, MAX_SKIPPED = 2.0**-10, 50  # where float16 has no more hope


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message is one sentence."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Work that writes a file of the run. Raises TrainingFailed when it cannot, as on a full disk."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides the disk's own words
        if not isinstance(cause, OSError):
            raise
        raise TrainingFailed(
            f"{path}: cannot be written ({cause.strerror or cause}); what was saved before is whole, make room and go "
            "on with -r"
        ) from error


class StepRecord(NamedTuple):
    """One optimiser step, for checks and logs."""

    iteration: int  # from 0
    lr: float
    names: tuple[str, ...]  # losses, grad_norm, in float16 loss_scale
    values: Tensor  # (len(names),) on the host, valid once `ready` has passed
    ready: torch.cuda.Event | None
    batches: list[Batch]


class Watch:
    """Checks the steps of a run in every process, and shows them in the main one between `open` and `close`."""

    def __init__(self, state: RunState, output_dir: Path, device: torch.device, loader: DetectionLoader) -> None:
        self.state, self.output_dir, self.device, self.loader = state, output_dir, device, loader
        self.lag = 1 if device.type == "cuda" else 0  # steps between one and the look at its losses
        self._moved = state.iteration - 1  # the last step that was not skipped
        self._logged = (time.perf_counter(), 0)  # when, and pictures since
        self._waited = 0.0  # seconds for data, until then
        self._bar: tqdm[Any] | None = None
        self._metrics: MetricsLog | None = None

    def open(self) -> None:
        if not distributed.is_main():
            return
        with writing(self.output_dir):
            self._metrics = MetricsLog(self.output_dir, self.state.iteration or None, self.state.saved_iteration)
        self._bar = tqdm(
            total=self.state.total_iterations,
            initial=self.state.iteration,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 30.0,  # a log file wants few lines
            dynamic_ncols=True,
        )

    def close(self) -> None:
        if self._bar is not None and self._metrics is not None:
            self._bar.close()
            self._metrics.close()

    def restart_clock(self) -> None:
        """Pictures per second, and the time that passes waiting for them, are counted from here on."""
        self._logged, self._waited = (time.perf_counter(), 0), self.loader.seconds_waited

    def record(self, lr: float, names: tuple[str, ...], values: Tensor, batches: list[Batch]) -> StepRecord:
        """The record of the present step, whose values may still be under way."""
        ready = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepRecord(self.state.iteration, lr, names, values, ready, batches)

    def check(self, record: StepRecord) -> dict[str, float]:
        """The step's losses by name. Saves the batch and raises TrainingFailed when one is NaN or infinite, and when
        float16 gradients have been so for too long."""
        if record.ready is not None:
            record.ready.synchronize()
        values = dict(zip(record.names, record.values.tolist()))
        spoilt = values.pop("spoilt_picture", 0.0)
        watched = dict(values)
        if self.state.scaler.is_enabled():
            del watched["grad_norm"]  # float16 gradients may overflow: the scaler skips the step and scales down
        bad = {name: value for name, value in watched.items() if not math.isfinite(value)}
        if bad:
            what = ", ".join(f"{name} = {value}" for name, value in bad.items())
            if spoilt and len(record.batches) == 1:
                what = f"{record.batches[0].infos[int(spoilt) - 1].file_name}: {SPOILT}"
            self.fail(record.iteration, what, values, record.batches)
        if math.isfinite(values["grad_norm"]):
            self._moved = record.iteration
        skipped, scale = record.iteration - self._moved, values.get("loss_scale", 1.0)
        if skipped >= MAX_SKIPPED or scale < MIN_LOSS_SCALE:
            what = (
                f"the float16 gradients were not finite in {skipped} steps in a row, with a loss scale down to "
                f"{scale:g}; use train.precision=bf16 or fp32"
            )
            self.fail(record.iteration, what, values, record.batches)
        return values

    def fail(self, iteration: int, what: str, losses: dict[str, float], batches: list[Batch]) -> NoReturn:
        rank = distributed.rank()
        path = self.output_dir / (f"failed_batch_rank{rank}.pth" if rank else "failed_batch.pth")
        infos = [info for batch in batches for info in batch.infos]
        content = {
            "iteration": iteration,
            "epoch": self.state.epoch,
            "losses": losses,
            "pictures": [tuple(info) for info in infos],
            "batches": [(batch.images, tuple(batch.targets)) for batch in batches],
            "model": self.state.model.state_dict(),
        }
        save_checkpoint(path, content)
        names = ", ".join(info.file_name for info in infos)
        raise TrainingFailed(
            f"iteration {iteration} (epoch {self.state.epoch}): {what.rstrip('.')}; pictures {names}; batch and "
            f"weights are in {path}, the last state that was saved in last.pth beside it"
        )

    def finish(self, record: StepRecord) -> None:
        """Checks a step and shows it."""
        values = self.check(record)
        since, pictures = self._logged
        pictures += sum(len(batch.infos) for batch in record.batches) * distributed.world_size()
        self._logged = (since, pictures)
        if self._bar is None or self._metrics is None:
            return
        self._bar.update()
        if (record.iteration + 1) % self.state.cfg.train.log_every and record.iteration:
            return
        seconds = time.perf_counter() - since
        speed, data_wait = pictures / seconds, (self.loader.seconds_waited - self._waited) / seconds
        self.restart_clock()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        shown = {"lr": record.lr, "images_per_s": speed, "data_wait": data_wait, "memory_gib": memory}
        with writing(self._metrics.path):
            self._metrics.write("train", record.iteration + 1, self.state.epoch, {**values, **shown})
        self._bar.set_postfix_str(
            f"epoch {self.state.epoch} loss {values['loss']:.3f} lr {record.lr:.1e} {speed:.1f} img/s "
            f"(data {data_wait:.0%}) {memory:.1f} GiB"
        )

    def log_evaluation(self, figures: dict[str, float]) -> None:
        if self._metrics is not None:
            existing = {name: None if value < 0 else value for name, value in figures.items()}  # COCO's -1
            with writing(self._metrics.path):
                self._metrics.write("eval", self.state.iteration, self.state.epoch, existing)


def say(*messages: str) -> None:
    """Lines on the terminal, from the main process only, that leave the progress bar whole."""
    for message in messages if distributed.is_main() else ():
        tqdm.write(message)
