"""The training step through torch.compile: fewer and larger kernels, and a host that keeps ahead of the GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rtdetr.config import TrainConfig
from rtdetr.losses.criterion import Criterion
from rtdetr.models.rtdetrv3 import RTDETRv3

MAX_GRAPHS = 64  # of one function, before torch gives up on it
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


def compile_step(model: RTDETRv3, criterion: Criterion, backend: str | Callable[..., object] = "inductor") -> None:
    """Compiles the parts of the model and the losses in place; state dicts and copies made before stay as they are.

    What sees pictures gets a graph for each picture size: one for all takes torch minutes to reason about. What follows
    the number of boxes gets one for all. Random numbers are drawn outside, so that losses are those of the plain step
    up to rounding. What inductor makes is kept in ~/.cache/rtdetr between runs, unless TORCHINDUCTOR_CACHE_DIR names
    another place.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "rtdetr" / "inductor"))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    parts = [model.backbone, model.encoder, model.decoder.selector, *model.query_groups.selectors]
    for part in [*parts, model.dense_head] if model.dense_head is not None else parts:
        part.compile(backend=backend, dynamic=False)
    remember = torch.compile(model.decoder.remember, backend=backend, dynamic=False)
    model.decoder.remember = remember  # type: ignore[method-assign]
    model.decoder.compile(backend=backend)
    criterion.compile(backend=backend)
