"""The compiled training step: the same losses and weights as the plain one, and a bounded number of compilations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_helpers import made_up_batch, tiny_config
from torch import Tensor

from rtdetr.config import TrainConfig, load_config
from rtdetr.engine.acceleration.compile import WORTH_IT, compile_step, why_not_compile
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch

# Boxes in the images of a batch, and the image size. A batch without boxes has one empty slot, like one with a box.
BATCHES = [((3, 2), 64), ((5, 0), 64), ((1, 1), 96), ((0, 0), 64), ((12, 3), 96)]


def batches() -> list[Batch]:
    return [made_up_batch(counts, seed, size) for seed, (counts, size) in enumerate(BATCHES)]


def steps_of(trainer: Trainer) -> list[float]:
    trainer.model.train()
    return [float(trainer.train_step([batch]).values[-2]) for batch in batches()]


def test_losses_and_weights_are_those_of_the_plain_step(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data, "train.precision=fp32", "train.compile=off", "loss.atss_epochs=0")
    plain, compiled = (Trainer(cfg, tmp_path / name, torch.device("cpu")) for name in ("plain", "compiled"))
    compiled.model.load_state_dict(plain.model.state_dict())
    count = 0

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend("eager")(graph, examples)  # inductor would spend minutes in a compiler

    torch._dynamo.reset()
    compile_step(compiled.model, backend)
    losses = []
    for trainer in (plain, compiled):
        torch.manual_seed(3)
        losses.append(steps_of(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    for name, wanted in plain.model.state_dict().items():
        torch.testing.assert_close(compiled.model.state_dict()[name], wanted, atol=1e-3, rtol=1e-2, msg=name)
    found = count
    steps_of(compiled)
    assert count == found, "sizes that were seen before are compiled again"
    assert count == 6, "backbone, encoder and dense head have a graph for each of two sizes"


@pytest.mark.parametrize("processes", [1, 2])
def test_one_process_or_many(processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile stops at every SyncBatchNorm."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("rtdetr.engine.distributed.world_size", lambda: processes)
    reason = why_not_compile(TrainConfig(compile="auto"), torch.device("cuda"), WORTH_IT)
    assert reason is None if processes == 1 else "batch norm of several processes" in str(reason)


@pytest.mark.parametrize(
    ("setting", "device", "iterations", "reason"),
    [
        ("off", "cuda", WORTH_IT, "train.compile=off"),
        ("on", "cpu", 1, None),
        ("auto", "cpu", WORTH_IT, "there is no GPU"),
        ("auto", "cuda", 3 * WORTH_IT, None),
        ("auto", "cuda", 3 * WORTH_IT - 1, "takes longer than it saves"),
    ],
)
def test_when_the_step_is_compiled(
    setting: str, device: str, iterations: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("shutil.which", lambda name: name)
    found = why_not_compile(TrainConfig(compile=setting), torch.device(device), iterations, 3)  # type: ignore[arg-type]
    assert found is None if reason is None else found is not None and reason in found


def test_on_and_off_are_words(tmp_path: Path) -> None:
    """YAML reads them as true and false."""
    file = tmp_path / "config.yml"
    file.write_text("train:\n  compile: on\n")
    assert load_config(file).train.compile == "on"
    assert load_config(file, ["train.compile=off"]).train.compile == "off"
