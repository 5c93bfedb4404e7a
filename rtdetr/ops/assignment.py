"""Linear assignment: assigns boxes to queries at minimal total cost, for many images and sets of queries at once.

Letters: B images, T boxes of all images together, Q queries.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rtdetr.ops import kernels
from rtdetr.ops.backend import check_name, check_readable, check_tensors, run, why_not_compiled

AssignmentBackend = Literal["auto", "scipy", "cpu", "cuda"]
MAX_COLUMNS = 2048  # of a problem on a GPU: a block holds them in registers
LARGEST = 1e300  # largest valid cost; beyond it, sums along a path could overflow


def linear_assignment(
    cost: Tensor, counts: Sequence[int] | Tensor, repeats: int = 1, *, backend: AssignmentBackend = "auto"
) -> Tensor:
    """Return (..., B, Q) int64: the box assigned to each query, counted within its image, or -1.

    cost:    (..., T, Q) floating point, on any device; the rows are boxes, image after image
    counts:  boxes of each of the B images, which add up to T; a tensor is read on the host
    repeats: number of queries that each box is assigned to; if there are fewer queries, every query gets a box
    backend: scipy (the reference, one problem after another on the host), cpu (threads), cuda, or auto

    The total cost of every image is minimal, computed in float64. If several assignments cost the same, backends may
    choose different ones. The cuda backend does not wait for the device. An image with a NaN, infinite or too large
    cost (beyond 1e300) gets -1 everywhere. Raises ValueError if shapes do not match, RuntimeError if a named backend
    cannot run.
    """
    return linear_assignment_checked(cost, counts, repeats, backend=backend)[0]


def linear_assignment_checked(
    cost: Tensor, counts: Sequence[int] | Tensor, repeats: int = 1, *, backend: AssignmentBackend = "auto"
) -> tuple[Tensor, Tensor]:
    """`linear_assignment`, and (..., B) bool: the images whose costs are not all finite."""
    (cost, repeats), numbers = _as_solvers_take_it(cost, repeats), _whole_numbers(counts)
    if min(numbers, default=0) < 0 or sum(numbers) != cost.shape[-2]:
        raise ValueError(f"counts: expected numbers from 0 that add up to T = {cost.shape[-2]}, got {numbers}")
    if resolve_assignment_backend(backend, cost, numbers, repeats) == "scipy":
        return _by_scipy(cost, numbers, repeats)
    return run(torch.ops.rtdetr.linear_assignment, cost, numbers, repeats)


def linear_assignment_padded(
    cost: Tensor, counts: Tensor, repeats: int = 1, *, backend: AssignmentBackend = "auto"
) -> tuple[Tensor, Tensor]:
    """`linear_assignment_checked` if the host does not know the numbers of boxes, as in a CUDA graph.

    cost:   (..., B * M, Q), M rows for each image, the image's boxes first
    counts: (B,) int64 on the device of the costs, each at most M; the cuda backend does not read it on the host
    """
    check_tensors(cost=cost, counts=counts)
    (cost, repeats), images = _as_solvers_take_it(cost, repeats), counts.numel()
    if counts.dim() != 1 or counts.dtype != torch.int64 or not images or cost.shape[-2] % images:
        raise ValueError(
            f"counts: expected (B,) int64 for costs (..., B * M, Q), got {tuple(counts.shape)} {counts.dtype} for "
            f"{tuple(cost.shape)}"
        )
    slots = cost.shape[-2] // images
    if resolve_assignment_backend(backend, cost, [slots] * images, repeats) == "cuda":
        return run(torch.ops.rtdetr.linear_assignment_padded, cost, counts, repeats)
    own = [min(max(count, 0), slots) for count in counts.tolist()]
    rows = [image * slots + slot for image, count in enumerate(own) for slot in range(count)]
    return linear_assignment_checked(cost[..., rows, :], own, repeats, backend=backend)


def _as_solvers_take_it(cost: Tensor, repeats: int) -> tuple[Tensor, int]:
    """The costs in float32 or float64, detached; and the repeats, at most the number of queries: a box cannot get more
    of them."""
    check_tensors(cost=cost)
    check_readable("cost", cost)
    if cost.dim() < 2 or not cost.is_floating_point():
        raise ValueError(f"cost: expected (..., T, Q) floating point, got {tuple(cost.shape)} {cost.dtype}")
    if not isinstance(repeats, int | np.integer) or repeats < 1:
        raise ValueError(f"repeats: expected a whole number of at least 1, got {repeats}")
    cost = cost.detach() if cost.dtype in (torch.float32, torch.float64) else cost.detach().float()
    return cost, min(int(repeats), max(cost.shape[-1], 1))


def _whole_numbers(counts: Sequence[int] | Tensor) -> list[int]:
    check_readable("counts", counts)
    try:
        listed = counts.tolist() if isinstance(counts, Tensor) else list(counts)
        return [operator.index(count) for count in listed]
    except TypeError as error:
        raise ValueError(f"counts: expected a whole number for each image, got {counts}") from error


def resolve_assignment_backend(
    backend: AssignmentBackend, cost: Tensor, counts: Sequence[int], repeats: int
) -> Literal["scipy", "cpu", "cuda"]:
    """Return the backend that runs. `auto` uses scipy if no kernel can run; a named backend raises RuntimeError."""
    check_name(backend, get_args(AssignmentBackend))
    if backend == "scipy" or (backend == "auto" and kernels.are_plain()):
        return "scipy"
    device: Literal["cpu", "cuda"] = "cuda" if cost.is_cuda else "cpu"
    if backend not in ("auto", device):
        raise RuntimeError(f"backend={backend!r} needs costs on {backend}, got {cost.device=!s}; move them or use auto")
    columns = max(cost.shape[-1], repeats * max(counts, default=0))
    why_not = why_not_compiled(cost)
    if why_not is None and device == "cuda" and columns > MAX_COLUMNS:
        why_not = f"the cuda kernel takes up to {MAX_COLUMNS} queries and copies of an image's boxes, got {columns}"
    if why_not is None:
        return device
    if backend == "auto":
        return "scipy"
    raise RuntimeError(f"backend={backend!r} cannot run: {why_not}")


def _by_scipy(cost: Tensor, counts: list[int], repeats: int) -> tuple[Tensor, Tensor]:
    from scipy.optimize import linear_sum_assignment  # local, as importing it takes longer than `import rtdetr.ops`

    on_host = cost.cpu().numpy()
    index = np.full((*cost.shape[:-2], len(counts), cost.shape[-1]), -1, dtype=np.int64)
    bad = np.zeros(index.shape[:-1], dtype=bool)
    ends = np.cumsum(counts)
    for at in np.ndindex(*index.shape[:-1]):
        *group, image = at
        own = on_host[tuple(group)][ends[image] - counts[image] : ends[image]].astype(np.float64)
        bad[at] = not (np.abs(own) <= LARGEST).all()
        if not bad[at] and len(own):
            rows, queries = linear_sum_assignment(np.tile(own, (repeats, 1)))
            index[at][queries] = rows % len(own)  # row r of the tiled cost is a copy of box r % n
    return torch.from_numpy(index).to(cost.device), torch.from_numpy(bad).to(cost.device)
