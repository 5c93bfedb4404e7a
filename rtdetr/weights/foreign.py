"""Weights of other projects under the names of the official RT-DETRv3, in torch's layout.

Reads official RT-DETRv3 and RT-DETR `.pdparams` and `.pdema`; ResNet-vd backbones as `.pdparams` or as their PyTorch
conversions; RT-DETR v1 and v2 `.pth`; PyTorch conversions of RT-DETRv3 that kept the official names (detrs).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.weights.checkpoint import check_tensors, is_checkpoint, read_torch_file
from rtdetr.weights.official_names import STATISTICS, Rules, official_layout, translated
from rtdetr.weights.pdparams import ConvertError, read_pdparams

PADDLE_SUFFIXES = (".pdparams", ".pdema")
LABEL_EMBEDDING = "transformer.denoising_class_embed.weight"

# Keys under which training programs store the weights in their checkpoints, EMA weights first.
CONTAINERS = (("ema", "module"), ("ema",), ("model",), ("model_state_dict",), ("state_dict",), ("module",))
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile

# Entries computed from sizes when a model is built; they are not weights.
DERIVED = re.compile(
    r"num_batches_tracked$|(^|\.)(anchors|valid_mask|num_points_scale|anchor_points|stride_tensor)$|pos_embed\d$"
)

# RT-DETR v1 and v2 (PyTorch) to the names of the official RT-DETRv3. Their single query group is our group 0.
RTDETR_RULES: Rules = (
    (r"^encoder\.input_proj\.(\d)\.(?:conv|0)\.", r"neck.input_proj.\1.0."),
    (r"^encoder\.input_proj\.(\d)\.(?:norm|1)\.", r"neck.input_proj.\1.1."),
    (r"^encoder\.((?:lateral|downsample)_convs|(?:fpn|pan)_blocks)\.(.*)\.norm\.", r"neck.\1.\2.bn."),
    (r"^encoder\.", r"neck."),
    (r"^decoder\.enc_output\.(?:proj|0)\.", r"transformer.enc_output.0.0."),
    (r"^decoder\.enc_output\.(?:norm|1)\.", r"transformer.enc_output.0.1."),
    (r"^decoder\.enc_(score|bbox)_head\.", r"transformer.enc_\1_head.0."),
    (r"^decoder\.", r"transformer."),
)

# The Paddle release of RT-DETR v1 has v3's names, except for its single query group.
RTDETR_PADDLE_RULES: Rules = (
    (r"^transformer\.enc_output\.([01])\.(weight|bias)$", r"transformer.enc_output.0.\1.\2"),
    (r"^transformer\.enc_(score|bbox)_head\.(weight|bias|layers\.)", r"transformer.enc_\1_head.0.\2"),
)


def read_entries(path: str | Path) -> dict[str, Tensor]:
    """Entries of a weight file under the names and in the layout that they have in it. Raises CheckpointError."""
    path = Path(path)
    tensors = _paddle_tensors(path) if path.suffix in PADDLE_SUFFIXES else _torch_tensors(path)
    check_tensors(tensors, path)
    return tensors


def is_own(names: Iterable[str]) -> bool:
    """Whether entries have the names of this project."""
    return any(name.startswith("backbone.stages.") for name in names)


def to_official(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The entries of read_entries under official names (`.running_mean` becomes `._mean` and so on), in torch's layout.

    Entries with unknown names keep them. Raises CheckpointError if there is no known detector or backbone.
    """
    paddle = path.suffix in PADDLE_SUFFIXES
    official: dict[str, Tensor] = {}
    for name, new in _official_names([name for name in tensors if not DERIVED.search(name)], path).items():
        if new in official:
            raise ConvertError(f"{path}: {name} and another entry both stand for {new}")
        official[new] = official_layout(new, tensors[name]) if paddle else tensors[name]
    table, head = official.get(LABEL_EMBEDDING), official.get("transformer.dec_score_head.0.bias")
    if not paddle and table is not None and head is not None and head.dim() and table.shape[:1] == (len(head) + 1,):
        official[LABEL_EMBEDDING] = table[:-1]  # RT-DETR in PyTorch keeps a zero row for padding there
    return official


def _paddle_tensors(path: Path) -> dict[str, Tensor]:
    arrays = read_pdparams(path)
    if not arrays:
        raise ConvertError(f"{path}: the file holds no weights")
    try:
        return {name: torch.from_numpy(array) for name, array in arrays.items()}
    except TypeError as error:
        raise ConvertError(f"{path}: an array has a type that torch does not know ({error})") from error


def _torch_tensors(path: Path) -> dict[str, Tensor]:
    content = read_torch_file(path)
    if is_checkpoint(content):
        raise ConvertError(f"{path}: is a checkpoint of this project already; no conversion is needed")
    for keys in CONTAINERS:
        inner: Any = content
        for key in keys:
            inner = inner.get(key) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and any(isinstance(value, Tensor) for value in inner.values()):
            content = inner
            break
    if not isinstance(content, dict):
        raise ConvertError(f"{path}: expected a dict of tensors, got {type(content).__name__}")
    tensors = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if not tensors:
        raise ConvertError(f"{path}: no weights found at the top or under 'ema', 'model' or 'state_dict'")
    while wrapper := next((each for each in WRAPPERS if all(name.startswith(each) for name in tensors)), None):
        tensors = {name.removeprefix(wrapper): value for name, value in tensors.items()}
    return tensors


def _official_names(names: Collection[str], path: Path) -> dict[str, str]:
    """The official name of each entry, or its own if there is none."""
    rules: Rules

    def any_starts(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    if any_starts("backbone.res_layers.", "decoder.dec_score_head."):  # RT-DETR v1, v2
        rules = RTDETR_RULES
    elif any_starts("backbone.res2.", "transformer."):  # official RT-DETR and RT-DETRv3, and detrs
        rules = RTDETR_PADDLE_RULES if any_starts("transformer.enc_score_head.weight") else ()
    elif any_starts("res_layers.", "res2."):  # a backbone on its own
        rules = ((r"^", "backbone."),)
    elif is_own(names):
        raise ConvertError(
            f"{path}: is a state dict of this project, without the config and classes of a checkpoint; name the "
            "checkpoint that it came from, or start a training with it (rtdetr train -t)"
        )
    else:
        raise ConvertError(
            f"{path}: neither RT-DETR v1, v2 or v3 nor a ResNet-vd backbone; its first entries are"
            f" {', '.join(list(names)[:3])}"
        )
    return translated(names, (*rules, *STATISTICS))
