"""How many objects `rtdetr predict` found: `python -m rtdetr.inference.recall_check RESULTS.json ANNOTATIONS.json`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.data.classes import DataError

MIN_IOU = 0.5


class Counts(NamedTuple):
    """Counts over the images that are in both files; crowds do not count as objects."""

    images: int
    objects: int
    hits: int  # objects with a detection of their class and an IoU of at least MIN_IOU
    others: int  # detections that match no object, or one that a better detection has matched

    def text(self) -> str:
        share = 100 * self.hits / max(1, self.objects)
        return (
            f"found {self.hits} of {self.objects} objects ({share:.0f} %) in {self.images} images, right class and "
            f"IoU >= {MIN_IOU}; {self.others} other boxes"
        )


def count_found(results: Path, annotations: Path) -> Counts:
    """Compares the results.json of `rtdetr predict` with COCO annotations of the same images, matched by file name.

    Raises DataError if a file cannot be used or they have no image in common.
    """
    truth, images = _read(annotations, dict), _read(results, list)
    try:
        ids = {Path(image["file_name"]).name: image["id"] for image in truth["images"]}
        objects: dict[Any, list[dict[str, Any]]] = {image_id: [] for image_id in ids.values()}
        for each in truth["annotations"]:
            objects[each["image_id"]].append(each)
        known = [(ids[name], each) for each in images if (name := Path(each["file"]).name) in ids]
        readable = [(objects[image_id], each["detections"]) for image_id, each in known if "detections" in each]
        counts = [_count(*pair) for pair in readable]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{results}, {annotations}: expected a results.json and COCO annotations ({error!r})"
        ) from error
    if not counts:
        raise DataError(f"{results}: none of its images is named in {annotations}")
    return Counts(len(counts), *(sum(column) for column in zip(*counts)))


def _count(objects: list[dict[str, Any]], detections: list[dict[str, Any]]) -> tuple[int, int, int]:
    """Returns objects, hits and others of one image. The best detection is matched first, with its best object."""
    free = [each for each in objects if not each.get("iscrowd")]
    hits, total = 0, len(free)
    for detection in sorted(detections, key=lambda each: -each["score"]):
        same_class = [each for each in free if each["category_id"] == detection["category_id"]]
        overlaps = [_iou(detection["box"], each["bbox"]) for each in same_class]
        best = max(overlaps, default=0.0)
        if best >= MIN_IOU:
            free.remove(same_class[overlaps.index(best)])
            hits += 1
    return total, hits, len(detections) - hits


def _iou(corners: list[float], box: list[float]) -> float:
    """Returns the IoU of corners (x1, y1, x2, y2) and box (x, y, width, height), both in pixels."""
    x1, y1, x2, y2 = corners
    x, y, width, height = box
    shared = max(0.0, min(x2, x + width) - max(x1, x)) * max(0.0, min(y2, y + height) - max(y1, y))
    union = (x2 - x1) * (y2 - y1) + width * height - shared
    return shared / union if union > 0 else 0.0


def _read(path: Path, kind: type) -> Any:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, kind):
        raise DataError(f"{path}: expected a JSON {kind.__name__}, got a {type(content).__name__}")
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtdetr.inference.recall_check", description=__doc__)
    parser.add_argument("results", type=Path, help="results.json of `rtdetr predict`")
    parser.add_argument("annotations", type=Path, help="COCO annotations of the same images")
    args = parser.parse_args(arguments)
    try:
        print(count_found(args.results, args.annotations).text())
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
