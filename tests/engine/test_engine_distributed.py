"""Two processes, started as torchrun would: gloo on the CPU, NCCL on two GPUs."""

from __future__ import annotations

import copy
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_helpers import PartialDraws, made_up_batch, part_of, tiny_config, tiny_data
from run_cases import environment
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rtdetr.config import Config
from rtdetr.engine import distributed
from rtdetr.engine.acceleration.graphs import RUNS_BEFORE, GradientBuffer
from rtdetr.engine.evaluation.evaluator import evaluate
from rtdetr.engine.step import BatchPosition, training_step
from rtdetr.engine.trainer import Trainer
from rtdetr.losses.criterion import build_criterion
from rtdetr.types import Batch

# Boxes per image of each global batch. Both halves have the same maximum, on which the number of denoising copies
# depends, and enough boxes: losses are divided by "the mean over processes, but at least 1", and with less than that in
# one half two processes would rightly not equal one.
COUNTS = [(9, 7, 6, 9), (8, 8, 5, 8), (7, 7, 7, 0)]


def config_of(data: Path) -> Config:
    return tiny_config(data, "optimizer.lr=4.0e-4", "data.train_batch_size=2")


def train(cfg: Config, folder: Path, start: int, stop: int) -> Trainer:
    """Three steps on images start..stop-1 of the global batches, with stored batch-norm statistics."""
    trainer = Trainer(cfg, folder, torch.device("cpu"))
    trainer.model.forward = partial(trainer.model.forward, draws=PartialDraws(start, stop, 4))
    trainer.model.train()
    for module in trainer.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    for seed, counts in enumerate(COUNTS):
        trainer.train_step([part_of(made_up_batch(counts, seed), start, stop)])
    return trainer


def two(work: Callable[..., None], *arguments: Path) -> None:
    """Runs work(rank, *arguments) in two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(started, (port, work, *arguments), nprocs=2)


def started(rank: int, port: int, work: Callable[..., None], *arguments: Path) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}
    os.environ["LOCAL_RANK"] = str(rank)
    work(rank, *arguments)


def exchanged(trainer: Trainer, batch: Batch) -> list[list[Tensor]]:
    """The gradients of a batch, as DistributedDataParallel averages them and as GradientBuffer does."""
    step, found = partial(training_step, criterion=build_criterion(trainer.cfg, len(trainer.classes))), []
    for network in (DistributedDataParallel(copy.deepcopy(trainer.model)), copy.deepcopy(trainer.model)):
        parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        network.zero_grad()
        torch.manual_seed(distributed.rank())
        if isinstance(network, DistributedDataParallel):
            step(network, batch.images, batch.targets)
        else:
            flat = GradientBuffer(parameters)
            flat.behind(partial(step, network))(batch.images, batch.targets, BatchPosition())
            flat.average()
        found.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
    return found


def worker(rank: int, data: Path, folder: Path) -> None:
    with distributed.process_group("cpu") as device:
        cfg = config_of(data)
        trainer = train(cfg, folder, 2 * rank, 2 * rank + 2)
        weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
        average = {name: tensor.clone() for name, tensor in trainer.state.ema.model.state_dict().items()}
        annotations, classes = cfg.data.val.annotations, trainer.classes
        scored = evaluate(trainer.state.ema.model, trainer.val_loader, annotations, classes, cfg.eval, device)

        gradients = exchanged(trainer, made_up_batch((3, 2 + rank), seed=rank))
        lonely = trainer.train_step([made_up_batch((0, 0) if rank else (2, 1))])
        finite = bool(torch.isfinite(lonely.values).all())
        after = [p.detach().clone() for p in trainer.update.parameters[:5]]

        trainer.model.train()
        trainer.train_step([made_up_batch((3, 2), seed=rank)])
        statistics = []
        for action in (lambda: None, trainer._evaluate):
            action()
            statistics.append([buffer.clone() for buffer in trainer.state.ema.model.buffers()])

        before_signal = trainer._stopping()
        trainer.signals.received = signal.SIGTERM if rank == 1 else None
        stops = (before_signal, trainer._stopping())
        figures = None if scored is None else (scored.figures, sorted(d["image_id"] for d in scored.detections))
        result = {"weights": weights, "ema": average, "finite": finite, "after": after, "stops": stops, "eval": figures}
        result["statistics"], result["gradients"] = statistics, gradients
        result["decided"] = [distributed.from_main(lambda: f"of {rank}"), refused_by_main()]
        torch.save(result, folder / f"rank{rank}.pth")


def refused_by_main() -> str:
    def refuse() -> None:
        raise ValueError(f"in use, says {distributed.rank()}")

    try:
        distributed.from_main(refuse)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, list[dict[str, Any]]]:
    """The trainer of one process with the global batch, and what two processes with half of it each left."""
    data, folder = tiny_data(tmp_path_factory.mktemp("data") / "shapes"), tmp_path_factory.mktemp("two")
    two(worker, data, folder)
    results = [torch.load(folder / f"rank{rank}.pth", weights_only=True) for rank in range(2)]
    return train(config_of(data), folder / "one", 0, 4), results


def test_two_processes_train_as_one_with_the_same_global_batch(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    single, results = runs
    for part, model in (("weights", single.model), ("ema", single.state.ema.model)):
        for name, tensor in model.state_dict().items():
            assert torch.equal(results[0][part][name], results[1][part][name]), name
            # Measured: 5e-7, where Adam divides a rounding error by its own size (attention biases without gradient).
            assert float((results[0][part][name] - tensor).abs().max()) <= 1e-5, name


def test_the_three_steps_did_change_the_weights(runs: tuple[Trainer, list[dict[str, Any]]], tmp_path: Path) -> None:
    single, _ = runs
    fresh = Trainer(single.cfg, tmp_path, torch.device("cpu"))
    moved = [float((p - q).detach().abs().max()) for p, q in zip(single.update.parameters, fresh.update.parameters)]
    assert max(moved) > 1e-3 and sum(m > 1e-4 for m in moved) > 0.9 * len(moved)


def test_a_batch_without_boxes_on_one_process_goes_on(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    _, results = runs
    assert all(result["finite"] for result in results)
    assert all(torch.equal(a, b) for a, b in zip(results[0]["after"], results[1]["after"]))


def test_flat_gradients_are_those_of_distributed_data_parallel(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    (usual, flat), (elsewhere, flat_elsewhere) = (result["gradients"] for result in runs[1])
    assert len(usual) == len(flat) > 100
    for each in (flat, elsewhere, flat_elsewhere):
        for found, wanted in zip(each, usual, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-9)


def test_processes_evaluate_the_statistics_that_get_saved(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    """Each has seen other images, and there is no SyncBN on the CPU."""
    (first, first_in_evaluation), (second, second_in_evaluation) = (result["statistics"] for result in runs[1])
    assert not all(torch.equal(a, b) for a, b in zip(first, second))
    assert all(torch.equal(a, b) for a, b in zip(first, first_in_evaluation))
    assert all(torch.equal(a, b) for a, b in zip(first, second_in_evaluation))


def test_a_signal_to_one_process_stops_both(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    assert [result["stops"] for result in runs[1]] == [(False, True), (False, True)]


def test_the_main_process_decides_for_both(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    assert [result["decided"] for result in runs[1]] == [["of 0", "in use, says 0"]] * 2


def test_detections_of_both_processes_are_scored_together(runs: tuple[Trainer, list[dict[str, Any]]]) -> None:
    single, results = runs
    cfg = single.cfg
    expected = evaluate(
        single.state.ema.model,
        single.val_loader,
        cfg.data.val.annotations,
        single.classes,
        cfg.eval,
        torch.device("cpu"),
    )
    assert expected is not None and results[1]["eval"] is None
    figures, image_ids = results[0]["eval"]
    assert image_ids == sorted(d["image_id"] for d in expected.detections)
    assert figures == pytest.approx(expected.figures, abs=1e-3)


def graph_worker(rank: int, data: Path, folder: Path) -> None:
    """Steps of two kinds, the other one first on the other GPU: by DistributedDataParallel, and by graphs."""
    with distributed.process_group("cuda") as device:
        found = []
        for setting in ("off", "on"):
            updates = ("train.precision=fp32", "train.compile=off", "optimizer.lr=1e-12", f"train.graphs={setting}")
            updates = (*updates, "train.estimate_memory=false")
            trainer = Trainer(tiny_config(data, *updates), folder / setting, device)
            torch.set_float32_matmul_precision("highest")
            trainer.model.train()
            torch.manual_seed(5 + rank)
            for number in range(2 * (RUNS_BEFORE + 2)):
                kind = (number + rank) % 2
                record = trainer.train_step([made_up_batch(((3, 2), (9, 0))[kind], 10 * number + rank, 64 + 32 * kind)])
                torch.cuda.synchronize()
                gradients = torch.cat([p.grad.flatten().cpu() for p in trainer.update.parameters if p.grad is not None])
                found.append((setting, record.values.clone(), gradients))
            statistics = torch.cat([each.flatten().float().cpu() for each in trainer.model.buffers()])
            found.append((setting, statistics, torch.zeros(0)))
            assert setting == "off" or (trainer.graphs is not None and len(trainer.graphs.captured) == 2)
            trainer.release()
        torch.save(found, folder / f"rank{rank}.pth")


@pytest.mark.gpu
def test_graphs_on_two_gpus_train_as_distributed_data_parallel_does(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    two(graph_worker, tiny_data(tmp_path / "shapes"), tmp_path)
    ranks = [torch.load(tmp_path / f"rank{rank}.pth", weights_only=True) for rank in range(2)]
    for results in ranks:
        plain, graphs = ([each[1:] for each in results if each[0] == setting] for setting in ("off", "on"))
        for (values, gradients), (wanted_values, wanted) in zip(graphs, plain, strict=True):
            torch.testing.assert_close(values, wanted_values, atol=1e-3, rtol=2e-2)
            assert (gradients - wanted).norm() <= 0.02 * wanted.norm() + 1e-6
    for (_, values, gradients), (_, others, elsewhere) in zip(*ranks, strict=True):
        assert torch.equal(gradients, elsewhere)
        assert values.numel() < 100 or torch.equal(values, others), "statistics of batch norm differ"


def test_memory_of_a_training_grows_in_place_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    distributed.let_memory_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    del os.environ["PYTORCH_ALLOC_CONF"]
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    distributed.let_memory_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ


GROUPS = """
from rtdetr.engine import distributed
for turn in range(3):
    with distributed.process_group("cpu"):
        assert distributed.gather_objects(turn) == [turn, turn]
"""


def test_groups_follow_one_another_under_torchrun(tmp_path: Path) -> None:
    """As of model.train() and model.evaluate() in one script: torchrun's store outlives each of them."""
    (tmp_path / "groups.py").write_text(GROUPS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    subprocess.run([*command, tmp_path / "groups.py"], env=environment(), check=True, timeout=60)


class Kept:
    """What a script holds on to till the end, as a trainer with graphs."""


def test_last_acts_come_before_the_end_of_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for graphs that use it, and scripts keep their trainer."""
    done: list[str] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed.dist, "rendezvous", lambda _: iter([(torch.distributed.HashStore(), 0, 2)]))
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *_, **__: None)
    monkeypatch.setattr(distributed.dist, "destroy_process_group", lambda: done.append("the group is gone"))
    monkeypatch.setattr(distributed, "PeerWatchdog", lambda *_: SimpleNamespace(why_not="", close=lambda well: None))
    owner, lost = Kept(), Kept()
    with distributed.process_group("cpu"):
        distributed.before_the_end(owner, lambda: done.append("graphs of the owner"))
        distributed.before_the_end(lost, lambda: done.append("graphs of the lost one"))
        del lost
        assert done == ["graphs of the lost one"]
    assert done[1:] == ["graphs of the owner", "the group is gone"]
