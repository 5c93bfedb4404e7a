"""Writes a cleaned copy of a set: COCO JSON of the valid records, boxes clipped to their images, image sizes filled in.

Images are not copied. The new file refers to the usable ones in their folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rtdetr.data.classes import DataError
from rtdetr.data.dataset import clip_to_image
from rtdetr.data.doctor.examine import Examined
from rtdetr.data.formats.coco_records import is_id
from rtdetr.data.formats.document import NO_OWN_ID, as_table, corners_of
from rtdetr.data.formats.records import split_named
from rtdetr.data.formats.sources import read_document

OWN = ("id", "image_id", "category_id", "bbox", "area", "iscrowd")


def clean_files(parts: Sequence[Examined], out: Path) -> dict[Path, Examined]:
    """The path of each set's cleaned copy: `out` itself if it ends in .json, else in out/annotations. Raises DataError
    if a set cannot be read."""
    broken = [part for part in parts if part.data is None]
    if broken or not parts:
        what = broken[0].refused.what if broken and broken[0].refused else "there is no set"
        raise DataError(f"{out}: nothing to write there, as a set cannot be read: {what}")
    if out.suffix.lower() == ".json":
        return {out: parts[0]}
    files: dict[Path, Examined] = {}
    for part in parts:
        path = part.source.path
        split = part.source.split or part.name or "train"
        named_so = len(parts) == 1 or split_named(path) == split  # one set needs no split in its name
        own = path.suffix.lower() == ".json" and named_so and path.name not in {file.name for file in files}
        files[out / "annotations" / (path.name if own else f"instances_{split}.json")] = part
    return files


def clean_document(part: Examined) -> dict[str, Any]:
    """The COCO document of the usable records of a set. Other keys of a COCO JSON are preserved."""
    data, source = part.data, part.source
    assert data is not None  # `clean_files` refused the set
    document = read_document(data.origin, limit=None)
    table = as_table(document.annotations)
    raw = json.loads(source.path.read_bytes()) if source.format == "coco" else {}
    raw_images = {
        each["id"]: each for each in raw.get("images", ()) if isinstance(each, dict) and is_id(each.get("id"))
    }
    gone = set(part.gone)
    infos = {info.image_id: info for i, info in enumerate(data.infos()) if i not in gone}
    images = []
    for each in document.images:
        if each["id"] in infos:
            info = infos[each["id"]]
            known = {key: value for key, value in each.items() if value is not None}
            images.append({**raw_images.get(each["id"], {}), **known, "height": info.height, "width": info.width})
    table = table.where(np.isin(table.image_ids, list(infos)))
    corners = corners_of(table)
    sizes = np.array([(infos[i].height, infos[i].width) for i in table.image_ids.tolist()]).reshape(-1, 2)
    _, has_area = clip_to_image(corners, sizes)
    clipped = np.clip(corners, 0, sizes[:, [1, 0, 1, 0]])
    ids = table.own_ids.tolist()
    renumber = len(set(ids)) < len(ids) or NO_OWN_ID in ids
    annotations: list[dict[str, Any]] = []
    for i, (place, box) in enumerate(zip(table.places.tolist(), table)):
        if not box["iscrowd"] and not has_area[i]:
            continue
        if not box["iscrowd"] and (clipped[i] != corners[i]).any():
            x1, y1, x2, y2 = clipped[i].tolist()
            box["bbox"] = [x1, y1, x2 - x1, y2 - y1]
            box["area"] = min(box["area"], box["bbox"][2] * box["bbox"][3])
        if box["area"] < 0:
            box["area"] = max(0.0, box["bbox"][2] * box["bbox"][3])  # a crowd may have negative sides
        more = {k: v for k, v in raw["annotations"][place].items() if k not in OWN} if raw else {}
        annotations.append({"id": len(annotations) + 1 if renumber else ids[i], **box, **more})
    rest = {key: value for key, value in raw.items() if key not in ("images", "annotations", "categories")}
    categories = raw["categories"] if raw else document.categories
    return {**rest, "images": images, "annotations": annotations, "categories": categories}
