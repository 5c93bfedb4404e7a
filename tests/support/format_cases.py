"""One set in every format, and what a set says of itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from format_sets import SIZE
from PIL import Image

from rtdetr.data.dataset import DetectionSet
from rtdetr.data.formats.sources import find_sources


def everything(data: DetectionSet) -> list[Any]:
    """Names, sizes, boxes and labels of every image."""
    infos = [data.info(i) for i in range(len(data))]
    return [
        (Path(info.file_name).name, info.height, info.width, *(array.tolist() for array in data.targets(i)))
        for i, info in enumerate(infos)
    ]


def recognise(path: str | Path) -> str:
    """The format of a file or folder of annotations."""
    return next(iter(find_sources(path).values())).format


def yolo_set(root: Path, lines: str = "0 0.5 0.5 0.25 0.5\n", yaml: str = "train: images\nnames: [cat, dog]\n") -> Path:
    (root / "images").mkdir(parents=True, exist_ok=True)
    (root / "labels").mkdir(exist_ok=True)
    for name in ("a", "b"):
        Image.new("RGB", SIZE).save(root / "images" / f"{name}.png")
    (root / "labels" / "a.txt").write_text(lines)
    (root / "data.yaml").write_text(yaml)
    return root


def lvis_set(root: Path) -> tuple[Path, dict[str, Any]]:
    document: dict[str, Any] = {
        "images": [
            {
                "id": 1,
                "coco_url": "http://images.cocodataset.org/val2017/a.png",
                "width": SIZE[0],
                "height": SIZE[1],
                "neg_category_ids": [2],
                "not_exhaustive_category_ids": [],
            }
        ],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 30, 40], "area": 700.5}],
        "categories": [{"id": 1, "name": "cat", "frequency": "r"}, {"id": 2, "name": "dog", "frequency": "f"}],
    }
    (root / "val2017").mkdir(parents=True)
    Image.new("RGB", SIZE).save(root / "val2017" / "a.png")
    path = root / "lvis_v1_val.json"
    path.write_text(json.dumps(document))
    return path, document
