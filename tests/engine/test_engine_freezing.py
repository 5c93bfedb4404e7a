"""Frozen stages of the backbone do not move: not by steps, not in the average, not over a resumed run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from engine_helpers import tiny_config
from torch import Tensor

from rtdetr.config import BackboneConfig
from rtdetr.engine.trainer import Trainer
from rtdetr.models.backbone import build_backbone
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint

CPU = torch.device("cpu")
PARTS = ("backbone.stem.", "backbone.stages.0.", "backbone.stages.1.", "backbone.stages.2.", "backbone.stages.3.")


@pytest.fixture(scope="module")
def start(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a run of three steps whose batch norm trained."""
    folder = tmp_path_factory.mktemp("start")
    Trainer(tiny_config(data, "train.epochs=1"), folder, CPU).run()
    return folder / "last.pth"


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """The parts of which an entry changed."""
    return {
        part for part in PARTS for name in after if name.startswith(part) and not torch.equal(after[name], before[name])
    }


@pytest.mark.parametrize(("frozen", "muon"), [(1, 0), (3, 0), (2, 3)])
def test_frozen_stages_do_not_move(data: Path, start: Path, tmp_path: Path, frozen: int, muon: int) -> None:
    updates = [f"model.backbone.freeze_stages={frozen}", "train.max_iterations=2", "ema.decay=0.5", "ema.warmup=0"]
    updates += [f"optimizer.muon_lr_multiplier={muon}"]
    Trainer(tiny_config(data, *updates), tmp_path, CPU, tuning=start).run()
    updates[1] = "train.max_iterations=4"
    Trainer(tiny_config(data, *updates), tmp_path, CPU, resume=tmp_path / "last.pth").run()
    before, after = load_checkpoint(start)["ema"], load_checkpoint(tmp_path / "last.pth")
    assert after["training"]["iteration"] == 4
    for weights in (after["model"], after["ema"]):
        assert moved(before, weights) == set(PARTS[frozen:])


@pytest.mark.parametrize("norm", ["train", "frozen", "frozen_affine"])
def test_frozen_stages_add_to_what_norm_says(norm: Literal["train", "frozen", "frozen_affine"]) -> None:
    """frozen_affine takes batch statistics in frozen stages, too, as the official R50 does in its stem."""
    backbone = build_backbone(BackboneConfig(depth=18, width=0.125, norm=norm, freeze_stages=2))
    plain = build_backbone(BackboneConfig(depth=18, width=0.125, norm=norm, freeze_stages=0))
    trained = {name for name, parameter in backbone.named_parameters() if parameter.requires_grad}
    expected = {name for name, parameter in plain.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in expected if not name.startswith(("stem.", "stages.0."))} and trained
    backbone.train()
    statistics = {name: buffer.clone() for name, buffer in backbone.named_buffers()}
    backbone(torch.rand(2, 3, 64, 64))
    changed = {name for name, buffer in backbone.named_buffers() if not torch.equal(buffer, statistics[name])}
    assert any(name.startswith(("stem.", "stages.0.")) for name in changed) == (norm == "frozen_affine")
    assert bool(changed) == (norm != "frozen")


def test_resuming_with_other_stages_frozen_is_refused(data: Path, start: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "model.backbone.freeze_stages=2")
    with pytest.raises(CheckpointError, match=r"last\.pth"):
        Trainer(cfg, tmp_path, CPU, resume=start)
