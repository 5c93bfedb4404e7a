"""A small detection set without a defect: 24 images of 40 x 32 pixels with two boxes each, of three classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NUM_IMAGES, WIDTH, HEIGHT = 24, 40, 32
NAMES = {3: "cup", 7: "pen", 20: "key"}

Document = dict[str, Any]  # of a COCO file


def sound_document() -> Document:
    images = [{"id": 100 + i, "file_name": f"{i:02d}.png", "height": HEIGHT, "width": WIDTH} for i in range(NUM_IMAGES)]
    boxes = []
    for i in range(2 * NUM_IMAGES):
        box = [float(2 + i % 7), float(3 + i % 5), float(8 + i % 9), float(7 + i % 6)]
        category = list(NAMES)[i % 3]
        area = box[2] * box[3]
        boxes.append(
            {"id": i + 1, "image_id": 100 + i // 2, "category_id": category, "bbox": box, "area": area, "iscrowd": 0}
        )
    return {"images": images, "annotations": boxes, "categories": [{"id": i, "name": n} for i, n in NAMES.items()]}


def write_images(folder: Path) -> None:
    folder.mkdir(parents=True)
    for i in range(NUM_IMAGES):
        pixels = np.random.default_rng(i).integers(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02d}.png", compress_level=1)
