"""Checkpoint files: written whole or not at all, read without running code, and refused with a sentence.

A file is a dict: format "rtdetr", version, config, classes, preprocess, model, ema, training and source; the last three
may be None.
"""

from __future__ import annotations

import os
import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.config import Config, config_to_dict
from rtdetr.data.classes import Classes

FORMAT, VERSION = "rtdetr", 1


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message is one sentence for the person who gave it."""


def make_checkpoint(
    cfg: Config,
    classes: Classes,
    model: Mapping[str, Tensor],
    ema: Mapping[str, Tensor] | None = None,
    training: dict[str, Any] | None = None,
    source: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_dict(cfg),
        "classes": {"names": list(classes.names), "category_ids": list(classes.category_ids)},
        "preprocess": {"size": list(cfg.data.image_size), "interpolation": "cubic", "scale": 1.0 / 255.0},
        "model": dict(model),
        "ema": None if ema is None else dict(ema),
        "training": training,
        "source": source,
    }


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes beside `path`, then renames: whoever reads `path` finds the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint of this project, on the CPU. No code of the file runs. Raises CheckpointError."""
    content = read_own(Path(path))
    if content is None or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: not a checkpoint of this project; weights of other origin can start a training with -t, "
            "or become a checkpoint with tools/convert.py"
        )
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path}: checkpoint version {content.get('version')}, this program reads {VERSION}")
    return content


def read_own(path: Path) -> dict[str, Any] | None:
    """The dict in a torch file, or None when `path` is something else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such weight file")
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if file.read(2) == b"PK":  # the head of a zip without its end
                raise CheckpointError(f"{path}: the file is cut off; copy it again")
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return None  # holds more than tensors and plain values: not written by this project
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the file is damaged ({str(error).splitlines()[0]}); copy it again") from error
    return content if isinstance(content, dict) else None
