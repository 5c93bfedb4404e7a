"""Every setting with its default and its range, as frozen dataclasses; rtdetr/config_file.py reads them from YAML.

A file may name others under `base:` (shipped names, or paths relative to itself); they are merged first, in order, key
by key. A key that no dataclass declares, and a value out of its range, is an error that names the file and the dotted
path.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import yaml

from rtdetr.config_file import ConfigError, Range, build, find_config, merge, origin, parse_updates, read_config_file
from rtdetr.config_keys import SHORT_KEYS, foreign_key, full_key, nearest_key, replace_old_keys

Precision = Literal["auto", "bf16", "fp16", "fp32"]
Kernels = Literal["auto", "plain"]
Depth = Literal[18, 34, 50, 101]
Switch = Literal["auto", "on", "off"]
Interpolation = Literal["nearest", "linear", "area", "cubic", "lanczos"]
Resize = Literal["cubic", "bilinear", "bicubic"]
Logger = Literal["tensorboard", "wandb", "mlflow"]

# Every number has a range (a test checks that). The upper ends are far above sensible values: they catch typing errors
# before these fill the memory. What a training makes of `auto`: the table in rtdetr/engine/planning/auto_config.py.
CountOrAuto = Annotated[int | Literal["auto"], Range(1, 100_000)]
Share = Annotated[float, Range(0, 1)]
Amount = Annotated[float, Range(0, 1_000_000_000)]
Count = Annotated[int, Range(1, 100_000)]
CountOrNone = Annotated[int, Range(0, 100_000)]
EpochsOrAuto = Annotated[int | Literal["auto"], Range(0, 100_000)]
Iterations = Annotated[int, Range(0, 1_000_000_000)]
Seed = Annotated[int, Range(0, 2**32 - 1)]
Decay = Annotated[float, Range(0, 1, below=True)]
Side = Annotated[int, Range(32, 8192, multiple_of=32)]  # pixels of the network input; its coarsest cells have 32

Number = TypeVar("Number", int, float)
Section = TypeVar("Section")  # one of the dataclasses below
MAX_NAME = 200  # bytes; folders called so, with endings such as -old, have 255 at most
STRIDES = (8, 16, 32)  # of the three maps from which queries are selected: pixels of a cell


@dataclass(frozen=True, kw_only=True)
class BackboneConfig:
    depth: Depth = 50
    width: Annotated[float, Range(0.05, 8)] = 1.0  # multiplies every channel count
    # Frozen parts, from the input on: 1 the stem, 2 res2 too, up to 4 (all but res5). Where `norm` is train, theirs is
    # frozen. For trained weights: -t.
    freeze_stages: Annotated[int | Literal["auto"], Range(0, 4)] = 1
    # train: ordinary batch norm. frozen: stored statistics and affine values, also in train mode. frozen_affine: batch
    # statistics with frozen affine values, which is what the official code does for R50 on several GPUs.
    norm: Literal["train", "frozen", "frozen_affine"] = "frozen"


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    hidden_dim: Annotated[int, Range(4, 4096, multiple_of=4)] = 256
    feedforward_dim: Annotated[int, Range(1, 65_536)] = 1024
    num_heads: Annotated[int, Range(1, 256)] = 8
    expansion: Annotated[float, Range(0, 8, above=True)] = 1.0  # inner width of the CSP blocks, relative to hidden_dim
    num_csp_blocks: Annotated[int, Range(0, 64)] = 3


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    hidden_dim: Annotated[int, Range(1, 4096)] = 256
    feedforward_dim: Annotated[int, Range(1, 65_536)] = 1024
    num_heads: Annotated[int, Range(1, 256)] = 8
    num_points: Annotated[int, Range(1, 64)] = 4
    num_layers: Annotated[int, Range(1, 64)] = 6
    num_queries: Count = 300


@dataclass(frozen=True, kw_only=True)
class SupervisionConfig:
    """The training-only parts. None of them exists at inference."""

    num_noise_groups: Annotated[int, Range(0, 64)] = 2  # extra one-to-one groups with randomly masked self-attention
    num_one_to_many_queries: CountOrNone = 450  # 0 switches the group off
    num_denoising: CountOrNone = 100  # 0 switches denoising off
    dense_head: bool = True


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    backbone: BackboneConfig = field(default_factory=BackboneConfig)
    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    # The official code mixes up height and width in anchors and position codes. It matters for rectangles only.
    official_rectangles: bool = False


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    weights: tuple[Amount, Amount, Amount] = (1.0, 5.0, 2.0)  # of class, L1 and GIoU
    match_costs: tuple[Amount, Amount, Amount] = (2.0, 5.0, 2.0)  # the same of the matching
    # The dense head's assigner is ATSS before this epoch (from 0), task-aligned from it on.
    atss_epochs: CountOrNone = 30


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    images: str = ""  # image folder; empty: found from the annotations
    annotations: str = ""  # COCO or LVIS JSON, VOC folder, YOLO data.yaml, or the folder of a whole set
    split: Literal["", "train", "val", "trainval", "test"] = (
        ""  # of a folder with several splits; empty: the section's name
    )


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    distort_prob: Share = 0.8
    expand_prob: Share = 0.5
    expand_max_ratio: Annotated[float, Range(1, 16)] = 4.0
    crop_prob: Share = 0.8
    flip_prob: Share = 0.5
    # Not in the official recipe: up to four pasted objects of another image; rotation by 90, 180 or 270 degrees, from
    # epoch `turn_after` on (from 0); epochs over which zoom-out and crops rise from 0 to their probabilities.
    paste_prob: Share = 0.0
    turn_prob: Share = 0.0
    turn_after: EpochsOrAuto = 0
    zoom_ramp: EpochsOrAuto = 0
    batch_sizes: tuple[Side, ...] = (480, 512, 544, 576, 608, 640, 640, 640, 672, 704, 736, 768, 800)
    # package.module:function of your own augmentation, before all of the above (docs/data.md); empty: none.
    custom: str = ""
    interpolations: tuple[Interpolation, ...] = ("nearest", "linear", "area", "cubic", "lanczos")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    train: SplitConfig = field(default_factory=SplitConfig)
    val: SplitConfig = field(default_factory=SplitConfig)
    image_size: tuple[Side, Side] = (640, 640)  # height, width for evaluation and detection
    # Interpolation of that resize. cubic: OpenCV's, as in the official pipeline. bilinear, bicubic: antialiased, as in
    # Pillow, torchvision and transformers.
    interpolation: Resize = "cubic"
    # Images per process and batch; evaluation takes no more than 8 of them. auto: as many as fit into the GPU.
    train_batch_size: CountOrAuto = 16
    num_workers: Annotated[int, Range(0, 256)] = 4
    # Larger images are refused before they are decoded; raise it for aerial images.
    max_megapixels: Annotated[float, Range(0, 10_000, above=True)] = 179.0
    drop_images_without_boxes: bool = False  # True: as the official pipeline does
    # uniform: each image comes once per epoch. repeat_factor: images with rare classes come several times, and epochs
    # become longer (LVIS' definition). A number is its threshold: a class is rare if a smaller share of the images has
    # it; otherwise it depends on the number of images, 0.1 to LVIS' 0.001.
    sampling: Annotated[float | Literal["uniform", "repeat_factor"], Range(0, 1)] = "uniform"
    # Bad records are left out and listed, and unreadable images replaced by others in training, up to this share of the
    # images and of the boxes; nine unreadable images, or half of a small set, are never too many. 0: none may be bad.
    max_defects: Share = 0.05
    augment: AugmentConfig = field(default_factory=AugmentConfig)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    lr: Annotated[float, Range(0, 0.1, above=True)] = 4e-4
    lr_batch: Count = 16  # images per step that lr is meant for; used if data.train_batch_size is auto
    # Of stages res2 to res5; the stem has the full learning rate.
    backbone_lr_multiplier: Annotated[float | Literal["auto"], Range(0, 1000)] = 0.1
    weight_decay: Share = 1e-4
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    warmup_iterations: Annotated[int | Literal["auto"], Range(0, 10**9)] = 2000
    # Share of the iterations at the full learning rate, which then falls as half a cosine. 1: constant; 0: from the
    # warm-up on.
    flat_ratio: Share = 1.0
    min_lr_ratio: Share = 0.0  # final learning rate of the cosine, relative to lr
    clip_grad_norm: Amount = 0.1  # 0: no clipping
    # Muon instead of AdamW for matrices and convolutions, at this multiple of the learning rate; 0: AdamW for all.
    muon_lr_multiplier: Annotated[float | Literal["auto"], Range(0, 1000)] = 0.0


@dataclass(frozen=True, kw_only=True)
class EmaConfig:
    decay: Decay = 0.9999
    # Update t (from 0) uses decay * (1 - exp(-(t + 1) / warmup)).
    warmup: Annotated[float | Literal["auto"], Range(0, 1e9)] = 2000.0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    epochs: CountOrAuto = 72
    precision: Precision = "auto"  # bf16 on a GPU, else fp32: with bf16 most CPUs take ten times as long
    accumulate: CountOrAuto = 1  # batches per optimiser step
    # CUDA graphs of forward pass, losses and gradients; auto: on GPUs, unless batches are accumulated. off: without
    # graphs; several processes then use DistributedDataParallel
    graphs: Switch = "auto"
    estimate_memory: bool = True  # on a GPU, before the first step: does the worst-case batch fit?
    checkpoint_activations: bool = False  # decoder layers recompute their activations in the backward pass: less memory
    # torch.compile of the step; auto: on a GPU, if the run is long enough to save more time than compiling takes
    compile: Switch = "auto"
    eval_every: CountOrNone = 1  # epochs; 0: only at the end
    log_every: Count = 10  # optimiser steps
    # In addition to metrics.csv; wandb and mlflow need their packages. []: none.
    loggers: Annotated[tuple[Logger, ...], Range(0, 3)] = ("tensorboard",)
    # Early stopping after this many evaluations in a row without a better AP; 0: never.
    patience: CountOrNone = 0
    save_seconds: Amount = 60.0  # last.pth is written this often, before and after evaluations, and at the end
    seed: Seed = 0
    deterministic: bool = False  # the same bits in every run on a GPU, as on a CPU; slower
    # Steps with non-finite losses that are skipped; the next one ends the run. Above 0 losses are checked before the
    # weights change, for which the GPU has to wait.
    max_skips: CountOrNone = 0
    max_iterations: Iterations = 0  # optimiser steps after which training ends; 0: as many as the epochs give


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    max_detections: Count = 300


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = "rtdetrv3"
    # auto: this package's compiled operators and fused kernels, CUDA graphs and the compiler, wherever they can run.
    # plain: PyTorch and SciPy only, on any device; slower, and each step the same within rounding.
    kernels: Kernels = "auto"
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)


def check_data(cfg: Config, updates: Sequence[str], splits: Sequence[str] = ("train", "val")) -> None:
    """Raises ConfigError if the data do not exist and the user did not name them: the path in a shipped config, or in a
    checkpoint from another machine, is not one that the user typed."""
    for split in splits:
        path = getattr(cfg.data, split).annotations
        if any(each.startswith((f"data.{split}.", f"data.{split}=")) for each in updates) or os.path.exists(path):
            continue
        here = "not here" if os.path.isabs(path) else f"not here, in {os.getcwd()}"
        why = f"data.{split}.annotations of {cfg.name} is {path}, which is {here}" if path else f"{cfg.name} has none"
        raise ConfigError(f"--data DATA is needed, a folder or file with images and their boxes ({why})")


def load_config(path: str | Path, updates: list[str] | None = None) -> Config:
    """Reads a YAML file, or the shipped config of that name, merges its bases, applies `a.b=value` updates (values are
    YAML) and checks it all.

    Raises ConfigError with one sentence that names the file (or `-u`), the dotted path and what is wrong.
    """
    sources = read_config_file(find_config(str(path)))
    for content, file in sources:
        replace_old_keys(content, file)
    return _config(sources, updates)


def config_from_dict(data: dict[str, Any], source: str, updates: list[str] | None = None, by: str = "-u") -> Config:
    """The Config that `config_to_dict` wrote, with `a.b=value` updates. source: names the file in error messages; by:
    what gave the updates."""
    tree, where = copy.deepcopy(data), f"{source} (the config stored in it)"
    replace_old_keys(tree, where, stored=True)
    if isinstance(train := tree.get("train"), dict):
        # Keys that only another version had are left out: they changed how that run went, not its model.
        tree["train"] = {each.name: train[each.name] for each in dataclasses.fields(TrainConfig) if each.name in train}
    return _config([(tree, where)], updates, by)


def config_to_dict(config: Any) -> dict[str, Any]:
    """Plain dicts, lists, numbers and strings, ready for YAML or a checkpoint."""
    return dataclasses.asdict(
        config, dict_factory=lambda entries: {k: list(v) if isinstance(v, tuple) else v for k, v in entries}
    )


def settled(value: Number | Literal["auto"]) -> Number:
    """The number. Raises ConfigError for `auto`, which only training replaces by a number."""
    if value == "auto":
        raise ConfigError("a number is needed, got auto, which only training resolves")
    return value


def keyword_updates(settings: Mapping[str, Any]) -> list[str]:
    """`a.b=value` updates from keyword arguments.

    A key is written with dots or double underscores (`optimizer__lr`), or by its last word where no other key ends in
    it (`epochs`, `lr`, `precision`); `batch_size` is data.train_batch_size. Raises ConfigError for a word of several
    and for one of none, and for two values of a key.
    """
    keys, names = _all_keys(), dict[str, str]()
    for name in settings:
        key = full_key(name.replace("__", "."), keys)
        if names.setdefault(key, name) != name:
            raise ConfigError(f"{key}: expected one value, got {names[key]}= and {name}=; leave one out")
    return [f"{key}={json.dumps(settings[name], ensure_ascii=False, default=_plain)}" for key, name in names.items()]


def _plain(value: Any) -> Any:
    """What JSON has for a value: the numbers of an array or a tensor, the text of a path."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def setting(word: str) -> str | None:
    """What `-u` takes for the end of a key, or for what other projects call one; None: there is no such setting."""
    if words := foreign_key(word):
        return words if words.startswith(("-", "nothing")) else f"-u {words}"
    keys = [SHORT_KEYS[word]] if word in SHORT_KEYS else [key for key in _all_keys() if key.endswith(f".{word}")]
    return f"-u {keys[0]}=X" if len(keys) == 1 else None


def _all_keys() -> list[str]:
    return list(flat(config_to_dict(Config())))


def flat(tree: Mapping[str, Any], section: str = "") -> dict[str, Any]:
    """The values of nested dicts by their dotted keys. section: starts the keys."""
    values: dict[str, Any] = {}
    for key, value in tree.items():
        dotted = f"{section}{key}"
        values |= flat(value, f"{dotted}.") if isinstance(value, dict) else {dotted: value}
    return values


def with_values(config: Section, values: Mapping[str, Any]) -> Section:
    """A config, or a section of one, with other values at dotted keys; the values are not checked."""
    changed: Any = config
    for key, value in values.items():
        name, _, rest = key.partition(".")
        new = with_values(getattr(changed, name), {rest: value}) if rest else value
        changed = dataclasses.replace(changed, **{name: new})
    return cast(Section, changed)


def save_config(config: Config, path: str | Path) -> None:
    Path(path).write_text(yaml.safe_dump(config_to_dict(config), sort_keys=False), encoding="utf-8")


def _config(sources: list[tuple[dict[str, Any], str]], updates: list[str] | None, by: str = "-u") -> Config:
    keys = _all_keys()
    changes = parse_updates([_in_full(update, keys, by) for update in updates or []], by)
    replace_old_keys(changes, by)
    tree: dict[str, Any] = {}
    origins = {"": sources[-1][1]}
    for content, where in (*sources, (changes, by)):
        merge(tree, origins, content, where)
    config: Config = build(Config, tree, origins, partial(nearest_key, keys=keys))
    for key, other, sentence in _contradictions(config):
        set_by = [origin(origins, key), origin(origins, other)]
        raise ConfigError(f"{by if by in set_by else set_by[0]}: {key} {sentence}")
    return config


def _in_full(update: str, keys: list[str], by: str) -> str:
    name, separator, value = update.partition("=")
    return f"{full_key(name, keys, f'{by}: ')}={value}" if separator and name else update


def _contradictions(cfg: Config) -> Iterator[tuple[str, str, str]]:
    """Values that are right alone but not together: the key to blame, the other one, and what is wrong."""
    encoder, decoder, augment, loss = cfg.model.encoder, cfg.model.decoder, cfg.data.augment, cfg.loss
    if cfg.name in ("", ".", "..") or "/" in cfg.name:
        yield "name", "name", f"must be the name of a folder, got {cfg.name!r}"
    if (size := len(cfg.name.encode(errors="replace"))) > MAX_NAME:
        yield "name", "name", f"must have at most {MAX_NAME} bytes, as folders are named after it, got {size}"
    for part, dim, heads in (
        ("encoder", encoder.hidden_dim, encoder.num_heads),
        ("decoder", decoder.hidden_dim, decoder.num_heads),
    ):
        other = f"model.{part}.hidden_dim"
        if dim % heads:
            yield f"model.{part}.num_heads", other, f"must divide {other}={dim}, got {heads}"
    other, inner = "model.encoder.hidden_dim", encoder.hidden_dim * encoder.expansion
    if inner < 1:
        yield "model.encoder.expansion", other, f"must leave a channel of {other}={encoder.hidden_dim}, got {inner:g}"
    smallest = min(augment.batch_sizes)
    queries, many = "model.decoder.num_queries", "model.supervision.num_one_to_many_queries"
    for key, (height, width), other, number in (
        ("data.image_size", cfg.data.image_size, queries, decoder.num_queries),
        ("data.augment.batch_sizes", (smallest, smallest), queries, decoder.num_queries),
        ("data.augment.batch_sizes", (smallest, smallest), many, cfg.model.supervision.num_one_to_many_queries),
    ):
        cells = sum((height // side) * (width // side) for side in STRIDES)
        if cells < number:
            what = f"{cells} cells of {height} x {width} pixels"
            yield key, other, f"must give each query of {other}={number} a cell of its own, got {what}"
    if len({*cfg.train.loggers}) < len(cfg.train.loggers):
        yield "train.loggers", "train.loggers", f"must be given once each, got {', '.join(cfg.train.loggers)}"
    if cfg.train.max_skips and cfg.train.precision == "fp16":
        other, got = "train.precision", cfg.train.max_skips
        yield "train.max_skips", other, f"must be 0 where {other}=fp16, whose loss scale leaves steps out, got {got}"
    if not any(loss.match_costs):
        yield "loss.match_costs", "loss.match_costs", "must have one above 0, got zeros"
