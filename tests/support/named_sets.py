"""Sets as Label Studio, CVAT, LabelMe and Hugging Face write them, made here by hand and not by the package."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from sound_set import HEIGHT, NUM_IMAGES, WIDTH

CLASSES = ("cup", "key", "pen")  # by name, as all but CVAT order them


def boxes_of(i: int) -> list[tuple[str, list[float]]]:
    """Two boxes of an image: class, and x, y, w, h in whole pixels."""
    return [
        (CLASSES[k % 3], [float(v) for v in (2 + k % 7, 3 + k % 5, 8 + k % 9, 7 + k % 6)]) for k in (2 * i, 2 * i + 1)
    ]


def link(images: Path, folder: Path) -> None:
    folder.mkdir(parents=True)
    for each in images.iterdir():
        os.link(each, folder / each.name)


def write_coco(root: Path, images: Path) -> None:
    link(images, root / "train")
    document: dict[str, Any] = {
        "images": [{"id": i, "file_name": f"{i:02d}.png", "height": HEIGHT, "width": WIDTH} for i in range(NUM_IMAGES)],
        "annotations": [],
        "categories": [{"id": i, "name": name} for i, name in enumerate(CLASSES)],
    }
    for i in range(NUM_IMAGES):
        for name, box in boxes_of(i):
            own = {
                "image_id": i,
                "category_id": CLASSES.index(name),
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            document["annotations"].append({"id": len(document["annotations"]) + 1} | own)
    (root / "annotations").mkdir()
    (root / "annotations" / "instances_train.json").write_text(json.dumps(document))


def tasks() -> list[dict[str, Any]]:
    found = []
    for i in range(NUM_IMAGES):
        result = []
        for name, (x, y, w, h) in boxes_of(i):
            percent = {
                "x": 100 * x / WIDTH,
                "y": 100 * y / HEIGHT,
                "width": 100 * w / WIDTH,
                "height": 100 * h / HEIGHT,
            }
            value = percent | {"rotation": 0, "rectanglelabels": [name]}
            region = {"id": f"r{len(result)}", "type": "rectanglelabels", "from_name": "label", "to_name": "image"}
            size = {"original_width": WIDTH, "original_height": HEIGHT, "image_rotation": 0}
            result.append(region | size | {"value": value, "origin": "manual"})
        annotation = {"id": 7 + i, "was_cancelled": False, "ground_truth": False, "result": result}
        data = {"image": f"/data/upload/1/0a1b2c3d-{i:02d}.png"}
        found.append({"id": 100 + i, "annotations": [annotation], "predictions": [], "data": data, "project": 1})
    return found


def write_labelstudio(root: Path, images: Path) -> None:
    link(images, root / "images")
    (root / "export.json").write_text(json.dumps(tasks()))


def write_cvat(root: Path, images: Path) -> None:
    link(images, root / "images")
    labels = "".join(f"<label><name>{name}</name><color>#aa0000</color></label>" for name in CLASSES)
    text = (
        f"<?xml version='1.0' encoding='utf-8'?>\n<annotations>\n<version>1.1</version>\n<meta><task><labels>{labels}"
    )
    text += "</labels></task></meta>\n"
    for i in range(NUM_IMAGES):
        text += f'<image id="{i}" name="{i:02d}.png" width="{WIDTH}" height="{HEIGHT}">\n'
        for name, (x, y, w, h) in boxes_of(i):
            sides = f'xtl="{x:.2f}" ytl="{y:.2f}" xbr="{x + w:.2f}" ybr="{y + h:.2f}"'
            text += f'<box label="{name}" source="manual" occluded="0" {sides} z_order="0"></box>\n'
        text += "</image>\n"
    (root / "annotations.xml").write_text(text + "</annotations>\n")


def write_labelme(root: Path, images: Path) -> None:
    link(images, root)
    for i in range(NUM_IMAGES):
        shapes = [
            {
                "label": name,
                "points": [[x + w, y], [x, y + h]],
                "group_id": None,
                "shape_type": "rectangle",
                "flags": {},
            }
            for name, (x, y, w, h) in boxes_of(i)
        ]
        own = {"imagePath": f"..\\photos\\{i:02d}.png", "imageData": None, "imageHeight": HEIGHT, "imageWidth": WIDTH}
        (root / f"{i:02d}.json").write_text(
            json.dumps({"version": "5.5.0", "flags": {}, "shapes": shapes} | own, indent=1)
        )


def write_huggingface(root: Path, images: Path) -> None:
    link(images, root / "train")
    (root / "classes.txt").write_text("".join(f"{name}\n" for name in CLASSES))
    lines = []
    for i in range(NUM_IMAGES):
        boxes = boxes_of(i)
        objects = {"bbox": [box for _, box in boxes], "categories": [CLASSES.index(name) for name, _ in boxes]}
        lines.append(json.dumps({"file_name": f"{i:02d}.png", "objects": objects}) + "\n")
    (root / "train" / "metadata.jsonl").write_text("".join(lines))


WRITERS = {
    "labelstudio": write_labelstudio,
    "cvat": write_cvat,
    "labelme": write_labelme,
    "huggingface": write_huggingface,
}
