"""Weights of other projects under the names of the official RT-DETRv3, in torch's layout.

Reads official RT-DETRv3 and RT-DETR `.pdparams` and `.pdema`; ResNet-vd backbones as `.pdparams` or as their PyTorch
conversions; RT-DETR v1 and v2 `.pth`; PyTorch conversions of RT-DETRv3 that kept the official names (detrs).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.weights.checkpoint import check_tensors, is_checkpoint, read_torch_file
from rtdetr.weights.official_names import official_block, official_layout, renamed
from rtdetr.weights.pdparams import ConvertError, read_pdparams

PADDLE_SUFFIXES = (".pdparams", ".pdema")

# Keys under which training programs store the weights in their checkpoints, EMA weights first.
CONTAINERS = (("ema", "module"), ("ema",), ("model",), ("model_state_dict",), ("state_dict",), ("module",))
WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile

# Entries computed from sizes when a model is built; they are not weights.
DERIVED = re.compile(
    r"num_batches_tracked$|(^|\.)(anchors|valid_mask|num_points_scale|anchor_points|stride_tensor)$|pos_embed\d$"
)

# RT-DETR v1 and v2 (PyTorch) to the names of the official RT-DETRv3. Their single query group is our group 0.
RTDETR_RULES: tuple[tuple[str, str], ...] = (
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
RTDETR_PADDLE_RULES: tuple[tuple[str, str], ...] = (
    (r"^transformer\.enc_output\.([01])\.(weight|bias)$", r"transformer.enc_output.0.\1.\2"),
    (r"^transformer\.enc_(score|bbox)_head\.(weight|bias|layers\.)", r"transformer.enc_\1_head.0.\2"),
)


def read_entries(path: str | Path) -> dict[str, Tensor]:
    """Entries of a weight file under the names and in the layout that they have in it. Raises CheckpointError."""
    path = Path(path)
    tensors = _paddle_tensors(path) if path.suffix in PADDLE_SUFFIXES else _torch_tensors(path)
    check_tensors(tensors, path)
    return tensors


def is_own(names: Mapping[str, Tensor]) -> bool:
    """Whether entries have the names of this project."""
    return any(name.startswith("backbone.stages.") for name in names)


def to_official(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The entries of read_entries under official names (`.running_mean` becomes `._mean` and so on), in torch's layout.

    Entries with unknown names keep them. Raises CheckpointError if there is no known detector or backbone.
    """
    paddle = path.suffix in PADDLE_SUFFIXES
    tensors = {name: tensor for name, tensor in tensors.items() if not DERIVED.search(name)}
    names = _official_names(tensors, path)
    official = {}
    for name, tensor in tensors.items():
        new = names[name].replace(".running_mean", "._mean").replace(".running_var", "._variance")
        if new in official:
            raise ConvertError(f"{path}: {name} and another entry both stand for {new}")
        if new == "transformer.denoising_class_embed.weight" and not paddle:
            tensor = _without_padding_row(tensor, tensors)
        official[new] = official_layout(new, tensor) if paddle else tensor
    return official


def _without_padding_row(embedding: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    """Removes the zero row for padding that RT-DETR in PyTorch keeps in the table; official tables have a row per
    class."""
    heads = [tensor for name, tensor in tensors.items() if name.endswith("dec_score_head.0.bias") and tensor.dim()]
    return embedding[:-1] if heads and embedding.dim() and len(embedding) == len(heads[0]) + 1 else embedding


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


def _official_names(names: Mapping[str, Tensor], path: Path) -> dict[str, str]:
    """The official name of each entry, or its own if there is none."""

    def any_starts(*starts: str) -> bool:
        return any(name.startswith(starts) for name in names)

    if any_starts("backbone.res_layers.", "decoder.dec_score_head."):  # RT-DETR v1, v2
        rules = RTDETR_RULES
    elif any_starts("backbone.res2.", "transformer."):  # official RT-DETR and RT-DETRv3, and detrs
        rules = RTDETR_PADDLE_RULES if any_starts("transformer.enc_score_head.weight") else ()
    elif any_starts("res_layers.", "res2."):  # a backbone on its own
        return {name: _stage_names(f"backbone.{name}", names) for name in names}
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
    return {name: _stage_names(renamed(name, rules), names) for name in names}


def _stage_names(name: str, names: Mapping[str, Tensor]) -> str:
    """Renames `backbone.res_layers.0.blocks.1.` to `backbone.res2.res2b.`; long stages count a, b1, b2, ..."""
    match = re.match(r"backbone\.res_layers\.(\d)\.blocks\.(\d+)\.(.*)", name)
    if match is None:
        return name
    blocks = {found[1] for each in names if (found := re.search(rf"res_layers\.{match[1]}\.blocks\.(\d+)\.", each))}
    return f"{official_block(int(match[1]), int(match[2]), len(blocks))}.{match[3]}"
