"""Hashes that detect changes, of files, of weights and of dicts stored as JSON; sizes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def files_in(path: Path) -> list[Path]:
    """The file itself, or the files of a folder in the order of their names."""
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def num_bytes(path: Path) -> int:
    """Size of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in files_in(path))


def file_sha256(path: Path) -> str:
    """Hash of a file; for a folder, that of its files in the order of their names."""
    digest = hashlib.sha256()
    for each in files_in(path):
        with open(each, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Hash of the names, types, shapes and numbers of a state dict, whatever file it is in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def json_sha256(content: Mapping[str, Any], without: str) -> str:
    """Hash of a dict's content as JSON, one key left out, independent of its layout in a file."""
    kept = {key: value for key, value in content.items() if key != without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
