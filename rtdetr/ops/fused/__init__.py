"""Kernels of the training step, each with the torch code that it replaces: one file per kernel. A deployed model uses
some of them.

`why_not_fused` is the common check before each; a file adds the shapes and types that its kernel takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.ops import kernels
from rtdetr.ops.backend import why_not_compiled


def why_not_fused(x: Tensor, compiler_too: bool = False) -> str | None:
    """None if kernels may run on `x`, else a sentence with the reason.

    compiler_too: also under torch.compile, whose own code is as good for the other operators.
    """
    if kernels.are_plain():
        return "kernels=plain"
    if not x.is_cuda:
        return "the kernel needs a GPU"
    if not compiler_too and torch.compiler.is_compiling():
        return "torch.compile does as well as the kernel"
    return why_not_compiled(x)


def prefer_gpu_form(x: Tensor) -> bool:
    """Whether to use an implementation, in torch only, that is faster on a GPU but not elsewhere."""
    return x.is_cuda and not kernels.are_plain()
