"""Training images per second of one core, from the JPEG file to a float tensor.

`plain` and `fused` are what kernels=plain and kernels=auto do; `torchvision` is PIL and torchvision.transforms.v2 with
the same probabilities and ranges; "bytes" is what the loader hands over, which the device divides by 255; the two rows
of decoding are what files cost alone. All take turns on the same
images, sizes and interpolations. Times are those of the CPU, and each image counts with the fastest of its
turns, so that other programs on the machine disturb little.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import cv2
import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import v2

from rtdetr.config import AugmentConfig
from rtdetr.data import pixels, transforms
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.formats.sources import open_set
from rtdetr.data.preprocess import to_planes, to_tensor
from rtdetr.data.shapes import CATEGORIES, draw_image
from rtdetr.inference.prefetch import one_opencv_thread
from rtdetr.process_state import process_restored

HEIGHT, WIDTH = 480, 640  # of generated images, as COCO has them
SCALED = {"nearest": "NEAREST", "linear": "BILINEAR", "area": "BOX", "cubic": "BICUBIC", "lanczos": "LANCZOS"}
PEER = "torchvision"


class Sample(NamedTuple):
    image: int
    size: int
    interpolation: str
    seed: int


@contextmanager
def opened(folder: Path | None, count: int) -> Iterator[DetectionSet]:
    """The images of a folder beside a COCO `annotations` folder, or `count` generated ones."""
    if folder is not None:
        yield open_set(folder.parent / "annotations" / f"instances_{folder.name}.json", folder)
        return
    with tempfile.TemporaryDirectory() as made:
        yield generated(Path(made), count)


def generated(folder: Path, count: int) -> DetectionSet:
    """Cluttered JPEGs of 640 x 480 with a few textured shapes."""
    document: dict[str, list[dict[str, Any]]] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": number, "name": name} for number, name in CATEGORIES.items()],
    }
    for i in range(count):
        drawn, found = draw_image(WIDTH, np.random.default_rng(i))
        Image.fromarray(drawn[:HEIGHT]).save(folder / f"{i}.jpg", quality=92)
        document["images"].append({"id": i + 1, "file_name": f"{i}.jpg", "width": WIDTH, "height": HEIGHT})
        for category, (x1, y1, x2, y2) in found:
            box = {"image_id": i + 1, "category_id": category, "bbox": [x1, y1, x2 - x1, y2 - y1]}
            document["annotations"].append(box | {"id": len(document["annotations"]) + 1})
    (folder / "boxes.json").write_text(json.dumps(document), encoding="utf-8")
    return open_set(folder / "boxes.json", folder)


def samples(source: DetectionSet, count: int, config: AugmentConfig) -> list[Sample]:
    """Samples of a training: image after image, sizes and interpolations at random."""
    rng = np.random.default_rng(0)
    sizes, names = config.batch_sizes, config.interpolations
    return [Sample(i % len(source), int(rng.choice(sizes)), str(rng.choice(names)), i) for i in range(count)]


def variants(source: DetectionSet, config: AugmentConfig) -> dict[str, Callable[[Sample], object]]:
    """The pipelines, by name: each makes a training image of a sample, or only decodes its file."""

    def ours(
        sample: Sample,
        apply: Callable[..., np.ndarray],
        read: Callable[[int], Any],
        finish: Callable[[np.ndarray], Tensor] = lambda made: to_tensor(made),
    ) -> Tensor:
        boxes, labels = source.targets(sample.image)
        info, size = source.info(sample.image), (sample.size, sample.size)
        rng = np.random.default_rng(sample.seed)
        recipe = transforms.draw_recipe(config, (info.height, info.width), boxes, rng)
        result = finish(apply(read(sample.image), recipe, size, sample.interpolation))
        transforms.move_boxes(boxes, labels, recipe, size)
        return result

    peers: dict[tuple[int, str], Callable[..., Any]] = {
        (size, name): torchvision_pipeline(size, name, config)
        for size in set(config.batch_sizes)
        for name in config.interpolations
    }

    def peer(sample: Sample) -> Tensor:
        boxes, labels = source.targets(sample.image)
        torch.manual_seed(sample.seed)
        with Image.open(source.folder / source.info(sample.image).file_name) as opened:
            image = opened.convert("RGB")
        canvas = (image.height, image.width)
        given = {
            "image": image,
            "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(boxes), format="XYXY", canvas_size=canvas),
            "labels": torch.from_numpy(labels),
        }
        return peers[sample.size, sample.interpolation](given)["image"]

    return {
        "decode, plain": lambda sample: np.asarray(source.image(sample.image)),
        "decode, fused": lambda sample: np.asarray(source.pixels(sample.image)),
        PEER: peer,
        "plain": lambda sample: ours(sample, pixels.plain, source.image),
        "fused": lambda sample: ours(sample, pixels.fused, source.pixels),
        "fused, bytes": lambda sample: ours(sample, pixels.fused, source.pixels, to_planes),
    }


def torchvision_pipeline(size: int, interpolation: str, config: AugmentConfig) -> v2.Compose:
    """The same steps with the same probabilities and ranges. v2's photometric distortion permutes channels as well, so
    its parts are put together here."""
    low, high = transforms.COLOUR_RANGE
    hue = transforms.HUE_SHIFT / 255
    jitters = ({"brightness": (low, high)}, {"contrast": (low, high)}, {"saturation": (low, high)}, {"hue": hue})
    colours = v2.RandomOrder([v2.RandomApply([v2.ColorJitter(**jitter)], p=0.5) for jitter in jitters])
    return v2.Compose(
        [
            v2.RandomApply([colours], p=config.distort_prob),
            v2.RandomZoomOut(list(pixels.FILL), (1.0, config.expand_max_ratio), p=config.expand_prob),
            v2.RandomApply([v2.RandomIoUCrop(trials=transforms.CROP_TRIES)], p=config.crop_prob),
            v2.SanitizeBoundingBoxes(),
            v2.RandomHorizontalFlip(config.flip_prob),
            v2.Resize((size, size), v2.InterpolationMode[SCALED[interpolation]]),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )


@contextmanager
def one_thread() -> Iterator[None]:
    with process_restored(), one_opencv_thread():
        torch.set_num_threads(1)
        yield


def measure(source: DetectionSet, count: int, rounds: int) -> list[dict[str, Any]]:
    """One row per variant."""
    config = AugmentConfig()
    asked, pipelines = samples(source, count, config), variants(source, config)
    best = {name: [float("inf")] * len(asked) for name in pipelines}
    with one_thread():
        for name in pipelines:
            pipelines[name](asked[0])  # imports and first allocations
        for number in range(rounds):
            for name in list(pipelines) if number % 2 else reversed(pipelines):
                for i, sample in enumerate(asked):
                    started = time.thread_time()
                    pipelines[name](sample)
                    best[name][i] = min(best[name][i], time.thread_time() - started)
    each = {name: statistics.mean(taken) for name, taken in best.items()}
    return [
        {
            "variant": name,
            "images_per_second": 1 / taken,
            "milliseconds": 1e3 * taken,
            "times_torchvision": each[PEER] / taken,
        }
        for name, taken in each.items()
    ]


def profile(source: DetectionSet, count: int) -> dict[str, dict[str, float]]:
    """Milliseconds per image of each step of our two backends; "rest" is what no step accounts for."""
    config = AugmentConfig()
    asked = samples(source, count, config)
    steps: dict[str, list[tuple[Any, str, str]]] = {
        "plain": [(source, "image", "read"), (pixels, "distort", "colours"), (pixels, "cut", "expand and crop")],
        "fused": [(source, "pixels", "read"), (pixels, "recolour", "colours"), (pixels, "place", "place and resize")],
    }
    shared = [(transforms, "draw_recipe", "draw"), (transforms, "move_boxes", "boxes")]
    found = {}
    for backend, own in steps.items():
        spent: dict[str, float] = {}
        with ExitStack() as stack:
            for home, name, title in (*shared, *own):
                stack.enter_context(patch.object(home, name, _timed(getattr(home, name), title, spent)))
            stack.enter_context(patch(f"{__name__}.to_tensor", _timed(to_tensor, "float tensor", spent)))
            stack.enter_context(one_thread())
            pipeline = variants(source, config)[backend]
            started = time.thread_time()
            for sample in asked:
                pipeline(sample)
            whole = time.thread_time() - started
        spent["rest"] = whole - sum(spent.values())
        found[backend] = {title: 1e3 * taken / len(asked) for title, taken in spent.items()}
    return found


def _timed(function: Callable[..., Any], title: str, spent: dict[str, float]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        started = time.thread_time()
        result = function(*arguments)
        spent[title] = spent.get(title, 0.0) + time.thread_time() - started
        return result

    return call


def versions() -> dict[str, str]:
    modules = {"torchvision": torchvision, "opencv": cv2, "pillow": PIL, "numpy": np}
    return {name: module.__version__ for name, module in modules.items()}


ROW = "| {variant} | {images_per_second:.1f} | {milliseconds:.2f} | {times_torchvision:.2f} |"


def table(rows: list[dict[str, Any]]) -> str:
    titles = ["| variant | images/s | ms | times torchvision |", "|---|---|---|---|"]
    return "\n".join([*titles, *(ROW.format(**row) for row in rows)])
