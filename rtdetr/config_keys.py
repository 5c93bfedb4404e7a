"""Resolves config keys: short names (`epochs` for `train.epochs`), names of other projects, and old keys."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

from rtdetr.config_file import ConfigError, as_float
from rtdetr.wording import meant, name_here, option

logger = logging.getLogger("rtdetr")

SHORT_KEYS = {"batch_size": "data.train_batch_size"}
# Names here, as a command and as Python say it where that differs -> names of such settings in other detectors.
FOREIGN_KEYS: dict[str | tuple[str, str], str] = {
    "data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training": "imgsz img_size resolution",
    "data.augment.batch_sizes=[N,...]": "multi_scale",
    "data.train_batch_size=N": "batch per_device_train_batch_size",
    "train.epochs=N": "num_train_epochs",
    "optimizer.lr=X": "lr0 learning_rate",
    "optimizer.min_lr_ratio=X": "lrf",
    "optimizer.flat_ratio=0, a cosine from the warm-up on": "cos_lr",
    "optimizer.backbone_lr_multiplier=X, a factor of optimizer.lr": "lr_encoder",
    "optimizer.warmup_iterations=N": "warmup_epochs",
    "data.num_workers=N": "workers dataloader_num_workers",
    "train.accumulate=N": "grad_accum_steps gradient_accumulation_steps",
    "nothing: AdamW is used, and Muon where optimizer.muon_lr_multiplier is above 0": "optimizer",
    "data.train.images=DIR": "train_dir",
    "data.val.images=DIR": "val_dir",
    "data.train.annotations=FILE": "train_data",
    "data.val.annotations=FILE": "val_data",
    "model.backbone.freeze_stages=N, 0 to 4": "freeze_backbone freeze",
    "train.precision=auto, which is the default": "amp use_amp",
    "train.precision=fp16": "fp16",
    "train.precision=bf16": "bf16",
    "nothing: weights are always averaged, by ema.decay": "ema use_ema",
    "ema.decay=X": "ema_decay",
    "train.patience=N": "early_stopping",
    "train.loggers=[tensorboard], which is the default": "tensorboard",
    "train.loggers=[tensorboard,wandb]": "wandb",
    "train.loggers=[tensorboard,mlflow]": "mlflow",
    "train.save_seconds=X": "save_period",
    "nothing: classes come from the annotations": "nc",
    "nothing: classes come from the annotations; give them one": "single_cls",
    "nothing: files are read by data.num_workers processes, ahead of the steps": "cache",
    "nothing: curves.png is always written": "plots",
    "nothing: each evaluation is printed": "verbose",
    "data.augment.paste_prob=X": "mosaic mixup copy_paste",
    "data.augment.flip_prob=X": "fliplr",
    "data.augment.turn_prob=X, of turns by 90, 180 or 270 degrees": "degrees",
    "data.augment.distort_prob=X": "hsv_h hsv_s hsv_v",
    "data.augment.expand_prob=X and data.augment.crop_prob=X": "scale",
    ("--threshold, where a command detects", "threshold=, where it detects"): "conf",
    ("--device", "device= of from_pretrained()"): "device",
    ("-t WEIGHTS", "nothing: train() starts from the weights of its model"): "pretrained",
    ("--data DATA", "data="): "dataset_dir",
    ("--output-dir", "output_dir="): "project",
    ("--overwrite", "overwrite="): "exist_ok",
    "kernels=plain or auto": "msda_backend match_backend",
}
# Old keys that `kernels` replaces, and their values; the last one is kernels=plain now.
KERNEL_KEYS = {
    "model.decoder.msda_backend": ("auto", "cuda", "cpu", "torch"),
    "loss.match_backend": ("auto", "cuda", "cpu", "scipy"),
    "data.augment.backend": ("fused", "plain"),
}
RENAMED_KEYS = {"data.max_unreadable": "data.max_defects"}


class Replaced(NamedTuple):
    new: str
    values: dict[Any, Any]  # old value -> new value
    stands: Callable[[Any, Any], bool]  # of the old value and one given for `new`: whether that one stays as it is


REPLACED_KEYS = {
    "model.backbone.freeze_stem": Replaced(
        "model.backbone.freeze_stages", {True: 1, False: 0}, lambda stem, stages: not stem or stages != 0
    ),
    "data.on_defect": Replaced("data.max_defects", {"drop": 0.05, "refuse": 0.0}, lambda old, _: old == "drop"),
    "optimizer.schedule": Replaced(
        "optimizer.flat_ratio",
        {"constant": 1.0, "flat_cosine": 0.5, "cosine": 0.0},
        lambda old, _: old == "flat_cosine",
    ),
    "train.on_nan": Replaced("train.max_skips", {"stop": 0, "skip": 10}, lambda old, _: old == "skip"),
}
WEIGHTS, MATCH_COSTS = ("loss.weights", (1.0, 5.0, 2.0)), ("loss.match_costs", (2.0, 5.0, 2.0))
# Old scalar keys that are list entries now: the list, its default, and which entry.
LISTED_KEYS = {
    "loss.class_weight": (*WEIGHTS, 0),
    "loss.l1_weight": (*WEIGHTS, 1),
    "loss.giou_weight": (*WEIGHTS, 2),
    "loss.match_class_cost": (*MATCH_COSTS, 0),
    "loss.match_l1_cost": (*MATCH_COSTS, 1),
    "loss.match_giou_cost": (*MATCH_COSTS, 2),
}
# Keys that have one value now, that of every shipped config, and how to get another one.
FIXED_KEYS = {
    "model.backbone.weights": ("", "start from the weights with -t"),
    "model.supervision.noise_mask_ratio": (0.1, "change NOISE_MASK_RATIO in rtdetr/models/query_groups.py"),
    "model.supervision.label_noise_ratio": (0.5, "change NEW_LABELS, half of it, in rtdetr/models/denoising.py"),
    "model.supervision.box_noise_scale": (1.0, "change noise_targets in rtdetr/models/denoising.py"),
    "model.supervision.one_to_many_repeats": (4, "change ONE_TO_MANY_REPEATS in rtdetr/losses/criterion.py"),
    "model.supervision.crowd_limit": (200, "change CROWD_LIMIT in rtdetr/types.py"),
    "loss.dense_iou_weight": (2.5, "change DENSE_WEIGHTS in rtdetr/losses/criterion.py"),
    "loss.dense_dfl_weight": (0.5, "change DENSE_WEIGHTS in rtdetr/losses/criterion.py"),
    "optimizer.warmup_factor": (0.001, "change WARMUP_FACTOR in rtdetr/engine/optim.py"),
    "optimizer.decay_norm_and_bias": (True, "change parameter_groups in rtdetr/engine/optim.py"),
    "ema.from_zeros": (False, "change ModelEma in rtdetr/engine/ema.py"),
    "train.min_delta": (0.0, "change EarlyStop in rtdetr/engine/early_stop.py"),
    "train.data_seed": ("auto", "set train.seed"),
    "train.sync_batch_norm": (True, "change Trainer in rtdetr/engine/trainer.py"),
}
# Obsolete keys, and why they are not needed.
GONE_KEYS = {
    "num_classes": "classes come from the annotations",
    "model.backbone.zero_init_residual": "follows from model.backbone.depth",
    "data.val_batch_size": "evaluation takes data.train_batch_size images, at most 8",
    "data.repeat_threshold": "data.sampling takes the number",
    "train.counted_batches": "follows from train.accumulate",
    "train.find_unused_parameters": "every parameter is used",
    "eval.evaluator": "see `rtdetr eval --evaluator`",
}
GONE = (*KERNEL_KEYS, *RENAMED_KEYS, *REPLACED_KEYS, *LISTED_KEYS, *FIXED_KEYS, *GONE_KEYS)
START_ALONE = ("model.backbone.weights",)  # only read before a run began: checkpoints contain the resulting weights


def full_key(name: str, keys: Collection[str], by: str = "") -> str:
    """The dotted key for a short `name`: the only one of `keys` that ends in it. Names with a dot, and sections, are
    returned as they are.

    by: the source of the name, as the start of a message. Raises ConfigError if several keys, or none, end in it.
    """
    if name in SHORT_KEYS:
        return SHORT_KEYS[name]
    if "." in name or name in keys or any(key.startswith(f"{name}.") for key in keys):
        return name
    ending = [key for key in keys if _last(key) == name]
    ending = ending or [key for key in GONE if _last(key) == name and name_here(FOREIGN_KEYS, name) is None]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigError(f"{by}{name}: matches several keys, {', '.join(ending)}; write one of them in full")
    if words := foreign_key(name):
        raise ConfigError(f"{by}unknown config key {name}{meant(words)}")
    ends = {_last(key): key for key in keys} | SHORT_KEYS
    near = difflib.get_close_matches(name, ends, n=1)
    known = f"did you mean {ends[near[0]]}?" if near else "the config.yml of a run has them all"
    raise ConfigError(f"{by}unknown config key {name}; {known}")


def nearest_key(dotted: str, keys: Collection[str]) -> str:
    """What an unknown dotted key may have meant, as the end of a message: one of `keys`, or a section, that ends in its
    last word; what another project calls so; or what is spelt nearly so, in its section first."""
    section, _, word = dotted.rpartition(".")
    known = [*dict.fromkeys(key.rsplit(".", cut)[0] for key in keys for cut in range(key.count(".") + 1))]
    ends = {key: _last(key) for key in known}
    if dotted in known:
        return f"; did you mean {dotted.replace('.', ': {')}: ...{'}' * dotted.count('.')}?"
    if ending := [key for key in known if ends[key] == word or key == SHORT_KEYS.get(word)]:
        return f"; did you mean {' or '.join(f'`{key}`' for key in ending)}?"
    if words := foreign_key(word):
        return meant(words)
    if gone := [key for key in GONE_KEYS if _last(key) == word]:
        return f"; {gone[0]} is gone: {GONE_KEYS[gone[0]]}"
    for among, cutoff in (([key for key in known if key.rpartition(".")[0] == section], 0.5), (known, 0.7)):
        if near := difflib.get_close_matches(word, [ends[key] for key in among], n=1, cutoff=cutoff):
            return f", the nearest valid key is `{next(key for key in among if ends[key] == near[0])}`"
    return "; the config.yml of a run has them all"


def foreign_key(name: str) -> str | None:
    """Message on the key that a setting of another project corresponds to; see `meant`."""
    words = name_here(FOREIGN_KEYS, name)
    return option(*words) if isinstance(words, tuple) else words


def replace_old_keys(tree: dict[str, Any], where: str, stored: bool = False) -> None:
    """Converts old keys of one source to current ones, before it is merged with others, and logs the changes in one
    line. where: names the source; stored: it is a checkpoint, which contains every key of its version, so that only
    unsupported values are logged. Raises ConfigError for such values in any other source. Keys without a successor
    affect training only, so that an old checkpoint detects as before."""
    said = _replace(tree, where)
    lines = _fix(tree, where, stored) + _to_kernels(tree, where, stored) + ([] if stored else said)
    if lines:
        logger.warning("%s: %s", where, "; ".join(lines))


def _replace(tree: dict[str, Any], where: str) -> list[str]:
    """Replaces old keys that have a successor, and removes those without effect."""
    lines = []
    for dotted, value, section in _taken(tree, RENAMED_KEYS):
        new = RENAMED_KEYS[dotted]
        section[_last(new)] = value
        lines.append(f"{dotted} is now {new}")
    for dotted, value, section in _taken(tree, REPLACED_KEYS):
        new, values, stands = REPLACED_KEYS[dotted]
        _check_choice(dotted, value, tuple(values), new, where)
        if _last(new) not in section or not stands(value, section[_last(new)]):
            section[_last(new)] = values[value]
        lines.append(f"{dotted}={value} is now {new}={section[_last(new)]}")
    for dotted, value, section in _taken(tree, LISTED_KEYS):
        new, default, entry = LISTED_KEYS[dotted]
        given = section.get(_last(new), default)
        if isinstance(given, (list, tuple)) and len(given) == len(default):  # other values are refused later
            section[_last(new)] = [*given[:entry], value, *given[entry + 1 :]]
        lines.append(f"{dotted} is now number {entry + 1} of {new}")
    data = tree.get("data")
    if isinstance(data, dict) and data.get("sampling") == "repeat_factor":
        threshold = data.get("repeat_threshold", "auto")
        data["sampling"] = "repeat_factor" if threshold == "auto" else threshold
    return lines + [f"{dotted} is gone: {GONE_KEYS[dotted]}" for dotted, *_ in _taken(tree, GONE_KEYS)]


def _fix(tree: dict[str, Any], where: str, stored: bool) -> list[str]:
    """Removes the keys that have only one value now."""
    lines, same = [], []
    for dotted, value, _ in _taken(tree, FIXED_KEYS):
        fixed, instead = FIXED_KEYS[dotted]
        if as_float(value) == fixed:
            same.append(f"{dotted}={value}")
        elif not stored:
            shown = fixed or repr(fixed)  # '' for no text
            raise ConfigError(f"{where}: {dotted} is no key any more, and always {shown}; {instead} instead")
        elif dotted not in START_ALONE:
            lines.append(f"{dotted} was {value} and is {fixed} in any further training; it detects as before")
    return lines if stored or not same else [f"{', '.join(same)} cannot be changed any more"]


def _to_kernels(tree: dict[str, Any], where: str, stored: bool) -> list[str]:
    """Converts the old keys that `kernels` replaces."""
    lines = []
    for dotted, value, _ in _taken(tree, KERNEL_KEYS):
        values = KERNEL_KEYS[dotted]
        _check_choice(dotted, value, values, "kernels", where)
        plain = value == values[-1]
        if plain:
            tree.setdefault("kernels", "plain")
        if plain or not stored:
            lines.append(f"{dotted}={value} is now " + (f"kernels={tree['kernels']}" if plain else "up to kernels"))
    return lines


def _check_choice(dotted: str, value: Any, values: tuple[Any, ...], new: str, where: str) -> None:
    if not any(value == each and type(value) is type(each) for each in values):
        known = ", ".join(map(str, values))
        raise ConfigError(f"{where}: {dotted} is now `{new}`, and was one of {known}, got {value!r}")


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _taken(tree: dict[str, Any], keys: Iterable[str]) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Removes the dotted keys that are there; yields each one, its value, and the section that held it."""
    for dotted in keys:
        section: Any = tree
        for name in dotted.split(".")[:-1]:
            section = section.get(name) if isinstance(section, dict) else None
        if isinstance(section, dict) and _last(dotted) in section:
            yield dotted, section.pop(_last(dotted)), section
