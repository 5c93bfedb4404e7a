"""The loop: it resumes to the last bit, accumulates, stops with a reason, and its evaluation changes nothing."""

from __future__ import annotations

import gc
import json
import math
import multiprocessing
import signal
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import PartialDraws, made_up_batch, part_of, tiny_config, tiny_data
from messages import message
from torch import Tensor, nn

from rtdetr.config import ConfigError
from rtdetr.data.shapes import make_shapes
from rtdetr.engine.evaluation.evaluator import FIGURES
from rtdetr.engine.failures import TrainingFailed
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.step import BatchPosition, Losses, training_step
from rtdetr.engine.step_checks import StepRecord
from rtdetr.engine.trainer import Trainer
from rtdetr.losses.criterion import Criterion, build_criterion
from rtdetr.types import Batch, Targets
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint

CPU = torch.device("cpu")


def train_rows(folder: Path) -> list[dict[str, str]]:
    """Columns of the training rows as text; times and memory differ between runs, and there are none of evaluation."""
    rows = [row for row in read_rows(folder / "metrics.csv") if row["kind"] == "train"]
    kept = [name for name in rows[0] if name not in ("images_per_s", "data_wait", "memory_gib", *FIGURES)]
    return [{name: row[name] for name in kept} for row in rows]


def stop_after(trainer: Trainer, steps: int, number: int = signal.SIGTERM) -> None:
    """Raises a real signal in the middle of the given step."""
    step = trainer.train_step

    def counted(batches: list) -> StepRecord:  # type: ignore[type-arg]
        if trainer.state.iteration == steps - 1:
            signal.raise_signal(number)
        return step(batches)

    trainer.train_step = counted  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def whole(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs of three steps, in one go."""
    folder = tmp_path_factory.mktemp("whole")
    assert Trainer(tiny_config(data, "train.loggers=[tensorboard]"), folder, CPU).run() is None
    return folder


@pytest.mark.parametrize("steps", [2, 3])
def test_a_stopped_and_resumed_run_equals_one_in_one_go(data: Path, whole: Path, tmp_path: Path, steps: int) -> None:
    """Step 3 ends the first epoch; 2 is in the middle of it."""
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    stop_after(trainer, steps)
    assert trainer.run() == signal.SIGTERM
    assert len(train_rows(tmp_path)) == steps
    with open(tmp_path / "metrics.csv", "a") as file:  # a killed run has logged more than its last checkpoint knows
        file.write(f"train,{steps + 1},0," + "9," * 20 + "\n")
    resumed = Trainer(tiny_config(data), tmp_path, CPU, resume=tmp_path / "last.pth")
    assert resumed.state.iteration == steps and resumed.run() is None
    assert train_rows(tmp_path) == train_rows(whole)
    ours, theirs = (load_checkpoint(folder / "last.pth") for folder in (tmp_path, whole))
    for part in ("model", "ema"):
        for name, tensor in theirs[part].items():
            assert torch.equal(ours[part][name], tensor), name


def test_a_run_leaves_what_it_promises(whole: Path) -> None:
    for name in ("config.yml", "metrics.csv", "curves.png", "last.pth", "best.pth", "tensorboard"):
        assert (whole / name).exists(), name
    rows = read_rows(whole / "metrics.csv")
    assert all(0 <= float(row["data_wait"]) <= 1 for row in rows if row["kind"] == "train")
    assert [row["kind"] for row in rows] == ["train"] * 6 + ["eval"]
    assert float(rows[-1]["AP"]) >= 0
    assert load_checkpoint(whole / "best.pth")["training"] is None


def test_evaluation_does_not_change_the_training(data: Path, whole: Path, tmp_path: Path) -> None:
    Trainer(tiny_config(data, "train.eval_every=1"), tmp_path, CPU).run()
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.csv")].count("eval") == 2
    assert train_rows(tmp_path) == train_rows(whole)


def test_max_iterations_ends_early_with_an_evaluation(data: Path, whole: Path, tmp_path: Path) -> None:
    Trainer(tiny_config(data, "train.max_iterations=2"), tmp_path, CPU).run()
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.csv")] == ["train", "train", "eval"]
    state = load_checkpoint(tmp_path / "last.pth")["training"]
    assert (state["epoch"], state["pictures"], state["iteration"]) == (0, 8, 2)


def test_a_stop_before_the_evaluation_evaluates_after_resuming(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "train.max_iterations=1")
    trainer = Trainer(cfg, tmp_path, CPU)
    evaluate = trainer._evaluate

    def interrupted() -> None:
        signal.raise_signal(signal.SIGINT)
        evaluate()

    trainer._evaluate = interrupted  # type: ignore[method-assign]
    assert trainer.run() == signal.SIGINT
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.csv")] == ["train"]
    Trainer(cfg, tmp_path, CPU, resume=tmp_path / "last.pth").run()
    assert [row["kind"] for row in read_rows(tmp_path / "metrics.csv")] == ["train", "eval"]


def test_without_boxes_to_validate_on_the_latest_weights_are_the_best(data: Path, tmp_path: Path) -> None:
    content = json.loads((data / "annotations" / "instances_val.json").read_text())
    (tmp_path / "empty.json").write_text(json.dumps({**content, "annotations": []}))
    updates = [f"data.val.annotations={tmp_path}/empty.json", "train.epochs=2", "train.eval_every=1"]
    Trainer(tiny_config(data, *updates), tmp_path, CPU).run()
    rows = [row for row in read_rows(tmp_path / "metrics.csv") if row["kind"] == "eval"]
    assert len(rows) == 2 and {row[name] for row in rows for name in FIGURES} == {""}
    best, last = (load_checkpoint(tmp_path / name) for name in ("best.pth", "last.pth"))
    assert all(torch.equal(tensor, last["ema"][name]) for name, tensor in best["model"].items())


def freeze_statistics(model: nn.Module) -> None:
    model.train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


def gradient(trainer: Trainer, batch: Batch, num_parts: int) -> Tensor:
    """Of one step on a batch of four in so many parts, each image with the same random numbers."""
    freeze_statistics(trainer.model)
    size = 4 // num_parts
    parts = [part_of(batch, start, start + size) for start in range(0, 4, size)]
    draws = iter([PartialDraws(start, start + size, 4) for start in range(0, 4, size)])
    criterion = build_criterion(trainer.cfg, len(trainer.classes))

    def with_own_draws(images: Tensor, targets: Targets, position: BatchPosition) -> Losses:
        return training_step(partial(trainer.model, draws=next(draws)), images, targets, position, criterion=criterion)

    trainer.step = with_own_draws
    trainer.train_step(parts)
    return torch.cat([parameter.grad.flatten() for parameter in trainer.update.parameters])  # type: ignore[union-attr]


NO_DENSE_HEAD, NO_DENOISING = "model.supervision.dense_head=false", "model.supervision.num_denoising=0"


@pytest.mark.parametrize(
    ("counts", "off", "tolerance"),
    [
        ((8, 8, 1, 1), [NO_DENSE_HEAD, NO_DENOISING], 1e-5),
        ((8, 8, 0, 0), [NO_DENSE_HEAD, NO_DENOISING], 1e-5),
        # Both halves have the same maximum, on which the number of denoising copies depends.
        ((8, 8, 1, 8), [NO_DENSE_HEAD], 1e-5),
        ((0, 0, 0, 0), [NO_DENSE_HEAD], 1e-5),
        # Only nearly: the dense loss is divided by scores that nobody knows before the last forward pass.
        ((8, 8, 1, 1), [NO_DENOISING], 0.15),
    ],
)
def test_an_accumulated_group_is_the_larger_batch(
    data: Path, tmp_path: Path, counts: tuple[int, ...], off: list[str], tolerance: float
) -> None:
    cfg = tiny_config(data, "optimizer.clip_grad_norm=0", *off)
    whole, parts = (gradient(Trainer(cfg, tmp_path, CPU), made_up_batch(counts), n) for n in (1, 2))
    assert float((whole - parts).norm() / whole.norm()) <= tolerance


def test_no_worker_outlives_the_run(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, "data.num_workers=2", "train.max_iterations=2"), tmp_path, CPU)
    assert trainer.run() is None
    assert multiprocessing.active_children() == []  # while somebody still holds the trainer


def test_a_batch_without_boxes_trains(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    trainer.model.train()
    record = trainer.train_step([made_up_batch((0, 0))])
    assert torch.isfinite(record.values).all()
    assert all(p.grad is not None for p in trainer.update.parameters)
    assert torch.isfinite(trainer.train_step([made_up_batch((0, 3))]).values).all()


def spoil_images(trainer: Trainer, _: pytest.MonkeyPatch) -> None:
    loader = trainer.train_loader
    original = loader.collate_fn

    def collate(items: list) -> object:  # type: ignore[type-arg]
        batch = original(items)
        return batch._replace(images=batch.images * float("nan")) if trainer.state.iteration == 1 else batch

    loader.collate_fn = collate


def spoil_loss(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Criterion._losses

    def spoiled(*arguments: Any) -> dict[str, Tensor]:
        losses = compute(*arguments)
        if trainer.state.iteration == 1:
            losses["loss_giou"] = losses["loss_giou"] / 0
            losses["loss"] = losses["loss"] + losses["loss_giou"]
        return losses

    monkeypatch.setattr(Criterion, "_losses", spoiled)


@pytest.mark.parametrize(("spoil", "named"), [(spoil_images, "matching cost"), (spoil_loss, "loss_giou = inf")])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_non_finite_loss_stops_with_one_sentence_and_keeps_the_batch(
    data: Path, tmp_path: Path, device: str, spoil: Callable[..., None], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(tiny_config(data), tmp_path, torch.device(device))
    spoil(trainer, monkeypatch)
    with pytest.raises(TrainingFailed) as error:
        trainer.run()
    text = str(error.value)
    kept = torch.load(tmp_path / "failed_batch.pth", weights_only=True)
    assert "\n" not in text and text.startswith("iteration 1 (epoch 0)") and named in text
    assert all(image[1] in text for image in kept["pictures"]) and len(kept["pictures"]) == 4
    assert kept["batches"][0][0].shape == (4, 3, 64, 64)
    for name, parameter in trainer.model.named_parameters():  # the weights are still those of before the step
        assert torch.isfinite(parameter).all() and torch.equal(kept["model"][name].cpu(), parameter.cpu()), name


def test_a_failed_step_is_kept_with_all_its_batches(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, "train.accumulate=2"), tmp_path, CPU)
    good, bad = made_up_batch((0, 3)), made_up_batch((1,))
    with pytest.raises(TrainingFailed):
        trainer.train_step([good, bad._replace(images=bad.images * float("nan"))])
    kept = torch.load(tmp_path / "failed_batch.pth", weights_only=True)
    assert [len(images) for images, _ in kept["batches"]] == [2, 1]


def test_nothing_but_its_owner_keeps_a_run_in_memory(data: Path, tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        trainer = Trainer(tiny_config(data, "train.max_iterations=1"), tmp_path, CPU)
        trainer.run()
        kept = [weakref.ref(each) for each in (trainer, trainer.model, trainer.state.optimizer, trainer.state.ema)]
        del trainer
        assert [each() for each in kept] == [None] * len(kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_late_check_still_keeps_the_weights_of_the_failed_step(
    data: Path, tmp_path: Path, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a fused optimiser, and losses that are looked at when the next step is done. The failed step's
    gradients are finite in float32; in float16 the loss itself is NaN, which the scaler sees once."""
    trainer = Trainer(tiny_config(data, f"train.precision={precision}"), tmp_path, CPU)
    trainer.checks.lag = 1
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=precision == "fp16")
    for group in trainer.state.optimizer.param_groups:
        group["fused"] = precision == "fp32"
    compute, train_step = Criterion._losses, trainer.train_step
    before: list[dict[str, Tensor]] = []

    def spoiled(*arguments: Any) -> dict[str, Tensor]:
        losses = compute(*arguments)
        if trainer.state.iteration == 1:
            losses["loss_giou"] = losses["loss_giou"].detach() / 0
            losses["loss"] = losses["loss"] * (float("nan") if precision == "fp16" else 1.0)
        return losses

    def noted(batches: list[Batch]) -> StepRecord:
        before.append({name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()})
        return train_step(batches)

    monkeypatch.setattr(Criterion, "_losses", spoiled)
    trainer.train_step = noted  # type: ignore[method-assign]
    with pytest.raises(TrainingFailed, match="iteration 1"):
        trainer.run()
    kept = torch.load(tmp_path / "failed_batch.pth", weights_only=True)["model"]
    assert len(before) == 3 and any(not torch.equal(before[0][name], before[1][name]) for name in before[0])
    for name, parameter in before[1].items():
        assert torch.equal(kept[name], parameter), name


def test_auto_trains_a_processor_in_float32(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ends = []
    for precision in ("auto", "fp32"):
        trainer = Trainer(tiny_config(data, f"train.precision={precision}"), tmp_path, CPU)
        ends.append(trainer.train_step([made_up_batch((2, 1))]).values)
    assert torch.equal(*ends)
    run = Trainer(tiny_config(data, "train.precision=auto", "train.max_iterations=1"), tmp_path / "run", CPU)
    run.run()
    assert " on cpu, fp32, 1 process, auto kernels," in capsys.readouterr().out


def test_bf16_and_fp16_train(data: Path, tmp_path: Path) -> None:
    for precision in ("bf16", "fp16"):
        trainer = Trainer(tiny_config(data, f"train.precision={precision}"), tmp_path, CPU)
        trainer.model.train()
        before = {name: p.clone() for name, p in trainer.model.named_parameters()}
        losses = []
        if precision == "fp16":
            assert trainer.state.scaler.is_enabled()
            trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=16.0)  # the usual 65536 skips the first steps
        try:
            for _ in range(2):
                losses.append(trainer.train_step([made_up_batch((2, 1))]).values)
        except RuntimeError as error:
            if "pack_vnni2" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} has no bfloat16 attention at this ATEN_CPU_CAPABILITY: {error}")
        assert all(torch.isfinite(values[:-2]).all() for values in losses)
        assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
        assert any(not torch.equal(before[name], p) for name, p in trainer.model.named_parameters())


@pytest.mark.parametrize(("init_scale", "steps"), [(16.0, 16), (2.0**90, 50)])
def test_fp16_stops_when_nothing_moves(data: Path, tmp_path: Path, init_scale: float, steps: int) -> None:
    """One gradient is NaN in every step, while the losses stay finite: the scaler skips the steps and scales down."""
    trainer = Trainer(tiny_config(data, "train.precision=fp16", "train.epochs=99"), tmp_path, CPU)
    trainer.state.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.update.parameters[0].register_hook(lambda gradient: gradient * float("nan"))
    batch = made_up_batch((2, 1))
    with pytest.raises(TrainingFailed, match=message("non-finite", f"{steps} steps", "train.precision=bf16")):
        for _ in range(60):
            trainer.train_step([batch])
    assert (tmp_path / "failed_batch.pth").is_file()
    assert all(torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())


def test_what_cannot_be_resumed(data: Path, whole: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds weights but no training state"):
        Trainer(tiny_config(data), tmp_path, CPU, resume=whole / "best.pth")
    with pytest.raises(CheckpointError, match="weights of another model"):
        Trainer(tiny_config(data, "model.decoder.num_layers=3"), tmp_path, CPU, resume=whole / "last.pth")
    with pytest.raises(ConfigError, match=message("not possible", "train.compile=on", "kernels=plain")):
        Trainer(tiny_config(data, "kernels=plain", "train.compile=on"), tmp_path, CPU)


def test_resuming_obeys_the_config_not_the_file(data: Path, whole: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "optimizer.weight_decay=0.5", "train.epochs=3")
    trainer = Trainer(cfg, tmp_path, CPU, resume=whole / "last.pth")
    assert {group["weight_decay"] for group in trainer.state.optimizer.param_groups} == {0.5}
    assert trainer.state.total_iterations == 9 and trainer.state.iteration == 6


def test_the_best_ap_starts_anew_on_other_validation_data(
    data: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = load_checkpoint(whole / "last.pth")
    written["training"] |= {"best_ap": 0.9, "early_stop": {"best": 0.9, "best_iteration": 3, "waited": 5}}
    torch.save(written, tmp_path / "last.pth")
    truth = json.loads((data / "annotations" / "instances_val.json").read_text())
    (tmp_path / "same.json").write_text(json.dumps(truth))
    truth["annotations"].pop()
    (tmp_path / "other.json").write_text(json.dumps(truth))
    for name, best, waited in (("same", 0.9, 5), ("other", -math.inf, 0)):
        cfg = tiny_config(data, "train.epochs=3", f"data.val.annotations={tmp_path / name}.json")
        trainer = Trainer(cfg, tmp_path / name, CPU, resume=tmp_path / "last.pth")
        assert (trainer.state.best_ap, trainer.state.early_stop.waited) == (best, waited)
        assert ("other validation data" in capsys.readouterr().out) == (name == "other")


def test_an_unreadable_image_is_left_out_of_the_evaluation(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_data(tmp_path / "shapes")
    kept = json.loads((folder / "annotations" / "instances_val.json").read_text())
    bad = kept["images"].pop(0)
    kept["annotations"] = [each for each in kept["annotations"] if each["image_id"] != bad["id"]]
    (tmp_path / "without.json").write_text(json.dumps(kept))
    settings = ("train.epochs=3", "train.eval_every=1", "optimizer.lr=1e-3", "train.log_every=3")
    without = Trainer(
        tiny_config(folder, *settings, f"data.val.annotations={tmp_path}/without.json"), tmp_path / "without", CPU
    )
    assert without.run() is None
    (folder / "val" / bad["file_name"]).write_bytes(b"no image")
    capsys.readouterr()
    assert Trainer(tiny_config(folder, *settings), tmp_path / "run", CPU).run() is None
    said = capsys.readouterr().out
    assert said.count(f"{bad['file_name']}: cannot be read as an image") == said.count("evaluation does without") == 1
    evaluated = []
    for name in ("run", "without"):
        rows = read_rows(tmp_path / name / "metrics.csv")
        evaluated.append([[row[figure] for figure in FIGURES] for row in rows if row["kind"] == "eval"])
    assert len(evaluated[0]) == 3 and evaluated[0] == evaluated[1]


@pytest.mark.parametrize(("share", "bad", "stops"), [(0.05, 4, True), (0.05, 3, False), (0.0, 1, True)])
def test_too_many_unreadable_validation_images_stop_the_run(
    tmp_path: Path, share: float, bad: int, stops: bool
) -> None:
    folder = tiny_data(tmp_path / "shapes")
    for each in sorted((folder / "val").iterdir())[:bad]:
        each.write_bytes(b"no image")
    updates = (f"data.max_defects={share}", "train.eval_every=1", "train.epochs=1")
    trainer = Trainer(tiny_config(folder, *updates), tmp_path / "run", CPU)
    if not stops:
        assert trainer.run() is None
        return
    with pytest.raises(TrainingFailed, match=message("not an image", f"{bad} of the 4")):
        trainer.run()
    assert load_checkpoint(tmp_path / "run" / "last.pth")["training"]["evaluation_due"]


def test_tuning_reports_and_starts_from_the_average(data: Path, whole: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, "train.max_iterations=1"), tmp_path / "run", CPU, tuning=whole / "last.pth")
    average = load_checkpoint(whole / "last.pth")["ema"]
    assert all(torch.equal(p, average[name]) for name, p in trainer.model.named_parameters())
    assert trainer.state.iteration == 0 and not list(tmp_path.iterdir())  # nothing is written before the run starts
    trainer.run()
    assert "(100.0%)" in (tmp_path / "run" / "load_report.txt").read_text()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_unreadable_image_is_named_once_counted_and_replaced(
    tmp_path: Path, num_workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_data(tmp_path / "shapes")
    (folder / "train" / "000003.jpg").write_bytes(b"no image")
    updates = (f"data.num_workers={num_workers}", "train.epochs=4")
    assert Trainer(tiny_config(folder, *updates), tmp_path / "run", CPU).run() is None
    said = capsys.readouterr().out
    assert said.count("000003.jpg: cannot be read as an image") == said.count("takes another image instead") == 1
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.csv") if row["kind"] == "train"]
    assert rows[-1]["unreadable"] == "4" and all(math.isfinite(float(row["loss"])) for row in rows)
    again = Trainer(tiny_config(folder, "train.epochs=4"), tmp_path / "again", CPU)
    again.run()
    ours, theirs = (load_checkpoint(tmp_path / name / "last.pth")["model"] for name in ("run", "again"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


@pytest.mark.parametrize(
    ("share", "num_train", "bad", "stops"),
    [
        *((0.05, 12, 7, True), (0.05, 12, 6, False), (0.9, 12, 10, False), (0, 12, 1, True)),  # of a few: most
        *((0.05, 24, 10, True), (0.05, 24, 9, False)),
    ],
)
def test_too_many_unreadable_images_stop_the_run(
    tmp_path: Path, share: float, num_train: int, bad: int, stops: bool
) -> None:
    folder = make_shapes(tmp_path / "shapes", num_train=num_train, num_val=4, size=96)
    for each in sorted((folder / "train").iterdir())[:bad]:
        each.write_bytes(b"no image")
    trainer = Trainer(tiny_config(folder, f"data.max_defects={share}"), tmp_path / "run", CPU)
    if not stops:
        assert trainer.run() is None
        return
    sentence = rf"{bad} of the \d+ images .* data.max_defects={share:g} allows; `rtdetr doctor CONFIG`"
    with pytest.raises(TrainingFailed, match=sentence):
        trainer.run()
