"""`auto` for epochs and batch: the rule, and what a run prints, writes and resumes with."""

from __future__ import annotations

import dataclasses
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import KEYS_BY_WEIGHTS, KNOWING, NUM_TRAIN, tiny_config

from rtdetr import RTDETRv3
from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict, load_config
from rtdetr.data.classes import Classes
from rtdetr.data.loader import build_train_loader
from rtdetr.engine.planning import auto_config
from rtdetr.engine.trainer import Trainer
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import load_checkpoint, make_checkpoint, save_checkpoint
from rtdetr.weights.load import read_checkpoint

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("steps", "epochs"), [(1, 1500), (7, 215), (12, 125), (18, 84), (62, 72), (125, 48), (625, 12), (7000, 12)]
)
def test_epochs_follow_the_steps_of_one(steps: int, epochs: int) -> None:
    assert auto_config.epochs_for(steps) == epochs


@pytest.mark.parametrize("room", [0, 1, 2, 3, 5, 8, 13, 24, 25, 99])
@pytest.mark.parametrize("most", [1, 2, 4, 7, 25, 32])
def test_the_largest_batch_that_fits_is_found(room: int, most: int) -> None:
    asked: list[int] = []

    def fits(number: int) -> bool:
        asked.append(number)
        return number <= room

    assert auto_config.largest(most, fits) == max(1, min(room, most))
    assert len(asked) == len(set(asked)) <= 10 and all(2 <= each <= most for each in asked)


def test_auto_is_printed_written_and_kept_by_a_resumed_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    updates = ["data.train_batch_size=auto", "train.epochs=auto", "train.max_iterations=1"]
    updates += ["optimizer.lr=0.002", "optimizer.lr_batch=16"]
    Trainer(tiny_config(data, *updates), tmp_path, CPU).run()
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [
        "data.train_batch_size: auto is 4; optimizer.lr 0.002, meant for 16 images a step, is 0.0005 for 4",
        f"train.epochs: auto is 500, {500 * NUM_TRAIN // 4} iterations",
    ]
    written = load_config(tmp_path / "config.yml")
    assert (written.data.train_batch_size, written.train.epochs, written.optimizer.lr) == (4, 500, 0.0005)
    monkeypatch.setattr(auto_config, "ON_CPU", 2)
    resumed = Trainer(tiny_config(data, *updates), tmp_path, CPU, resume=tmp_path / "last.pth")
    assert resumed.cfg == written


AUTO = [f"{key}=auto" for key in KEYS_BY_WEIGHTS]
RANDOM = (0, 1.0, 3.0, 50, 100.0, 0, 30, 1)
LIKE_THIS = (0, 1.0, 8.0, 20, 50.0, 30, 60, 2)  # weights of a run that trained all of them


def by_weights(cfg: Config) -> tuple[Any, ...]:
    return tuple(attrgetter(key)(cfg) for key in KEYS_BY_WEIGHTS)


def test_every_such_key_is_tested() -> None:
    assert tuple(auto_config.BY_WEIGHTS) == KEYS_BY_WEIGHTS


def weights_of(data: Path, path: Path, *updates: str) -> Path:
    """The checkpoint of a run of no steps."""
    cfg = tiny_config(data, *updates)
    model = build_model(cfg.model, 3)
    content = make_checkpoint(
        cfg, Classes(("a", "b", "c"), (1, 2, 3)), model.state_dict(), source={"licence": "CC0-1.0"}
    )
    save_checkpoint(path, content)
    return path


def test_what_a_run_starts_from_decides(data: Path, tmp_path: Path) -> None:
    cfg, lines = auto_config.settle(tiny_config(data, *AUTO), CPU)
    assert by_weights(cfg) == RANDOM
    assert lines == [
        "auto, for random weights: model.backbone.freeze_stages 0, optimizer.backbone_lr_multiplier 1, "
        "optimizer.muon_lr_multiplier 3, optimizer.warmup_iterations 50, ema.warmup 100, data.augment.zoom_ramp 0, "
        "data.augment.turn_after 30, train.accumulate 1"
    ]
    slowly = weights_of(data, tmp_path / "slowly.pth", "optimizer.backbone_lr_multiplier=0.1")
    wholly = weights_of(data, tmp_path / "wholly.pth", "optimizer.backbone_lr_multiplier=1")
    tuned = weights_of(data, tmp_path / "tuned.pth", "optimizer.backbone_lr_multiplier=1")
    content = load_checkpoint(tuned)
    content["config"]["model"]["backbone"]["weights"] = "w.pth"  # of before
    save_checkpoint(tuned, content)
    torch.save(load_checkpoint(wholly)["model"], tmp_path / "foreign.pth")
    for path, expected in (
        (slowly, KNOWING),
        (wholly, LIKE_THIS),
        (tuned, KNOWING),
        (tmp_path / "foreign.pth", KNOWING),
    ):
        cfg, lines = auto_config.settle(tiny_config(data, *AUTO), CPU, None, path)
        assert by_weights(cfg) == expected, path
        (line,) = lines
        assert line.startswith("auto, for the weights it starts from: ") and line.count(", ") == len(AUTO)


FULL = "optimizer.backbone_lr_multiplier=1"


@pytest.mark.parametrize(
    ("updates", "start", "in_full"),
    [
        ([FULL], None, True),
        (["optimizer.backbone_lr_multiplier=0.1"], None, False),
        ([FULL, "model.backbone.freeze_stages=1"], None, False),
        ([FULL], "known", False),  # official weights, and a rate that keeps nothing back
        ([FULL], "learnt", True),
        (["optimizer.backbone_lr_multiplier=auto"], "learnt", True),
        (["optimizer.backbone_lr_multiplier=auto"], "known", False),
    ],
)
def test_checkpoints_tell_how_their_run_began(
    data: Path, tmp_path: Path, updates: list[str], start: str | None, in_full: bool
) -> None:
    paths = {
        "known": weights_of(data, tmp_path / "known.pth", "optimizer.backbone_lr_multiplier=0.1"),
        "learnt": weights_of(data, tmp_path / "learnt.pth", FULL),
    }
    cfg = tiny_config(data, *updates, "train.max_iterations=2", "train.eval_every=1")
    tuning = paths[start] if start is not None else None
    Trainer(cfg, tmp_path / "run", CPU, tuning=tuning).run()
    Trainer(cfg, tmp_path / "on", CPU, resume=tmp_path / "run" / "last.pth").saver.save()  # a resumed run began so, too
    RTDETRv3.from_pretrained(tmp_path / "run" / "best.pth").save_pretrained(tmp_path / "shared")
    licence = {"licence": "CC0-1.0"} if start is not None else {}
    name = paths[start].name if start is not None else ""
    for file in ("run/best.pth", "run/last.pth", "on/last.pth", "shared"):
        content = read_checkpoint(tmp_path / file)
        assert content["began"] == {"weights": name, "in_full": in_full, "images": NUM_TRAIN} | licence, file
        settled, _ = auto_config.settle(tiny_config(data, *AUTO), CPU, None, tmp_path / file)
        assert by_weights(settled) == (LIKE_THIS if in_full else KNOWING), file


def test_random_weights_that_were_changed_may_have_auto_in_their_config(data: Path, tmp_path: Path) -> None:
    """As when somebody loads a backbone of their own into a new model, and trains that."""
    changed = weights_of(data, tmp_path / "changed.pth", *AUTO)
    cfg, _ = auto_config.settle(tiny_config(data, *AUTO), CPU, None, changed)
    assert by_weights(cfg) == KNOWING


def test_the_guide_has_the_same_table() -> None:
    """Its columns: random weights, a run of these presets, other weights."""
    guide = (Path(__file__).resolve().parents[2] / "docs" / "finetuning.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+\.[\w.]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", guide, re.MULTILINE)
    written = {key: (float(random), float(others), float(own)) for key, random, own, others in rows}
    assert written == auto_config.BY_WEIGHTS


def test_a_number_given_stays_beside_auto(data: Path, tmp_path: Path) -> None:
    wholly = weights_of(data, tmp_path / "wholly.pth", "optimizer.backbone_lr_multiplier=1")
    updates = [*AUTO, "optimizer.muon_lr_multiplier=2", "data.augment.zoom_ramp=7"]
    cfg, lines = auto_config.settle(tiny_config(data, *updates), CPU, None, wholly)
    assert (cfg.optimizer.muon_lr_multiplier, cfg.data.augment.zoom_ramp) == (2, 7)
    assert (cfg.ema.warmup, cfg.optimizer.warmup_iterations) == (50, 20)
    assert "muon" not in lines[0] and "zoom" not in lines[0] and "ema.warmup 50" in lines[0]


@pytest.mark.parametrize(("multiplier", "expected"), [("0.1", KNOWING), ("auto", LIKE_THIS)])
def test_a_resumed_run_keeps_what_it_started_with(
    data: Path, tmp_path: Path, multiplier: str, expected: tuple[float, ...]
) -> None:
    updates = [*AUTO, "train.max_iterations=1"]
    first = tiny_config(data, *updates, f"optimizer.backbone_lr_multiplier={multiplier}")
    Trainer(first, tmp_path / "first", CPU).run()
    tuned = Trainer(tiny_config(data, *updates), tmp_path / "tuned", CPU, tuning=tmp_path / "first" / "last.pth")
    assert by_weights(tuned.cfg) == expected
    tuned.run()
    resumed = Trainer(tiny_config(data, *updates), tmp_path / "tuned", CPU, resume=tmp_path / "tuned" / "last.pth")
    assert resumed.cfg == tuned.cfg


def test_a_checkpoint_from_before_a_setting_had_its_default(data: Path, tmp_path: Path) -> None:
    path = weights_of(data, tmp_path / "old.pth", "optimizer.muon_lr_multiplier=2")
    content = load_checkpoint(path)
    del content["config"]["data"]["augment"]["zoom_ramp"]
    save_checkpoint(path, content)
    cfg, lines = auto_config.settle(tiny_config(data, *AUTO), CPU, resume=path)
    assert lines[0].startswith("auto, for the run that is resumed: ")
    assert (cfg.data.augment.zoom_ramp, cfg.optimizer.muon_lr_multiplier) == (0, 2)


def test_the_rate_counts_all_images_of_a_step(data: Path) -> None:
    updates = ["data.train_batch_size=auto", "train.accumulate=3", "optimizer.lr_batch=24", "optimizer.lr=0.002"]
    cfg, lines = auto_config.settle(tiny_config(data, *updates), CPU)
    assert cfg.optimizer.lr == pytest.approx(0.001) and len(lines) == 1


def test_batches_that_auto_puts_together_change_neither_rate_nor_length(data: Path, tmp_path: Path) -> None:
    wholly = weights_of(data, tmp_path / "wholly.pth", "optimizer.backbone_lr_multiplier=1")
    updates = ["data.train_batch_size=auto", "train.epochs=auto", "train.accumulate=auto", "optimizer.lr=0.002"]
    updates += ["optimizer.lr_batch=8"]
    random, tuned = (auto_config.settle(tiny_config(data, *updates), CPU, None, start) for start in (None, wholly))
    assert (random[0].train.accumulate, tuned[0].train.accumulate) == (1, 2)
    assert dataclasses.replace(random[0], train=tuned[0].train) == tuned[0] and tuned[0].optimizer.lr == 0.001
    assert random[0].train.epochs == tuned[0].train.epochs == 500
    steps = NUM_TRAIN // 4
    assert random[1][-1] == f"train.epochs: auto is 500, {500 * steps} iterations"
    assert tuned[1][-1] == f"train.epochs: auto is 500, {500 * -(-steps // 2)} iterations"


def test_a_settled_config_stays_as_it_is(data: Path, tmp_path: Path) -> None:
    updates = ["data.train_batch_size=auto", "train.epochs=auto", *AUTO, "optimizer.lr=0.002", "optimizer.lr_batch=16"]
    wholly = weights_of(data, tmp_path / "wholly.pth", "optimizer.backbone_lr_multiplier=1")
    for start in (None, wholly):
        once, _ = auto_config.settle(tiny_config(data, *updates), CPU, None, start)
        assert auto_config.settle(once, CPU, None, start) == (once, [])
        for key in ("data.train_batch_size", "train.epochs", *auto_config.BY_WEIGHTS):
            again = config_from_dict(config_to_dict(once), "config.yml", [f"{key}=auto"])
            assert auto_config.settle(again, CPU, None, start)[0] == once, (key, start)


@pytest.mark.parametrize("batch", ["auto", "2"])
def test_a_resumed_run_keeps_its_rate(data: Path, tmp_path: Path, batch: str) -> None:
    """Also one with a batch of its own, whose rate nobody scaled, and one of a file from before `lr_batch` followed."""
    updates = [f"data.train_batch_size={batch}", "optimizer.lr=0.002", "optimizer.lr_batch=16"]
    cfg, _ = auto_config.settle(tiny_config(data, *updates), CPU)
    cfg = dataclasses.replace(cfg, optimizer=dataclasses.replace(cfg.optimizer, lr_batch=16))
    save_checkpoint(
        tmp_path / "last.pth",
        make_checkpoint(cfg, Classes(("a", "b", "c"), (1, 2, 3)), build_model(cfg.model, 3).state_dict()),
    )
    again = config_from_dict(config_to_dict(cfg), "last.pth", ["data.train_batch_size=auto"])
    resumed, lines = auto_config.settle(again, CPU, tmp_path / "last.pth")
    assert resumed == cfg and lines == [
        f"data.train_batch_size: auto is {cfg.data.train_batch_size}; optimizer.lr {cfg.optimizer.lr:g}, "
        "as in the run that is resumed"
    ]


@pytest.mark.parametrize(("in_full", "lr"), [(True, 0.001), (False, 0.002)])
def test_a_resumed_run_counts_its_batches_as_it_began(data: Path, tmp_path: Path, in_full: bool, lr: float) -> None:
    """Two a step are what auto makes where a run started from weights that had learnt in full, else somebody's wish."""
    cfg = tiny_config(data, "data.train_batch_size=4", "train.accumulate=2", "optimizer.lr_batch=4")
    began, weights = {"weights": "w.pth", "in_full": in_full}, build_model(cfg.model, 3).state_dict()
    content = make_checkpoint(cfg, Classes(("a", "b", "c"), (1, 2, 3)), weights, began=began)
    save_checkpoint(tmp_path / "last.pth", content)
    again = config_from_dict(config_to_dict(cfg), "last.pth", ["data.train_batch_size=auto", "optimizer.lr=0.001"])
    assert auto_config.settle(again, CPU, tmp_path / "last.pth")[0].optimizer.lr == pytest.approx(lr)


def test_a_step_that_auto_puts_together_has_no_more_images_than_one_batch(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholly = weights_of(data, tmp_path / "wholly.pth", "optimizer.backbone_lr_multiplier=1")
    monkeypatch.setattr(auto_config, "fits", lambda *_: True)
    monkeypatch.setattr(auto_config, "MOST_IMAGES", 4)
    # Two batches a step from such weights are what auto makes, and mean the same if somebody gives them.
    cases = ("auto", wholly, 2), ("2", wholly, 2), ("auto", None, 4), ("2", None, 4), ("4", wholly, 4)
    for accumulate, start, size in cases:
        cfg = tiny_config(data, "data.train_batch_size=auto", f"train.accumulate={accumulate}")
        settled, _ = auto_config.settle(cfg, torch.device("cuda"), None, start)
        assert settled.data.train_batch_size == size, (accumulate, start)


def test_a_given_batch_keeps_its_rate(data: Path) -> None:
    cfg = tiny_config(data, "train.epochs=auto", "optimizer.lr=0.002")
    assert auto_config.settle(cfg, CPU)[0].optimizer == cfg.optimizer


def test_a_gpu_is_asked_within_limits(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto_config, "fits", lambda cfg, source, number, device: number <= 3)
    cfg, _ = auto_config.settle(tiny_config(data, "data.train_batch_size=auto"), torch.device("cuda"))
    assert cfg.data.train_batch_size == 3


def test_auto_that_nobody_replaced_is_refused(data: Path) -> None:
    with pytest.raises(ConfigError, match="only training resolves"):
        build_train_loader(tiny_config(data, "data.train_batch_size=auto"), seed=0)
