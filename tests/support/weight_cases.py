"""The smallest config, and classes for its checkpoints."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rtdetr.config import Config, load_config
from rtdetr.data.classes import Classes

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
CLASSES = Classes(("mug", "pen", "cup"), (3, 7, 90))


def nano_config(depth: int = 18) -> Config:
    cfg = load_config(CONFIGS / "rtdetrv3_nano_shapes.yml")
    backbone = dataclasses.replace(cfg.model.backbone, depth=depth)
    return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, backbone=backbone))
