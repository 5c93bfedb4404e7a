"""Optional packages: imported when they are first used, and one sentence where they are missing."""

from __future__ import annotations

import importlib
from types import ModuleType

from rtdetr.config_file import ConfigError


class MissingPackage(ConfigError):
    """An environment without a package that was not installed along; the message says how to get it."""


def optional(module: str, extra: str, purpose: str) -> ModuleType:
    """The module, of a package that the extra of that name installs. Raises MissingPackage."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingPackage(
            f'{purpose} needs the package {error.name}, which is not installed: pip install "rtdetr[{extra}]"'
        ) from error
