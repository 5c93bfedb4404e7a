"""Names and layouts of the official Paddle weights, one for one with those here.

The map is between a state dict here and the official `.pdparams`. `num_batches_tracked` exists here only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import ascii_lowercase

from torch import Tensor

_RULES: tuple[tuple[str, str], ...] = (
    (r"^backbone\.stages\.(\d+)\.(\d+)\.shortcut\.project\.", r"backbone.stages.\1.\2.short."),
    (r"^encoder\.input_proj\.(\d)\.conv\.", r"neck.input_proj.\1.0."),
    (r"^encoder\.input_proj\.(\d)\.norm\.", r"neck.input_proj.\1.1."),
    (r"^encoder\.aifi\.", r"neck.encoder.0.layers.0."),
    (r"^encoder\.lateral\.", r"neck.lateral_convs."),
    (r"^encoder\.top_down\.", r"neck.fpn_blocks."),
    (r"^encoder\.downsample\.", r"neck.downsample_convs."),
    (r"^encoder\.bottom_up\.", r"neck.pan_blocks."),
    (r"^(neck\..*)\.blocks\.(\d)\.conv3x3\.", r"\1.bottlenecks.\2.conv1."),
    (r"^(neck\..*)\.blocks\.(\d)\.conv1x1\.", r"\1.bottlenecks.\2.conv2."),
    (r"^(neck\.(?:lateral|fpn|downsample|pan).*)\.norm\.", r"\1.bn."),
    (r"^decoder\.input_proj\.", r"transformer.input_proj."),
    (r"^decoder\.selector\.", r"selectors.0."),
    (r"^selectors\.(\d+)\.proj\.", r"transformer.enc_output.\1.0."),
    (r"^selectors\.(\d+)\.norm\.", r"transformer.enc_output.\1.1."),
    (r"^selectors\.(\d+)\.score_head\.", r"transformer.enc_score_head.\1."),
    (r"^selectors\.(\d+)\.box_head\.", r"transformer.enc_bbox_head.\1."),
    (r"^decoder\.layers\.", r"transformer.decoder.layers."),
    (r"^decoder\.query_pos\.", r"transformer.query_pos_head."),
    (r"^decoder\.score_heads\.", r"transformer.dec_score_head."),
    (r"^decoder\.box_heads\.", r"transformer.dec_bbox_head."),
    (r"^query_groups\.memory_proj\.", r"transformer.map_memory."),
    (r"^query_groups\.label_embedding\.", r"transformer.denoising_class_embed."),
    (r"^dense_head\.class_stems\.", r"aux_o2m_head.stem_cls."),
    (r"^dense_head\.box_stems\.", r"aux_o2m_head.stem_reg."),
    (r"^(aux_o2m_head\..*)\.norm\.", r"\1.bn."),
    (r"^dense_head\.class_heads\.", r"aux_o2m_head.pred_cls."),
    (r"^dense_head\.box_heads\.", r"aux_o2m_head.pred_reg."),
    (r"^dense_head\.bins$", r"aux_o2m_head.proj_conv.weight"),
    (r"\.running_mean$", r"._mean"),
    (r"\.running_var$", r"._variance"),
)


def official_names(ours: Iterable[str]) -> dict[str, str]:
    """Maps our state dict's names, except `num_batches_tracked`, to official names.

    `ours` must be the whole state dict: the letters of a backbone stage depend on how many blocks it has.
    """
    names = [name for name in ours if not name.endswith("num_batches_tracked")]
    stage_sizes: dict[int, int] = {}
    for name in names:
        if match := re.match(r"backbone\.stages\.(\d+)\.(\d+)\.", name):
            stage = int(match[1])
            stage_sizes[stage] = max(stage_sizes.get(stage, 0), int(match[2]) + 1)
    return {name: _official_name(name, stage_sizes) for name in names}


def official_layout(official_name: str, tensor: Tensor) -> Tensor:
    """The tensor transposed from the layout here into the official one, or back: the same operation.

    Linear weights are (in, out) there and (out, in) here; so is the packed attention projection. The embedding is
    two-dimensional too, and stays.
    """
    is_linear = tensor.dim() == 2 and not official_name.endswith("denoising_class_embed.weight")
    return tensor.t() if is_linear else tensor


def _official_name(name: str, stage_sizes: dict[int, int]) -> str:
    # Group 0 is part of the decoder; the extra groups count from 1 in the official names and from 0 in ours.
    name = re.sub(r"^query_groups\.selectors\.(\d+)\.", lambda m: f"selectors.{int(m[1]) + 1}.", name)
    name = renamed(name, _RULES)
    name = re.sub(r"^backbone\.stem\.(\d)\.", lambda m: f"backbone.conv1.conv1_{int(m[1]) + 1}.", name)
    match = re.match(r"backbone\.stages\.(\d+)\.(\d+)\.(short|conv(\d))\.(.*)", name)
    if match is None:
        return name
    stage, block = int(match[1]), int(match[2])
    part = match[3] if match[3] == "short" else f"branch2{ascii_lowercase[int(match[4]) - 1]}"
    if part == "short" and stage > 0:  # the projection after the pool of a strided shortcut
        part = "short.conv"
    return f"{official_block(stage, block, stage_sizes[stage])}.{part}.{match[5]}"


def official_block(stage: int, block: int, num_blocks: int) -> str:
    """The name of a block of a backbone stage, both counted from 0. Its letters are a, b, c, ...; in long stages a, b1,
    b2, ..."""
    letters = ascii_lowercase[block] if num_blocks <= 6 else "a" if block == 0 else f"b{block}"
    return f"backbone.res{stage + 2}.res{stage + 2}{letters}"


def renamed(name: str, rules: Iterable[tuple[str, str]]) -> str:
    """The name after all substitutions, pattern and replacement, one after the other."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
