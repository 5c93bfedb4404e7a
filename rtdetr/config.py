"""Frozen dataclasses, and the only reader of YAML.

A file may name others under `base:` (paths relative to itself); they are merged first, in order, key by key. A key
that no dataclass declares is an error that names the file, the dotted path and the nearest valid key.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

Backend = Literal["auto", "cuda", "cpu", "torch"]
Precision = Literal["bf16", "fp16", "fp32"]
Evaluator = Literal["faster-coco-eval", "pycocotools"]
MatchBackend = Literal["auto", "scipy", "cpu", "cuda"]


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is one sentence for the person who wrote it."""


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    depth: int = 50  # 18, 34, 50 or 101
    width: float = 1.0  # multiplies every channel count
    freeze_stem: bool = True
    # train: ordinary batch norm. frozen: stored statistics and affine values, also in train mode. frozen_affine: batch
    # statistics with frozen affine values, which is what the official code does for R50 on several GPUs.
    norm: Literal["train", "frozen", "frozen_affine"] = "frozen"
    weights: str = ""  # ImageNet weights of the backbone, loaded before training; empty: random


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    hidden_dim: int = 256
    feedforward_dim: int = 1024
    num_heads: int = 8
    expansion: float = 1.0  # width of the CSP blocks' inner branches, relative to hidden_dim
    num_csp_blocks: int = 3


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    hidden_dim: int = 256
    feedforward_dim: int = 1024
    num_heads: int = 8
    num_points: int = 4
    num_layers: int = 6
    num_queries: int = 300
    msda_backend: Backend = "auto"


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig:
    """The training-only parts. None of them exists at inference."""

    num_noise_groups: int = 2  # extra one-to-one groups with randomly masked self-attention
    noise_mask_ratio: float = 0.1  # share of query pairs hidden from each other in such a group
    num_one_to_many_queries: int = 450  # 0 switches the group off
    one_to_many_repeats: int = 4
    num_denoising: int = 100  # 0 switches denoising off
    label_noise_ratio: float = 0.5  # half of it is the probability that a label is redrawn
    box_noise_scale: float = 1.0
    dense_head: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    # The official code mixes up height and width in anchors and position codes. Squares do not notice; rectangles do.
    official_rectangles: bool = False


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    class_weight: float = 1.0
    l1_weight: float = 5.0
    giou_weight: float = 2.0
    match_class_cost: float = 2.0
    match_l1_cost: float = 5.0
    match_giou_cost: float = 2.0
    match_backend: MatchBackend = "auto"  # of rtdetr.ops.linear_assignment
    dense_iou_weight: float = 2.5
    dense_dfl_weight: float = 0.5
    atss_epochs: int = 30  # the dense head's assigner is ATSS before this epoch (from 0), task-aligned from it on


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    images: str = ""  # folder that holds the pictures
    annotations: str = ""  # COCO detection JSON


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    distort_prob: float = 0.8
    expand_prob: float = 0.5
    expand_max_ratio: float = 4.0
    crop_prob: float = 0.8
    flip_prob: float = 0.5
    batch_sizes: tuple[int, ...] = (480, 512, 544, 576, 608, 640, 640, 640, 672, 704, 736, 768, 800)
    interpolations: tuple[str, ...] = ("nearest", "linear", "area", "cubic", "lanczos")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: SplitConfig = field(default_factory=SplitConfig)
    val: SplitConfig = field(default_factory=SplitConfig)
    image_size: tuple[int, int] = (640, 640)  # height, width for evaluation and detection
    train_batch_size: int = 16  # pictures per process and step
    val_batch_size: int = 8
    num_workers: int = 4
    drop_images_without_boxes: bool = False  # True: as the official pipeline does
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: float = 4e-4
    backbone_lr_multiplier: float = 0.1  # stages res2 to res5; the stem trains at the full rate
    weight_decay: float = 1e-4
    decay_norm_and_bias: bool = True  # the official run decays them too, whatever its code intends
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_iterations: int = 2000
    warmup_factor: float = 0.001
    schedule: Literal["constant", "flat_cosine", "cosine"] = "constant"
    min_lr_ratio: float = 0.0  # final rate of a cosine, relative to lr
    flat_ratio: float = 0.5  # share of the iterations before the flat_cosine falls
    clip_grad_norm: float = 0.1  # 0: no clipping


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    decay: float = 0.9999
    warmup: float = 2000.0  # update t (from 0) uses decay * (1 - exp(-(t + 1) / warmup))
    from_zeros: bool = False  # True: the average starts from zeros, as the official one does


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: int = 72
    precision: Precision = "bf16"
    accumulate: int = 1  # batches per optimiser step
    eval_every: int = 1  # epochs
    log_every: int = 10  # optimiser steps
    save_seconds: float = 60.0  # last.pth is written at epoch ends this far apart, before evaluations and at the end
    seed: int = 0
    sync_batch_norm: bool = True  # on several GPUs
    find_unused_parameters: bool = False
    max_iterations: int = 0  # optimiser steps after which training ends; 0: as many as the epochs give


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    max_detections: int = 300
    evaluator: Evaluator = "faster-coco-eval"


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "rtdetrv3"
    num_classes: int = 0  # 0: from the training annotations
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def load_config(path: str | Path, updates: list[str] | None = None) -> Config:
    """Reads a YAML file, merges its bases, applies `a.b=value` updates (values are YAML) and checks every key.

    Raises ConfigError with one sentence that names the file (or `-u`), the dotted path and what is wrong.
    """
    merged, origins = _read_yaml(Path(path), ())
    _apply_updates(merged, origins, updates or [])
    return _build(Config, merged, "", origins)


def config_from_dict(data: dict[str, Any], source: str, updates: list[str] | None = None) -> Config:
    """The Config that `config_to_dict` wrote, with `a.b=value` updates; `source` names the file in error messages."""
    merged, origins = copy.deepcopy(data), {"": source}
    _apply_updates(merged, origins, updates or [])
    return _build(Config, merged, "", origins)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings, ready for YAML or a checkpoint."""
    plain: dict[str, Any] = {}
    for each in dataclasses.fields(config):
        value = getattr(config, each.name)
        if dataclasses.is_dataclass(value):
            plain[each.name] = config_to_dict(value)
        else:
            plain[each.name] = list(value) if isinstance(value, tuple) else value
    return plain


def save_config(config: Config, path: str | Path) -> None:
    Path(path).write_text(yaml.safe_dump(config_to_dict(config), sort_keys=False), encoding="utf-8")


def _read_yaml(path: Path, including: tuple[Path, ...]) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged content of a file and its bases, and for each dotted path the file that set it last."""
    if path.resolve() in including:
        raise ConfigError(f"{path}: `base` goes round in a circle")
    if not path.is_file():
        raise ConfigError(f"{path}: no such config file")
    try:
        own = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML ({str(error).splitlines()[-1].strip()})") from error
    if not isinstance(own, dict):
        raise ConfigError(f"{path}: expected a mapping at the top, got {type(own).__name__}")
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {"": str(path)}
    bases = own.pop("base", [])
    for base in [bases] if isinstance(bases, str) else bases:
        below, below_origins = _read_yaml(path.parent / base, (*including, path.resolve()))
        _merge(merged, origins, below, below_origins, "")
    _merge(merged, origins, own, {"": str(path)}, "")
    return merged, origins


def _origin(origins: dict[str, str], dotted: str) -> str:
    while dotted not in origins:
        dotted = dotted.rpartition(".")[0]
    return origins[dotted]


def _merge(
    into: dict[str, Any], origins: dict[str, str], new: dict[str, Any], new_origins: dict[str, str], prefix: str
) -> None:
    for key, value in new.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, dict):
            below = into.setdefault(key, {})
            if isinstance(below, dict):
                _merge(below, origins, value, new_origins, dotted)
                continue
        into[key] = value
        origins[dotted] = _origin(new_origins, dotted)


def _apply_updates(tree: dict[str, Any], origins: dict[str, str], updates: list[str]) -> None:
    for update in updates:
        dotted, separator, text = update.partition("=")
        if not separator or not dotted:
            raise ConfigError(f"-u {update}: expected key=value, for example -u train.epochs=12")
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"-u {update}: the value is not valid YAML ({error})") from error
        _set_dotted(tree, origins, dotted, value)


def _set_dotted(tree: dict[str, Any], origins: dict[str, str], dotted: str, value: Any) -> None:
    *parents, leaf = dotted.split(".")
    for name in parents:
        below = tree.setdefault(name, {})
        if not isinstance(below, dict):
            raise ConfigError(f"-u {dotted}: `{name}` is a value, not a section")
        tree = below
    tree[leaf] = value
    origins[dotted] = "-u"


def _build(cls: Any, data: Any, prefix: str, origins: dict[str, str]) -> Any:
    where = _origin(origins, prefix)
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: {prefix} is a section and needs keys below it, got {data!r}")
    fields = {each.name: each for each in dataclasses.fields(cls)}
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in data.items():
        dotted = f"{prefix}.{key}" if prefix else str(key)
        if key not in fields:
            near = difflib.get_close_matches(str(key), fields, n=1, cutoff=0.0)[0]
            nearest = f"{prefix}.{near}" if prefix else near
            raise ConfigError(
                f"{_origin(origins, dotted)}: unknown key `{dotted}`, the nearest valid key is `{nearest}`"
            )
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(hint, value, dotted, origins)
        else:
            values[key] = _check(hint, value, dotted, _origin(origins, dotted))
    return cls(**values)


def _check(hint: Any, value: Any, dotted: str, where: str) -> Any:
    """The value in its declared type, or a ConfigError. An int serves as a float, a list as a tuple."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        if value in arguments:
            return value
        raise ConfigError(f"{where}: {dotted} must be one of {', '.join(map(str, arguments))}, got {value!r}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            variadic = len(arguments) == 2 and arguments[1] is Ellipsis
            if variadic or len(value) == len(arguments):
                each = [arguments[0]] * len(value) if variadic else list(arguments)
                return tuple(_check(h, v, f"{dotted}[{i}]", where) for i, (h, v) in enumerate(zip(each, value)))
        raise ConfigError(f"{where}: {dotted} must be a list like {hint}, got {value!r}")
    if isinstance(hint, types.UnionType):  # pragma: no cover - no field declares one today
        raise ConfigError(f"{where}: {dotted} has an unsupported type {hint}")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):  # YAML reads 1e-4 (no dot) as a string
        try:
            return float(value)
        except ValueError:
            pass
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {dotted} must be {hint.__name__}, got {value!r}")
