"""The metadata of an exported file, which make it usable without its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import rtdetr
from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.weights.checkpoint import CheckpointError

FORMAT = "1"  # version of these entries
METADATA_FILE = "rtdetr.json"  # inside archives and folders
TRITON_MODEL = Path("rtdetr", "1", "model.onnx")  # in a model repository of Triton
CLASS_KEYS = ("names", "category_ids", "thresholds")  # the last one only if the user chose them
InputType = Literal["uint8", "float"]
Precision = Literal["fp32", "fp16", "int8"]

# The resize, described for other programs, by data.interpolation.
RESIZES = {"cubic": "OpenCV cubic"}
RESIZES |= {kind: f"{kind} with smoothing (Pillow, torchvision)" for kind in ("bilinear", "bicubic")}


@dataclass(frozen=True)
class Metadata:
    """config and classes are those of the checkpoint; the rest states how to feed the file and read its outputs."""

    config: Config
    classes: Classes
    input: InputType  # uint8 images, or float32 in [0, 1]
    raw: bool  # the outputs are the model's logits and boxes, else detections
    precision: Precision
    weights_sha256: str  # of the weights' names and values, see rtdetr/weights/digest.py
    checkpoint_sha256: str = ""  # of the weight file; empty for a model without one
    version: str = rtdetr.__version__
    fixed: bool = False  # takes one image at a time, of the config's size only

    def entries(self) -> dict[str, str]:
        """Returns the metadata as text, which files of all formats can store."""
        height, width = self.config.data.image_size
        preprocess = {
            "size": [height, width],
            "resize": f"{RESIZES[self.config.data.interpolation]} on uint8, aspect ratio not kept",
            "channels": "RGB",
            "input": self.input,
            "range": [0, 255] if self.input == "uint8" else [0, 1],
        }
        return {
            "rtdetr.format": FORMAT,
            "rtdetr.version": self.version,
            **{key: _json(value) for key, value in self.classes.entries().items()},
            "preprocess": json.dumps(preprocess),
            "outputs": "raw" if self.raw else "detections",
            "precision": self.precision,
            "fixed": "yes" if self.fixed else "no",
            "weights_sha256": self.weights_sha256,
            "checkpoint_sha256": self.checkpoint_sha256,
            "config": json.dumps(config_to_dict(self.config)),
        }


def _json(value: Any) -> str:
    """JSON with names as they are, as small readers know no escapes; except for what UTF-8 cannot store, halves of
    surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace").decode("utf-8")


def read_metadata(entries: Mapping[str, str], path: Path) -> Metadata:
    """Parses what `Metadata.entries` returned. Raises CheckpointError if the entries are missing or damaged."""
    if entries.get("rtdetr.format") != FORMAT:
        raise CheckpointError(
            f"{path}: not an export of this program, which would name its classes and preprocessing; "
            "write one with `rtdetr export WEIGHTS`"
        )
    try:
        config = config_from_dict(json.loads(entries["config"]), str(path))
        classes = Classes.of({key: json.loads(entries[key]) for key in CLASS_KEYS if key in entries})
        metadata = Metadata(
            config,
            classes,
            _one_of(InputType, json.loads(entries["preprocess"])["input"]),
            {"raw": True, "detections": False}[entries["outputs"]],
            _one_of(Precision, entries["precision"]),
            entries["weights_sha256"],
            entries["checkpoint_sha256"],
            entries["rtdetr.version"],
            {"yes": True, "no": False}[entries.get("fixed", "no")],  # missing in older files
        )
    except (ConfigError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its metadata are damaged ({error}); export it again") from error
    if not classes.names:
        raise CheckpointError(f"{path}: its metadata are damaged, there are no classes; export it again")
    return metadata


def _one_of(kind: Any, value: str) -> Any:
    if value not in get_args(kind):
        raise ValueError(f"expected one of {', '.join(get_args(kind))}, got {value!r}")
    return value
