"""Names of the entries of RTDetrForObjectDetection and RTDetrV2ForObjectDetection in files of transformers.

The table maps names here to theirs; reading inverts it. Their three entries for query, key and value are one here, and
their denoising table has one more row, for padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from rtdetr.weights.official_names import renamed

_RULES: tuple[tuple[str, str], ...] = (
    (r"^backbone\.stem\.(\d)\.conv\.", r"model.backbone.model.embedder.embedder.\1.convolution."),
    (r"^backbone\.stem\.(\d)\.norm\.", r"model.backbone.model.embedder.embedder.\1.normalization."),
    (r"^backbone\.stages\.", r"model.backbone.model.encoder.stages."),
    (r"^(model\.backbone\..*stages\.\d)\.(\d+)\.", r"\1.layers.\2."),
    # average pooling precedes the projection, which is therefore part 1 of the shortcut; stage 0 does not pool
    (r"^(model\.backbone\..*stages\.0\..*)\.shortcut\.project\.", r"\1.shortcut."),
    (r"^(model\.backbone\..*)\.shortcut\.project\.", r"\1.shortcut.1."),
    (r"^(model\.backbone\..*layers\.\d+)\.conv1\.", r"\1.layer.0."),
    (r"^(model\.backbone\..*layers\.\d+)\.conv2\.", r"\1.layer.1."),
    (r"^(model\.backbone\..*layers\.\d+)\.conv3\.", r"\1.layer.2."),
    (r"^(model\.backbone\..*)\.conv\.", r"\1.convolution."),
    (r"^(model\.backbone\..*)\.norm\.", r"\1.normalization."),
    (r"^encoder\.input_proj\.(\d)\.conv\.", r"model.encoder_input_proj.\1.0."),
    (r"^encoder\.input_proj\.(\d)\.norm\.", r"model.encoder_input_proj.\1.1."),
    (r"^encoder\.aifi\.norm1\.", r"encoder.aifi.self_attn_layer_norm."),
    (r"^encoder\.aifi\.norm2\.", r"encoder.aifi.final_layer_norm."),
    (r"^encoder\.aifi\.linear(\d)\.", r"encoder.aifi.fc\1."),
    (r"^encoder\.aifi\.", r"model.encoder.encoder.0.layers.0."),
    (r"^encoder\.lateral\.", r"model.encoder.lateral_convs."),
    (r"^encoder\.top_down\.", r"model.encoder.fpn_blocks."),
    (r"^encoder\.downsample\.", r"model.encoder.downsample_convs."),
    (r"^encoder\.bottom_up\.", r"model.encoder.pan_blocks."),
    (r"^(model\.encoder\..*)\.blocks\.(\d+)\.conv3x3\.", r"\1.bottlenecks.\2.conv1."),
    (r"^(model\.encoder\..*)\.blocks\.(\d+)\.conv1x1\.", r"\1.bottlenecks.\2.conv2."),
    (r"^decoder\.input_proj\.(\d)\.conv\.", r"model.decoder_input_proj.\1.0."),
    (r"^decoder\.input_proj\.(\d)\.norm\.", r"model.decoder_input_proj.\1.1."),
    (r"^decoder\.selector\.proj\.", r"model.enc_output.0."),
    (r"^decoder\.selector\.norm\.", r"model.enc_output.1."),
    (r"^decoder\.selector\.score_head\.", r"model.enc_score_head."),
    (r"^decoder\.selector\.box_head\.", r"model.enc_bbox_head."),
    (r"^decoder\.query_pos\.", r"model.decoder.query_pos_head."),
    (r"^decoder\.score_heads\.", r"model.decoder.class_embed."),
    (r"^decoder\.box_heads\.", r"model.decoder.bbox_embed."),
    (r"^(decoder\.layers\.\d+)\.norm1\.", r"\1.self_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.encoder_attn_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.final_layer_norm."),
    (r"^(decoder\.layers\.\d+)\.linear(\d)\.", r"\1.fc\2."),
    (r"^(decoder\.layers\.\d+)\.cross_attn\.", r"\1.encoder_attn."),
    (r"^decoder\.layers\.", r"model.decoder.layers."),
    (r"^query_groups\.label_embedding\.weight$", r"model.denoising_class_embed.weight"),
)
PADDED = "model.denoising_class_embed.weight"
TRAINING_ONLY = ("query_groups.", "dense_head.")  # absent in transformers, except for the label embedding

# Names of other transformers releases, and duplicate entries of the heads, to the names of the table.
_OTHER_NAMES: tuple[tuple[str, str], ...] = (
    (r"^(class_embed|bbox_embed)\.", r"model.decoder.\1."),
    (r"^model\.encoder\.aifi\.", r"model.encoder.encoder."),
    (r"\.mlp\.fc(\d)\.", r".fc\1."),
    (r"\.self_attn\.o_proj\.", r".self_attn.out_proj."),
)
# Entries computed from sizes when a model is built.
DERIVED = re.compile(r"\.n_points_scale$|^model\.(anchors|valid_mask)$")


def their_names(name: str) -> tuple[str, ...]:
    """Their entries for one entry here, three for a joined projection; none without an equivalent."""
    if match := re.search(r"\.in_proj_(weight|bias)$", name):
        stem = name.removesuffix(match[0])
        return tuple(each for part in "qkv" for each in their_names(f"{stem}.{part}_proj.{match[1]}"))
    name = renamed(name, _RULES)
    return () if name.startswith(TRAINING_ONLY) else (name,)


def to_theirs(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries under their names: backbone, encoder, decoder and label embedding of a state dict."""
    theirs: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        names = their_names(name)
        theirs |= dict(zip(names, tensor.chunk(3) if len(names) == 3 else [tensor]))
    if PADDED in theirs:
        table = theirs[PADDED]
        theirs[PADDED] = torch.cat((table, table.new_zeros(1, *table.shape[1:])))
    return theirs


def of_this_release(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The entries of a file of any release under the names of `to_theirs`."""
    return {renamed(name, _OTHER_NAMES): tensor for name, tensor in theirs.items() if not DERIVED.search(name)}


def to_ours(theirs: Mapping[str, Tensor], own: Iterable[str]) -> dict[str, Tensor]:
    """Inverse of `to_theirs`, for the names in `own`; missing entries are left out."""
    weights: dict[str, Tensor] = {}
    for name in own:
        parts = [theirs[each] for each in their_names(name) if each in theirs]
        if parts:
            weights[name] = torch.cat(parts) if len(parts) > 1 else parts[0]
            if PADDED in their_names(name):
                weights[name] = weights[name][:-1]
    return weights
