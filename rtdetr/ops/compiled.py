"""Loads the compiled libraries on import, and registers everything about their operators except the kernels with
PyTorch: fake tensors, gradients, autocast, vmap. Operators: `torch.ops.rtdetr.ms_deform_attn`, `..._backward`,
`..._fused`, `..._fused_backward`, `torch.ops.rtdetr.deformable_aggregation`, `..._backward` (CUDA only).

hw: 2 * L integers height, width; or empty, with the sizes in the tensors `shapes` (L, 2) and `starts` (L,).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.ops.reference import compute_dtype

HERE = Path(__file__).parent
BUILD = "pip install ."  # in the source tree
Hw = list[int]


def find_libraries() -> tuple[Path, dict[str, Any]]:
    """Folder of the libraries, and how they were built: this one, or if it has none and RTDETR_JIT=1, a cache that is
    filled on first use."""
    if os.environ.get("RTDETR_JIT") != "1" or (HERE / "_cpu.so").exists():
        return HERE, build_info(HERE)
    setup = HERE.parent.parent / "setup.py"
    if not setup.exists():
        raise FileNotFoundError(f"RTDETR_JIT=1 compiles from the source tree, but there is no {setup}; unset it")
    settings = sorted((k, v) for k, v in os.environ.items() if k in _BUILD_SETTINGS)
    digest = hashlib.sha256(f"{settings} {torch.__version__} {torch.version.cuda}".encode())
    for source in [setup, *sorted((HERE / "csrc").rglob("*.*"))]:
        digest.update(source.read_bytes())
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rtdetr" / digest.hexdigest()[:16]
    folder = cache / "rtdetr/ops"
    info = build_info(folder)
    if not _has_cpu(info):
        try:
            info = _fill(cache, setup)
        except subprocess.CalledProcessError:
            info = {"cpu": {"reason": f"RTDETR_JIT=1, but {setup} failed and says above why"}}
        except OSError as error:
            fix = f"set XDG_CACHE_HOME to a folder that can be written, or {BUILD}"
            info = {"cpu": {"reason": f"RTDETR_JIT=1, but {error.filename}: {error.strerror}", "fix": fix}}
    return (folder if _has_cpu(info) else HERE), info


def _fill(cache: Path, setup: Path) -> dict[str, Any]:
    """Compiles into the cache, which stays empty if nothing can be compiled; returns the decisions. Processes may run
    concurrently: each compiles into its own folder, and the first to finish renames it."""
    mine = cache.with_name(f"{cache.name}.{os.getpid()}")
    command = [sys.executable, setup.name, "-q", "build_ext", "--build-lib", mine, "--build-temp", mine / "objects"]
    try:
        mine.mkdir(parents=True, exist_ok=True)
        subprocess.run([str(part) for part in command], cwd=setup.parent, check=True, stdout=subprocess.DEVNULL)
        info = build_info(mine / "rtdetr/ops")
        if _has_cpu(info):
            try:
                mine.rename(cache)
            except OSError:
                if not _has_cpu(build_info(cache / "rtdetr/ops")):
                    raise
        return info
    finally:
        shutil.rmtree(mine, ignore_errors=True)


_BUILD_SETTINGS = ("RTDETR_CUDA", "FORCE_CPU", "RTDETR_DEBUG", "TORCH_CUDA_ARCH_LIST", "CUDA_HOME", "CXX")


def build_info(folder: Path) -> dict[str, Any]:
    """Build decisions recorded by setup.py, {} if it never ran here."""
    path = folder / "_build.json"
    return json.loads(path.read_text()) if path.exists() else {}


def _has_cpu(info: dict[str, Any]) -> bool:
    return bool(info.get("cpu", {}).get("built"))


def load(kind: str, folder: Path, info: dict[str, Any]) -> str | None:
    """Load the library of `kind` (cpu or cuda); return None, or a sentence on why it is not available."""
    library, facts = folder / f"_{kind}.so", info.get(kind, {})
    if not library.exists():
        reason, fix = facts.get("reason", "nothing has been compiled yet"), facts.get("fix", BUILD)
        return f"the {kind} kernels are not built ({reason}); to build them: {fix}"
    if kind == "cuda" and torch.version.cuda is None:
        return f"the cuda kernels are built, but torch {torch.__version__} has no CUDA; install a torch that has it"
    try:
        torch.ops.load_library(str(library))
    except OSError as error:
        return (
            f"the {kind} kernels are built (torch {facts.get('torch', 'unknown')}) but do not load with torch"
            f" {torch.__version__} ({error}); to build them again: {BUILD}"
        )
    if not hasattr(torch.ops.rtdetr, "matching_cost"):  # the newest operator
        return f"the {kind} kernels are of an older version of this package; to build them again: {BUILD}"
    return None


FOLDER, INFO = find_libraries()
WHY_NOT: dict[str, str | None] = {"cpu": load("cpu", FOLDER, INFO)}
# _cpu.so declares the operators, _cuda.so only adds kernels to them.
WHY_NOT["cuda"] = (
    f"the cuda kernels need the cpu ones, but {WHY_NOT['cpu']}" if WHY_NOT["cpu"] else load("cuda", FOLDER, INFO)
)


def _forward_fake(
    value: Tensor, hw: Hw, shapes: Tensor | None, starts: Tensor | None, points: Tensor, *_: Any
) -> Tensor:
    """points: the first tensor of the points, (B, Q, ...) of each operator, for the aggregation (B, A, ...)."""
    return value.new_empty(value.shape[0], points.shape[1], math.prod(value.shape[2:]))


def _backward_fake(
    grad: Tensor, value: Tensor, hw: Hw, shapes: Tensor | None, starts: Tensor | None, *points_and_flags: Any
) -> tuple[Tensor, ...]:
    tensors = [value, *(each for each in points_and_flags if isinstance(each, Tensor))]
    flags = [each for each in points_and_flags if isinstance(each, bool)]  # the first ones: which gradients are needed
    return tuple(tensor.new_empty(tensor.shape if needed else (0,)) for tensor, needed in zip(tensors, flags))


def _setup(ctx: Any, inputs: Sequence[Any], output: Tensor) -> None:
    value, ctx.hw, *others = inputs
    ctx.save_for_backward(value, *others[:5])
    ctx.scale = others[5:]  # of the fused operator, whose points are three tensors; empty for the others


def _gradients(ctx: Any, grad: Tensor, operator: Any, *flags: bool) -> tuple[Any, ...]:
    """Gradients of all inputs of an operator, by its backward operator; None for those that are not needed."""
    value, shapes, starts, *points = ctx.saved_tensors
    needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[4 : 4 + len(points)]
    grads = operator(grad, value, ctx.hw, shapes, starts, *points, *ctx.scale, *needed, *flags)
    by_value, *by_points = [g if n else None for g, n in zip(grads, needed, strict=True)]
    return by_value, None, None, None, *by_points, *[None for _ in ctx.scale]


def _attention_backward(operator: Any, ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return _gradients(ctx, grad, operator, torch.are_deterministic_algorithms_enabled())


def _aggregation_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    if torch.are_deterministic_algorithms_enabled():
        raise RuntimeError("deformable_aggregation: deterministic algorithms were asked for after its forward pass")
    return _gradients(ctx, grad, torch.ops.rtdetr.deformable_aggregation_backward)


def _no_double_backward(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError("the compiled backends of this operator have no second derivative; backend='torch' has")


def _assignment_fake(cost: Tensor, counts: Sequence[int], repeats: int) -> tuple[Tensor, Tensor]:
    shape = (*cost.shape[:-2], len(counts))
    return cost.new_empty((*shape, cost.shape[-1]), dtype=torch.int64), cost.new_empty(shape, dtype=torch.bool)


def _padded_assignment_fake(cost: Tensor, counts: Tensor, repeats: int) -> tuple[Tensor, Tensor]:
    return _assignment_fake(cost, range(counts.shape[0]), repeats)


def _top_k_fake(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    return values.new_empty(values.shape[0], k), values.new_empty(values.shape[0], k, dtype=torch.int64)


def _matching_cost_fake(
    logits: Tensor, boxes: Tensor, labels: Tensor, targets: Tensor, counts: Sequence[int], *_: float
) -> Tensor:
    layers, groups, _images, queries, _classes = logits.shape
    return boxes.new_empty(layers, groups, sum(counts) if counts else labels.numel(), queries)


def _autocast_forward(
    value: Tensor, hw: Hw, shapes: Tensor | None, starts: Tensor | None, locations: Tensor, weights: Tensor
) -> Tensor:
    """Converts values to the autocast type, locations and weights to float32."""
    device = value.device.type
    with torch.autocast(device, enabled=False):
        value = value if value.dtype == torch.float64 else value.to(torch.get_autocast_dtype(device))
        dtype = compute_dtype(value)
        return torch.ops.rtdetr.ms_deform_attn(value, hw, shapes, starts, locations.to(dtype), weights.to(dtype))


def _vmap(operator: Any) -> Any:
    """The rule under vmap: the mapped dimension joins the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Tensor, int]:
        if in_dims[2] is not None or in_dims[3] is not None:
            raise NotImplementedError(f"{operator}: vmap over spatial_shapes or level_start_index is not possible")
        size, folded = info.batch_size, list(args)
        for i in (0, 4, 5):
            new = in_dims[i] is None
            moved = args[i].unsqueeze(0).expand(size, *args[i].shape) if new else args[i].movedim(in_dims[i], 0)
            folded[i] = moved.flatten(0, 1)
        return operator(*folded).unflatten(0, (size, -1)), 0

    return rule


def _register() -> None:
    library, ops = torch.library, torch.ops.rtdetr
    for name, backward in (
        ("ms_deform_attn", partial(_attention_backward, ops.ms_deform_attn_backward)),
        ("ms_deform_attn_fused", partial(_attention_backward, ops.ms_deform_attn_fused_backward)),
        ("deformable_aggregation", _aggregation_backward),
    ):
        library.register_fake(f"rtdetr::{name}")(_forward_fake)
        library.register_fake(f"rtdetr::{name}_backward")(_backward_fake)
        library.register_autograd(f"rtdetr::{name}", backward, setup_context=_setup)
        library.register_autograd(f"rtdetr::{name}_backward", _no_double_backward)
    for name in ("ms_deform_attn", "deformable_aggregation"):
        library.register_vmap(f"rtdetr::{name}", _vmap(getattr(ops, name)))
    library.register_fake("rtdetr::linear_assignment")(_assignment_fake)
    library.register_fake("rtdetr::linear_assignment_padded")(_padded_assignment_fake)
    library.register_fake("rtdetr::top_k")(_top_k_fake)
    library.register_fake("rtdetr::matching_cost")(_matching_cost_fake)
    for key in ("AutocastCPU", "AutocastCUDA"):
        _AUTOCAST.impl("ms_deform_attn", _autocast_forward, key)


if WHY_NOT["cpu"] is None:
    _AUTOCAST = torch.library.Library("rtdetr", "IMPL")
    _register()
