"""Linear assignment: which query gets which box at the least total cost, for many pictures and sets of queries at once.

Letters: B pictures, T boxes of all pictures together, Q queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rtdetr.ops import compiled
from rtdetr.ops.backend import why_not_compiled

AssignmentBackend = Literal["auto", "scipy", "cpu", "cuda"]
BACKENDS: tuple[str, ...] = get_args(AssignmentBackend)
MAX_COLUMNS = 2048  # of a problem on a GPU: a block keeps them in registers
LARGEST = 1e300  # of a cost; beyond it, sums along a path could overflow


def linear_assignment(
    cost: Tensor, counts: Sequence[int] | Tensor, repeats: int = 1, *, backend: AssignmentBackend = "auto"
) -> Tensor:
    """Return (..., B, Q) int64: the box that each query got, counted within its picture, or -1.

    cost:    (..., T, Q) float32 or float64, on any device; the rows are boxes, picture after picture
    counts:  boxes of each of the B pictures; they add up to T. Or (B,) int64 on the device of the costs: then every
             picture has T / B rows, of which its boxes are the first, and the host need not know how many
    repeats: how many queries a box is offered to; where the offers outnumber the queries, every query gets a box
    backend: scipy (the reference, one problem after another on the host), cpu (threads), cuda, or auto

    The total cost of every picture is the least possible. Where several assignments cost the same, backends may choose
    different ones. The cuda backend does not wait for the device. A picture that has a NaN, infinite or absurd cost
    (beyond 1e300) gets -1 everywhere. Raises ValueError for sizes that do not fit, RuntimeError if a named backend
    cannot run.
    """
    return linear_assignment_checked(cost, counts, repeats, backend=backend)[0]


def linear_assignment_checked(
    cost: Tensor, counts: Sequence[int] | Tensor, repeats: int = 1, *, backend: AssignmentBackend = "auto"
) -> tuple[Tensor, Tensor]:
    """`linear_assignment`, and (..., B) bool: the pictures whose costs are not all finite."""
    if isinstance(counts, Tensor):
        return _padded(cost, counts, repeats, backend)
    counts = list(counts)
    if cost.dim() < 2 or cost.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"cost: expected (..., T, Q) float32 or float64, got {tuple(cost.shape)} {cost.dtype}")
    if min(counts, default=0) < 0 or sum(counts) != cost.shape[-2]:
        raise ValueError(f"counts: expected numbers that add up to T = {cost.shape[-2]}, got {counts}")
    if repeats < 1:
        raise ValueError(f"repeats: expected at least 1, got {repeats}")
    if resolve_assignment_backend(backend, cost, counts, repeats) == "scipy":
        return _by_scipy(cost, counts, repeats)
    index, bad = torch.ops.rtdetr.linear_assignment(cost.detach(), counts, repeats)
    return index, bad


def _padded(cost: Tensor, counts: Tensor, repeats: int, backend: AssignmentBackend) -> tuple[Tensor, Tensor]:
    """The same for counts in a tensor. Backends on the host look into it."""
    pictures = counts.numel()
    if counts.dim() != 1 or counts.dtype != torch.int64 or cost.dim() < 2 or not pictures or cost.shape[-2] % pictures:
        raise ValueError(
            f"counts: expected (B,) int64 for costs (..., B * M, Q), got {tuple(counts.shape)} {counts.dtype} for "
            f"{tuple(cost.shape)}"
        )
    slots = cost.shape[-2] // pictures
    if repeats >= 1 and resolve_assignment_backend(backend, cost, [slots] * pictures, repeats) == "cuda":
        index, bad = torch.ops.rtdetr.linear_assignment_padded(cost.detach(), counts, repeats)
        return index, bad
    own = [min(max(count, 0), slots) for count in counts.tolist()]
    rows = [picture * slots + slot for picture, count in enumerate(own) for slot in range(count)]
    return linear_assignment_checked(cost[..., rows, :], own, repeats, backend=backend)


def resolve_assignment_backend(
    backend: AssignmentBackend, cost: Tensor, counts: Sequence[int], repeats: int
) -> Literal["scipy", "cpu", "cuda"]:
    """Return the backend that runs; `auto` takes scipy where no kernel can, a named one raises RuntimeError."""
    if backend not in BACKENDS:
        raise ValueError(f"backend: expected one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "scipy":
        return "scipy"
    device: Literal["cpu", "cuda"] = "cuda" if cost.is_cuda else "cpu"
    if backend not in ("auto", device):
        raise RuntimeError(f"backend={backend!r} needs costs on {backend}, got {cost.device=!s}; move them or use auto")
    columns = max(cost.shape[-1], repeats * max(counts, default=0))
    why_not = why_not_compiled(cost)
    if why_not is None and device == "cuda" and columns > MAX_COLUMNS:
        why_not = f"the cuda kernel takes up to {MAX_COLUMNS} queries and copies of a picture's boxes, got {columns}"
    if why_not is None:
        return device
    if backend == "auto":
        return "scipy"
    raise RuntimeError(f"backend={backend!r} cannot run: {why_not}")


def _by_scipy(cost: Tensor, counts: list[int], repeats: int) -> tuple[Tensor, Tensor]:
    from scipy.optimize import linear_sum_assignment  # here because importing it takes longer than `import rtdetr.ops`

    on_host = cost.detach().cpu().numpy()
    index = np.full((*cost.shape[:-2], len(counts), cost.shape[-1]), -1, dtype=np.int64)
    bad = np.zeros(index.shape[:-1], dtype=bool)
    ends = np.cumsum(counts)
    for at in np.ndindex(*index.shape[:-1]):
        *group, picture = at
        own = on_host[tuple(group)][ends[picture] - counts[picture] : ends[picture]].astype(np.float64)
        bad[at] = not (np.abs(own) <= LARGEST).all()
        if not bad[at] and len(own):
            rows, queries = linear_sum_assignment(np.tile(own, (repeats, 1)))
            index[at][queries] = rows % len(own)  # row r of the tiled cost is a copy of box r % n
    return torch.from_numpy(index).to(cost.device), torch.from_numpy(bad).to(cost.device)


def _fake(cost: Tensor, counts: Sequence[int], repeats: int) -> tuple[Tensor, Tensor]:
    shape = (*cost.shape[:-2], len(counts))
    return cost.new_empty((*shape, cost.shape[-1]), dtype=torch.int64), cost.new_empty(shape, dtype=torch.bool)


def _fake_padded(cost: Tensor, counts: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    return _fake(cost, range(counts.shape[0]), repeats)


if compiled.WHY_NOT["cpu"] is None:
    torch.library.register_fake("rtdetr::linear_assignment")(_fake)
    torch.library.register_fake("rtdetr::linear_assignment_padded")(_fake_padded)
