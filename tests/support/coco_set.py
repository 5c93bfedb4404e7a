"""A small COCO set, of which tests break one entry at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from rtdetr.data.dataset import DetectionSet
from rtdetr.data.formats.coco import read_coco
from rtdetr.data.formats.records import DataSource
from rtdetr.data.images import MAX_MEGAPIXELS

SET: dict[str, Any] = {
    "images": [
        {"id": 40, "file_name": "b.png", "width": 60, "height": 40},
        {"id": 7, "file_name": "sub/ä.png", "width": 30, "height": 50},
        {"id": 9, "file_name": "empty.png"},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "category_id": 11, "bbox": [1, 2, 10, 20]},
        {"id": 2, "image_id": 40, "category_id": 2, "bbox": [-5, 30.5, 20, 100], "iscrowd": 0},
        {"id": 3, "image_id": 40, "category_id": 5, "bbox": [0, 0, 10, 10], "iscrowd": 1},
        {"id": 4, "image_id": 7, "category_id": 2, "bbox": [3, 3, 0, 9]},
        {"id": 5, "image_id": 7, "category_id": 2, "bbox": [31, 3, 8, 9]},
        {"id": 6, "image_id": 40, "category_id": 11, "bbox": [10, 10, 5.5, 6]},
    ],
    "categories": [{"id": 11, "name": "cross"}, {"id": 2, "name": "circle"}, {"id": 5, "name": "triangle"}],
}


def write_set(root: Path, document: dict[str, Any] = SET) -> tuple[Path, Path]:
    (root / "images" / "sub").mkdir(parents=True, exist_ok=True)
    for name, size in (("b.png", (60, 40)), ("sub/ä.png", (30, 50)), ("empty.png", (20, 10))):
        Image.new("RGB", size, (10, 20, 30)).save(root / "images" / name)
    path = root / "a.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return root / "images", path


def open_coco(
    images: Path, annotations: Path, max_megapixels: float = MAX_MEGAPIXELS, **arguments: Any
) -> DetectionSet:
    """A COCO JSON and its image folder as a set. arguments: those of DetectionSet."""
    source = DataSource("coco", annotations, "", images, max_megapixels)
    return DetectionSet(read_coco(annotations), source, **arguments)
