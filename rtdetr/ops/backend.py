"""Selects the implementation of the op: `why_not_compiled` is the check, `resolve_backend` falls back or raises."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Collection, Sequence
from functools import cache
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from rtdetr.ops import kernels

Backend = Literal["auto", "cuda", "cpu", "torch"]
BACKENDS: tuple[str, ...] = get_args(Backend)
SpatialShapes = Tensor | Sequence[tuple[int, int]]
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
MAX_HOST_LEVELS = 32  # kMaxHostLevels of csrc/cuda/common.cuh

REFUSED = re.compile(r"[^,]+, [^,]*\.(?:cpp|h):\d+, (.*)")  # function, source location, message

logger = logging.getLogger("rtdetr")


def why_not_compiled(value: Tensor, host_levels: int = 0) -> str | None:
    """Return None if a compiled kernel supports this value and number of levels with sizes on the host (0: sizes are in
    a tensor), else a sentence with the reason. The first call loads the libraries."""
    device = value.device.type
    if device not in ("cuda", "cpu"):
        return f"there is no compiled kernel for the device type {device!r}"
    if value.dtype not in DTYPES:
        return f"the compiled kernels take float32, float64, float16 and bfloat16 values, got {value.dtype}"
    from rtdetr.ops import compiled  # local: kernels=plain never loads the libraries

    if compiled.WHY_NOT[device] is None and device == "cuda":
        if host_levels > MAX_HOST_LEVELS:
            return (
                f"the cuda kernels take the sizes of at most {MAX_HOST_LEVELS} levels as pairs of integers, got"
                f" {host_levels}; give spatial_shapes as a tensor on the device"
            )
        return _why_not_this_gpu(value.device.index)
    return compiled.WHY_NOT[device]


def _why_not_this_gpu(index: int | None) -> str | None:
    """Compares architectures in advance, as a library without code for the GPU would fail at its first launch."""
    return _compare_architectures(index)


# Otherwise torch.compile would trace into the cached function. torch.compiler.assume_constant_result does only this,
# but first imports the compiler, which takes as long as importing torch.
vars(_why_not_this_gpu)["_dynamo_marked_constant"] = True


@cache
def _compare_architectures(index: int | None) -> str | None:
    from rtdetr.ops import compiled

    major, minor = torch.cuda.get_device_capability(index)
    archs = compiled.INFO.get("cuda", {}).get("archs", [])
    if covers(archs, major, minor):
        return None
    return (
        f"the cuda kernels are built for the architectures {' '.join(archs)}, which leave out {major}.{minor}"
        f" ({torch.cuda.get_device_name(index)}); to build for it: {compiled.BUILD}"
    )


def covers(archs: list[str], major: int, minor: int) -> bool:
    """Whether code for `archs` ("90", "90a", "120+PTX") runs on compute capability major.minor: binaries need the same
    major and no higher minor, PTX no higher capability, and names with a letter an exact match."""
    for arch in archs:
        name = arch.removesuffix("+PTX")
        if not name.isdigit():
            if name.rstrip("af") == f"{major}{minor}":
                return True
            continue
        capability = (int(name[:-1]), int(name[-1]))
        if capability <= (major, minor) and (capability[0] == major or arch.endswith("+PTX")):
            return True
    return False


def check_tensors(**named: object) -> None:
    """Raises ValueError for all but dense tensors of real numbers, and for one on another device than the first."""
    (first, leader), *_ = named.items()
    for name, each in named.items():
        if not isinstance(each, Tensor):
            raise ValueError(f"{name}: expected a tensor, got {type(each).__name__}")
        if each.is_complex() or each.layout != torch.strided:
            raise ValueError(f"{name}: expected a dense tensor of real numbers, got {each.dtype} in {each.layout}")
        assert isinstance(leader, Tensor)
        if each.device != leader.device:
            raise ValueError(f"{name}: expected on {leader.device}, where {first} is, got {each.device}")


def check_readable(name: str, values: object, on_meta: bool = False) -> None:
    """Raises ValueError for a tensor that `check_tensors` refuses and, unless on_meta, for one on the meta device."""
    if isinstance(values, Tensor):
        check_tensors(**{name: values})
        if values.is_meta and not on_meta:
            raise ValueError(f"{name}: expected a tensor that holds numbers, got one on the meta device")


def is_pair(pair: object) -> bool:
    """Whether it is a height and a width, two whole numbers. In an export symbols or tensors stand for them."""
    return isinstance(pair, Collection) and len(pair) == 2 and all(map(_is_whole, pair))


def _is_whole(side: object) -> bool:
    if isinstance(side, Tensor):
        return side.dim() == 0 and not side.is_floating_point()
    return isinstance(side, (Integral, torch.SymInt)) and not isinstance(side, bool)


def as_autocast(value: Tensor) -> Tensor:
    """Under autocast, converts values to the autocast type; locations and weights stay float32."""
    device, dtype = value.device.type, value.dtype
    if device == "meta" or dtype == torch.float64 or not dtype.is_floating_point:
        return value
    return value.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else value


def without_autocast(value: Tensor) -> torch.autocast:
    """Context manager: inside, autocast does not change types."""
    return torch.autocast("cpu" if value.is_meta else value.device.type, enabled=False)


def operator_levels(
    spatial_shapes: SpatialShapes, level_start_index: Tensor | None, value: Tensor
) -> tuple[list[int], Tensor | None, Tensor | None]:
    """Three arguments of the compiled operators: integers for sizes known on the host, else two tensors."""
    if not isinstance(spatial_shapes, Tensor):
        return [size for pair in spatial_shapes for size in pair], None, None
    shapes = spatial_shapes.to(value.device, torch.int64, non_blocking=True)
    if level_start_index is not None:
        check_tensors(level_start_index=level_start_index)
        check_readable("level_start_index", level_start_index, value.is_meta)
        return [], shapes, level_start_index.to(value.device, torch.int64, non_blocking=True)
    cells = shapes[:, 0] * shapes[:, 1]
    return [], shapes, cells.cumsum(0) - cells


def run(operator: Any, *arguments: Any) -> Any:
    """Calls a compiled operator. Raises ValueError for arguments that it refuses, with only its own message, and
    NotImplementedError for derivatives by torch.func, and in forward mode, which torch would take to be 0."""
    if torch.compiler.is_compiling():
        return operator(*arguments)
    if any(isinstance(each, Tensor) and unpack_dual(each).tangent is not None for each in arguments):
        raise NotImplementedError(
            "the compiled backends have no forward-mode derivative; backend='torch' has one with respect to the weights"
        )
    try:
        return operator(*arguments)
    except RuntimeError as error:
        if "functorch transforms" in str(error):
            raise NotImplementedError("torch.func can only differentiate backend='torch'") from None
        if str(error).startswith("rtdetr::") and "for argument 'hw'" in str(error):
            raise ValueError("spatial_shapes: expected whole numbers of at most 64 bits") from None
        if (said := REFUSED.match(str(error))) is None:
            raise
        raise (ValueError if ": expected" in said[1] or "cells" in said[1] else RuntimeError)(said[1]) from None


def check_name(backend: str, backends: tuple[str, ...] = BACKENDS) -> None:
    """Raises ValueError for an unknown backend."""
    if backend not in backends:
        raise ValueError(f"backend: expected one of {', '.join(backends)}, got {backend!r}")


def resolve_backend(
    backend: Backend, value: Tensor, host_levels: int = 0, op: str = "ms_deform_attn"
) -> Literal["cuda", "cpu", "torch"]:
    """Return the backend that runs for this value and these levels (see why_not_compiled). `auto` logs once why it
    falls back to torch; a named backend that cannot run raises RuntimeError with the same sentence; an unknown name
    raises ValueError."""
    check_name(backend)
    if backend == "torch" or (backend == "auto" and kernels.are_plain()):
        return "torch"
    if backend == "auto":
        # only a process that exports has imported torch.onnx
        if (torch.compiler.is_compiling() or "torch.onnx" in sys.modules) and torch.onnx.is_in_onnx_export():
            return "torch"
        reason = why_not_compiled(value, host_levels)
        if reason is None:
            return "cuda" if value.is_cuda else "cpu"
        if not torch.compiler.is_compiling():
            _log_once(op, reason)
        return "torch"
    if value.device.type != backend:
        raise RuntimeError(f"backend={backend!r} needs {backend} tensors, got {value.device=!s}; move them or use auto")
    reason = why_not_compiled(value, host_levels)
    if reason is not None:
        raise RuntimeError(f"backend={backend!r} cannot run: {reason}")
    return backend


@cache
def _log_once(op: str, reason: str) -> None:
    logger.warning("%s takes the torch backend: %s", op, reason)
