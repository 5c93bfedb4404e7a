"""A few floats of every process to all of them, as batch norm over processes needs them 150 times in a training step:
by a kernel that writes into the memory of the machine's other GPUs where it can, else by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rtdetr.ops.backend import why_not_compiled

MAX_PROCESSES, MAX_NUMBERS, HANDLE_BYTES = 16, 8192, 64  # kMaxProcesses, kMaxExchanged, kHandleBytes of csrc/exchange.h
TRIAL = 20  # seconds
BUILT = hasattr(torch.ops.rtdetr, "exchange")  # libraries built before it came have none


class Inboxes(NamedTuple):
    """Where processes write to one another."""

    addresses: list[int]  # of the memory of every process, as this one sees it
    rank: int
    done: Tensor  # () int32, on the device: exchanges so far

    def exchange(self, own: Tensor, mean: bool, seconds: int = 600) -> Tensor:
        """What every process has put in, in the order of ranks in front of the shape of `own`, or the mean of it: the
        same bits everywhere; NaN for those that do not come in time. All processes call it in the same order, on one
        stream each."""
        result: Tensor = torch.ops.rtdetr.exchange(own, self.done, self.addresses, self.rank, mean, seconds)
        return result

    def work(self) -> bool:
        """Whether numbers arrive. There are machines that promise it and do not hold it."""
        ranks = torch.arange(len(self.addresses), dtype=torch.float32)
        return torch.equal(self.exchange(ranks[self.rank].to(self.done.device), mean=False, seconds=TRIAL).cpu(), ranks)


_inboxes: Inboxes | None = None


def connect(device: torch.device, host: str, gather: Callable[[Any], list[Any]]) -> str | None:
    """From now on exchanges go by memory, if that is possible among all processes: None; or a sentence why not.

    Every process calls it. host: name of its machine; gather: gives the values of all processes, in the order of ranks.
    """
    global _inboxes
    disconnect()
    why_not, handle = why_not_by_memory(device), torch.zeros(HANDLE_BYTES, dtype=torch.uint8)
    done, addresses = torch.zeros((), dtype=torch.int32, device=device), []
    rank, processes = dist.get_rank(), dist.get_world_size()
    if why_not is None:
        try:
            addresses = [torch.ops.rtdetr.make_inbox(done, handle, processes)] * processes
        except RuntimeError as error:
            why_not = f"the GPU gave no memory that others can open: {error}"
    found = gather((host, why_not, bytes(handle.tolist())))
    why_not = _first([reason for _, reason, _ in found])
    if len({each for each, _, _ in found}) > 1:
        why_not = "the processes are on several machines"
    if processes > MAX_PROCESSES:
        why_not = f"there are more than {MAX_PROCESSES} processes"
    if why_not is None:
        try:
            for other, (_, _, theirs) in enumerate(found):
                if other != rank:
                    handle = torch.tensor(list(theirs), dtype=torch.uint8)
                    addresses[other] = torch.ops.rtdetr.open_inbox(done, handle)
        except RuntimeError as error:
            why_not = f"the GPUs cannot write into one another's memory: {error}"
    why_not = _first(gather(why_not))
    if why_not is None:
        inboxes = Inboxes(addresses, rank, done)
        why_not = _first(
            gather(None if inboxes.work() else "what GPUs write into one another's memory does not arrive")
        )
        _inboxes = inboxes if why_not is None else None
    return why_not


def _first(reasons: list[str | None]) -> str | None:
    """Either all processes go by memory or none."""
    return next((reason for reason in reasons if reason is not None), None)


def disconnect() -> None:
    """From now on exchanges go by torch.distributed."""
    global _inboxes
    _inboxes = None


def by_memory() -> bool:
    return _inboxes is not None


def why_not_by_memory(device: torch.device) -> str | None:
    if device.type != "cuda" or not BUILT:
        return "the kernel needs GPUs, and a library built with it"
    return why_not_compiled(torch.empty(0, device=device))


def gather(own: Tensor) -> Tensor:
    """(processes, N) float32 for (1, N) of each process."""
    if _inboxes is not None and own.numel() <= MAX_NUMBERS:
        return _inboxes.exchange(own[0], mean=False)
    result = own.new_empty(dist.get_world_size(), own.shape[1])
    dist.all_gather_into_tensor(result, own)
    return result


def mean(own: Tensor) -> Tensor:
    """The mean of float32 tensors of all processes."""
    if _inboxes is not None and own.numel() <= MAX_NUMBERS:
        return _inboxes.exchange(own, mean=True)
    dist.all_reduce(own, op=dist.ReduceOp.AVG)
    return own
