"""Process groups and collectives under torchrun. Every function also works in a single process."""

from __future__ import annotations

import itertools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rtdetr.engine.peer_watchdog import PeerWatchdog, ProcessLost
from rtdetr.wording import option

Result = TypeVar("Result")
LOOKING = 5.0  # seconds to wait for news of a dead process after a collective has failed

_group_numbers = itertools.count()
_last_acts: list[weakref.finalize[..., object]] = []


class DeviceError(ValueError):
    """The device does not exist or cannot be used; the message is one sentence."""

    exit_code = 2


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    return rank() == 0


@contextmanager
def process_group(device: str, training: bool = False) -> Iterator[torch.device]:
    """Context manager: yields the device of this process; under torchrun it creates and destroys the process group.

    device: "auto" (GPU if there is one), "cpu", "cuda" or "cuda:1"; training: see let_memory_grow. Under torchrun every
    process takes the GPU of its LOCAL_RANK. CPU tensors use gloo even then, so that host decisions (stop now?) need no
    device synchronisation.
    Raises DeviceError if the device does not exist, and ProcessLost if another process has died.
    """
    chosen = choose_device(device)
    if chosen.type == "cuda":
        if training:
            let_memory_grow()
        torch.cuda.set_device(chosen)
    if os.environ.get("WORLD_SIZE", "1") == "1" or dist.is_initialized():
        yield chosen
        return
    store, number, count = next(dist.rendezvous("env://"))
    # torchrun's store keeps the addresses of earlier groups of these processes, to which nobody listens any more.
    store = dist.PrefixStore(f"group {next(_group_numbers)}", store)
    kinds, on_gpu = ("cpu:gloo,cuda:nccl", chosen) if chosen.type == "cuda" else ("gloo", None)
    dist.init_process_group(kinds, store=store, rank=number, world_size=count, device_id=on_gpu)
    line, well = PeerWatchdog(rank(), world_size(), gather_objects), False
    if line.why_not:
        print(f"warning: {line.why_not}", file=sys.stderr)
    try:
        yield chosen
        well = True
    except RuntimeError as error:
        # torch raises exactly these types if it cannot reach another process; other subclasses have other causes.
        torchs = type(error) is RuntimeError or isinstance(error, dist.DistError)
        if torchs and (sentence := line.lost(LOOKING)) is not None:
            raise ProcessLost(sentence) from error
        raise
    finally:
        for act in _last_acts:
            act()
        _last_acts.clear()
        line.close(well)
        if well:  # after a failure it could wait forever for a dead process
            dist.destroy_process_group()


def let_memory_grow() -> None:
    """Enables expandable memory segments, which avoid fragmentation; call it before CUDA starts. CUDA graphs would keep
    the fragmented memory, 1 GiB of 7.4. Keeps the user's allocator settings."""
    if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def before_the_end(owner: object, act: Callable[[], object]) -> None:
    """Calls `act` before the process group ends, when `owner` is garbage collected, or when the program ends."""
    _last_acts[:] = [each for each in _last_acts if each.alive]
    _last_acts.append(weakref.finalize(owner, act))


def choose_device(device: str) -> torch.device:
    """Parses a device name, see `process_group`. Raises DeviceError if it is unknown or the GPU does not exist."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.isdecimal():  # the notation of other projects
        device = f"cuda:{device}"
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):  # mps, xpu: untested
        several = "; for several GPUs, torchrun --nproc_per_node=N tools/train.py ..." if "," in device else ""
        raise DeviceError(f"device {device}: expected cpu, cuda or cuda:N{several}")
    if chosen.type == "cuda":
        index, count = int(os.environ.get("LOCAL_RANK", chosen.index or 0)), torch.cuda.device_count()
        if index >= count:
            cpu = option("--device cpu", "device='cpu'")
            raise DeviceError(f"device {device}: no GPU number {index}, this machine has {count}; use {cpu}")
        chosen = torch.device("cuda", index)
    return chosen


def refuse_several(what: str) -> None:
    """Raises DeviceError if several processes run."""
    if world_size() > 1:
        raise DeviceError(f"{what} runs in one process; start it without torchrun")


def gather_objects(value: Any) -> list[Any]:
    """Returns the `value` of every process, in rank order, on every process."""
    if world_size() == 1:
        return [value]
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def from_main(decide: Callable[[], Result]) -> Result:
    """Runs `decide` in the main process and returns its result in every process. If it raises ValueError or
    RuntimeError, every process raises it, so that none hangs."""
    result, error = None, None
    if is_main():
        try:
            result = decide()
        except (ValueError, RuntimeError) as raised:
            error = raised
    result, error = gather_objects((result, error))[0]
    if error is not None:
        raise error
    return result


def take_from_main(tensors: Iterable[Tensor]) -> None:
    """Broadcasts tensors from rank 0, in place; every process passes the same number of tensors, of equal shapes."""
    if world_size() == 1:
        return
    for tensor in tensors:
        dist.broadcast(tensor, src=0)


def average(tensor: Tensor) -> None:
    """Replaces a tensor by its mean over all processes."""
    if world_size() == 1:
        return
    if tensor.is_cuda:
        dist.all_reduce(tensor, op=dist.ReduceOp.AVG)
    else:  # gloo has no mean
        dist.all_reduce(tensor)
        tensor /= world_size()


def any_process(flag: bool) -> bool:
    """Returns True on every process if `flag` is true on any. Uses CPU tensors: no device synchronisation."""
    if world_size() == 1:
        return flag
    count = torch.tensor(int(flag))
    dist.all_reduce(count)
    return bool(count)
