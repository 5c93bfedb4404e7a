"""Failed steps: the recorder names image and module, --replay does it again, train.max_skips leaves it out."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers import NANO, tiny_config
from messages import message
from run_cases import LAYER, at_step

from rtdetr import cli
from rtdetr.config import ConfigError
from rtdetr.engine.failures import StepFailed, TrainingFailed
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.losses.criterion import Criterion
from rtdetr.weights.checkpoint import load_checkpoint, save_checkpoint

CPU = torch.device("cpu")


def spoil_layer(trainer: Trainer) -> None:
    weight = trainer.model.get_parameter(f"{LAYER}.weight")
    at_step(trainer, 1, lambda: weight.data.view(-1)[0].fill_(torch.nan))


def spoil_box(trainer: Trainer) -> None:
    """After loading; before it the transforms would drop it."""
    collate = trainer.train_loader.collate_fn

    def non_finite(items):  # type: ignore[no-untyped-def]
        batch = collate(items)
        for index, info in enumerate(batch.infos):
            if info.file_name == "000004.jpg":
                batch.targets.boxes[index, 0] = torch.nan
        return batch

    trainer.train_loader.collate_fn = non_finite


@pytest.mark.parametrize(
    ("spoil", "module", "image"),
    [(spoil_layer, LAYER, ""), (spoil_box, "", "the boxes of 000004.jpg are not finite")],
)
def test_module_and_image_are_named_and_the_step_fails_again(
    data: Path, tmp_path: Path, spoil: Callable[[Trainer], None], module: str, image: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trainer = Trainer(tiny_config(data), tmp_path, CPU)
    spoil(trainer)
    with pytest.raises(StepFailed) as caught:
        trainer.run()
    file, said = tmp_path / "failed_batch.pth", str(caught.value)
    assert module in said and image in said and f"`rtdetr train --replay {file}`" in said and "\n" not in said
    capsys.readouterr()
    assert cli.main(["train", "--replay", str(file), "--device", "cpu"]) == 1
    again = capsys.readouterr().out
    assert f"{module} (" in again and image in again and again.endswith("the failure is reproduced\n")
    assert message("first non-finite module").search(again) and "no module" not in again


def test_a_sound_step_is_done_again_to_the_same_losses(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The recorder is called for nothing: same weights, same random numbers, so the same losses as shown."""
    trainer = Trainer(tiny_config(data, "train.accumulate=2"), tmp_path, CPU)
    trainer.model.train()
    batches = list(trainer.train_loader)[:2]
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    record = trainer.train_step(batches)
    trainer.model.load_state_dict(weights)
    before = torch.get_rng_state()
    with pytest.raises(StepFailed, match="no module is the first"):
        trainer.checks.fail(record, "nothing", {})
    assert torch.equal(before, torch.get_rng_state())
    assert cli.main(["train", "--replay", str(tmp_path / "failed_batch.pth"), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert said.endswith("the failure is not reproduced\n")
    again = dict(re.findall(r"^(\w+) = (\S+)$", said, re.MULTILINE))  # of two batches, whose mean is rounded elsewhere
    for name, value in zip(record.names, record.values.tolist()):
        assert float(again[name]) == pytest.approx(value, rel=1e-5)


def test_what_cannot_be_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_checkpoint(tmp_path / "a.pth", {"model": {}})
    for arguments, sentence in (
        (["--replay", str(tmp_path / "a.pth")], "not a failed step"),
        (["--replay", str(tmp_path / "b.pth")], "no such weight file"),
        (["--replay", str(tmp_path / "a.pth"), "-c", str(NANO)], "leave out DATA, -c"),
        (["--replay", str(tmp_path / "a.pth"), "-r", str(tmp_path / "a.pth")], "not allowed with"),
    ):
        try:
            code = cli.main(["train", "--device", "cpu", *arguments])
        except SystemExit as ended:
            code = ended.code  # type: ignore[assignment]
        said = capsys.readouterr().err
        assert code == 2 and sentence in said and said.count("\n") == 1, said


def spoil_criterion(trainer: Trainer, steps: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    compute = Criterion._losses

    def non_finite(*arguments):  # type: ignore[no-untyped-def]
        losses = compute(*arguments)
        if trainer.state.iteration in steps:
            losses["loss"] = losses["loss"] * torch.nan
        return losses

    monkeypatch.setattr(Criterion, "_losses", non_finite)


def test_a_failed_step_can_be_left_out(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, their average, the optimiser and batch norm are after the step what they were before it."""
    trainer = Trainer(tiny_config(data, "train.max_skips=2"), tmp_path, CPU)
    spoil_criterion(trainer, {1, 3}, monkeypatch)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    train_step = trainer.train_step

    def noted(batches):  # type: ignore[no-untyped-def]
        content = trainer.state.content()
        assert content is not None
        seen[trainer.state.iteration] = {
            f"{part}.{name}": tensor.clone() for part in ("model", "ema") for name, tensor in content[part].items()
        }
        return train_step(batches)

    trainer.train_step = noted  # type: ignore[method-assign]
    assert trainer.run() is None
    for step in (1, 3):
        assert all(torch.equal(seen[step + 1][name], tensor) for name, tensor in seen[step].items())
    assert any(not torch.equal(seen[3][name], tensor) for name, tensor in seen[2].items())
    said = capsys.readouterr().out
    assert said.count("step skipped, number") == 2 and "number 2 of at most 2" in said
    rows = [row["iteration"] for row in read_rows(tmp_path / "metrics.csv") if row["kind"] == "train"]
    assert rows == ["1", "3", "5", "6"]
    assert load_checkpoint(tmp_path / "last.pth")["training"]["iteration"] == 6


def test_too_many_end_the_run(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(tiny_config(data, "train.max_skips=1"), tmp_path, CPU)
    spoil_criterion(trainer, {1, 3}, monkeypatch)
    with pytest.raises(TrainingFailed, match=message("non-finite", "iteration 3", "1 step", "train.max_skips")):
        trainer.run()


def test_fp16_leaves_steps_out_by_itself(data: Path) -> None:
    with pytest.raises(ConfigError, match=message("expected", "train.max_skips", "0", "train.precision=fp16")):
        tiny_config(data, "train.max_skips=1", "train.precision=fp16")
