"""What a run survives, on a GPU, where steps are captured as graphs and their losses are looked at late."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers import NANO, tiny_config, tiny_updates
from run_cases import LAYER, ROOT, at_step, environment
from torch import Tensor, nn

from rtdetr import cli
from rtdetr.config import OptimizerConfig
from rtdetr.engine.acceleration.graphs import StepGraphs
from rtdetr.engine.failures import StepFailed
from rtdetr.engine.optim import parameter_groups
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch
from rtdetr.weights.checkpoint import load_checkpoint

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
# No crop takes a box away, so that there is one kind of batch: captured at the third step.
ALIKE = ("data.augment.crop_prob=0", "model.supervision.num_denoising=1", "train.epochs=4")


def spoil_layer(trainer: Trainer, steps: set[int]) -> None:
    weight = trainer.model.get_parameter(f"{LAYER}.weight")
    at_step(trainer, min(steps), lambda: weight.data[0].fill_(torch.nan))


def spoil_box(trainer: Trainer, steps: set[int]) -> None:
    step = trainer._step

    def non_finite(batches: list[Batch]):  # type: ignore[no-untyped-def]
        if trainer.state.iteration in steps:
            batches[0].targets.boxes[2, 0] = torch.nan
        return step(batches)

    trainer._step = non_finite  # type: ignore[method-assign]


@pytest.mark.parametrize("graphs", ["off", "on"])
@pytest.mark.parametrize(("spoil", "module"), [(spoil_layer, LAYER), (spoil_box, "")])
def test_module_and_image_are_named_and_the_step_fails_again(
    data: Path, tmp_path: Path, graphs: str, spoil: Callable[[Trainer, set[int]], None], module: str,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A graph runs no hook: the step is done again without."""
    trainer = Trainer(tiny_config(data, *ALIKE, f"train.graphs={graphs}"), tmp_path, GPU)
    spoil(trainer, {9})
    captured, clear = [], StepGraphs.clear

    def noted(step: StepGraphs) -> None:
        captured.append(len(step.captured))
        clear(step)

    monkeypatch.setattr(StepGraphs, "clear", noted)
    with pytest.raises(StepFailed) as caught:
        trainer.run()
    assert (sum(captured) > 0) == (graphs == "on")
    file, said = tmp_path / "failed_batch.pth", str(caught.value)
    name = load_checkpoint_images(file)[2]
    image = "" if module else f"the boxes of {name} are not finite"
    assert said.startswith("iteration 9 ") and module in said and image in said and "no module" not in said
    capsys.readouterr()
    for device in ("cuda", "cpu"):
        assert cli.main(["train", "--replay", str(file), "--device", device]) == 1
        again = capsys.readouterr().out
        assert f"{module} (" in again and image in again and again.endswith("the failure is reproduced\n")


def load_checkpoint_images(file: Path) -> list[str]:
    return [image[1] for image in torch.load(file, weights_only=True)["pictures"]]


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_failed_steps_can_be_left_out(
    data: Path, tmp_path: Path, graphs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    updates = (*ALIKE, f"train.graphs={graphs}", "train.max_skips=2")
    trainer = Trainer(tiny_config(data, *updates), tmp_path, GPU)
    spoil_box(trainer, {7, 9})
    before: dict[int, list[torch.Tensor]] = {}
    train_step = trainer.train_step

    def noted(batches: list[Batch]):  # type: ignore[no-untyped-def]
        before[trainer.state.iteration] = [each.clone() for each in trainer.model.state_dict().values()]
        return train_step(batches)

    trainer.train_step = noted  # type: ignore[method-assign]
    assert trainer.run() is None
    for step in (7, 9):
        assert all(torch.equal(a, b) for a, b in zip(before[step], before[step + 1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(before[8], before[9], strict=True))
    assert capsys.readouterr().out.count("step skipped, number") == 2
    rows = [int(row["iteration"]) for row in read_rows(tmp_path / "metrics.csv") if row["kind"] == "train"]
    assert rows == [each for each in range(1, 13) if each not in (8, 10)]


SCRIPT = """
import sys
from rtdetr import cli
from rtdetr.engine.trainer import Trainer
step, last = Trainer.train_step, int(sys.argv[1])
def stopping(self, batches):
    self.signals.received = 15 if self.state.iteration == last - 1 else None
    return step(self, batches)
Trainer.train_step = stopping
sys.exit(cli.main(sys.argv[2:]))
"""


@pytest.mark.parametrize("graphs", ["off", "on"])
def test_a_deterministic_run_goes_on_bit_for_bit_and_saves_beside_its_steps(
    data: Path, tmp_path: Path, graphs: str
) -> None:
    settings = [*tiny_updates(data), *ALIKE, f"train.graphs={graphs}", "train.deterministic=true"]

    def run(last: int, *arguments: str) -> int:
        command = [sys.executable, "-c", SCRIPT, str(last), "train", "--device", "cuda", *arguments]
        done = subprocess.run(command, env=environment(), capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert done.returncode in (0, 143), done.stderr
        return done.returncode

    new = ["-c", str(NANO), "-u", *settings]
    assert run(99, "--output-dir", f"{tmp_path}/whole", *new) == 0
    assert run(99, "--output-dir", f"{tmp_path}/again", *new, "train.save_seconds=0") == 0
    assert run(7, "--output-dir", f"{tmp_path}/stopped", *new) == 143
    assert run(99, "-r", f"{tmp_path}/stopped/last.pth") == 0
    whole = load_checkpoint(tmp_path / "whole" / "last.pth")
    for name in ("again", "stopped"):
        other = load_checkpoint(tmp_path / name / "last.pth")
        for part in ("model", "ema"):
            different = [key for key, tensor in whole[part].items() if not torch.equal(tensor, other[part][key])]
            assert not different, (name, part, different[:5])
    assert load_checkpoint(tmp_path / "again" / "last-1.pth")["training"]["iteration"] >= 1


@pytest.mark.parametrize("fused", [True, False])
def test_another_optimiser_trains_and_changes_no_weight_in_a_failed_step(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    def sgd(model: nn.Module, cfg: OptimizerConfig) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameter_groups(model.named_parameters(), cfg), lr=cfg.lr, momentum=0.9, fused=fused)

    monkeypatch.setattr("rtdetr.engine.run_files.run_state.build_optimizer", sgd)
    trainer = Trainer(tiny_config(data, *ALIKE), tmp_path, GPU)
    assert trainer.checks.lag == fused
    before: list[Tensor] = []
    parameters = [*trainer.model.parameters()]
    at_step(trainer, 7, lambda: before.extend(each.detach().clone() for each in parameters))
    spoil_box(trainer, {7})
    with pytest.raises(StepFailed, match="iteration 7 "):
        trainer.run()
    assert len(read_rows(tmp_path / "metrics.csv")) == 7
    assert all(map(torch.equal, before, parameters)) and before
