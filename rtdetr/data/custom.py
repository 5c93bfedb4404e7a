"""The user's own augmentation of image, boxes and labels, applied before all others: a function, a transform of
torchvision.transforms.v2 or of Albumentations. Its result is checked; its random numbers are seeded per sample."""

from __future__ import annotations

import importlib
import logging
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rtdetr.config import Config, ConfigError, config_to_dict
from rtdetr.data.classes import DataError
from rtdetr.data.pixels import Pixels
from rtdetr.data.transforms import MIN_SIDE, Boxes, Labels

logger = logging.getLogger("rtdetr")

KEY = "data.augment.custom"
GIVEN = "augment="  # prefix of the name of a callable that cannot be imported by name
Result = tuple[Pixels, Boxes, Labels]


class CustomAugmentation:
    """name: what `name_of` returns; function: its argument, if the caller has that. Raises ConfigError if the name
    cannot be imported or is not callable."""

    def __init__(self, name: str, function: Any = None) -> None:
        self.name = name
        self.function = imported(name) if function is None or isinstance(function, str) else function
        if not callable(self.function):
            raise ConfigError(f"{KEY}: {name} is no function, but {self.function!r:.100}")
        self.is_albumentations = type(self.function).__module__.partition(".")[0] == "albumentations"
        if self.is_albumentations and "bboxes" not in getattr(self.function, "processors", {}):
            raise ConfigError(
                f"{KEY}: {name} knows no boxes; it must be a Compose([...], bbox_params=BboxParams('pascal_voc', "
                "label_fields=['labels']))"
            )

    def __reduce__(self) -> Any:
        """Pickles an importable function as its name, for data workers: transforms need not be picklable."""
        return CustomAugmentation, (self.name, self.function if self.name.startswith(GIVEN) else None)

    def __call__(self, pixels: Pixels, boxes: Boxes, labels: Labels, seed: int, image: str, num_classes: int) -> Result:
        """seed: for the random numbers of Python, numpy and torch. image: its name in messages. Raises DataError, in
        one line, if the function fails or returns an invalid result."""
        try:
            with seeded(seed, self.function):
                result = self._apply(np.require(pixels, requirements="W"), boxes, labels)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(f"{type(error).__name__}: {error}".split())
            where = f"in {os.path.basename(last.filename)} line {last.lineno}"
            if last.filename == __file__:  # its parameters do not fit
                where = "called with image, boxes and labels"
            raise DataError(f"{KEY}: {self.name} failed on image {image} ({text}, {where})") from error
        try:
            return checked(result, num_classes)
        except ValueError as error:
            raise DataError(f"{KEY}: {self.name} returned, for image {image}, {error}") from error

    def _apply(self, pixels: Pixels, boxes: Boxes, labels: Labels) -> Any:
        """Calls the function with image, boxes and labels in the form that it expects."""
        if isinstance(self.function, torch.nn.Module):
            return _by_torchvision(self.function, pixels, boxes, labels)
        if self.is_albumentations:
            made = self.function(image=pixels, bboxes=boxes, labels=labels)
            return made["image"], made["bboxes"], made["labels"]
        return self.function(pixels, boxes, labels)


def imported(name: str) -> Any:
    """Imports the object that `package.module:function` names; the current folder is searched as well."""
    module, separator, attribute = name.partition(":")
    if name.startswith(GIVEN):
        raise ConfigError(
            f"{KEY}: the run began with {name}, a callable of Python; give it again as augment=, or put it into a "
            f"module and set {KEY}=package.module:function"
        )
    if not separator or not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigError(f"{KEY}: expected package.module:function, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # permanent: data workers may have to import from it, too
    try:
        value: Any = importlib.import_module(module)
        for part in attribute.split("."):
            value = getattr(value, part)
    except Exception as error:  # importing runs the module, which may raise anything
        text = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{KEY}: {name} cannot be imported ({text})") from error
    return value


def name_of(function: Any) -> str:
    """`package.module:function` if importing it returns this object or it is that text, else GIVEN and a display
    name."""
    if isinstance(function, str):
        return function
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", type(function).__name__)
    value: Any = sys.modules.get(module or "") if module != "__main__" else None
    for part in name.split("."):
        value = getattr(value, part, None)
    return f"{module}:{name}" if value is not None and value is function else f"{GIVEN}{name}"


@contextmanager
def seeded(seed: int, function: Any) -> Iterator[None]:
    """Context manager: inside, the generators of Python, numpy, torch (CPU) and of an Albumentations transform start at
    `seed`; afterwards, those of the run continue unchanged."""
    before = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs
    if hasattr(function, "set_random_seed"):  # Albumentations has its own generators
        function.set_random_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.default_generator.set_state(before[2])


def checked(result: Any, num_classes: int) -> Result:
    """Image, clipped boxes and labels as arrays, without boxes of no area. Raises ValueError for invalid ones."""
    if not isinstance(result, (tuple, list)) or len(result) != 3:
        kind = f"{len(result)} values" if isinstance(result, (tuple, list)) else f"a {type(result).__name__}"
        raise ValueError(f"{kind}; expected image, boxes and labels")
    try:
        pixels, boxes, labels = (np.asarray(each) for each in result)
    except (ValueError, TypeError) as error:
        raise ValueError(f"what is no array ({' '.join(str(error).split())})") from error
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3 or not pixels.size:
        raise ValueError(f"an image of {pixels.dtype} {pixels.shape}; expected uint8 (height, width, 3), RGB")
    if boxes.size == 0:
        boxes, labels = np.zeros((0, 4), np.float32), np.zeros(0, np.int64) if labels.size == 0 else labels
    if boxes.ndim != 2 or boxes.shape[1] != 4 or labels.shape != (len(boxes),):
        raise ValueError(f"boxes {boxes.shape} and labels {labels.shape}; expected (n, 4), xyxy in pixels, and (n,)")
    if boxes.dtype.kind not in "iuf" or labels.dtype.kind not in "iuf":
        raise ValueError("boxes and labels that are no numbers")
    boxes = boxes.astype(np.float32)
    if not np.isfinite(boxes).all():
        raise ValueError("boxes that are not finite")
    if not (labels == labels.astype(np.int64)).all() or not ((labels >= 0) & (labels < num_classes)).all():
        raise ValueError(f"labels {np.unique(labels).tolist()}; expected class indices from 0 to {num_classes - 1}")
    height, width = pixels.shape[:2]
    boxes = np.clip(boxes, 0, np.array([width, height, width, height], np.float32))
    thick = (boxes[:, 2:] - boxes[:, :2] >= MIN_SIDE).all(axis=1)
    return np.ascontiguousarray(pixels), boxes[thick], labels[thick].astype(np.int64)


def _by_torchvision(transform: Any, pixels: Pixels, boxes: Boxes, labels: Labels) -> Any:
    from torchvision import tv_tensors

    image = tv_tensors.Image(torch.from_numpy(pixels).permute(2, 0, 1))
    there: Any = {"format": "XYXY", "canvas_size": pixels.shape[:2]}
    sample = {"image": image, "boxes": tv_tensors.BoundingBoxes(torch.from_numpy(boxes), **there)}
    made = transform({**sample, "labels": torch.from_numpy(labels)})
    return made["image"].permute(1, 2, 0).numpy(), made["boxes"].numpy(), made["labels"].numpy()


def without_custom(cfg: Config, weights: Path | None) -> dict[str, Any]:
    """The config of a model without its file's custom augmentation, which would run code that the file names."""
    base = config_to_dict(cfg)
    augment = base["data"]["augment"]
    if weights is not None and augment["custom"]:
        given = "give it again to use it"
        logger.warning("data.augment.custom=%s of %s is left out; %s", augment["custom"], weights, given)
        augment["custom"] = ""
    return base
