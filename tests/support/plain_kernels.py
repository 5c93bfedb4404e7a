"""Sees which operators of this package run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class OurOperators(TorchDispatchMode):
    """In here the names of our operators that run are gathered, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "rtdetr":
            self.names.add(str(func))
        call: Callable[..., Any] = func
        return call(*args, **(kwargs or {}))
