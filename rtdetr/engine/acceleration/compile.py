"""The training step through torch.compile: fewer and larger kernels, and less work for the host."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch

from rtdetr.config import ConfigError, Kernels, TrainConfig
from rtdetr.engine import distributed
from rtdetr.models.rtdetrv3 import Network
from rtdetr.wording import counted

MAX_GRAPHS = 64  # of one function, before torch stops compiling it
WORTH_IT = 25000  # iterations of an image size that win back the 75 seconds it takes to compile (3 ms each, H200)


def why_not_compile(
    cfg: TrainConfig, device: torch.device, iterations: int, sizes: int = 1, kernels: Kernels = "auto"
) -> str | None:
    """Why the step of a run with that many iterations left, on that many image sizes, is not compiled; None: it is.
    Raises ConfigError if the config demands compilation and it is impossible."""
    if cfg.compile == "off":
        return "train.compile=off"
    if kernels == "plain":
        if cfg.compile == "on":
            raise ConfigError("train.compile=on is not possible with kernels=plain; set it to auto")
        return "kernels=plain"
    if cfg.compile == "on":
        return None
    if device.type != "cuda":
        return "there is no GPU"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "triton finds no C compiler"
    if distributed.world_size() > 1:  # pytorch/pytorch#161302
        return "batch norm of several processes breaks what is compiled into pieces"
    if iterations < WORTH_IT * sizes:
        return f"compiling {counted(sizes, 'image size')} takes longer than it saves in {iterations} iterations"
    return None


def compile_step(model: Network, backend: str | Callable[..., object] = "inductor") -> None:
    """Compiles the parts that see images, in place: backbone, encoder, dense head. Existing state dicts and copies stay
    valid.

    Each image size gets its own graph: one for all takes torch minutes of symbolic reasoning, and graphs of decoder and
    losses, which depend on the number of boxes, cost more time than they save. Inductor's output is cached in
    ~/.cache/rtdetr, unless TORCHINDUCTOR_CACHE_DIR names another folder.
    """
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path.home() / ".cache" / "rtdetr" / "inductor"))
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_GRAPHS)
    for part in (model.backbone, model.encoder, model.dense_head):
        if part is not None:
            part.compile(backend=backend, dynamic=False)
