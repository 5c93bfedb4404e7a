"""The training step through torch.compile: fewer and larger kernels, and a host that keeps ahead of the GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from rtdetr.config import TrainConfig
from rtdetr.losses.criterion import Criterion
from rtdetr.types import Targets

MAX_GRAPHS = 32  # of one function, before torch gives up on it
WORTH_IT = 1000  # iterations, about a minute on a large GPU, that win back what compiling costs


def why_not_compile(cfg: TrainConfig, device: torch.device, iterations: int) -> str | None:
    """Why the step of a run with so many iterations left runs as it stands; None: it shall be compiled."""
    if cfg.compile == "off":
        return "train.compile=off"
    if cfg.compile == "on":
        return None
    if device.type != "cuda":
        return "there is no GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "triton finds no C compiler"
    if iterations < WORTH_IT:
        return f"{iterations} iterations do not win back the minute that compiling takes"
    return None


def compile_step(model: nn.Module, criterion: Criterion, backend: str | Callable[..., object] = "inductor") -> None:
    """Compiles the forward pass and the losses in place; state dicts and copies made before stay as they are.

    Random numbers are torch's own in the same order, so that losses are those of the plain step up to rounding. What
    inductor makes is kept in ~/.cache/rtdetr between runs, unless TORCHINDUCTOR_CACHE_DIR names another place.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "rtdetr" / "inductor"))
    options: dict[str, str | int | bool] | None = {"fallback_random": True} if backend == "inductor" else None
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    model.compile(backend=backend, options=options)
    criterion.compile(backend=backend, options=options)


def mark_sizes(images: Tensor, targets: Targets, several_sizes: bool) -> None:
    """Tells the compiler what differs from batch to batch, so that the first graph of the model serves them all: the
    boxes of the fullest picture and, with several sizes, height and width. (A number of 1 is always a graph apart.)"""
    for tensor in targets[:4]:
        torch._dynamo.maybe_mark_dynamic(tensor, 1)
    for axis in (2, 3) if several_sizes else ():
        torch._dynamo.maybe_mark_dynamic(images, axis)
