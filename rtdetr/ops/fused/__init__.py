"""Kernels of the training step, each beside the torch code that it stands for: a file is one of them.

`why_not_fused` is the one question before each; a file adds the shapes and types that its kernel takes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtdetr.ops import kernels
from rtdetr.ops.backend import why_not_compiled


def why_not_fused(operator: str, x: Tensor, compiler_too: bool = False) -> str | None:
    """None where the kernels of torch.ops.rtdetr.<operator> may run on `x`, else a sentence that says why not.

    compiler_too: under torch.compile, which does as well for the others.
    """
    if kernels.are_plain():
        return "kernels=plain"
    if not x.is_cuda:
        return "the kernel needs a GPU"
    if not compiler_too and torch.compiler.is_compiling():
        return "torch.compile does as well as the kernel"
    if (reason := why_not_compiled(x)) is not None:
        return reason
    from rtdetr.ops.compiled import BUILT  # here, as in why_not_compiled

    return None if operator in BUILT else "the kernel needs a library built with it"


def prefer_gpu_form(x: Tensor) -> bool:
    """Whether to compute in a form, of torch alone, that is only faster on a GPU."""
    return x.is_cuda and not kernels.are_plain()
