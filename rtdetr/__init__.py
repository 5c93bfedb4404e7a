"""RT-DETRv3: a real-time object detector. `from rtdetr import RTDETRv3` is the way in; see docs/python.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from rtdetr.garbage_collection import collection_paused

if TYPE_CHECKING:
    from rtdetr.api import RTDETRv3
    from rtdetr.engine.callbacks import Callback
    from rtdetr.gpu_startup import wake_gpu
    from rtdetr.inference.result import Result

__version__ = "0.1.0"
__all__ = ["Callback", "RTDETRv3", "Result", "__version__", "wake_gpu"]

_HOMES = {
    "Callback": "rtdetr.engine.callbacks",
    "RTDETRv3": "rtdetr.api",
    "Result": "rtdetr.inference.result",
    "wake_gpu": "rtdetr.gpu_startup",
}


def __getattr__(name: str) -> Any:
    """Imports torch and the rest at first use: `import rtdetr` and `rtdetr --help` do not."""
    if name not in _HOMES:
        from rtdetr.foreign_names import no_attribute

        raise no_attribute("module 'rtdetr'", name)
    with collection_paused():
        value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
