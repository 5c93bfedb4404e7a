"""Training steps as CUDA graphs: what a graph does is what the plain step does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_helpers import made_up_batch, tiny_config

from rtdetr.config import ConfigError, Kernels, TrainConfig
from rtdetr.engine.acceleration import graphs
from rtdetr.engine.acceleration.graphs import RUNS_BEFORE, why_not_capture
from rtdetr.engine.acceleration.placement import slots_for
from rtdetr.engine.trainer import Trainer
from rtdetr.ops.assignment import MAX_COLUMNS
from rtdetr.types import Batch, Targets

ON_GPU = ("train.precision=fp32", "train.compile=off", "optimizer.lr=1e-4")


def batches(rounds: int) -> list[Batch]:
    """Four kinds of batches, with other images and numbers of boxes in every round."""
    kinds = [((3, 2), 64), ((9, 0), 96), ((0, 0), 64), ((620, 1), 64)]
    return [
        made_up_batch((max(0, counts[0] - number % 2), counts[1]), 10 * number + kind, size)
        for number in range(rounds)
        for kind, (counts, size) in enumerate(kinds)
    ]


@pytest.mark.gpu
def test_losses_and_gradients_are_those_of_the_plain_step(data: Path, tmp_path: Path) -> None:
    """At a rate that moves nothing: rounding, which atomic additions make another one each time, does not add up."""
    device, ends = torch.device("cuda"), []
    for setting in ("off", "on"):
        updates = (*ON_GPU, "optimizer.lr=1e-12", f"train.graphs={setting}")
        trainer = Trainer(tiny_config(data, *updates), tmp_path / setting, device)
        torch.set_float32_matmul_precision("highest")
        trainer.model.train()
        torch.manual_seed(5)
        found: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []
        for batch in batches(RUNS_BEFORE + 3):
            record = trainer.train_step([batch])
            torch.cuda.synchronize()
            gradients = {n: p.grad.clone() for n, p in trainer.model.named_parameters() if p.grad is not None}
            found.append((record.values.clone(), gradients))
        ends.append(found)
        assert setting == "off" or (trainer.graphs is not None and len(trainer.graphs.captured) == 4)
    for (values, gradients), (wanted_values, wanted) in zip(*ends, strict=True):
        torch.testing.assert_close(values[:-1], wanted_values[:-1], atol=1e-4, rtol=1e-3)
        assert gradients.keys() == wanted.keys()
        whole = torch.cat([(gradients[name] - wanted[name]).flatten() for name in wanted]).norm()
        assert whole <= 0.02 * torch.cat([each.flatten() for each in wanted.values()]).norm() + 1e-6


@pytest.mark.gpu
def test_an_image_too_crowded_to_be_matched_on_the_gpu_is_not_captured(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, *ON_GPU, "train.graphs=on"), tmp_path, torch.device("cuda"))
    assert trainer.graphs is not None
    trainer.model.train()
    for seed in range(RUNS_BEFORE + 2):
        record = trainer.train_step([made_up_batch((MAX_COLUMNS + 1, 2), seed)])
        assert torch.isfinite(record.values).all()
    assert not trainer.graphs.captured


@pytest.mark.gpu
def test_a_non_finite_image_is_named_from_a_graph(data: Path, tmp_path: Path) -> None:
    trainer = Trainer(tiny_config(data, *ON_GPU, "train.graphs=on"), tmp_path, torch.device("cuda"))
    trainer.model.train()
    for batch in [made_up_batch((3, 2), seed) for seed in range(RUNS_BEFORE + 1)]:
        trainer.checks.check(trainer.train_step([batch]))
    weights = {name: tensor.clone() for name, tensor in trainer.model.named_parameters()}
    bad = made_up_batch((3, 2), 99)
    bad.targets.boxes[1, 0] = torch.nan
    with pytest.raises(RuntimeError, match=r"noise99_1\.png"):
        trainer.checks.check(trainer.train_step([bad]))
    for name, tensor in trainer.model.named_parameters():
        assert torch.equal(tensor, weights[name]), name


def test_a_few_sizes_serve_all_numbers_of_boxes() -> None:
    for num_denoising in (0, 20, 100):
        for boxes in range(301):
            slots = slots_for(boxes, num_denoising)
            assert slots >= max(1, boxes)
            assert max(1, num_denoising // slots) == max(1, num_denoising // max(1, boxes)), "the copies change"
            assert not 3 <= boxes <= num_denoising or slots <= 1.5 * boxes, "a third of the step's work is for padding"
    assert len({slots_for(boxes, 100) for boxes in range(301)}) <= 24


def test_padding_changes_no_loss_but_by_its_random_numbers() -> None:
    targets = made_up_batch((3, 1), 0).targets
    padded = targets.padded(7)
    assert isinstance(padded, Targets) and padded.counts == targets.counts
    for before, after in zip(targets[:4], padded[:4]):
        assert after.shape[1] == 7 and torch.equal(after[:, :3], before) and not after[:, 3:].any()


@pytest.mark.parametrize(
    ("changes", "device", "kernels", "reason"),
    [
        ({}, "cuda", "auto", None),
        ({"graphs": "off"}, "cuda", "auto", "train.graphs=off"),
        ({}, "cpu", "auto", "no GPU"),
        ({"accumulate": 2}, "cuda", "auto", "train.accumulate"),
        ({}, "cuda", "plain", "kernels=plain"),
        ({}, "cuda", "auto", "matched on the host: no compiler"),
    ],
)
def test_when_steps_are_captured(
    changes: dict[str, object], device: str, kernels: Kernels, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_kernels = "no compiler" if reason and "no compiler" in reason else None
    monkeypatch.setattr(graphs, "why_no_kernels", lambda device: no_kernels)  # there may be no GPU here
    found = why_not_capture(TrainConfig(**changes), torch.device(device), kernels)  # type: ignore[arg-type]
    assert found is None if reason is None else found is not None and reason in found
    if reason is not None and "graphs" not in changes:
        with pytest.raises(ConfigError, match=r"train\.graphs=on is not possible"):
            why_not_capture(TrainConfig(**{**changes, "graphs": "on"}), torch.device(device), kernels)  # type: ignore
