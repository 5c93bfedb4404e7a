"""What the parity tests share: golden files, formula weights, replayed draws, and the record of deviations.

Which files are run is decided by what lies in the golden folder; see `golden_names`. A file that belongs to
no particular model (component arrays, images, parameter lists) may also come from the default folders.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from golden_files import SHARED, golden_dir, golden_file
from golden_formulas import Array, det_image, det_param
from PIL import Image
from tolerances import Tolerance
from torch import Tensor

from rtdetr.config import Config, load_config
from rtdetr.models.denoising import Draws
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.types import Targets
from rtdetr.weights.official_names import official_layout, official_names

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
DTYPES = {"f32": torch.float32, "f64": torch.float64}


def golden_json(name: str) -> Any:
    return json.loads(golden_file(name).read_text(encoding="utf-8"))


def golden_names(pattern: str) -> list[str]:
    """Names of the files that match a glob, sorted, in the golden folder: RTDETR_GOLDEN, else tests/golden, else
    ../shared/golden."""
    folder = golden_dir()
    if not os.environ.get("RTDETR_GOLDEN") and not any(folder.glob("*.npz")):
        folder = SHARED / "golden"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such golden folder; set RTDETR_GOLDEN to the one with eval_r18_f64.npz")
    return sorted(path.name for path in folder.glob(pattern))


def split_name(name: str) -> tuple[str, str, str]:
    """Model, dtype and case of `eval_r18_f64.npz` or `train_r18_f64_sq_atss.npz`."""
    match = re.fullmatch(r"(?:eval|train)_([a-z0-9]+)_(f32|f64)_?(\w*)\.(?:npz|json)", name)
    if match is None:
        raise ValueError(f"{name}: expected a name like train_r18_f64_sq_atss.npz")
    return match[1], match[2], match[3]


def config_of(model: str, official_rectangles: bool = False) -> Config:
    """The config file of a golden model, `r18` and so on."""
    config = load_config(CONFIGS / f"rtdetrv3_{model}vd_6x_coco.yml")
    return replace(config, model=replace(config.model, official_rectangles=official_rectangles))


@functools.lru_cache(maxsize=1)
def official_state(model: str) -> dict[str, Array]:
    """Formula weights of a whole official state dict, float32 in Paddle's layout."""
    return {e["name"]: det_param(e["name"], e["shape"]) for e in golden_json(f"params_{model}.json")["entries"]}


def formula_model(config: Config, state: dict[str, Array], dtype: torch.dtype, num_classes: int = 80) -> Network:
    """A model of `config` that holds the official `state`. Every entry must find its place, on both sides."""
    model = build_model(config.model, num_classes)
    own = model.state_dict()
    names = official_names(own)
    assert sorted(names.values()) == sorted(state), "our names and the official ones differ"
    with torch.no_grad():
        for ours, official in names.items():
            own[ours].copy_(official_layout(official, torch.from_numpy(state[official])))
    return model.to(dtype)


def write_pdparams(path: Path, state: dict[str, Any], protocol: int = 4) -> Path:
    """A weight file as Paddle writes it: arrays, and the table of internal names."""
    table = {name: f"parameter_{i}.w_0" for i, name in enumerate(state)}
    path.write_bytes(pickle.dumps({**state, "StructuredToParameterName@@": table}, protocol=protocol))
    return path


class StoredDraws(Draws):
    """Replays the stored random draws of the reference. `groups`: for each one-to-one group its arrays by label."""

    def __init__(self, groups: Sequence[dict[str, Array]]) -> None:
        self.groups = groups

    def _stacked(self, label: str, like: Tensor) -> Tensor:
        values = np.stack([group[label].reshape(like.shape[1:]) for group in self.groups])
        return torch.from_numpy(values.astype(np.float64)).to(like.dtype if like.is_floating_point() else torch.float32)

    def label_flip(self, like: Tensor) -> Tensor:
        return self._stacked("label_flip", like)

    def new_labels(self, flipped: Tensor, num_classes: int) -> Tensor:
        labels = torch.zeros(flipped.shape, dtype=torch.int64)
        for group, where, own in zip(self.groups, flipped, labels, strict=True):
            own[where] = torch.from_numpy(group["new_label"].astype(np.int64))  # fails when the number of flips differs
        return labels

    def box_sign(self, like: Tensor) -> Tensor:
        return self._stacked("box_sign", like)

    def box_part(self, like: Tensor) -> Tensor:
        return self._stacked("box_part", like)

    def attention_keep(self, group: int, num_queries: int, mask_ratio: float, device: torch.device) -> Tensor:
        bits = np.unpackbits(self.groups[group]["self_attn_keep"])[: num_queries**2]
        return torch.from_numpy(bits.reshape(num_queries, num_queries).astype(bool))


def stored_draws(arrays: Any, num_groups: int) -> StoredDraws:
    labels = ("label_flip", "new_label", "box_sign", "box_part", "self_attn_keep")
    return StoredDraws([{label: arrays[f"draw/g{g}.{label}"] for label in labels} for g in range(num_groups)])


def stored_targets(arrays: Any, batch: int, dtype: torch.dtype) -> Targets:
    """Ground truth of a train golden: gt{i}.class, .box_cxcywh and .box_xyxy."""

    def column(key: str, kind: torch.dtype) -> list[Tensor]:
        return [torch.from_numpy(arrays[f"gt{i}.{key}"].astype(np.float64)).to(kind) for i in range(batch)]

    labels = [each.flatten() for each in column("class", torch.int64)]
    return Targets.stack(labels, column("box_cxcywh", dtype), column("box_xyxy", dtype))


def eval_images(case: str) -> Tensor:
    """Network input of an eval golden, float32."""
    if case == "coco":
        images = [Image.open(golden_file(f"{key}_640.png")) for key in ("coco139", "coco724")]
        from rtdetr.data.preprocess import preprocess

        return torch.stack([preprocess(image, (640, 640)) for image in images])
    made = {"b1": ("eval10", 1, 640, 640), "b2": ("eval6", 2, 640, 640), "rect": ("eval-rect", 1, 512, 640)}
    return torch.from_numpy(det_image(*made[case]))


@dataclass
class Record:
    """Worst deviation of each quantity over all files of a run."""

    worst: dict[tuple[str, str], tuple[float, Tolerance, str]] = field(default_factory=dict)

    def add(self, group: str, quantity: str, deviation: float, tolerance: Tolerance, where: str) -> None:
        key = (group, quantity)
        if key not in self.worst or not deviation <= self.worst[key][0]:
            self.worst[key] = (deviation, tolerance, where)

    def markdown(self) -> str:
        lines = ["| what | quantity | worst | where | tolerance | why |", "|---|---|---|---|---|---|"]
        for (group, quantity), (deviation, tolerance, where) in sorted(self.worst.items()):
            lines.append(
                f"| {group} | {quantity} | {deviation:.1e} | {where} | {tolerance.value:g} | {tolerance.reason} |"
            )
        return "\n".join(lines) + "\n"


RECORD = Record()


class Checks:
    """Collects the deviations of one file, so that a failure lists the worst of every quantity, not only the first."""

    def __init__(self, group: str, where: str, tolerances: dict[str, Tolerance]) -> None:
        self.group, self.where, self.tolerances = group, where, tolerances
        self.failures: list[str] = []
        self.off: dict[str, tuple[float, str]] = {}

    def near(self, quantity: str, deviation: float, detail: str = "") -> None:
        """`quantity` must be a line of the table of tolerances; NaN fails."""
        tolerance = self.tolerances[quantity]
        RECORD.add(self.group, quantity, float(deviation), tolerance, self.where)
        if not deviation <= tolerance.value and not deviation <= self.off.get(quantity, (-1.0, ""))[0]:
            self.off[quantity] = (deviation, f"{quantity}, {detail}: {deviation:.3g} > {tolerance.value:g}")

    def same(self, quantity: str, ours: Any, golden: Any, detail: str = "") -> None:
        """Every element equal; the deviation is the number of elements that are not."""
        ours, golden = np.asarray(ours), np.asarray(golden)
        if ours.shape != golden.shape:
            self.failures.append(f"{quantity} {detail}: shape {ours.shape}, expected {golden.shape}")
            return
        self.near(quantity, float((ours != golden).sum()), detail)

    def summary(self, quantity: str, ours: Tensor, arrays: Any, key: str) -> None:
        """A large tensor against the stored sample of it, relative to its largest value."""
        shape = tuple(int(size) for size in arrays[f"{key}.shape"])
        if tuple(ours.shape) != shape:
            self.failures.append(f"{quantity} {key}: shape {tuple(ours.shape)}, expected {shape}")
            return
        largest = float(arrays[f"{key}.stats"][2])
        values = ours.detach().double().flatten()[torch.from_numpy(arrays[f"{key}.idx"].astype(np.int64))].numpy()
        self.near(quantity, deviation(values, arrays[f"{key}.val"]) / largest, key)
        mean, std = float(arrays[f"{key}.stats"][0]), float(arrays[f"{key}.stats"][1])
        everywhere = ours.detach().double()
        off = max(abs(float(everywhere.mean()) - mean), abs(float(everywhere.std(correction=0)) - std))
        self.near(quantity, off / largest, f"{key} mean and deviation over all elements")

    def done(self) -> None:
        messages = self.failures + [message for _, message in self.off.values()]
        assert not messages, f"{self.where}: " + "; ".join(messages)


def deviation(ours: Any, golden: Any) -> float:
    """Largest absolute difference; NaN if there is any."""
    ours, golden = as_float64(ours), as_float64(golden)
    assert ours.shape == golden.shape, f"shape {ours.shape}, expected {golden.shape}"
    return float(np.abs(ours - golden).max()) if ours.size else 0.0


def as_float64(values: Any) -> Array:
    if isinstance(values, Tensor):
        values = values.detach().double().numpy()
    return np.asarray(values, np.float64)


def cases_of(pattern: str) -> Iterator[tuple[str, str]]:
    """(file, case) of every eval golden of the folder."""
    for name in golden_names(pattern):
        with np.load(golden_file(name)) as arrays:
            for case in sorted({key.split("/")[0] for key in arrays.files}):
                yield name, case
