"""The short names of config keys: `epochs` for `train.epochs`, what other projects call them, and keys of before."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection
from typing import Any

from rtdetr.config_file import ConfigError, Origins, as_float, origin

logger = logging.getLogger("rtdetr")

SHORT_KEYS = {"batch_size": "data.train_batch_size"}
# What other detectors call a setting -> what it is here.
FOREIGN_KEYS = {
    "imgsz": "data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training",
    "img_size": "data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training",
    "resolution": "data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training",
    "batch": "data.train_batch_size=N",
    "lr0": "optimizer.lr=X",
    "lr_encoder": "optimizer.backbone_lr_multiplier=X, a factor of optimizer.lr",
    "workers": "data.num_workers=N",
    "grad_accum_steps": "train.accumulate=N",
    "freeze": "model.backbone.freeze_stages=N, 0 to 4",
    "amp": "train.precision=auto, which is the default",
    "nc": "nothing: classes come from the annotations",
    "conf": "--threshold (threshold= in Python), where it detects",
    "project": "--output-dir (output_dir= in Python)",
    "msda_backend": "kernels=plain or auto",
    "match_backend": "kernels=plain or auto",
}
# Keys of before `kernels`: their default first, and last the value that is kernels=plain now.
OLD_KEYS = {
    "model.decoder.msda_backend": ("auto", "cuda", "cpu", "torch"),
    "loss.match_backend": ("auto", "cuda", "cpu", "scipy"),
    "data.augment.backend": ("fused", "plain"),
}

# Keys that are constants now, with the value that they have always had in shipped configs.
FIXED_KEYS = {
    "model.supervision.noise_mask_ratio": (0.1, "NOISE_MASK_RATIO in rtdetr/models/query_groups.py"),
    "model.supervision.label_noise_ratio": (0.5, "NEW_LABELS, half of it, in rtdetr/models/denoising.py"),
    "model.supervision.box_noise_scale": (1.0, "noise_targets in rtdetr/models/denoising.py"),
    "model.supervision.one_to_many_repeats": (4, "ONE_TO_MANY_REPEATS in rtdetr/losses/criterion.py"),
    "loss.dense_iou_weight": (2.5, "DENSE_WEIGHTS in rtdetr/losses/criterion.py"),
    "loss.dense_dfl_weight": (0.5, "DENSE_WEIGHTS in rtdetr/losses/criterion.py"),
    "optimizer.warmup_factor": (0.001, "WARMUP_FACTOR in rtdetr/engine/optim.py"),
}
RENAMED_KEYS = {"train.rehearsal": "train.estimate_memory"}


def full_key(name: str, keys: Collection[str], by: str = "") -> str:
    """The dotted key that `name` stands for: the only one of `keys` that ends so. Names with a dot, and sections, stay.

    by: what gave it, as the start of a message. Raises ConfigError for a name of several keys and for one of none.
    """
    if name in SHORT_KEYS:
        return SHORT_KEYS[name]
    if "." in name or name in keys or any(key.startswith(f"{name}.") for key in keys):
        return name
    meant = [key for key in keys if key.rpartition(".")[2] == name]
    if len(meant) == 1:
        return meant[0]
    if meant:
        raise ConfigError(f"{by}{name}: is the end of several keys, {', '.join(meant)}; write one of them in full")
    if name in FOREIGN_KEYS:
        raise ConfigError(f"{by}unknown config key {name}; did you mean {FOREIGN_KEYS[name]}?")
    ends = {key.rpartition(".")[2]: key for key in keys} | SHORT_KEYS
    near = difflib.get_close_matches(name, ends, n=1, cutoff=0.0)[0]
    raise ConfigError(f"{by}unknown config key {name}; did you mean {near} ({ends[near]})?")


def replace_old_keys(tree: dict[str, Any], origins: Origins, stored: bool) -> None:
    """Makes `kernels` of the keys that it took the place of, and says so in a line for each. A checkpoint has them all
    (`stored`): their defaults are not worth a line. Keys that have another name now get it, and those that are
    constants now go. Raises ConfigError for other values of these."""
    for dotted, new in RENAMED_KEYS.items():
        if (section := _section_with(tree, dotted)) is not None:
            section[new.rpartition(".")[2]] = section.pop(dotted.rpartition(".")[2])
            origins[new] = origin(origins, dotted)
    for dotted, (value, home) in FIXED_KEYS.items():
        if (section := _section_with(tree, dotted)) is not None:
            given, where = section.pop(dotted.rpartition(".")[2]), origin(origins, dotted)
            if as_float(given) != value:
                raise ConfigError(f"{where}: {dotted} is no key any more, and always {value}; change {home} instead")
    found = {}
    for dotted, values in OLD_KEYS.items():
        if (section := _section_with(tree, dotted)) is not None:
            value, where = section.pop(dotted.rpartition(".")[2]), origin(origins, dotted)
            if value not in values:
                raise ConfigError(f"{where}: {dotted} is now `kernels`, which must be auto or plain, got {value!r}")
            found[dotted] = (value, where)
    if "kernels" not in tree:
        for dotted, (value, where) in found.items():
            if value == OLD_KEYS[dotted][-1]:
                tree["kernels"], origins["kernels"] = "plain", where
    for dotted, (value, where) in found.items():
        if not stored or value != OLD_KEYS[dotted][0]:
            logger.warning("%s: %s=%s is now kernels=%s", where, dotted, value, tree.get("kernels", "auto"))


def _section_with(tree: dict[str, Any], dotted: str) -> dict[str, Any] | None:
    """The section that holds the key, if there is one."""
    *sections, key = dotted.split(".")
    section: Any = tree
    for name in sections:
        section = section.get(name) if isinstance(section, dict) else None
    return section if isinstance(section, dict) and key in section else None
