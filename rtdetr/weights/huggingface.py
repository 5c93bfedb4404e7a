"""Reads and writes models of transformers (RTDetrForObjectDetection, RTDetrV2ForObjectDetection).

A folder contains config.json, model.safetensors or pytorch_model.bin, and preprocessor_config.json. Settings without an
equivalent here are refused by the name of their key. No code of a file is run. Facts from huggingface/transformers:
models/rt_detr, models/rt_detr_v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from rtdetr import __version__
from rtdetr.config import Config, ConfigError, config_from_dict
from rtdetr.data.class_names import COCO_CLASSES
from rtdetr.data.classes import Classes, plain_name
from rtdetr.extras import optional
from rtdetr.models.backbone import STAGE_BLOCKS, STAGE_CHANNELS
from rtdetr.weights.checkpoint import CheckpointError, check_tensors, make_checkpoint, read_torch_file
from rtdetr.weights.compare import compare, listed
from rtdetr.weights.huggingface_names import PADDED, of_this_release, to_ours, to_theirs
from rtdetr.weights.official import on_meta_device
from rtdetr.weights.pretrained import (
    CONFIG,
    OWN_FOLDER,
    OWN_KEY,
    PROCESSOR,
    check_target,
    read_safetensors,
    read_settings,
    save_pretrained,
    weight_file,
    write_folder,
)
from rtdetr.weights.training_parts import with_training_parts
from rtdetr.wording import counted

KINDS = {"rt_detr": "RTDetrForObjectDetection", "rt_detr_v2": "RTDetrV2ForObjectDetection"}
RESAMPLES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
LAST_STAGES = ["stage2", "stage3", "stage4"]

# The only values supported here, by key; they are also the defaults there.
FIXED: dict[str, Any] = {
    **{"encoder_layers": 1, "encode_proj_layers": [2], "positional_encoding_temperature": 10000, "eval_size": None},
    **{"encoder_activation_function": "gelu", "activation_function": "silu", "decoder_activation_function": "relu"},
    **{"normalize_before": False, "feat_strides": [8, 16, 32], "num_feature_levels": 3, "decoder_n_levels": 3},
    **{"learn_initial_query": False, "with_box_refine": True, "layer_norm_eps": 1e-5, "batch_norm_eps": 1e-5},
    **{"decoder_method": "default", "decoder_offset_scale": 0.5, "backbone": None, "use_timm_backbone": False},
}
FIXED_BACKBONE: dict[str, Any] = {
    **{"model_type": "rt_detr_resnet", "hidden_act": "relu", "num_channels": 3, "downsample_in_first_stage": False},
    **{"downsample_in_bottleneck": False, "out_features": LAST_STAGES, "out_indices": [2, 3, 4]},
}
FIXED_PROCESSOR: dict[str, Any] = {
    **{"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": False, "do_pad": False}
}
# Keys of transformers -> section and key of our config, and transformers' default for a missing key.
SETTINGS: dict[str, tuple[str, str, Any]] = {
    "encoder_hidden_dim": ("encoder", "hidden_dim", 256),
    "encoder_ffn_dim": ("encoder", "feedforward_dim", 1024),
    "encoder_attention_heads": ("encoder", "num_heads", 8),
    "hidden_expansion": ("encoder", "expansion", 1.0),
    "d_model": ("decoder", "hidden_dim", 256),
    "decoder_ffn_dim": ("decoder", "feedforward_dim", 1024),
    "decoder_attention_heads": ("decoder", "num_heads", 8),
    "decoder_n_points": ("decoder", "num_points", 4),
    "decoder_layers": ("decoder", "num_layers", 6),
    "num_queries": ("decoder", "num_queries", 300),
    "num_denoising": ("supervision", "num_denoising", 100),
}
FROZEN = "freeze_backbone_batch_norms"


def is_huggingface(path: str | Path) -> bool:
    """Whether a path is a folder, or the weights in one, whose config.json is one of transformers."""
    config = weight_file(Path(path)).with_name(CONFIG)
    if not config.is_file() or (Path(path).is_file() and Path(path).suffix not in (".safetensors", ".bin")):
        return False
    about = read_settings(config)
    return isinstance(about, dict) and about.get("model_type", "rtdetrv3") != "rtdetrv3"


def read_huggingface(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint, from a folder, with new training parts. Raises CheckpointError, and MissingPackage
    if safetensors is not installed."""
    file = weight_file(Path(path))
    config = file.with_name(CONFIG)
    about = read_settings(config)
    kind = about.get("model_type")
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(f"{config}: model_type: expected {' or '.join(KINDS)}, got {kind!r:.60}")
    classes = _classes(about, config)
    cfg = _config(about, config, _preprocessing(file.with_name(PROCESSOR)))
    theirs = read_safetensors(file)[0] if file.suffix == ".safetensors" else _tensors(file)
    check_tensors(theirs, file)
    weights = _weights(theirs, cfg, len(classes), file)
    source = {"file": file.name, "origin": f"transformers, {KINDS[kind]}"}
    if licence := about.get("licence"):  # a key that only our folders have
        source["licence"] = str(licence)
    return make_checkpoint(cfg, classes, with_training_parts(weights, cfg.model, len(classes)), source=source)


def _tensors(file: Path) -> dict[str, Any]:
    content = read_torch_file(file)
    if not isinstance(content, dict):
        raise CheckpointError(f"{file}: expected a dict of tensors, got {type(content).__name__}")
    return content


def _weights(theirs: Mapping[str, Tensor], cfg: Config, num_classes: int, file: Path) -> dict[str, Tensor]:
    """All detection weights, under the names used here, in float32. Raises CheckpointError."""
    own = on_meta_device(cfg.model, num_classes, file).state_dict()
    theirs = of_this_release(theirs)
    report = compare(to_theirs(own), theirs)
    missing = [name for name in report.missing if name != PADDED]
    if wrong := report._replace(missing=missing).differing():
        raise CheckpointError(
            f"{file}: does not fit its {CONFIG} in {counted(len(wrong), 'entry', 'entries')} "
            f"(shape in the file, by the config): {listed(wrong, 3)}"
        )
    weights = to_ours(theirs, own)
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}


def _classes(about: Mapping[str, Any], file: Path) -> Classes:
    labels = about.get("id2label", {"0": "LABEL_0", "1": "LABEL_1"})  # transformers' default
    numbers = [str(index) for index in range(len(labels))] if isinstance(labels, dict) else None
    if not labels or numbers is None or any(not isinstance(labels.get(number), str) for number in numbers):
        raise CheckpointError(f"{file}: id2label: expected names under 0, 1, 2, ..., got {labels!r:.60}")
    names = tuple(labels[number] for number in numbers)
    ids = about.get("category_ids", list(range(len(names))))  # a key that only our folders have
    if "category_ids" not in about and [*map(plain_name, names)] == [*map(plain_name, COCO_CLASSES.names)]:
        ids = list(COCO_CLASSES.category_ids)
    if not isinstance(ids, list) or len(ids) != len(names) or any(type(each) is not int for each in ids):
        raise CheckpointError(f"{file}: category_ids: expected {len(names)} whole numbers, got {ids!r:.60}")
    try:
        return Classes.of({"names": list(names), "category_ids": ids, "thresholds": about.get("thresholds", [])})
    except ValueError as error:
        raise CheckpointError(f"{file}: {error}") from error


def _config(about: Mapping[str, Any], file: Path, data: dict[str, Any]) -> Config:
    _check_fixed(about, FIXED, file)
    frozen = about.get(FROZEN, True)
    if not isinstance(frozen, bool):
        raise CheckpointError(f"{file}: {FROZEN}: expected true or false, got {frozen!r:.60}")
    backbone = _backbone(about.get("backbone_config"), file)
    sections: dict[str, dict[str, Any]] = {"backbone": backbone, "encoder": {}, "decoder": {}, "supervision": {}}
    sections["backbone"] |= {"norm": "frozen" if frozen else "train", "freeze_stages": int(frozen)}
    for key, (section, own, default) in SETTINGS.items():
        sections[section][own] = about.get(key, default)
    width = sections["encoder"]["hidden_dim"]
    channels = about.get("decoder_in_channels", [256] * 3)
    if channels != [width] * 3:
        raise CheckpointError(f"{file}: decoder_in_channels: expected {[width] * 3} as encoder_hidden_dim says")
    anchors = about.get("anchor_image_size")
    if anchors not in (None, data["image_size"]):
        raise CheckpointError(f"{file}: anchor_image_size: expected null or {data['image_size']}, got {anchors!r:.60}")
    name = f"{about['model_type'].replace('rt_detr', 'rtdetr')}_r{backbone['depth']}vd"
    try:
        return config_from_dict({"name": name, "model": sections, "data": data}, str(file))
    except ConfigError as error:  # which names our keys
        names = {f"model.{section}.{own}": key for key, (section, own, _) in SETTINGS.items()}
        names |= {f"data.image_size[{i}]": f"size.{side} of {PROCESSOR}" for i, side in enumerate(("height", "width"))}
        text = str(error).replace(" (the config stored in it)", "")
        for own, key in names.items():
            text = text.replace(own, key)
        raise CheckpointError(text) from error


def _backbone(about: Any, file: Path) -> dict[str, Any]:
    """Depth and width of a ResNet-vd. Raises CheckpointError."""
    about = {} if about is None else about
    if not isinstance(about, dict):
        raise CheckpointError(f"{file}: backbone_config: expected a mapping, got {about!r:.60}")
    _check_fixed(about, FIXED_BACKBONE, file, "backbone_config.")
    depths, kind = about.get("depths", [3, 4, 6, 3]), about.get("layer_type", "bottleneck")
    stem, sizes = about.get("embedding_size", 64), about.get("hidden_sizes", [256, 512, 1024, 2048])
    for depth, blocks in STAGE_BLOCKS.items():
        deep = depth >= 50
        known = depths == list(blocks) and kind == ("bottleneck" if deep else "basic")
        if known and type(stem) is int and 0 < stem <= 512 and (stem, sizes) == _channels(stem / 64, deep):
            return {"depth": depth, "width": stem / 64}
    raise CheckpointError(
        f"{file}: backbone_config: expected a ResNet-vd of {', '.join(map(str, STAGE_BLOCKS))} layers, got "
        f"depths {depths!r:.60}, layer_type {kind!r:.60}, embedding_size {stem!r:.60}, hidden_sizes {sizes!r:.60}"
    )


def _channels(width: float, deep: bool) -> tuple[int, list[int]]:
    """Channels after the stem and after each stage."""
    return round(64 * width), [round(each * width) * (4 if deep else 1) for each in STAGE_CHANNELS]


def _preprocessing(file: Path) -> dict[str, Any]:
    """The `data` section of the config, from the processor's settings. Raises CheckpointError."""
    about = read_settings(file) if file.is_file() else {}
    if not isinstance(about, dict):
        raise CheckpointError(f"{file}: expected a mapping, got {about!r:.60}")
    _check_fixed(about, FIXED_PROCESSOR, file)
    size, resample = about.get("size", {"height": 640, "width": 640}), about.get("resample", 2)
    if not isinstance(size, dict) or size.keys() != {"height", "width"}:
        raise CheckpointError(f"{file}: size: expected height and width, as the model here resizes, got {size!r:.60}")
    if type(resample) is not int or resample not in RESAMPLES:
        raise CheckpointError(f"{file}: resample: expected 2 (bilinear) or 3 (bicubic), got {resample!r:.60}")
    return {"image_size": [size["height"], size["width"]], "interpolation": RESAMPLES[resample]}


def _check_fixed(about: Mapping[str, Any], fixed: Mapping[str, Any], file: Path, where: str = "") -> None:
    for key, value in fixed.items():
        given = about.get(key, value)
        if given != value or isinstance(given, bool) != isinstance(value, bool):  # True == 1 in Python
            raise CheckpointError(f"{file}: {where}{key}: the model here has {value!r}, got {given!r:.60}")


def save_huggingface(
    folder: Path, content: dict[str, Any], licence: str | None = None, own_folder: bool = False
) -> None:
    """Writes a checkpoint's content for transformers, without the training parts. own_folder: also writes everything in
    this project's format into OWN_FOLDER, which is then what is read here. Existing files of this project are replaced.
    Raises CheckpointError for a model without an equivalent in transformers, and for files of others."""
    safetensors = optional("safetensors.torch", "hub", "the format transformers")
    cfg = config_from_dict(content["config"], str(folder))
    about = _about(cfg, content["classes"], licence) | ({OWN_KEY: OWN_FOLDER} if own_folder else {})
    check_target(folder, lambda there: "rtdetr_version" in there and there.get("model_type") in KINDS)
    if own_folder:
        save_pretrained(folder / OWN_FOLDER, content, licence)
    weights = content["ema"] or content["model"]
    theirs = to_theirs({name: tensor.detach().cpu() for name, tensor in weights.items()})
    if cfg.model.backbone.norm == "frozen":
        theirs = {n: t for n, t in theirs.items() if not (".backbone." in n and n.endswith("num_batches_tracked"))}
    height, width = cfg.data.image_size
    processor = {
        **{"image_processor_type": "RTDetrImageProcessor", "size": {"height": height, "width": width}},
        **{"resample": 2 if cfg.data.interpolation == "bilinear" else 3},
        **FIXED_PROCESSOR,
    }
    plain = {name: tensor.clone().contiguous() for name, tensor in theirs.items()}
    write_folder(folder, safetensors.save(plain, metadata={"format": "pt"}), {PROCESSOR: processor, CONFIG: about})


def _about(cfg: Config, classes: Mapping[str, Any], licence: str | None) -> dict[str, Any]:
    """config.json of a model. Raises CheckpointError."""
    model, deep = cfg.model, cfg.model.backbone.depth >= 50
    stem, sizes = _channels(model.backbone.width, deep)
    for key, given, expected in (
        ("model.official_rectangles", model.official_rectangles, False),
        ("model.encoder.num_csp_blocks", model.encoder.num_csp_blocks, 3),
        ("model.backbone.width", round(32 * model.backbone.width), stem // 2),
    ):
        if given != expected:
            raise CheckpointError(f"{key}: transformers supports only {expected}, the model has {given}")
    backbone = {
        **{"embedding_size": stem, "hidden_sizes": sizes, "depths": list(STAGE_BLOCKS[model.backbone.depth])},
        **{"layer_type": "bottleneck" if deep else "basic"},
        **FIXED_BACKBONE,
    }
    names = classes["names"]
    return {
        **{"architectures": [KINDS["rt_detr"]], "model_type": "rt_detr", "rtdetr_version": __version__},
        **{"licence": licence, "backbone_config": backbone, FROZEN: model.backbone.norm == "frozen"},
        **{key: getattr(getattr(model, section), own) for key, (section, own, _) in SETTINGS.items()},
        **{"encoder_in_channels": sizes[1:], "decoder_in_channels": [model.encoder.hidden_dim] * 3},
        **{key: value for key, value in FIXED.items() if not key.startswith(("decoder_method", "decoder_offset"))},
        **{"id2label": {str(index): name for index, name in enumerate(names)}, "dtype": "float32"},
        **{"label2id": {name: index for index, name in enumerate(names)}},
        **{key: value for key, value in classes.items() if key != "names"},  # category_ids, and thresholds if set
    }
