"""Names and layouts of the official Paddle weights, one for one with those here.

The map is between a state dict here and the official `.pdparams`. `num_batches_tracked` exists here only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from string import ascii_lowercase

from torch import Tensor

Rules = Iterable[tuple[str, str | Callable[[re.Match[str]], str]]]  # patterns and replacements, in their order

STATISTICS: Rules = ((r"\.running_mean$", r"._mean"), (r"\.running_var$", r"._variance"))  # of batch norms
_RULES: Rules = (
    (r"^backbone\.stem\.(\d)\.", lambda match: f"backbone.conv1.conv1_{int(match[1]) + 1}."),
    (r"^backbone\.stages\.(\d+)\.(\d+)\.", r"backbone.res_layers.\1.blocks.\2."),
    (r"^(backbone\..*)\.conv(\d)\.", lambda match: f"{match[1]}.branch2{ascii_lowercase[int(match[2]) - 1]}."),
    (r"^(backbone\.res_layers\.0\..*)\.shortcut\.project\.", r"\1.short."),
    (r"^(backbone\..*)\.shortcut\.project\.", r"\1.short.conv."),  # after the pool of a strided shortcut
    (r"^encoder\.input_proj\.(\d)\.conv\.", r"neck.input_proj.\1.0."),
    (r"^encoder\.input_proj\.(\d)\.norm\.", r"neck.input_proj.\1.1."),
    (r"^encoder\.aifi\.", r"neck.encoder.0.layers.0."),
    (r"^encoder\.(lateral|downsample)\.", r"neck.\1_convs."),
    (r"^encoder\.top_down\.", r"neck.fpn_blocks."),
    (r"^encoder\.bottom_up\.", r"neck.pan_blocks."),
    (r"^(neck\..*)\.blocks\.(\d)\.conv3x3\.", r"\1.bottlenecks.\2.conv1."),
    (r"^(neck\..*)\.blocks\.(\d)\.conv1x1\.", r"\1.bottlenecks.\2.conv2."),
    (r"^(neck\.(?:lateral|fpn|downsample|pan).*)\.norm\.", r"\1.bn."),
    (r"^decoder\.input_proj\.", r"transformer.input_proj."),
    # Group 0 is part of the decoder; the extra groups count from 1 in the official names and from 0 in ours.
    (r"^decoder\.selector\.", r"selectors.0."),
    (r"^query_groups\.selectors\.(\d+)\.", lambda match: f"selectors.{int(match[1]) + 1}."),
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
    *STATISTICS,
)
BLOCK = re.compile(r"^backbone\.res_layers\.(\d+)\.blocks\.(\d+)\.")


def official_names(ours: Iterable[str]) -> dict[str, str]:
    """Maps our state dict's names, except `num_batches_tracked`, to official names.

    `ours` must be the whole state dict: the letters of a backbone stage depend on how many blocks it has.
    """
    return translated([name for name in ours if not name.endswith("num_batches_tracked")], _RULES)


def official_layout(official_name: str, tensor: Tensor) -> Tensor:
    """The tensor transposed from the layout here into the official one, or back: the same operation.

    Linear weights are (in, out) there and (out, in) here; so is the packed attention projection. The embedding is
    two-dimensional too, and stays.
    """
    is_linear = tensor.dim() == 2 and not official_name.endswith("denoising_class_embed.weight")
    return tensor.t() if is_linear else tensor


def translated(names: Collection[str], rules: Rules) -> dict[str, str]:
    """Maps names to those after all substitutions, with letters for the blocks of a backbone stage: a, b, c, ...; in
    long stages a, b1, b2, ..."""
    new = {name: renamed(name, rules) for name in names}
    blocks = {match.groups() for match in map(BLOCK.match, new.values()) if match}
    num_blocks = Counter(stage for stage, _ in blocks)

    def lettered(match: re.Match[str]) -> str:
        stage, block = int(match[1]) + 2, int(match[2])
        letters = ascii_lowercase[block] if num_blocks[match[1]] <= 6 else f"b{block}" if block else "a"
        return f"backbone.res{stage}.res{stage}{letters}."

    return {name: BLOCK.sub(lettered, each) for name, each in new.items()}


def renamed(name: str, rules: Rules) -> str:
    """The name after all substitutions, one after the other."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
