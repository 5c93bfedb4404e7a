"""The configs that come with the package, by name: configs/ of a clone, rtdetr/configs in a wheel."""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from pathlib import Path

from rtdetr.config import Config, ConfigError
from rtdetr.config_file import shipped_configs


def find_config(text: str) -> Path:
    """The file that `-c` means: a bare name, without suffix and separator, is a shipped config; everything else is a
    path.

    Raises ConfigError for a bare name that is neither a shipped config nor a file.
    """
    path, shipped = Path(text), shipped_configs()
    if text in shipped:
        return shipped[text]
    if path.name == text and not path.suffix and not os.path.exists(path):  # which says no to a name too long
        near = difflib.get_close_matches(text, shipped, n=5) or list(shipped)
        raise ConfigError(f"{text}: no config of that name is shipped, the nearest are {', '.join(near)}")
    return path


def check_data(cfg: Config, updates: Sequence[str], splits: Sequence[str] = ("train", "val")) -> None:
    """Raises ConfigError if the data do not exist and the user did not name them: the path in a shipped config, or in a
    checkpoint from another machine, is not one that the user typed."""
    for split in splits:
        path = getattr(cfg.data, split).annotations
        if any(each.startswith(f"data.{split}.") for each in updates) or (path and os.path.exists(path)):
            continue
        here = "not here" if os.path.isabs(path) else f"not here, in {os.getcwd()}"
        why = f"data.{split}.annotations of {cfg.name} is {path}, which is {here}" if path else f"{cfg.name} has none"
        raise ConfigError(f"--data DATA is needed, a folder or file with images and their boxes ({why})")
