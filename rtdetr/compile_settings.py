"""Settings of torch.compile, which are those of the process."""

from __future__ import annotations

import os
from pathlib import Path

import torch

CACHE_KEY, CACHE = "TORCHINDUCTOR_CACHE_DIR", Path("~/.cache/rtdetr/inductor")
TORCH_DEFAULT = "torchinductor_"  # beginning of its temporary folder, which importing torchvision may set
MAX_SHAPES = 64  # of one function, in all models; by default torch gives up after 8 of them, silently


def prepare_compiler() -> None:
    """Keeps compiled code in CACHE, where the next process finds it, unless the user has chosen another folder, and
    allows MAX_SHAPES."""
    chosen = os.environ.get(CACHE_KEY)
    if chosen is None or Path(chosen).name.startswith(TORCH_DEFAULT):
        os.environ[CACHE_KEY] = str(CACHE.expanduser())
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_SHAPES)
