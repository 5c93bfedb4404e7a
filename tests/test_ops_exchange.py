"""Exchanges between processes: by memory of other GPUs, or by torch.distributed where that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rtdetr.ops import exchange
from rtdetr.ops.exchange import HANDLE_BYTES, MAX_NUMBERS, Inboxes

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(exchange.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(exchange.dist, "get_rank", lambda: 0)
    yield
    exchange.disconnect()


def twice(value: Any) -> list[Any]:
    return [value, value]


def test_without_gpus_torch_distributed_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_gather(result: Tensor, own: Tensor) -> None:
        result.copy_(torch.cat((own, own + 1)))

    monkeypatch.setattr(exchange.dist, "all_gather_into_tensor", all_gather)
    monkeypatch.setattr(exchange.dist, "all_reduce", lambda own, op: own.add_(0.5))
    assert "needs GPUs" in str(exchange.connect(CPU, "here", twice))
    own = torch.arange(8.0)[None]
    assert torch.equal(exchange.gather(own), torch.stack((own[0], own[0] + 1)))
    assert torch.equal(exchange.mean(own.clone()), own + 0.5)


def test_all_processes_go_by_memory_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in the way of one is what all of them hear, first of all that there are several machines."""
    monkeypatch.setattr(exchange, "why_not_by_memory", lambda device: "no kernel here")

    def elsewhere(value: Any) -> list[Any]:
        return [value, ("there", *value[1:])] if isinstance(value, tuple) else [value, value]

    assert exchange.connect(CPU, "here", twice) == "no kernel here"
    assert "several machines" in str(exchange.connect(CPU, "here", elsewhere))
    monkeypatch.setattr(exchange, "why_not_by_memory", lambda device: None)  # but there is no GPU to ask for memory
    assert "gave no memory" in str(exchange.connect(CPU, "here", twice))


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_the_kernel_brings_every_process_what_all_have(captured: bool) -> None:
    """Three processes are three streams here: their kernels wait for one another."""
    device, processes = torch.device("cuda"), 3
    if exchange.why_not_by_memory(device) is not None:
        pytest.skip("no kernel")
    streams = [torch.cuda.Stream() for _ in range(processes)]
    counts = [torch.zeros((), dtype=torch.int32, device=device) for _ in streams]
    handle = torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
    addresses = [torch.ops.rtdetr.make_inbox(done, handle, processes) for done in counts]
    ends = [Inboxes(addresses, rank, done) for rank, done in enumerate(counts)]
    own = [torch.randn(processes, size, device=device) for size in (1, 36, 516, 4100, MAX_NUMBERS)]
    for stream in streams:  # room for results: the driver, asked for more, may wait for the kernels
        with torch.cuda.stream(stream):
            torch.empty(2**18, device=device)
    torch.cuda.synchronize()

    def call(rank: int) -> list[tuple[Tensor, Tensor]]:
        return [(ends[rank].exchange(x[rank], mean=False), ends[rank].exchange(x[rank], mean=True)) for x in own]

    found, graphs = [], []
    for rank, stream in enumerate(streams):
        with torch.cuda.stream(stream):
            if captured:
                graphs.append(torch.cuda.CUDAGraph())
                with torch.cuda.graph(graphs[-1], stream=stream):
                    found.append(call(rank))
            else:
                found.append(call(rank))
    for _ in range(3 if captured else 0):
        for graph, stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [int(done) for done in counts] == [2 * len(own) * (3 if captured else 1)] * processes
    for results in found:
        for x, (together, mean), (_, elsewhere) in zip(own, results, found[0], strict=True):
            assert torch.equal(together, x) and torch.equal(mean, elsewhere)
            torch.testing.assert_close(mean, x.mean(0))
