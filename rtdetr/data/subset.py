"""Writes some images of a set as COCO JSON, whatever the format of the set."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rtdetr.config import SplitConfig
from rtdetr.data.dataset import DetectionSet


def spread(among: Sequence[int], number: int) -> list[int]:
    """`number` evenly spaced elements, or all if there are fewer."""
    places = np.linspace(0, len(among) - 1, min(number, len(among))).round().astype(int)
    return [among[place] for place in places.tolist()]


def with_boxes(source: DetectionSet) -> list[int]:
    """Indices of the images that have boxes."""
    return np.flatnonzero(source.boxes_per_image()).tolist()


def write_subset(source: DetectionSet, indices: Sequence[int], path: Path) -> SplitConfig:
    """Writes these images with their boxes and all classes of the set; returns the config of the new split.

    Crowd boxes are left out, as in training. The image files are not copied.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in indices:
        info = source.info(index)
        images.append({"id": info.image_id, "file_name": info.file_name, "height": info.height, "width": info.width})
        for (x, y, right, bottom), label in zip(*(each.tolist() for each in source.targets(index))):
            box = [x, y, right - x, bottom - y]
            entry = {"image_id": info.image_id, "category_id": source.classes.category_ids[label], "bbox": box}
            annotations.append({"id": len(annotations) + 1, "area": box[2] * box[3], "iscrowd": 0, **entry})
    categories = [{"id": own, "name": name} for own, name in zip(source.classes.category_ids, source.classes.names)]
    document = {"images": images, "annotations": annotations, "categories": categories}
    path.write_text(json.dumps(document), encoding="utf-8")
    return SplitConfig(images=os.path.abspath(source.folder), annotations=os.path.abspath(path))
