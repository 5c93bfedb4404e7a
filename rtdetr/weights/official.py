"""Converts official weights into checkpoints of this project, and other projects' weights for warm starts.

No code of a weight file is run: see pdparams.py for Paddle's format; torch files are read with weights_only.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rtdetr.config import BackboneConfig, Config, DecoderConfig, EncoderConfig, ModelConfig, SupervisionConfig
from rtdetr.data.class_names import COCO_CLASSES
from rtdetr.data.classes import Classes
from rtdetr.models.backbone import STAGE_BLOCKS
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint
from rtdetr.weights.compare import LoadReport, compare
from rtdetr.weights.digest import file_sha256
from rtdetr.weights.foreign import is_own, read_entries, to_official
from rtdetr.weights.official_names import official_names
from rtdetr.weights.pdparams import ConvertError
from rtdetr.wording import counted

OFFICIAL_LICENCE = "Apache-2.0"  # of the official RT-DETRv3 repository, which offers its weights without other terms
NUM_SAMPLES = 3 * 8  # levels, heads
IMPOSSIBLE_SIZES = "its entries have sizes that no model has; download the file again, or name its config with -c"
LAYER = "transformer.decoder.layers.0"
# Entries that `recognise` reads sizes from: name, axis, and an entry whose first axis is as long.
TWINS = (
    ("backbone.conv1.conv1_1.conv.weight", 0, "backbone.conv1.conv1_1.norm.weight"),
    ("neck.input_proj.0.0.weight", 0, "neck.input_proj.0.1.weight"),
    ("neck.encoder.0.layers.0.linear1.weight", 0, "neck.encoder.0.layers.0.linear1.bias"),
    ("neck.fpn_blocks.0.conv1.conv.weight", 0, "neck.fpn_blocks.0.conv1.bn.weight"),
    (f"{LAYER}.linear1.weight", 0, f"{LAYER}.linear1.bias"),
    (f"{LAYER}.linear1.weight", 1, f"{LAYER}.norm1.weight"),
    (f"{LAYER}.cross_attn.attention_weights.weight", 0, f"{LAYER}.cross_attn.attention_weights.bias"),
    ("transformer.dec_score_head.0.weight", 0, "transformer.dec_score_head.0.bias"),
)


class Conversion(NamedTuple):
    config: Config
    classes: Classes
    weights: dict[str, Tensor]  # under our names, in our layout, float32
    report: LoadReport
    sha256: str  # of the file that was read


def convert(path: str | Path, config: Config | None = None, classes: Classes | None = None) -> Conversion:
    """Converts the weights of an official file for the model of `config`, or for the model that its names and shapes
    indicate.

    Entries that are missing or have another shape are in the report, not in the weights. Raises ConvertError if the
    file cannot be read, is not an RT-DETRv3, or has another number of classes.
    """
    official = to_official(read_entries(path), Path(path))
    if config is None:
        config = recognise(official, path)
        if "transformer.dec_score_head.0.weight" not in official:
            raise ConvertError(f"{path}: a backbone alone is no detector; train with it instead (-t {path})")
    num_classes = _num_classes(official)
    if classes is not None and len(classes) != num_classes:
        raise ConvertError(f"{path}: has {counted(num_classes, 'class')}, the annotation file names {len(classes)}")
    model = on_meta_device(config.model, num_classes, path)
    weights = under_our_names(official, model)
    report = compare(model.state_dict(), weights)
    fitting = {name: weights[name].contiguous().float() for name in report.matched}
    return Conversion(config, classes or guess_classes(num_classes), fitting, report, file_sha256(Path(path)))


def save_conversion(conversion: Conversion, source: str | Path, output: str | Path, licence: str) -> None:
    """Writes a checkpoint that records its origin. Raises ConvertError unless every entry was matched."""
    report, classes = conversion.report, conversion.classes
    if report.missing or report.mismatched or report.unexpected:
        raise ConvertError(
            f"{source}: does not fit {conversion.config.name}: {counted(len(report.missing), 'entry', 'entries')} "
            f"missing, {len(report.mismatched)} of another shape, {len(report.unexpected)} left over; nothing was "
            "written; name the right config with -c, or use the file as a warm start (rtdetr train -t)"
        )
    origin = {"file": Path(source).name, "sha256": conversion.sha256, "licence": licence}
    began = {"weights": origin["file"], "in_full": False}
    content = make_checkpoint(conversion.config, classes, conversion.weights, source=origin, began=began)
    save_checkpoint(Path(output), content)


def load_foreign_weights(path: str | Path) -> dict[str, Tensor]:
    """Entries of another project's weight file, or of a state dict of this one, under the names used here, for a warm
    start; entries without an equivalent keep their names and appear as left over in the load report. Raises
    CheckpointError with one sentence."""
    tensors = read_entries(path)
    if is_own(tensors):
        return tensors
    official = to_official(tensors, Path(path))
    config = recognise(official, path)
    return under_our_names(official, on_meta_device(config.model, _num_classes(official), path))


def under_our_names(official: Mapping[str, Tensor], model: Network) -> dict[str, Tensor]:
    """Renames entries from official names to those of `model`; entries that it lacks keep their official names."""
    ours = {official_name: own for own, official_name in official_names(model.state_dict()).items()}
    return {ours.get(name, name): tensor for name, tensor in official.items()}


def recognise(official: Mapping[str, Tensor], path: str | Path) -> Config:
    """The config of the model with these entries (official names, torch's layout).

    Missing parts get their default, so a backbone or an RT-DETR v1 is recognised too. Raises ConvertError if there is
    no known ResNet-vd among the entries.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in official.items()}
    for name, axis, twin in TWINS:
        if name in shapes and twin in shapes and shapes[name][axis : axis + 1] != shapes[twin][:1]:
            raise ConvertError(
                f"{path}: damaged, {name} of shape {shapes[name]} does not go with {twin} of shape {shapes[twin]}; "
                "download the file again, or name its config with -c"
            )

    def size(name: str, default: int, axis: int = 0) -> int:
        return shapes[name][axis] if name in shapes else default

    def count(pattern: str) -> int:
        return len({match[1] for name in shapes if (match := re.match(pattern, name))})

    try:
        backbone = _recognise_backbone(shapes, path)
        width = size("neck.input_proj.0.0.weight", EncoderConfig.hidden_dim)
        inner = size("neck.fpn_blocks.0.conv1.conv.weight", int(EncoderConfig.expansion * width))
        encoder = EncoderConfig(
            hidden_dim=width,
            feedforward_dim=size("neck.encoder.0.layers.0.linear1.weight", EncoderConfig.feedforward_dim),
            expansion=inner / width,
            num_csp_blocks=count(r"neck\.fpn_blocks\.0\.bottlenecks\.(\d+)\.") or EncoderConfig.num_csp_blocks,
        )
        samples = size(f"{LAYER}.cross_attn.attention_weights.weight", NUM_SAMPLES * DecoderConfig.num_points)
        decoder = DecoderConfig(
            hidden_dim=size(f"{LAYER}.linear1.weight", DecoderConfig.hidden_dim, axis=1),
            feedforward_dim=size(f"{LAYER}.linear1.weight", DecoderConfig.feedforward_dim),
            num_points=samples // NUM_SAMPLES,
            num_layers=count(r"transformer\.decoder\.layers\.(\d+)\.") or DecoderConfig.num_layers,
        )
    except (IndexError, ZeroDivisionError) as error:  # too few axes, an axis of length 0
        raise ConvertError(f"{path}: {IMPOSSIBLE_SIZES}") from error
    # Main group, noise groups, one-to-many group. RT-DETR v1 and v2 have the main group only.
    groups = count(r"transformer\.enc_score_head\.(\d+)\.")
    supervision = SupervisionConfig(num_noise_groups=groups - 2) if groups >= 2 else SupervisionConfig()
    model = ModelConfig(backbone=backbone, encoder=encoder, decoder=decoder, supervision=supervision)
    num_classes = _num_classes(official)
    data = {80: "6x_coco", 1203: "6x_lvis"}.get(num_classes, f"{num_classes}classes")
    return Config(name=f"rtdetrv3_r{backbone.depth}vd_{data}", model=model)


def _recognise_backbone(shapes: Mapping[str, tuple[int, ...]], path: str | Path) -> BackboneConfig:
    found = {match.groups() for name in shapes if (match := re.match(r"backbone\.res(\d)\.res\d([a-z]\d*)\.", name))}
    counts = tuple(blocks for _, blocks in sorted(Counter(stage for stage, _ in found).items()))
    deep = any(".branch2c." in name for name in shapes)
    depths = [depth for depth, each in STAGE_BLOCKS.items() if each == counts and (depth >= 50) == deep]
    stem = shapes.get("backbone.conv1.conv1_1.conv.weight")
    if not depths or stem is None:
        raise ConvertError(
            f"{path}: no known ResNet-vd; expected stages of {' or '.join(map(str, sorted({*STAGE_BLOCKS.values()})))} "
            f"blocks and a stem of three convolutions, got {counts} and {'no' if stem is None else 'a'} stem"
        )
    return BackboneConfig(
        depth=depths[0], width=stem[0] / 32, freeze_stages=int(deep), norm="frozen" if deep else "train"
    )


def _num_classes(official: Mapping[str, Tensor]) -> int:
    head = official.get("transformer.dec_score_head.0.weight")
    return head.shape[0] if head is not None and head.dim() else 80


def on_meta_device(config: ModelConfig, num_classes: int, path: str | Path) -> Network:
    """The model without memory for its weights: only names and shapes are needed."""
    try:
        with torch.device("meta"):
            return build_model(config, num_classes)
    except (AssertionError, RuntimeError, ValueError, ZeroDivisionError) as error:  # torch's own checks of sizes
        raise ConvertError(f"{path}: {IMPOSSIBLE_SIZES}") from error


def guess_classes(num_classes: int) -> Classes:
    """COCO's names for 80 classes; numbers for others, from 1 as in LVIS."""
    if num_classes == len(COCO_CLASSES):
        return COCO_CLASSES
    ids = tuple(range(1, num_classes + 1))
    return Classes(tuple(f"class {each}" for each in ids), ids)
