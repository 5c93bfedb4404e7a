"""Optional packages: imported at first use; a missing one is reported in one sentence."""

from __future__ import annotations

import importlib
from types import ModuleType

from rtdetr.config_file import ConfigError


class MissingPackage(ConfigError):
    """A package that is not installed; the message says how to install it."""


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """Imports a module of the extra with that name. Raises MissingPackage."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f'{purpose} needs the package {error.name}, which is not installed: pip install "rtdetr[{extra}]"'
        ) from error
