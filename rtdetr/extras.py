"""Imports optional packages at first use; a missing one raises an error of one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from rtdetr.config_file import ConfigError


class MissingPackage(ConfigError):
    """An optional package is not installed; the message states how to install it."""


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports a module that the extra of that name installs. Raises MissingPackage if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f'{purpose} needs the package {error.name or module}, which is not installed: pip install "rtdetr[{extra}]"'
        ) from error
