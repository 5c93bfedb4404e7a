"""Writes thresholds of classes into a weight file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from rtdetr.weights.huggingface import is_huggingface
from rtdetr.weights.pretrained import is_pretrained, replace_thresholds


def check_own(path: Path) -> None:
    """Raises CheckpointError for files that cannot store thresholds, and for downloaded weights."""
    ours = (path.suffix == ".pth" and path.is_file()) or (is_pretrained(path) and not is_huggingface(path))
    if not ours:
        raise CheckpointError(
            f"{path}: cannot carry thresholds; expected a .pth of yours, or a folder of save_pretrained"
        )


def save_thresholds(path: Path, thresholds: Sequence[float]) -> None:
    """Replaces the stored thresholds, in the order of the classes; the file is the old one or the new one at any
    moment. Raises CheckpointError and OSError."""
    check_own(path)
    if is_pretrained(path):
        replace_thresholds(path, thresholds)
        return
    content = load_checkpoint(path)
    content["classes"]["thresholds"] = list(thresholds)
    save_checkpoint(path, content)
