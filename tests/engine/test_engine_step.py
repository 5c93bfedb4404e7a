"""The training step exists once, and little lies between the loop and it."""

from __future__ import annotations

import re
import traceback
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny_config, tiny_data

from rtdetr.engine.trainer import Trainer
from rtdetr.models.rtdetrv3 import Network

CPU = torch.device("cpu")
PACKAGE = Path(__file__).resolve().parents[2] / "rtdetr"


def test_the_criterion_is_called_in_one_place() -> None:
    calls = [
        (path.relative_to(PACKAGE).as_posix(), line.strip())
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"\bcriterion\(|\bbackward\(\)", line) and not re.search(r"def |build_criterion\(", line)
    ]
    assert calls == [
        ("engine/step.py", "losses = criterion(model(images, targets), targets, position.epoch, position.group)"),
        ("engine/step.py", 'scale(losses["loss"] / share).backward()'),
    ]


def test_models_and_losses_do_not_ask_for_a_gpu() -> None:
    for room in ("models", "losses"):
        for path in (PACKAGE / room).glob("*.py"):
            assert "is_cuda" not in path.read_text(encoding="utf-8"), path


def test_four_calls_lead_from_the_loop_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks, forward = [], Network.forward

    def noted(self, *arguments):  # type: ignore[no-untyped-def]
        if self.training:
            stacks.append([each.name for each in traceback.extract_stack() if str(PACKAGE) in each.filename])
        return forward(self, *arguments)

    monkeypatch.setattr(Network, "forward", noted)
    Trainer(tiny_config(tiny_data(tmp_path / "shapes"), "train.max_iterations=1"), tmp_path / "run", CPU).run()
    assert [stack[stack.index("_train_epoch") :] for stack in stacks] == [
        ["_train_epoch", "train_step", "_step", "training_step"]
    ]
