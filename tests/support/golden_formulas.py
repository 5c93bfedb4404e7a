"""The formulas behind the golden data: weights and images that two frameworks compute alike, so nobody stores them.

Every number comes from NumPy's PCG64, seeded with the CRC-32 of a tag; see the README of the golden folder.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SALT = "2901"
SCORE_LAYERS = ("enc_score_head", "dec_score_head", "pred_cls")


def generator(tag: str) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(zlib.crc32(tag.encode("utf-8"))))


def unit(tag: str, shape: Sequence[int]) -> Array:
    """Uniform float64 numbers of mean 0 and variance 1."""
    return (2 * generator(tag).random(tuple(shape)) - 1) * math.sqrt(3)


def _bias_like(name: str, leaf: str, z: Array) -> Array:
    if leaf == "_mean":
        return 0.1 * z
    if leaf == "_variance":
        return 1 + 0.2 * np.abs(z)
    if any(word in name for word in SCORE_LAYERS):
        return (-4.0 if "pred_cls" in name else -8.0) + 0.3 * z
    return (1.5 if "sampling_offsets" in name else 0.05) * z


def _gain(name: str, dimensions: int) -> float:
    if any(word in name for word in SCORE_LAYERS):
        return 0.5 if "pred_cls" in name else 3.0
    if "sampling_offsets" in name or ("bbox_head" in name and ".layers.2." in name):
        return 0.5
    if "pred_reg" in name:
        return 2.0
    if dimensions == 4 and name.startswith("backbone."):
        return 0.6 if "branch2c" in name else 1.0 if "branch2b" in name else 1.4
    if dimensions == 4:
        return {"neck": 1.45, "transformer": 1.5}.get(name.split(".")[0], 1.0)
    return 1.0


def det_param(name: str, shape: Sequence[int]) -> Array:
    """Weight `name` as float32 in Paddle's layout; both name and shape exactly as in params_*.json."""
    shape = tuple(int(size) for size in shape)
    leaf = name.rsplit(".", 1)[-1]
    if name.endswith(".proj_conv.weight"):
        return np.arange(shape[1], dtype=np.float32).reshape(shape)
    z = unit(f"{name}#{SALT}", shape)
    if leaf in ("_mean", "_variance", "bias", "in_proj_bias"):
        value = _bias_like(name, leaf, z)
    elif len(shape) == 1:
        value = 1 + 0.1 * z
    elif "denoising_class_embed" in name:
        value = z
    else:
        fan_in = shape[0] if len(shape) == 2 else shape[1] * shape[2] * shape[3]
        value = _gain(name, len(shape)) * z / math.sqrt(fan_in)
    return np.asarray(value, np.float64).astype(np.float32)


def det_image(tag: str, n: int, height: int, width: int) -> Array:
    """Images (n, 3, height, width) float32 in [0, 1]: blocks of 32 pixels plus noise."""
    images = np.empty((n, 3, height, width), np.float32)
    for i in range(n):
        random = generator(f"{tag}:{i}")
        coarse = random.random((3, height // 32, width // 32)).repeat(32, 1).repeat(32, 2)
        images[i] = (0.6 * coarse + 0.4 * random.random((3, height, width))).astype(np.float32)
    return images
