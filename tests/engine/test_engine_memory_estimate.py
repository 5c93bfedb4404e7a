"""The estimate of GPU memory: what it counts, what it says, and that it trains on the worst batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import tiny_config
from messages import message
from torch.utils.checkpoint import checkpoint

from rtdetr.config import Config, ConfigError
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.loader import open_train_set
from rtdetr.engine.planning import memory_estimate
from rtdetr.engine.planning.memory_estimate import MemoryNeed, estimate_memory, train_on_worst, worst_batch
from rtdetr.losses.functional import mean_over_processes, without_averaging

CPU = torch.device("cpu")


@pytest.mark.parametrize(("graphs", "largest"), [("off", 9), ("on", 4)])
def test_a_tenth_of_the_memory_stays_free(
    data: Path, monkeypatch: pytest.MonkeyPatch, graphs: str, largest: int
) -> None:
    """100 units are free; a batch takes 10 an image and gives them back, and above 11 images there is no more."""
    reserved = [7]

    def train(cfg: Config, source: DetectionSet, batch_size: int, device: torch.device) -> tuple[int, Any]:
        if batch_size > 11:
            raise torch.cuda.OutOfMemoryError("full")
        reserved[0] = 7 + 10 * batch_size
        return 0, None

    monkeypatch.setattr(memory_estimate, "train_on_worst", train)
    monkeypatch.setattr(memory_estimate, "_detect", lambda *_: reserved.__setitem__(0, 7))
    monkeypatch.setattr("rtdetr.engine.acceleration.graphs.why_no_kernels", lambda _: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(memory_estimate.gc, "collect", lambda: None)  # it takes its time
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (100, 200))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 7)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: reserved[0])
    monkeypatch.setattr(memory_estimate, "why_not_capture", lambda *_: None if graphs == "on" else "off")
    cfg = tiny_config(data)
    source, device = open_train_set(cfg), torch.device("cuda")
    fitting = [number for number in range(1, 20) if memory_estimate.fits(cfg, source, number, device)]
    assert fitting == list(range(1, largest + 1))


FREE = 20 * 2**30


@pytest.mark.parametrize(
    ("updates", "need", "said"),
    [
        (
            "train.graphs=off",
            MemoryNeed(2**30, 2**30, 2**30),
            "memory     up to 2.0 of the 20.0 GiB free on cuda, estimated on ",
        ),
        (
            "train.graphs=on",
            MemoryNeed(2**30, 2**30, 2**30),
            "memory     up to 3.0 of the 20.0 GiB free on cuda, estimated on ",
        ),
        (
            "train.graphs=on",
            MemoryNeed(2**30, FREE, 0),
            "warning: the run may end for lack of memory; set train.checkpoint",
        ),
        ("train.graphs=on", None, "the worst batch of the set (4 images of 64 x 64, up to "),
    ],
)
def test_the_forecast_is_said_before_the_first_step(
    updates: str, need: MemoryNeed | None, said: str, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtdetr.engine.acceleration.graphs.why_no_kernels", lambda _: None)
    monkeypatch.setattr(memory_estimate, "measure", lambda *_: need)
    monkeypatch.setattr(memory_estimate, "_free", lambda _: FREE)
    monkeypatch.setattr(memory_estimate, "why_not_capture", lambda *_: None if updates.endswith("on") else "off")
    cfg = tiny_config(data)
    if need is None:
        with pytest.raises(ConfigError) as refused:
            estimate_memory(cfg, open_train_set(cfg), torch.device("cuda"))
        lines = [str(refused.value)]
        assert message("no room in memory", "20.0 GiB", "cuda", "train.checkpoint_activations").search(lines[0])
    else:
        lines = estimate_memory(cfg, open_train_set(cfg), torch.device("cuda"))
    assert lines[-1].startswith(said), lines


def test_the_fullest_of_several_gpus_counts(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    need = MemoryNeed(2**30, 2**30, 0)
    monkeypatch.setattr(memory_estimate, "measure", lambda *_: need)
    monkeypatch.setattr(memory_estimate, "_free", lambda _: FREE)
    monkeypatch.setattr("rtdetr.engine.distributed.gather_objects", lambda own: [own, (need, 2**30), own])
    cfg = tiny_config(data, "train.graphs=off")
    line, warning = estimate_memory(cfg, open_train_set(cfg), torch.device("cuda"))
    assert "2.0 of the 1.0 GiB free" in line and warning.startswith("warning: ")


def test_what_is_needed_at_the_same_time() -> None:
    assert [MemoryNeed(1, 10, 2).total(graphs) for graphs in (0, 1, 2)] == [11, 13, 21]
    assert [MemoryNeed(1, 10, 20).total(graphs) for graphs in (0, 1, 2)] == [21, 31, 31]


@pytest.mark.parametrize(
    ("counts", "updates", "graphs"),
    [
        ((5, 5), (), 1),
        ((5, 50), (), 2),
        ((5, 5), ("data.augment.batch_sizes=[64, 96]",), 2),
        ((1000, 1000), (), 1),
        ((2049, 3000), (), 0),
        ((1, 3000), (), 2),
    ],
)
def test_steps_with_more_boxes_than_a_gpu_matches_are_no_graphs(
    counts: tuple[int, int], updates: tuple[str, ...], graphs: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = tiny_config(data, *updates)
    source = open_train_set(cfg)
    monkeypatch.setattr(source, "boxes_per_image", lambda: np.array(counts))
    assert memory_estimate.graphs_of(cfg, source) == graphs


def test_losses_of_an_estimate_ask_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with without_averaging():
        assert mean_over_processes(torch.tensor(3.0)) == 3
    with pytest.raises(ValueError, match="process group"):
        mean_over_processes(torch.tensor(3.0))


def test_the_estimated_batch_is_the_worst(data: Path) -> None:
    cfg = tiny_config(data)
    source = open_train_set(cfg)
    images, targets, *_ = worst_batch(source, 2, 64)
    counts = sorted(len(source.targets(i)[0]) for i in range(len(source)))
    assert images.shape == (2, 3, 64, 64) and targets.counts == (counts[-1], counts[-2])
    assert targets.boxes.max() <= 1 and 1 < targets.boxes_pixel.max() <= 64
    assert len(worst_batch(source, 20, 64).infos) == 20  # more than the set has
    train_on_worst(cfg, source, 2, CPU)


def test_the_estimate_saves_memory_where_the_training_does(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return checkpoint(*arguments, **options)

    monkeypatch.setattr("rtdetr.models.decoder.checkpoint", counted)
    cfg = tiny_config(data, "train.checkpoint_activations=true")
    train_on_worst(cfg, open_train_set(cfg), 2, CPU)
    assert len(calls) == memory_estimate.STEPS * cfg.model.decoder.num_layers
