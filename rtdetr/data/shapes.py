"""The embedded data set: textured shapes on cluttered backgrounds, COCO format, the same bytes for the same arguments.

It takes seconds and no download, and gives the demo and the tests something real to learn. Category ids have gaps and
some images are empty, on purpose: both often reveal errors in detectors. `python -m rtdetr.data.shapes FOLDER` writes
it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from rtdetr.data.classes import DataError

CATEGORIES = {2: "circle", 3: "square", 5: "triangle", 7: "star", 11: "cross"}
VERSION = 1  # increment with any change to the images, so that old copies are regenerated
STAMP = "shapes.json"
SMALLEST, LARGEST = 0.2, 0.45  # extent of a shape, relative to the image's side
EMPTY_SHARE = 0.06
MAX_SHAPES = 5
MAX_COVERED = 0.25  # largest overlap of two boxes, as a share of the smaller one
MIN_CONTRAST = 90.0  # RGB distance between a texture's mean colour and the background under it
FINE = 4  # supersampling factor of shapes, for smooth edges

Pixels = NDArray[np.float32]  # (h, w, 3) in [0, 255]


def make_shapes(folder: str | Path, num_train: int = 900, num_val: int = 100, size: int = 224, seed: int = 0) -> Path:
    """Writes train/, val/ and annotations/instances_{train,val}.json below `folder`, unless they exist already.

    size: side of the square images in pixels, at least 96. The set is moved into place only when complete; one created
    with other arguments is replaced. Raises DataError if the folder contains something else or an argument is invalid.
    """
    folder = Path(folder)
    stamp = {"version": VERSION, "num_train": num_train, "num_val": num_val, "size": size, "seed": seed}
    if size < 96 or num_train < 1 or num_val < 1 or seed < 0:
        raise DataError(f"shapes need size >= 96, num_train and num_val >= 1 and seed >= 0, got {stamp}")
    if _stamp_of(folder) == stamp:
        return folder
    if folder.exists() and _stamp_of(folder) is None and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder}: holds something else than generated shapes; choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True) as place:
        new = Path(place, "new")
        for split, count in (("train", num_train), ("val", num_val)):
            _write_split(new, split, count, size, seed)
        (new / STAMP).write_text(json.dumps(stamp), encoding="utf-8")
        try:
            if folder.exists() and _stamp_of(folder) != stamp:
                folder.rename(Path(place, "old"))
            new.rename(folder)
        except OSError:
            if _stamp_of(folder) != stamp:  # else another process moved the same set there first
                raise
    return folder


def _stamp_of(folder: Path) -> dict[str, int] | None:
    """The arguments that a set was made with; None for a folder that is none of ours, or has a damaged stamp."""
    path = folder / STAMP
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except ValueError:
        return None


def _write_split(root: Path, split: str, count: int, size: int, seed: int) -> None:
    (root / split).mkdir(parents=True)
    (root / "annotations").mkdir(exist_ok=True)
    document: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": i, "name": name, "supercategory": "shape"} for i, name in CATEGORIES.items()],
    }
    for i in range(count):
        rng = np.random.default_rng((seed, 0 if split == "train" else 1, i))
        pixels, found = draw_image(size, rng)
        name, image_id = f"{i:06d}.jpg", 10 + 3 * i
        Image.fromarray(pixels).save(root / split / name, quality=92)
        document["images"].append({"id": image_id, "file_name": name, "width": size, "height": size})
        for category_id, (x1, y1, x2, y2) in found:
            box = [x1, y1, x2 - x1, y2 - y1]
            entry = {
                "image_id": image_id,
                "category_id": category_id,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": 0,
            }
            document["annotations"].append({"id": len(document["annotations"]) + 1, **entry})
    (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(document), encoding="utf-8")


def draw_image(size: int, rng: Generator) -> tuple[NDArray[np.uint8], list[tuple[int, tuple[int, int, int, int]]]]:
    """An image (size, size, 3) uint8 RGB and its objects: (category id, (x1, y1, x2, y2) in pixels)."""
    canvas = _background(size, rng)
    found: list[tuple[int, tuple[int, int, int, int]]] = []
    wanted = 0 if rng.random() < EMPTY_SHARE else int(rng.integers(1, MAX_SHAPES, endpoint=True))
    for _ in range(wanted):
        category_id = int(rng.choice(list(CATEGORIES)))
        mask = _shape_mask(CATEGORIES[category_id], size * rng.uniform(SMALLEST, LARGEST), rng)
        height, width = mask.shape
        for _ in range(20):  # tries to place it; a full image gets fewer shapes
            x, y = int(rng.integers(size - width)), int(rng.integers(size - height))
            box = (x, y, x + width, y + height)
            if all(_covered(box, other) <= MAX_COVERED for _, other in found):
                under = canvas[y : y + height, x : x + width]
                texture = _texture(height, width, under.mean(axis=(0, 1)), rng)
                under += mask[..., None] * (texture - under)
                found.append((category_id, box))
                break
    canvas += np.float32(rng.uniform(1, 6)) * rng.standard_normal(canvas.shape, np.float32)
    return canvas.clip(0, 255).astype(np.uint8), found


def _covered(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """Intersection area relative to the smaller box."""
    shared = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    return shared / min((a[2] - a[0]) * (a[3] - a[1]), (b[2] - b[0]) * (b[3] - b[1]))


def _shape_mask(name: str, extent: float, rng: Generator) -> NDArray[np.float32]:
    """Opacity (h, w) in [0, 1] of a randomly rotated shape, cropped to its visible part."""
    radius = extent / 2
    side = int(np.ceil(extent)) + 4
    turn, squeeze = rng.uniform(0, 2 * np.pi), rng.uniform(0.8, 1.0)
    corners = {"circle": 48, "square": 4, "triangle": 3, "star": 10, "cross": 12}[name]
    angle = np.arange(corners) * (2 * np.pi / corners)
    reach = np.ones(corners)
    if name == "star":
        reach[1::2] = 0.42
    if name == "cross":  # each arm has two outer corners, followed by one inner corner
        arm = np.arctan2(0.3, 1.0)
        angle = np.concatenate([[k * np.pi / 2 - arm, k * np.pi / 2 + arm, (k + 0.5) * np.pi / 2] for k in range(4)])
        reach = np.tile([1.0, 1.0, 0.3 * 2**0.5 * np.cos(arm)], 4)
    x, y = reach * np.cos(angle), reach * np.sin(angle) * squeeze
    turned = np.stack((x * np.cos(turn) - y * np.sin(turn), x * np.sin(turn) + y * np.cos(turn)), axis=1)
    drawing = Image.new("L", (side * FINE, side * FINE))
    points = (turned * radius + side / 2) * FINE
    ImageDraw.Draw(drawing).polygon([(float(px), float(py)) for px, py in points], fill=255)
    mask = np.asarray(drawing.reduce(FINE), np.float32) / np.float32(255)
    rows, columns = np.flatnonzero((mask >= 0.5).any(axis=1)), np.flatnonzero((mask >= 0.5).any(axis=0))
    return mask[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _texture(height: int, width: int, behind: Pixels, rng: Generator) -> Pixels:
    """A plain, striped, dotted, chequered or graded surface whose mean colour differs clearly from the background."""
    while True:
        light, dark = rng.uniform(0, 255, (2, 3)).astype(np.float32)
        dark = light + 0.45 * (dark - light)
        if np.linalg.norm((light + dark) / 2 - behind) >= MIN_CONTRAST:
            break
    y, x = np.mgrid[:height, :width].astype(np.float32)
    turn, period = rng.uniform(0, np.pi), rng.uniform(5, 12)
    u, v = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    waves_u, waves_v = np.sin(u * 2 * np.pi / period), np.sin(v * 2 * np.pi / period)
    kinds = (u * 0, waves_u > 0, waves_u + waves_v > 1, waves_u * waves_v > 0, (u - u.min()) / (np.ptp(u) + 1))
    share = kinds[rng.integers(len(kinds))].astype(np.float32)[..., None]
    return (light + share * (dark - light)).astype(np.float32)


def _background(size: int, rng: Generator) -> Pixels:
    """Soft patches of colour, with lines, outlines and specks that are not objects."""
    coarse = rng.uniform(20, 235, (int(rng.integers(2, 6)), int(rng.integers(2, 6)), 3)).astype(np.uint8)
    image = Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(image)
    for _ in range(int(rng.integers(4, 14))):
        colour = tuple(int(c) for c in rng.integers(0, 256, 3))
        x, y = rng.uniform(0, size, 2).tolist()
        dx, dy = rng.uniform(-0.4 * size, 0.4 * size, 2).tolist()
        kind = rng.integers(3)
        if kind == 0:
            pen.line((x, y, x + dx, y + dy), fill=colour, width=int(rng.integers(1, 5)))
        elif kind == 1:
            start, end = rng.uniform(0, 360, 2).tolist()
            pen.arc((x, y, x + abs(dx) + 4, y + abs(dy) + 4), start, end, fill=colour, width=2)
        else:
            pen.ellipse((x, y, x + size * 0.03, y + size * 0.03), fill=colour)
    return np.asarray(image, np.float32).copy()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rtdetr.data.shapes", description="Makes the embedded data set.")
    parser.add_argument("folder", type=Path)
    for name, default in (("--num-train", 900), ("--num-val", 100), ("--size", 224), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default, help=f"default: {default}")
    try:
        print(make_shapes(**vars(parser.parse_args(arguments))))
    except (DataError, OSError) as error:
        what = f"{error.filename}: cannot be written ({error.strerror})" if isinstance(error, OSError) else error
        print(f"error: {what}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
