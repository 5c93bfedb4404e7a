"""Checkpoint files: written whole or not at all, read without running code, and refused with a sentence.

A file is a dict: format "rtdetr", version, config, classes, preprocess, model, ema, training and source; the last three
may be None.
"""

from __future__ import annotations

import os
import pickle
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rtdetr.config import Config, config_from_dict, config_to_dict
from rtdetr.data.coco import Classes
from rtdetr.models.rtdetrv3 import RTDETRv3, build_model

FORMAT, VERSION = "rtdetr", 1
SHOWN_NAMES = 6  # of each kind, in messages


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message is one sentence for the person who gave it."""


class LoadReport(NamedTuple):
    """What became of the entries of a weight file."""

    matched: list[str]
    missing: list[str]  # in the model only
    unexpected: list[str]  # in the file only
    mismatched: list[str]  # in both, with different shapes: "name (file's shape, model's shape)"

    def text(self, shown: int = SHOWN_NAMES) -> str:
        """Several lines: share of the model that was loaded, then up to `shown` names of each kind that was not."""
        total = len(self.matched) + len(self.missing) + len(self.mismatched)
        lines = [
            f"loaded {len(self.matched)} of {total} entries of the model ({len(self.matched) / max(total, 1):.1%})"
        ]
        for kind, names in (
            ("missing in the file, kept as they were", self.missing),
            ("of another shape, kept as they were", self.mismatched),
            ("left over in the file", self.unexpected),
        ):
            if names:
                more = f", and {len(names) - shown} more" if len(names) > shown else ""
                lines.append(f"  {len(names)} {kind}: {', '.join(names[:shown])}{more}")
        return "\n".join(lines)


def make_checkpoint(
    cfg: Config,
    classes: Classes,
    model: Mapping[str, Tensor],
    ema: Mapping[str, Tensor] | None = None,
    training: dict[str, Any] | None = None,
    source: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_dict(cfg),
        "classes": {"names": list(classes.names), "category_ids": list(classes.category_ids)},
        "preprocess": {"size": list(cfg.data.image_size), "interpolation": "cubic", "scale": 1.0 / 255.0},
        "model": dict(model),
        "ema": None if ema is None else dict(ema),
        "training": training,
        "source": source,
    }


def save_checkpoint(path: Path, content: dict[str, Any]) -> None:
    """Writes beside `path`, then renames: whoever reads `path` finds the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint of this project, on the CPU. No code of the file runs. Raises CheckpointError."""
    content = _read(Path(path))
    if content is None or content.get("format") != FORMAT:
        raise CheckpointError(
            f"{path}: not a checkpoint of this project; weights of other origin can start a training with -t, "
            "or become a checkpoint with tools/convert.py"
        )
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path}: checkpoint version {content.get('version')}, this program reads {VERSION}")
    return content


def _read(path: Path) -> dict[str, Any] | None:
    """The dict in a torch file, or None when `path` is something else."""
    if not path.is_file():
        raise CheckpointError(f"{path}: no such weight file")
    if not zipfile.is_zipfile(path):
        with open(path, "rb") as file:
            if file.read(2) == b"PK":  # the head of a zip without its end
                raise CheckpointError(f"{path}: the file is cut off; copy it again")
        return None
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        return None  # holds more than tensors and plain values: not written by this project
    except RuntimeError as error:
        raise CheckpointError(f"{path}: the file is damaged ({str(error).splitlines()[0]}); copy it again") from error
    return content if isinstance(content, dict) else None


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Model entries under our names, from a checkpoint (its average if it has one) or a foreign weight file."""
    content = _read(Path(path))
    if content is not None and content.get("format") == FORMAT:
        return load_checkpoint(path)["ema"] or content["model"]
    from rtdetr.engine.convert import load_foreign_weights  # here because the converter uses this module

    return load_foreign_weights(Path(path))


def compare(model: nn.Module, weights: Mapping[str, Tensor]) -> LoadReport:
    """Which entries of `weights` fit the model by name and shape. `num_batches_tracked` counts for nothing."""
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("num_batches_tracked")}
    given = {name: tensor for name, tensor in weights.items() if not name.endswith("num_batches_tracked")}
    both = [name for name in own if name in given]
    fitting = [name for name in both if own[name].shape == given[name].shape]
    mismatched = [
        f"{name} ({tuple(given[name].shape)}, {tuple(own[name].shape)})" for name in both if name not in set(fitting)
    ]
    missing, unexpected = [n for n in own if n not in given], [n for n in given if n not in own]
    return LoadReport(fitting, missing, unexpected, mismatched)


def warm_start(model: nn.Module, path: str | Path) -> LoadReport:
    """Copies what fits from a weight file and reports the rest. Raises CheckpointError when nothing fits."""
    weights = read_weights(path)
    report = compare(model, weights)
    if not report.matched:
        raise CheckpointError(
            f"{path}: weights of another model: none of its {len(weights)} entries fits; "
            f"first names there: {', '.join(list(weights)[:3])}"
        )
    model.load_state_dict({name: weights[name] for name in report.matched}, strict=False)
    return report


def load_exactly(model: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Loads `weights` into the model; every entry must be there and fit. Raises CheckpointError."""
    report = compare(model, weights)
    wrong = report.mismatched + [f"{n} missing" for n in report.missing] + [f"{n} left over" for n in report.unexpected]
    if wrong:
        raise CheckpointError(
            f"{path}: weights of another model: they look like {describe(weights)}, expected "
            f"{describe(model.state_dict())}; {len(wrong)} entries differ (shape in the file, in the model): "
            f"{', '.join(wrong[:3])}"
        )
    model.load_state_dict(weights, strict=all(name in weights for name in model.state_dict()))


def describe(weights: Mapping[str, Tensor]) -> str:
    """A few words on the model that has these entries."""
    blocks = {name.split(".")[3] for name in weights if name.startswith("backbone.stages.2.")}
    wide = any(name.startswith("backbone.stages.2.0.conv3.") for name in weights)
    head = weights.get("decoder.score_heads.0.weight")
    if not blocks or head is None:
        return f"something else than RT-DETRv3 (first name {next(iter(weights), 'none')})"
    depth = {(2, False): "R18", (6, False): "R34", (6, True): "R50", (23, True): "R101"}.get((len(blocks), wide), "R?")
    layers = len({name.split(".")[2] for name in weights if name.startswith("decoder.score_heads.")})
    stem = weights["backbone.stem.0.conv.weight"].shape[0] if "backbone.stem.0.conv.weight" in weights else 0
    width = "" if stem == 32 else f" with a stem of {stem} channels"
    return f"RT-DETRv3 {depth}{width}, {layers} decoder layers of width {head.shape[1]}, {head.shape[0]} classes"


def model_from_checkpoint(
    path: str | Path, updates: list[str] | None = None, cfg: Config | None = None
) -> tuple[RTDETRv3, Config, Classes]:
    """The averaged model of a checkpoint in eval mode, its config and classes.

    updates: `a.b=value` changes of the stored config; cfg: replaces the stored one. Raises CheckpointError or
    ConfigError.
    """
    content = load_checkpoint(path)
    cfg = cfg or config_from_dict(content["config"], str(path), updates)
    classes = Classes(tuple(content["classes"]["names"]), tuple(content["classes"]["category_ids"]))
    model = build_model(cfg.model, len(classes))
    load_exactly(model, content["ema"] or content["model"], path)
    return model.eval(), cfg, classes


def rng_state() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators, in types that a weights-only load accepts."""
    numpy_state: Any = np.random.get_state()
    name, keys, *rest = numpy_state
    return {
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
