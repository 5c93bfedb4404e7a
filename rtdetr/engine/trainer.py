"""The training loop."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rtdetr.config import Config, save_config
from rtdetr.data.classes import DataError, some
from rtdetr.data.data_report import save_report
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import SampleKey, build_train_loader, build_val_loader
from rtdetr.engine import distributed
from rtdetr.engine.acceleration.accelerate import accelerate
from rtdetr.engine.acceleration.mixed_precision import precision_on
from rtdetr.engine.acceleration.placement import layout_of, on_device
from rtdetr.engine.callbacks import Callback, Listeners, Outcome
from rtdetr.engine.evaluation.evaluator import EvaluationStopped, evaluate
from rtdetr.engine.failures import StepFailed, writing_run_file
from rtdetr.engine.log import TrainingLog, say
from rtdetr.engine.optimizer_step import OptimizerStep
from rtdetr.engine.planning.auto_config import how_it_began, settle
from rtdetr.engine.planning.data_warnings import on_data, on_no_ap, on_sizes
from rtdetr.engine.planning.memory_estimate import estimate_memory, out_of_memory
from rtdetr.engine.run_files.loggers import make_loggers
from rtdetr.engine.run_files.metrics import draw_curves
from rtdetr.engine.run_files.run_state import RunState, be_deterministic, seed_everything, with_absolute_paths
from rtdetr.engine.run_files.saving import Saver
from rtdetr.engine.signals import StopSignal
from rtdetr.engine.step import BatchPosition
from rtdetr.engine.step_checks import StepChecks, StepRecord
from rtdetr.engine.unreadable import Unreadable
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.ops.kernels import using
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import LAST
from rtdetr.weights.load import warm_start
from rtdetr.wording import counted


class Trainer:
    """A training run on one device, or the part of it in this process.

    resume: checkpoint of a run to resume; tuning: weight file to start from; signals: the StopSignal used during
    setup; callbacks: receive the events of the run; augment: the function that cfg.data.augment.custom names, if
    already imported.
    Raises ConfigError, DataError or CheckpointError if the run cannot start.
    """

    def __init__(
        self,
        cfg: Config,
        output_dir: Path,
        device: torch.device,
        resume: Path | None = None,
        tuning: Path | None = None,
        signals: StopSignal | None = None,
        callbacks: Sequence[Callback] = (),
        augment: Any = None,
    ) -> None:
        self.output_dir, self.device = output_dir, device
        loggers = make_loggers(cfg.train.loggers)  # in every process, as all have to end if a package is missing
        if not distributed.is_main():
            loggers, callbacks = {}, ()
        self.listeners = Listeners(loggers, callbacks, warn=say)
        cfg, automatic = settle(cfg, device, resume, tuning)
        say(*automatic)
        self.cfg = with_absolute_paths(cfg)
        self._open_data(cfg, augment)
        if device.type == "cuda":
            # TF32 for operations that autocast leaves in float32, but not in evaluation.
            torch.set_float32_matmul_precision("high")
            if cfg.train.deterministic:
                be_deterministic()
            if cfg.train.estimate_memory:
                say(*estimate_memory(cfg, self.train_loader.source, device))
        seed_everything(cfg.train.seed)  # the same initial weights in every process
        network = build_model(cfg.model, len(self.classes))
        network.decoder.recompute = cfg.train.checkpoint_activations
        self.model: nn.Module = network
        self._load_report = ""
        if tuning is not None and resume is None:
            self._warm_start(tuning)
        self.model.to(device).to(memory_format=layout_of(device))
        if distributed.world_size() > 1 and device.type == "cuda":
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # leaves fully frozen batch norm alone
        digest = self.val_loader.source.digest()
        self.state = RunState(self.cfg, self.classes, self.model, self.train_loader.num_samples, digest)
        seed_everything(cfg.train.seed + distributed.rank())
        if resume is None:
            self.state.began = how_it_began(cfg, tuning, len(self.train_loader.source))
        else:
            say(*self.state.load(resume))
        self.signals, self.update = signals or StopSignal(), OptimizerStep(self.state, device)
        criterion, left = build_criterion(cfg, len(self.classes)), self.state.total_iterations - self.state.iteration
        accelerated = accelerate(cfg, network, criterion, device, left, self.update.scale)
        self.step, self.graphs, self.why_not_compiled = accelerated
        self.advise = True
        self.checks, self.unreadable = StepChecks(self.state, output_dir, device), Unreadable(self.state)
        self.log = TrainingLog(self.state, output_dir, device, self.train_loader, self.listeners)
        tell = self.listeners.tell  # without `self`, whose memory a cycle of references would keep
        self.saver = Saver(self.state, output_dir, resume, lambda *file: tell("on_save", *file))

    def _open_data(self, cfg: Config, augment: Any) -> None:
        rank, world_size = distributed.rank(), distributed.world_size()
        self.train_loader = build_train_loader(cfg, cfg.train.seed, rank, world_size, augment)
        self.classes = self.train_loader.classes
        _check_boxes(self.train_loader.source)
        if (augmented := cfg.data.augment).custom:  # tried before the first file is written
            self.train_loader.dataset[SampleKey(0, 0, augmented.batch_sizes[0], augmented.interpolations[0])]
        self.val_loader = build_val_loader(cfg, self.classes, rank, world_size, go_on=True)

    def run(self, prepare: Callable[[], None] = lambda: None) -> int | None:
        """Trains, evaluates and saves until the end, or until SIGINT or SIGTERM, whose number is returned.

        prepare: called by the main process before the first file is written, if there is anything left to train.
        """
        state = self.state
        if state.early_stop.over and not state.evaluation_due:
            say(state.early_stop.sentence(state.iteration))
            return None
        if state.finished and not state.evaluation_due:
            setting = "max_iterations" if state.total_iterations == self.cfg.train.max_iterations else "epochs"
            done = f"finished at iteration {state.iteration} of {state.total_iterations}"
            say(f"{done}; raise train.{setting} to continue")
            return None
        with self.signals.listening("stopping after this step and saving"):
            distributed.from_main(prepare)
            precision = precision_on(self.device, self.cfg.train.precision)
            where = f"{self.device}, {precision}, {counted(distributed.world_size(), 'process')}"
            say(f"{self.cfg.name} on {where}, {self.cfg.kernels} kernels, into {self.output_dir}")
            if self.advise:
                say(*on_sizes(self.cfg, self.device, state.pace.batches))
            if state.iteration:
                say(f"resuming at iteration {state.iteration} of {state.total_iterations}")
            if self.why_not_compiled is None:
                say("compiling: the first step of each image size takes a minute or two, unless it is cached")
            elif self.device.type == "cuda":
                say(f"not compiled: {self.why_not_compiled}")
            say(f"training   {self.train_loader.source.summary()}\nvalidation {self.val_loader.source.summary()}")
            outcome: Outcome = "failed"
            with ExitStack() as at_end:  # last in, first out; each even if another one fails
                at_end.callback(lambda: self.listeners.end(outcome))
                at_end.callback(lambda: self._draw_curves() if outcome != "failed" else None)
                at_end.callback(self.release)
                at_end.callback(self.log.close)
                at_end.callback(self.saver.end)
                try:
                    if distributed.is_main():
                        if self.advise:
                            say(*on_data(self.train_loader.source, self.val_loader.source))
                        self._save_settings()
                    self.log.open()
                    stopped = self._go_on()
                    outcome = "stopped" if stopped else "finished"
                except torch.cuda.OutOfMemoryError as error:
                    last, captured = self.output_dir / LAST, self.graphs is not None
                    raise out_of_memory(self.cfg, state.iteration, last, state.evaluation_due, captured) from error
            return self.signals.agreed() if stopped else None

    def _draw_curves(self) -> None:
        if distributed.is_main():
            with writing_run_file(self.output_dir / "curves.png"):
                draw_curves(self.output_dir / "metrics.csv", self.output_dir / "curves.png")

    def release(self) -> None:
        """Stops the data workers and frees the memory of CUDA graphs."""
        for loader in (self.train_loader, self.val_loader):
            loader.close()
        if self.graphs is not None:
            self.graphs.clear()

    def _go_on(self) -> bool:
        """Trains until the end. Returns True if a signal stopped it earlier, after saving the state."""
        state = self.state
        if state.evaluation_due and not self._stopping():
            self._evaluate()
        batches = self.train_loader.stream(state.epoch, state.start_batch)
        while not (state.finished or state.early_stop.over or self._stopping()):
            self._train_epoch(itertools.islice(batches, len(self.train_loader) - state.start_batch))
        stopped = self._stopping()
        if stopped:
            self.saver.save(final=True)
        return stopped

    def _train_epoch(self, batches_left: Iterator[Batch]) -> None:
        """Trains for the rest of the current epoch, and evaluates if due."""
        state = self.state
        self.model.train()
        self.log.restart_clock()
        unfinished: list[StepRecord] = []
        groups = iter(lambda: [*itertools.islice(batches_left, state.pace.accumulate)], [])  # the last may be smaller
        for batches in groups:
            if state.iteration == 0:
                self.log.show_batch(batches[0])
            unfinished.append(self.train_step(batches))
            self._finish(unfinished, but=self.checks.lag)
            state.start_batch += len(batches)
            if self._stopping() or state.finished:
                break
            if state.start_batch < len(self.train_loader) and self.saver.due():
                self._finish(unfinished)  # a state is saved after its losses have been checked
                self.saver.save(background=True)
        self._finish(unfinished)
        if state.start_batch < len(self.train_loader) and not state.finished:
            return  # stopped in the middle
        if state.start_batch >= len(self.train_loader):
            state.epoch, state.start_batch = state.epoch + 1, 0
        state.evaluation_due = state.to_be_evaluated()
        # Before an evaluation, so that its failure loses nothing; else every save_seconds: epochs may last a second.
        if state.evaluation_due or self.saver.due():
            # Workers of the evaluation start while nothing is being written.
            self.saver.save(background=not state.evaluation_due)
        if state.evaluation_due and not self._stopping():
            self._evaluate()

    def _finish(self, unfinished: list[StepRecord], but: int = 0) -> None:
        """Checks and logs these steps, but for the last ones, and removes them from the list."""
        while len(unfinished) > but:
            record = unfinished.pop(0)
            values = self.checks.check(record) if record.names else {}
            self.unreadable.count(record.batches)
            self.log.show(record, values, self.unreadable.replaced)

    def train_step(self, batches: list[Batch]) -> StepRecord:
        """Runs one optimiser step on `batches` together; a failed step that may be skipped changes no weights."""
        with using(self.cfg.kernels):
            if self.cfg.train.max_skips == 0:
                return self._step(batches)
            buffers = [buffer.clone() for buffer in self.model.buffers()]  # batch norm updates its statistics
            try:
                return self._step(batches)
            except StepFailed as error:
                record = self.checks.skip(error, batches)
            torch._foreach_copy_([*self.model.buffers()], buffers)
            self.state.iteration += 1
            return record

    def _step(self, batches: list[Batch]) -> StepRecord:
        """Clears the gradients, adds those of each batch, clips them, and updates the weights. `self.step` is
        `training_step`, in the wrappers of `accelerate`."""
        self.checks.begin()
        lr, scaler = self.update.begin(), self.state.scaler
        boxes = [sum(batch.targets.counts) for batch in batches]
        names: tuple[str, ...] = ()
        total = torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            images, targets = on_device(batch, self.device, self.cfg.model.supervision.num_denoising)
            position = BatchPosition(self.state.epoch, boxes if len(boxes) > 1 else (), last=number == len(batches))
            try:
                names, values = self.step(images, targets, position)
            except FloatingPointError as error:
                self.checks.fail(self.checks.record(lr, (), total, batches), str(error), {})
            total = values if number == 1 else total + values
        names, total = (*names, "grad_norm"), torch.cat((total, self.update.clip().float()[None]))
        if scaler.is_enabled():
            scale = scaler.scale(torch.ones((1,), device=self.device))
            names, total = (*names, "loss_scale"), torch.cat((total, scale))
        record = self.checks.record(lr, names, total, batches)
        if self.checks.lag:
            self.update.skip_unless_finite(total)
        else:
            self.checks.check(record)
        self.update.step()
        return record

    def _evaluate(self) -> None:
        """Evaluates the averaged weights and keeps the best. A signal interrupts it and leaves `evaluation_due` set."""
        started = time.perf_counter()
        annotations, classes = self.val_loader.source.origin, self.val_loader.classes  # under the ids of that file
        state, model, stop = self.state, self.state.ema.model, self.signals.asked
        distributed.take_from_main(model.buffers())  # its batch norm is saved; those of others differ without SyncBN
        try:
            with using(self.cfg.kernels):
                result = evaluate(model, self.val_loader, annotations, classes, self.cfg.eval, self.device, stop)
        except EvaluationStopped:
            return
        images = len(self.val_loader.source)
        figures = distributed.from_main(lambda: self.unreadable.figures_of(result, images) if result else {})
        state.evaluation_due = False
        state.early_stop.see(figures, state.iteration)
        if result is not None:
            self.log.log_evaluation(result, self.val_loader.source, classes)
            seconds = time.perf_counter() - started
            epoch = state.epoch + (state.start_batch > 0)  # counted from 1, like the progress bar's
            say(f"epoch {epoch}, iteration {state.iteration}, {seconds:.1f} s\n{result.table(most=100)}")
            ap = result.figures["AP"]
            if ap > state.best_ap or max(ap, state.best_ap) < 0:  # -1 without boxes: the latest weights count as best
                state.best_ap = ap
                self.saver.keep_best()
            if self.advise and not state.warned:
                warnings = on_no_ap(state.best_ap, state.iteration, state.total_iterations)
                say(*warnings)
                state.warned = bool(warnings)
        self.saver.save(final=state.early_stop.over or state.finished)
        if state.early_stop.over and not state.finished:
            say(state.early_stop.sentence(state.iteration))

    def _save_settings(self) -> None:
        with writing_run_file(self.output_dir):
            self.output_dir.mkdir(parents=True, exist_ok=True)
            self.saver.begin()
            save_config(self.cfg, self.output_dir / "config.yml")
            save_report(self.output_dir, train=self.train_loader.source, val=self.val_loader.source)
            if self._load_report:
                (self.output_dir / "load_report.txt").write_text(self._load_report, encoding="utf-8")

    def _stopping(self) -> bool:
        return distributed.any_process(self.signals.asked())

    def _warm_start(self, path: Path) -> None:
        report = warm_start(self.model, path, self.classes)
        say(f"{path}: {report.text()}")
        self._load_report = f"{path}: {report.text(shown=sys.maxsize)}\n"


def _check_boxes(source: DetectionSet) -> None:
    if not source.boxes_per_image().any():
        numbers = {"crowd": source.num_crowd, "without area": source.num_degenerate}
        left_out = [f"{number} {kind}" for kind, number in numbers.items() if number]
        raise DataError(
            f"{source.annotation_file}: {counted(len(source), 'image')} but no box to learn from"
            f"{f' (left out: {some(left_out)})' if left_out else ''}; is it the right file?"
        )
