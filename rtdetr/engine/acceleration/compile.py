"""Compiles the training step with torch.compile: fewer and larger kernels, and less work for the host."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable

import torch

from rtdetr.compile_settings import prepare_compiler
from rtdetr.config import ConfigError, Kernels, TrainConfig
from rtdetr.engine import distributed
from rtdetr.models.rtdetrv3 import Network
from rtdetr.wording import counted

WORTH_IT = 25000  # iterations per image size that repay 75 s of compilation (3 ms saved per iteration, H200)


def why_not_compile(
    cfg: TrainConfig, device: torch.device, iterations: int, sizes: int = 1, kernels: Kernels = "auto"
) -> str | None:
    """Returns the reason why the step is not compiled, or None if it is. iterations: those left; sizes: number of image
    sizes. Raises ConfigError if the config demands compilation and it is impossible."""
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
    """Compiles backbone, encoder and dense head in place. State dicts and earlier copies of the model are unaffected.

    Each image size gets a graph of its own: a dynamic-shape graph takes minutes to compile. Decoder and losses depend
    on the number of boxes; compiling them takes longer than it saves. Compiled code is kept for the next run.
    """
    prepare_compiler()
    for part in (model.backbone, model.encoder, model.dense_head):
        if part is not None:
            part.compile(backend=backend, dynamic=False)
