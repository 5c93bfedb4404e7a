"""Early stop: a run that gets no better ends as if it were done, says why, and says so again when it is resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import tiny_config

from rtdetr.engine.early_stop import EarlyStop
from rtdetr.engine.evaluation.evaluator import FIGURES, EvalResult
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import load_checkpoint

CPU = torch.device("cpu")
PATIENT = ["train.epochs=6", "train.eval_every=1", "train.patience=2"]
SENTENCE = (
    "ended at iteration 12: 2 evaluations since iteration 6 without an AP above its 0.3400; "
    "raise train.patience to continue"
)


@pytest.fixture(autouse=True)
def _figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations find .3, .34, .32, .34, .9, .9, ... in turn."""
    turns = iter([0.3, 0.34, 0.32, 0.34, *[0.9] * 20])

    def evaluate(*_: Any) -> EvalResult:
        ap = next(turns)
        return EvalResult(dict.fromkeys(FIGURES, ap), [], [])

    monkeypatch.setattr("rtdetr.engine.trainer.evaluate", evaluate)


def test_a_run_that_gets_no_better_ends_and_says_so(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Trainer(tiny_config(data, *PATIENT), tmp_path, CPU).run() is None
    assert capsys.readouterr().out.count(SENTENCE) == 1
    saved = load_checkpoint(tmp_path / "last.pth")["training"]
    assert (saved["iteration"], saved["best_ap"], saved["evaluation_due"]) == (12, 0.34, False)
    last = (tmp_path / "last.pth").read_bytes()
    resume = tmp_path / "last.pth"
    assert Trainer(tiny_config(data, *PATIENT), tmp_path, CPU, resume=resume).run() is None
    assert capsys.readouterr().out.strip() == SENTENCE and resume.read_bytes() == last
    more = Trainer(tiny_config(data, *PATIENT, "train.patience=3"), tmp_path, CPU, resume=resume)
    assert more.run() is None and more.state.iteration == 18
    assert "evaluations since" not in capsys.readouterr().out


def test_the_best_iteration_is_renumbered_like_the_others(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(tiny_config(data, *PATIENT), tmp_path, CPU).run()
    cfg = tiny_config(data, *PATIENT, "train.accumulate=3")  # an epoch is one step
    Trainer(cfg, tmp_path, CPU, resume=tmp_path / "last.pth").run()
    assert "ended at iteration 4: 2 evaluations since iteration 2 without" in capsys.readouterr().out


def test_one_evaluation_is_no_plural() -> None:
    stop = EarlyStop(1)
    for iteration in (3, 6):
        stop.see({"AP": 0.3, "AP50": 0.5}, iteration)
    assert stop.over and "iteration 6: 1 evaluation since iteration 3 without" in stop.sentence(6)


def test_without_patience_a_run_goes_on_to_its_end(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, "train.epochs=4", "train.eval_every=1"), tmp_path, CPU)
    assert trainer.run() is None and trainer.state.iteration == 12


def test_patience_waits_across_a_resumed_run() -> None:
    first, second = EarlyStop(3), EarlyStop(3)
    for ap in (0.2, 0.2, 0.1):
        first.see({"AP": ap, "AP50": ap}, 1)
    second.load(first.state())
    assert not second.over
    second.see({"AP": 0.2, "AP50": 0.2}, 4)
    assert second.over


def test_a_set_without_boxes_ends_no_run() -> None:
    stop = EarlyStop(1)
    for iteration in range(5):
        stop.see({"AP": -1.0, "AP50": -1.0}, iteration)
    assert not stop.over


def test_a_goal_ends_it_at_once() -> None:
    stop = EarlyStop(0, goal=0.9)
    stop.see({"AP": 0.5, "AP50": 0.89}, 1)
    assert not stop.over
    stop.see({"AP": 0.5, "AP50": 0.9}, 2)
    assert stop.over and stop.sentence(2) == "ended at iteration 2: AP50 has reached 0.9"
