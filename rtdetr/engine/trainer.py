"""Training: the loop, its checkpoints and how it ends.

On a GPU the losses of a step travel to the host in the background and are looked at one step later, so that watching
them never makes the GPU wait. On a CPU they are looked at before the weights change.
"""

from __future__ import annotations

import itertools
import math
import random
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from rtdetr.config import Config, ConfigError, save_config
from rtdetr.data.loader import build_train_loader, build_val_loader
from rtdetr.engine import distributed
from rtdetr.engine.ema import ModelEma
from rtdetr.engine.evaluator import EvaluationStopped, evaluate
from rtdetr.engine.metrics import MetricsLog, draw_curves
from rtdetr.engine.optim import build_optimizer, clip_grad_norm, lr_at, set_lr
from rtdetr.engine.run_state import rng_state, set_rng_state
from rtdetr.engine.signals import StopSignal
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.denoising import Draws
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, make_checkpoint, save_checkpoint
from rtdetr.weights.load import load_exactly, warm_start

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # fp32: none


class TrainingFailed(RuntimeError):
    """The run cannot go on; the message is one sentence."""


class StepRecord(NamedTuple):
    """One optimiser step, for checks and logs."""

    iteration: int  # from 0
    lr: float
    names: tuple[str, ...]  # losses, then grad_norm
    values: Tensor  # (len(names),) on the host, valid once `ready` has passed
    ready: torch.cuda.Event | None
    batches: list[Batch]


class Trainer:
    """One training run on one device, or this process's part of it.

    resume: checkpoint of a run to go on with; tuning: weight file to start from; draws: replayed random numbers.
    Raises ConfigError, DataError or CheckpointError when the run cannot start.
    """

    def __init__(
        self,
        cfg: Config,
        output_dir: Path,
        device: torch.device,
        resume: Path | None = None,
        tuning: Path | None = None,
        draws: Draws | None = None,
    ) -> None:
        self.cfg, self.output_dir, self.device, self.draws = cfg, output_dir, device, draws
        self.main = distributed.is_main()
        rank, world_size = distributed.rank(), distributed.world_size()
        self.train_loader = build_train_loader(cfg, cfg.train.seed, rank, world_size)
        self.classes = self.train_loader.classes
        if cfg.num_classes not in (0, len(self.classes)):
            raise ConfigError(
                f"num_classes is {cfg.num_classes}, {cfg.data.train.annotations} has {len(self.classes)} categories; "
                "set it to 0 to take them from the file"
            )
        self.val_loader = build_val_loader(cfg, self.classes, rank, world_size)
        if device.type == "cuda":
            torch.set_float32_matmul_precision("high")  # TF32 for what autocast leaves in float32, in evaluation too
        _seed_everything(cfg.train.seed)  # the same initial weights in every process
        self.model: nn.Module = build_model(cfg.model, len(self.classes))
        for weights in (cfg.model.backbone.weights, tuning):
            if weights and resume is None:
                self._report(weights, warm_start(self.model, weights, self.classes))
        self.model.to(device)
        if world_size > 1 and device.type == "cuda" and cfg.train.sync_batch_norm:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)  # leaves fully frozen batch norm alone
        self.criterion = build_criterion(cfg, len(self.classes))
        self.optimizer = build_optimizer(self.model, cfg.optimizer)
        self.parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.scaler = torch.amp.GradScaler(device.type, enabled=cfg.train.precision == "fp16")
        self.ema = ModelEma(self.model, cfg.ema)
        self.iteration = self.epoch = self.start_batch = 0
        self.best_ap, self.evaluation_due = -1.0, False
        _seed_everything(cfg.train.seed + rank)
        if resume is not None:
            self._resume(resume)
        self.parallel: nn.Module = self.model
        if world_size > 1:
            self.parallel = DistributedDataParallel(
                self.model, find_unused_parameters=cfg.train.find_unused_parameters, gradient_as_bucket_view=True
            )
        steps = math.ceil(len(self.train_loader) / cfg.train.accumulate) * cfg.train.epochs
        self.total_iterations = min(steps, cfg.train.max_iterations or steps)
        self.signals = StopSignal()
        self.lag = 1 if device.type == "cuda" else 0  # steps between one and the look at its losses
        self._logged = (time.perf_counter(), 0)  # when, and pictures since
        self._saved = time.perf_counter()
        self._bar: tqdm[Any] | None = None
        self._metrics: MetricsLog | None = None

    # ---------------------------------------------------------------- the run

    def run(self) -> int | None:
        """Trains, evaluates and saves until the end, or until SIGINT or SIGTERM, whose number is returned."""
        self.output_dir.mkdir(parents=True, exist_ok=True)
        if self.main:
            self._say(
                f"{self.cfg.name} on {self.device}, {self.cfg.train.precision}, {distributed.world_size()} process(es)"
            )
            self._say(f"training   {self.train_loader.source.summary()}\nvalidation {self.val_loader.source.summary()}")
            save_config(self.cfg, self.output_dir / "config.yml")
            self._metrics = MetricsLog(self.output_dir, self.iteration or None)
            interval = 0.5 if sys.stderr.isatty() else 30.0  # a log file wants few lines
            self._bar = tqdm(
                total=self.total_iterations,
                initial=self.iteration,
                unit="step",
                mininterval=interval,
                dynamic_ncols=True,
            )
        try:
            with self.signals.listening():
                if self.evaluation_due:
                    self._evaluate()
                batches = self.train_loader.stream(self.epoch, self.start_batch)
                while self.iteration < self.total_iterations and not self._stopping():
                    self._train_epoch(itertools.islice(batches, len(self.train_loader) - self.start_batch))
                if self._stopping():
                    self._save("last.pth")
        finally:
            if self._bar is not None and self._metrics is not None:
                self._bar.close()
                self._metrics.close()
        if self.main:
            draw_curves(self.output_dir / "metrics.csv", self.output_dir / "curves.png")
        return self.signals.received

    def _train_epoch(self, batches_left: Iterator[Batch]) -> None:
        """The rest of the present epoch, and its evaluation when one is due."""
        self.model.train()
        self._logged = (time.perf_counter(), 0)
        unfinished: list[StepRecord] = []
        for batches in self._grouped(batches_left):
            unfinished.append(self.train_step(batches))
            while len(unfinished) > self.lag:
                self._finish(unfinished.pop(0))
            self.start_batch += len(batches)
            if self._stopping() or self.iteration >= self.total_iterations:
                break
        for record in unfinished:
            self._finish(record)
        ended = self.iteration >= self.total_iterations
        if self.start_batch < len(self.train_loader) and not ended:
            return  # stopped in the middle
        if self.start_batch >= len(self.train_loader):
            self.epoch, self.start_batch = self.epoch + 1, 0
        every = self.cfg.train.eval_every
        self.evaluation_due = ended or (every > 0 and self.epoch % every == 0)
        # Before an evaluation, so that its failure costs no training; else now and then: epochs may last a second.
        waited = time.perf_counter() - self._saved >= self.cfg.train.save_seconds
        if self.evaluation_due or distributed.any_process(waited):
            self._save("last.pth")
        if self.evaluation_due and not self._stopping():
            self._evaluate()

    def _grouped(self, batches: Iterator[Batch]) -> Iterator[list[Batch]]:
        """Batches of one optimiser step each; the last group of an epoch may be smaller."""
        group: list[Batch] = []
        for batch in batches:
            group.append(batch)
            if len(group) == self.cfg.train.accumulate:
                yield group
                group = []
        if group:
            yield group

    def train_step(self, batches: list[Batch]) -> StepRecord:
        """One optimiser step on the mean loss of `batches`."""
        lr = lr_at(self.iteration, self.total_iterations, self.cfg.optimizer)
        set_lr(self.optimizer, lr)
        self.optimizer.zero_grad(set_to_none=True)
        names: tuple[str, ...] = ()
        total = torch.zeros(())
        for number, batch in enumerate(batches, start=1):
            parallel, more = self.parallel, number < len(batches)
            with parallel.no_sync() if more and isinstance(parallel, DistributedDataParallel) else nullcontext():
                losses = self._losses(batch)
                self.scaler.scale(losses["loss"] / len(batches)).backward()
            names = tuple(losses)
            values = torch.stack([value.detach().float() for value in losses.values()]) / len(batches)
            total = values if number == 1 else total + values
        self.scaler.unscale_(self.optimizer)
        norm = clip_grad_norm(self.parameters, self.cfg.optimizer.clip_grad_norm)
        record = self._record(lr, (*names, "grad_norm"), torch.cat((total, norm.float()[None])), batches)
        if record.ready is None:
            self._check(record)
        elif not self.scaler.is_enabled():
            # The fused AdamW leaves the weights alone when this is not 0: the check comes one step too late for them.
            self.optimizer.found_inf = (~torch.isfinite(norm)).float()  # type: ignore[attr-defined]
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.ema.update()
        self.iteration += 1
        return record

    def _losses(self, batch: Batch) -> dict[str, Tensor]:
        dtype = AUTOCAST.get(self.cfg.train.precision)
        images = batch.images.to(self.device, non_blocking=True)
        targets = batch.targets.to(self.device, non_blocking=True)
        try:
            with torch.autocast(self.device.type, dtype, enabled=dtype is not None):
                outputs = self.parallel(images, targets, self.draws)
            return self.criterion(outputs, targets, self.epoch)
        except FloatingPointError as error:
            self._fail(self.iteration, str(error), {}, [batch])

    # ---------------------------------------------------------------- watching it

    def _record(self, lr: float, names: tuple[str, ...], values: Tensor, batches: list[Batch]) -> StepRecord:
        ready = None
        if self.device.type == "cuda":
            values = values.to("cpu", non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        return StepRecord(self.iteration, lr, names, values, ready, batches)

    def _check(self, record: StepRecord) -> dict[str, float]:
        """The step's losses by name. Saves the batch and raises TrainingFailed when one is NaN or infinite."""
        if record.ready is not None:
            record.ready.synchronize()
        values = dict(zip(record.names, record.values.tolist()))
        watched = dict(values)
        if self.scaler.is_enabled():
            del watched["grad_norm"]  # float16 gradients may overflow: the scaler skips the step and scales down
        bad = {name: value for name, value in watched.items() if not math.isfinite(value)}
        if bad:
            what = ", ".join(f"{name} = {value}" for name, value in bad.items())
            self._fail(record.iteration, what, values, record.batches)
        return values

    def _fail(self, iteration: int, what: str, losses: dict[str, float], batches: list[Batch]) -> NoReturn:
        rank = distributed.rank()
        path = self.output_dir / (f"failed_batch_rank{rank}.pth" if rank else "failed_batch.pth")
        infos = [info for batch in batches for info in batch.infos]
        content = {
            "iteration": iteration,
            "epoch": self.epoch,
            "losses": losses,
            "pictures": [tuple(info) for info in infos],
            "batches": [(batch.images, tuple(batch.targets)) for batch in batches],
            "model": self.model.state_dict(),
        }
        save_checkpoint(path, content)
        names = ", ".join(info.file_name for info in infos)
        raise TrainingFailed(
            f"iteration {iteration} (epoch {self.epoch}): {what.rstrip('.')}; pictures {names}; batch and weights "
            f"are in {path}, the last state that was saved in last.pth beside it"
        )

    def _finish(self, record: StepRecord) -> None:
        """Checks a step and shows it."""
        values = self._check(record)
        since, pictures = self._logged
        pictures += sum(len(batch.infos) for batch in record.batches) * distributed.world_size()
        self._logged = (since, pictures)
        if self._bar is None or self._metrics is None:
            return
        self._bar.update()
        if (record.iteration + 1) % self.cfg.train.log_every and record.iteration:
            return
        speed = pictures / (time.perf_counter() - since)
        self._logged = (time.perf_counter(), 0)
        if self.device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(self.device) / 2**30
        else:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        shown = {"lr": record.lr, "images_per_s": speed, "memory_gib": memory}
        self._metrics.write("train", record.iteration + 1, self.epoch, {**values, **shown})
        self._bar.set_postfix_str(
            f"epoch {self.epoch} loss {values['loss']:.3f} lr {record.lr:.1e} {speed:.1f} img/s {memory:.1f} GiB"
        )

    def _evaluate(self) -> None:
        """AP of the averaged weights; keeps the best ones. Leaves `evaluation_due` when a signal came in between."""
        started = time.perf_counter()
        annotations = self.cfg.data.val.annotations
        model, stop = self.ema.model, lambda: self.signals.received is not None
        try:
            result = evaluate(model, self.val_loader, annotations, self.classes, self.cfg.eval, self.device, stop)
        except EvaluationStopped:
            return
        self.evaluation_due = False
        if result is not None and self._metrics is not None:
            self._metrics.write("eval", self.iteration, self.epoch, result.figures)
            seconds = time.perf_counter() - started
            self._say(f"epoch {self.epoch}, iteration {self.iteration}, {seconds:.1f} s\n{result.table()}")
            if result.figures["AP"] > self.best_ap:
                self.best_ap = result.figures["AP"]
                ema = self.ema.model.state_dict()
                save_checkpoint(self.output_dir / "best.pth", make_checkpoint(self.cfg, self.classes, ema))
        self._save("last.pth")

    # ---------------------------------------------------------------- stopping and going on

    def _stopping(self) -> bool:
        return distributed.any_process(self.signals.received is not None)

    def _save(self, name: str) -> None:
        generators = distributed.gather_objects(rng_state())
        self._saved = time.perf_counter()
        if not self.main:
            return
        training = {
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "iteration": self.iteration,
            "epoch": self.epoch,
            "start_batch": self.start_batch,
            "batch_size": self.cfg.data.train_batch_size,
            "ema_updates": self.ema.num_updates,
            "best_ap": self.best_ap,
            "evaluation_due": self.evaluation_due,
            "rng": generators,
        }
        ema = self.ema.model.state_dict()
        save_checkpoint(
            self.output_dir / name, make_checkpoint(self.cfg, self.classes, self.model.state_dict(), ema, training)
        )

    def _resume(self, path: Path) -> None:
        content = load_checkpoint(path)
        state = content["training"]
        if state is None:
            raise CheckpointError(
                f"{path}: holds weights but no training state; start from them with -t, or resume last.pth"
            )
        if tuple(content["classes"]["category_ids"]) != self.classes.category_ids:
            raise CheckpointError(
                f"{path}: trained for other category ids than those in {self.cfg.data.train.annotations}"
            )
        load_exactly(self.model, content["model"], path)
        load_exactly(self.ema.model, content["ema"], path)
        own = [{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups]
        try:
            self.optimizer.load_state_dict(state["optimizer"])
        except ValueError as error:
            raise CheckpointError(
                f"{path}: the optimiser state does not fit ({error}); was something else frozen?"
            ) from error
        for group, settings in zip(self.optimizer.param_groups, own):
            group.update(settings)  # the config decides on decay and multipliers, not the file
        if self.scaler.is_enabled() and state["scaler"]:  # empty when the run had another precision
            self.scaler.load_state_dict(state["scaler"])
        self.iteration, self.epoch, self.start_batch = state["iteration"], state["epoch"], state["start_batch"]
        self.ema.num_updates, self.best_ap = state["ema_updates"], state["best_ap"]
        self.evaluation_due = state["evaluation_due"]
        if len(state["rng"]) == distributed.world_size() and state["batch_size"] == self.cfg.data.train_batch_size:
            set_rng_state(state["rng"][distributed.rank()])
        else:
            self.start_batch = 0  # counted batches of another size
            self._say(f"{path}: other batch size or number of processes; epoch {self.epoch} starts anew")

    def _report(self, path: str | Path, report: Any) -> None:
        if self.main:
            self._say(f"{path}: {report.text()}")
            self.output_dir.mkdir(parents=True, exist_ok=True)
            full = report.text(shown=sys.maxsize)
            (self.output_dir / "load_report.txt").write_text(f"{path}: {full}\n", encoding="utf-8")

    def _say(self, message: str) -> None:
        if self.main:
            tqdm.write(message)


def _seed_everything(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
