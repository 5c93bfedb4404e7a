"""What tells whether bytes are still those that were written: of weights, and of what is written as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def weights_sha256(weights: Mapping[str, Tensor]) -> str:
    """Hash of the names, types, shapes and numbers of a state dict, whatever file it is in."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def json_sha256(content: Mapping[str, Any], without: str) -> str:
    """Hash of what JSON keeps of a dict, one key left out, whatever its layout in a file."""
    kept = {key: value for key, value in content.items() if key != without}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()
