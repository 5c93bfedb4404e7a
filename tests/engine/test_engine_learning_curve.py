"""`rtdetr learning-curve`: two runs of as many iterations, and a sentence that follows from their AP."""

from __future__ import annotations

import json
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from engine_helpers import KEYS_BY_WEIGHTS, KNOWING, NANO, NUM_TRAIN, tiny_config, tiny_updates
from messages import message

from rtdetr import cli
from rtdetr.config import load_config
from rtdetr.engine.evaluation.learning_curve import Point, estimate
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer


def command(data: Path, folder: Path, *updates: str, weights: Path | None = None) -> int:
    arguments = ["learning-curve", "-c", str(NANO), "--device", "cpu", "--output-dir", str(folder)]
    arguments += ["-t", str(weights)] if weights else []
    return cli.main([*arguments, "-u", *tiny_updates(data), "train.eval_every=1", *updates])


def test_both_runs_have_the_same_iterations(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(data, tmp_path / "curve", "data.train_batch_size=3") == 0
    said = capsys.readouterr().out.splitlines()
    written = json.loads((tmp_path / "curve" / "learning_curve.json").read_text())
    points = written["points"]
    assert [each["images"] for each in points] == [NUM_TRAIN // 2, NUM_TRAIN] and written["iterations"] == 8
    assert said[-3:] == [*(f"AP {each['ap']:.3f} from {each['images']} images" for each in points), said[-1]]
    assert said[-1] == written["estimate"]
    half, whole = (load_config(tmp_path / "curve" / name / "config.yml") for name in ("half", "whole"))
    assert (half.train.epochs, whole.train.epochs, half.train.eval_every, whole.train.eval_every) == (4, 2, 2, 1)
    assert half.loss.atss_epochs == 2 * whole.loss.atss_epochs
    for name in ("half", "whole"):
        rows = read_rows(tmp_path / "curve" / name / "metrics.csv")
        assert [int(row["iteration"]) for row in rows if row["kind"] == "eval"] == [4, 8]
    assert cli.main(["learning-curve", "nowhere"]) == 2
    assert message("no such path", "nowhere").search(capsys.readouterr().err)
    assert command(data, tmp_path / "curve") == 2
    assert message("already", "half", "whole", "half.json", "learning_curve.json").search(capsys.readouterr().err)


def test_both_runs_keep_of_weights_what_a_training_keeps(data: Path, tmp_path: Path) -> None:
    slowly = "optimizer.backbone_lr_multiplier=0.1"
    Trainer(tiny_config(data, "train.max_iterations=1", slowly), tmp_path / "start", torch.device("cpu")).run()
    updates = [*(f"{key}=auto" for key in KEYS_BY_WEIGHTS), "train.max_iterations=1"]
    assert command(data, tmp_path / "curve", *updates, weights=tmp_path / "start" / "last.pth") == 0
    for name in ("half", "whole"):
        cfg = load_config(tmp_path / "curve" / name / "config.yml")
        assert attrgetter(*KEYS_BY_WEIGHTS)(cfg) == KNOWING


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        (["data.train_batch_size=7"], "half of 12 images does not fill a batch of 7"),
        (["data.train.annotations={one}"], "a learning curve needs 2 images or more, got 1"),
        (["data.val.annotations=none.json"], "none.json: no such"),
    ],
)
def test_nothing_is_written_for_what_cannot_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], updates: list[str], message: str
) -> None:
    document = json.loads((data / "annotations" / "instances_train.json").read_text())
    only = document["images"][0]["id"]
    document["images"] = document["images"][:1]
    document["annotations"] = [each for each in document["annotations"] if each["image_id"] == only]
    (tmp_path / "one.json").write_text(json.dumps(document))
    updates = [each.replace("{one}", str(tmp_path / "one.json")) for each in updates]
    assert command(data, tmp_path / "curve", *updates) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "curve").exists()


@pytest.mark.parametrize(
    ("half", "whole", "sentence"),
    [
        (0.5, 0.6, message("more would pay", "+0.100", "400")),
        (0.6, 0.605, message("more would hardly pay", "+0.005")),
        (0.7, 0.6, message("more would hardly pay", "-0.100")),
        (0.97, 0.985, message("more would pay little")),
        (0.003, 0.002, message("no estimate", "too short", "0.05")),
        (-1.0, -1.0, message("no estimate", "no boxes")),
    ],
)
def test_the_estimate_follows_from_the_two(half: float, whole: float, sentence: re.Pattern[str]) -> None:
    assert sentence.search(estimate(Point(100, half), Point(200, whole)))


def test_the_next_doubling_is_worth_what_the_last_one_was() -> None:
    assert "might bring +0.080 more, to about 0.680" in estimate(Point(100, 0.5), Point(200, 0.6))
