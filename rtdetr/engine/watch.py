"""Looking at the steps of a run: checks, the batch that failed, the log.

On a GPU the losses of a step travel to the host in the background and are looked at one step later, so that watching
them never makes the GPU wait. On a CPU they are looked at before the weights change.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from rtdetr.config import Config, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import DetectionLoader
from rtdetr.engine import distributed
from rtdetr.engine.evaluator import EvalResult
from rtdetr.engine.memory_estimate import what_to_lower
from rtdetr.engine.metrics import MetricsLog
from rtdetr.engine.replay import FailedStep, diagnose, random_state
from rtdetr.engine.run_state import RunState
from rtdetr.engine.tensorboard import album
from rtdetr.losses.matcher import SPOILT
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import save_checkpoint
from rtdetr.wording import option

MIN_LOSS_SCALE, MAX_SKIPPED = 2.0**-10, 50  # where float16 has no more hope

MIN_UNREADABLE = 10  # pictures, or most of the set; fewer do not stop a run whose data.max_unreadable is not 0


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message is one sentence."""


class StepFailed(TrainingFailed):
    """The losses or gradients of a step are not finite; losses: by name, empty where they could not be computed."""

    def __init__(self, sentence: str, losses: dict[str, float]) -> None:
        self.losses = losses
        super().__init__(sentence)


class CannotWrite(TrainingFailed):
    """A file of the run cannot be written, as on a full disk; `reason` is the system's."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        saved = f"what was saved before is whole, make room and go on with {option('-r', 'resume')}"
        super().__init__(f"{path}: cannot be written ({reason}); {saved}")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Work that writes a file of the run. Raises CannotWrite."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides the disk's own words
        if not isinstance(cause, OSError):
            raise
        raise CannotWrite(path, cause.strerror or str(cause)) from error


def out_of_memory(cfg: Config, iteration: int, last: Path, evaluating: bool, captured: bool) -> TrainingFailed:
    """What a run that does not fit into its GPU can change."""
    what = f"lower data.val_batch_size ({cfg.data.val_batch_size})" if evaluating else what_to_lower(cfg, captured)
    go_on = f"; go on with {option(f'-r {last}', f'resume={str(last)!r}')}" if last.is_file() else ""
    return TrainingFailed(
        f"iteration {iteration}: CUDA out of memory{' in the evaluation' if evaluating else ''}; {what}, or stop what "
        f"else uses the GPU{go_on}"
    )


class StepRecord(NamedTuple):
    """One optimiser step, for checks and logs."""

    iteration: int  # from 0
    lr: float
    names: tuple[str, ...]  # losses, grad_norm, in float16 loss_scale
    values: Tensor  # (len(names),) on the host, valid once `ready` has passed
    ready: torch.cuda.Event | None
    batches: list[Batch]
    random: list[Tensor]  # state of the generators before the step


class Watch:
    """Checks the steps of a run in every process, and shows them in the main one between `open` and `close`."""

    def __init__(self, state: RunState, output_dir: Path, device: torch.device, loader: DetectionLoader) -> None:
        self.state, self.output_dir, self.device, self.loader = state, output_dir, device, loader
        # Steps between one and the look at its losses. One that may be left out is looked at before it is taken.
        self.lag = 1 if device.type == "cuda" and state.cfg.train.on_nan == "stop" else 0
        self._moved = state.iteration - 1  # the last step that was not skipped
        self._logged = (time.perf_counter(), 0)  # when, and pictures since
        self._waited = 0.0  # seconds for data, until then
        self.begin()
        self._unreadable: set[str] = set()  # sentences about pictures, of training
        self._named: set[str] = set()  # those that were said, of evaluation, too
        self._skipped = 0  # steps
        self._log_waits = False
        self._replaced = self._seen = 0  # pictures, the former as often as they came
        self._bar: tqdm[Any] | None = None
        self._metrics: MetricsLog | None = None

    def open(self) -> None:
        if not distributed.is_main():
            return
        with writing(self.output_dir):
            resume_at, due = self.state.iteration or None, self.state.evaluation_due
            self._metrics = MetricsLog(self.output_dir, resume_at, self.state.saved_iteration, due)
            if (aside := self._metrics.aside) is not None:
                say(f"{self._metrics.path}: is not as a run writes it; it is {aside.name} now, and a new one begins")
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

    def restart_clock(self) -> None:
        """Pictures per second, and the time that passes waiting for them, are counted from here on."""
        self._logged, self._waited = (time.perf_counter(), 0), self.loader.seconds_waited

    def begin(self) -> None:
        """A step begins: what it draws can be drawn again."""
        self._random = random_state(self.device)

    def record(self, lr: float, names: tuple[str, ...], values: Tensor, batches: list[Batch]) -> StepRecord:
        """The record of the present step, whose values may still be under way."""
        ready = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepRecord(self.state.iteration, lr, names, values, ready, batches, self._random)

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
            self.fail(record.iteration, what, values, record.batches, record.random)
        if math.isfinite(values["grad_norm"]):
            self._moved = record.iteration
        skipped, scale = record.iteration - self._moved, values.get("loss_scale", 1.0)
        if skipped >= MAX_SKIPPED or scale < MIN_LOSS_SCALE:
            what = (
                f"the float16 gradients were not finite in {skipped} steps in a row, with a loss scale down to "
                f"{scale:g}; use train.precision=bf16 or fp32"
            )
            self.fail(record.iteration, what, values, record.batches, record.random)
        return values

    def fail(
        self,
        iteration: int,
        what: str,
        losses: dict[str, float],
        batches: list[Batch],
        random: list[Tensor] | None = None,
    ) -> NoReturn:
        """Keeps all that a step follows from, finds its first bad module and raises StepFailed. random: of the
        present step where it is None."""
        rank = distributed.rank()
        path = self.output_dir / (f"failed_batch_rank{rank}.pth" if rank else "failed_batch.pth")
        state, model = self.state, self.state.model.state_dict()
        random = random or self._random
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
            found = diagnose(step, self.device)
        except torch.cuda.OutOfMemoryError:
            closer = "the GPU has no room to look for the module here"
        else:
            closer = found.text()
            with writing(path):
                save_checkpoint(path, {**content, "module": found.module})
        names = ", ".join(info.file_name for info in infos)
        raise StepFailed(
            f"iteration {iteration} (epoch {state.epoch}): {what.rstrip('.')}; {closer}; pictures {names}; "
            f"`rtdetr train --replay {path}` does the step again",
            losses,
        )

    def skip(self, error: StepFailed, batches: list[Batch]) -> StepRecord:
        """The record of a failed step that is left out. Raises TrainingFailed when there have been too many."""
        most, self._skipped = self.state.cfg.train.max_skips, self._skipped + 1
        if self._skipped > most:
            raise TrainingFailed(f"{error}; {most} steps were left out before (train.max_skips)") from error
        if distributed.world_size() > 1 and not error.losses:  # the other processes wait for its gradients
            raise error
        tqdm.write(f"{error}; the step is left out, number {self._skipped} of at most {most}")
        return StepRecord(self.state.iteration, 0.0, (), torch.zeros(0), None, batches, [])

    def finish(self, record: StepRecord) -> None:
        """Checks a step and shows it."""
        values = self.check(record) if record.names else {}
        self._count_unreadable(record.batches)
        since, pictures = self._logged
        pictures += sum(len(batch.infos) for batch in record.batches) * distributed.world_size()
        self._logged = (since, pictures)
        if self._bar is None or self._metrics is None:
            return
        self._bar.update()
        between = (record.iteration + 1) % self.state.cfg.train.log_every and record.iteration
        if between or not values:
            return
        seconds = time.perf_counter() - since
        speed, data_wait = pictures / seconds, (self.loader.seconds_waited - self._waited) / seconds
        self.restart_clock()
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_reserved(self.device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        shown = {"lr": record.lr, "images_per_s": speed, "data_wait": data_wait, "memory_gib": memory}
        if self._replaced:
            shown["unreadable"] = self._replaced
        self._log("train", record.iteration + 1, {**values, **shown})
        self._bar.set_postfix_str(
            f"epoch {self.state.epoch} loss {values['loss']:.3f} lr {record.lr:.1e} {speed:.1f} img/s "
            f"(data {data_wait:.0%}) {memory:.1f} GiB"
        )

    def _count_unreadable(self, batches: list[Batch]) -> None:
        """Names each picture that could not be read once. Raises TrainingFailed when there are too many of them."""
        for batch in batches:
            self._seen += len(batch.infos)
            self._replaced += len(batch.unreadable)
            self._unreadable.update(batch.unreadable)
            self._name(batch.unreadable, "training takes another picture instead")
        bad, num_pictures = len(self._unreadable), self.state.pace.num_pictures
        self._refuse(bad, min(self._seen, num_pictures), "pictures seen so far", MIN_UNREADABLE)
        self._refuse(bad, num_pictures, "pictures of the set", num_pictures // 2 + 1)

    def figures_of(self, result: EvalResult | None, num_pictures: int) -> dict[str, float]:
        """Those of an evaluation of so many pictures, on the main process; names each that it had to do without once.
        Raises TrainingFailed when there are too many of them."""
        if result is None:
            return {}
        self._name(result.unreadable, "evaluation does without it")
        least = min(MIN_UNREADABLE, num_pictures)
        self._refuse(len(result.unreadable), num_pictures, "validation pictures", least)
        return result.figures

    def _name(self, sentences: Sequence[str], instead: str) -> None:
        for sentence in sentences:
            if sentence not in self._named:
                self._named.add(sentence)
                tqdm.write(f"{sentence}; {instead}")

    def _refuse(self, bad: int, of: int, what: str, least: int) -> None:
        share = self.state.cfg.data.max_unreadable
        if bad > share * of and bad >= (least if share else 1):
            raise TrainingFailed(
                f"{bad} of the {of} {what} cannot be read (above), more than data.max_unreadable={share:g} allows; "
                "`rtdetr doctor CONFIG` names them all"
            )

    def log_evaluation(self, result: EvalResult, source: DetectionSet, classes: Classes) -> None:
        """source, classes: of the pictures that were evaluated, under the ids of the detections."""
        if self._metrics is None:
            return
        existing = {name: None if value < 0 else value for name, value in result.figures.items()}  # COCO's -1
        self._log("eval", self.state.iteration, existing)
        for number, picture in enumerate(album(source, classes, result.detections)):
            with self._waiting_for_room():
                self._metrics.board.add_picture(self.state.iteration, f"pictures/{number}", picture)

    def _log(self, kind: str, iteration: int, values: Mapping[str, float | None]) -> None:
        """A row of the log. Where the disk does not take it, says so once and lets it wait for the next one."""
        if self._metrics is None:
            return
        with self._waiting_for_room():
            self._metrics.write(kind, iteration, self.state.epoch, values)

    @contextmanager
    def _waiting_for_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._log_waits:
                path = self.output_dir / "metrics.csv"
                say(f"{path}: cannot be written ({error.strerror or error}); its rows wait for room")
            self._log_waits = True
        else:
            self._log_waits = False


def say(*messages: str) -> None:
    """Lines on the terminal, from the main process only, that leave the progress bar whole."""
    for message in messages if distributed.is_main() else ():
        tqdm.write(message)
