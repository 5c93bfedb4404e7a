"""The same few images and boxes as COCO, VOC and YOLO, written here by hand and not by the package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

IDS = {4000: "zebra", 1203: "a big cat", 0: "ähre"}  # class order by id: ähre, a big cat, zebra
SIZE = (96, 64)  # w, h


def boxes_of(seed: int) -> list[list[tuple[int, list[float]]]]:
    """Whole-pixel boxes for each of six images: (category id, x, y, w, h); the last image has none."""
    rng = np.random.default_rng(seed)
    images = []
    for i in range(6):
        boxes = []
        for _ in range(0 if i == 5 else 1 + i % 3):
            w, h = int(rng.integers(8, 40)), int(rng.integers(8, 40))
            x, y = int(rng.integers(0, SIZE[0] - w)), int(rng.integers(0, SIZE[1] - h))
            boxes.append((int(rng.choice(list(IDS))), [float(v) for v in (x, y, w, h)]))
        images.append(boxes)
    return images


def write_all(root: Path) -> dict[str, Path]:
    """coco/, voc/ and yolo/ below the root, each with a train and a val of six images."""
    rng = np.random.default_rng(3)
    for split, seed in (("train", 1), ("val", 2)):
        images = boxes_of(seed)
        names = [f"{split} {i}ß.png" for i in range(len(images))]
        for name, boxes in zip(names, images):
            pixels = rng.integers(0, 80, (SIZE[1], SIZE[0], 3)).astype(np.uint8)
            for category, (x, y, w, h) in boxes:
                colour = {4000: (255, 0, 0), 1203: (0, 255, 0), 0: (0, 0, 255)}[category]
                pixels[int(y) : int(y + h), int(x) : int(x + w)] = colour
            for folder in (f"coco/{split}", "voc/JPEGImages", f"yolo/images/{split}"):
                (root / folder).mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels).save(root / folder / name)
        _coco(root / "coco", split, names, images)
        _voc(root / "voc", split, names, images)
        _yolo(root / "yolo", split, names, images)
    listed = "\n".join(f"  {i}: {IDS[category]}" for i, category in enumerate(sorted(IDS)))
    (root / "yolo" / "data.yaml").write_text(f"train: images/train\nval: images/val\nnc: 3\nnames:\n{listed}\n")
    (root / "voc" / "classes.txt").write_text("".join(f"{IDS[category]}\n" for category in sorted(IDS)))
    return {name: root / name for name in ("coco", "voc", "yolo")}


def _coco(root: Path, split: str, names: list[str], images: list[Any]) -> None:
    document: dict[str, Any] = {
        "images": [
            {"id": 1000 - i, "file_name": name, "width": SIZE[0], "height": SIZE[1]} for i, name in enumerate(names)
        ],
        "categories": [{"id": category, "name": name} for category, name in IDS.items()],
        "annotations": [],
    }
    for i, boxes in enumerate(images):
        for category, box in boxes:
            number = len(document["annotations"]) + 1
            entry = {"id": number, "image_id": 1000 - i, "category_id": category, "bbox": box, "iscrowd": 0}
            document["annotations"].append(entry | {"area": box[2] * box[3]})
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(document))


def _voc(root: Path, split: str, names: list[str], images: list[Any]) -> None:
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for name, boxes in zip(names, images):
        objects = [voc_object(IDS[category], box) for category, box in boxes]
        path = root / "Annotations" / name.replace(".png", ".xml")
        path.write_text(voc_xml(name, objects), encoding="utf-8")
    stems = "".join(f"{name.removesuffix('.png')}\n" for name in names)
    (root / "ImageSets" / "Main" / f"{split}.txt").write_text(stems, encoding="utf-8")


def voc_xml(name: str, objects: list[str]) -> str:
    size = f"<size><width>{SIZE[0]}</width><height>{SIZE[1]}</height><depth>3</depth></size>"
    return f"<annotation>\n<filename>{name}</filename>\n{size}\n{''.join(objects)}</annotation>\n"


def voc_object(name: str, box: list[float]) -> str:
    x, y, w, h = box
    corners = f"<xmin>{x + 1:g}</xmin><ymin>{y + 1:g}</ymin><xmax>{x + w:g}</xmax><ymax>{y + h:g}</ymax>"
    return f"<object>\n<name>{name}</name>\n<bndbox>{corners}</bndbox>\n</object>\n"


def _yolo(root: Path, split: str, names: list[str], images: list[Any]) -> None:
    (root / "labels" / split).mkdir(parents=True, exist_ok=True)
    for name, boxes in zip(names, images):
        lines = [yolo_line(sorted(IDS).index(category), box) for category, box in boxes]
        if lines:
            (root / "labels" / split / name.replace(".png", ".txt")).write_text("".join(lines))


def yolo_line(label: int, box: list[float]) -> str:
    """Six digits, as most tools write."""
    x, y, w, h = box
    numbers = ((x + w / 2) / SIZE[0], (y + h / 2) / SIZE[1], w / SIZE[0], h / SIZE[1])
    return f"{label} {' '.join(f'{number:.6f}' for number in numbers)}\n"
