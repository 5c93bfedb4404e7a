"""Repeats a failed step without any fast path, and finds the first module with non-finite output."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtdetr.config import Config, config_from_dict
from rtdetr.engine.acceleration.mixed_precision import autocast_type, precision_on
from rtdetr.engine.acceleration.placement import on_device
from rtdetr.engine.step import BatchPosition, training_step
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.ops.kernels import using
from rtdetr.types import Batch, ImageInfo, Targets
from rtdetr.weights.checkpoint import CheckpointError, read_torch_file

PARTS = {"config", "num_classes", "iteration", "epoch", "random", "pictures", "batches", "model"}


class Diagnosis(NamedTuple):
    """The result of a repeated step."""

    losses: dict[str, float]  # by name, with grad_norm; those computed before the failure
    refused: str  # why the losses could not be computed; "" if they were
    module: str  # the first one whose output was not finite; "" when there was none
    images: list[str]  # those whose pixels or boxes are not finite, and which of the two

    @property
    def failed(self) -> bool:
        return bool(self.refused or self.module) or not all(map(math.isfinite, self.losses.values()))

    def text(self) -> str:
        """Returns the diagnosis as one clause."""
        first = f"{self.module or 'no module'} is the first module whose output is not finite"
        return "; ".join((first, *self.images))


def random_state(device: torch.device) -> list[Tensor]:
    """States of the generators that a step uses."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def diagnose(content: Mapping[str, Any], cfg: Config, device: torch.device) -> Diagnosis:
    """Repeats the step of a failed_batch.pth with a new model, without graphs and compilation; random generators are
    restored. cfg: the config in it."""
    infos, random = (ImageInfo(*info) for info in content["pictures"]), content["random"]
    batches = [
        Batch(images, Targets(*targets), tuple(itertools.islice(infos, len(images))))
        for images, targets in content["batches"]
    ]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        model = build_model(cfg.model, content["num_classes"]).to(device)
        model.decoder.recompute = cfg.train.checkpoint_activations
        model.load_state_dict(content["model"])
        torch.set_rng_state(random[0])
        if device.type == "cuda" and len(random) > 1:
            torch.cuda.set_rng_state(random[1], device)
        model.train()
        bad = _watch_outputs(model)
        with using(cfg.kernels):
            losses, refused = _do(batches, model, cfg, content["num_classes"], content["epoch"])
    return Diagnosis(losses, refused, bad[0] if bad else "", [*_non_finite_images(batches)])


def _do(
    batches: list[Batch], model: nn.Module, cfg: Config, num_classes: int, epoch: int
) -> tuple[dict[str, float], str]:
    """The losses of the step, and why they could not be computed if they could not."""
    device = next(model.parameters()).device
    losses: dict[str, float] = {}
    criterion, dtype = build_criterion(cfg, num_classes), autocast_type(device, cfg.train.precision)
    boxes = [sum(batch.targets.counts) for batch in batches]
    for batch in batches:
        images, targets = on_device(batch, device, cfg.model.supervision.num_denoising)
        position = BatchPosition(epoch, boxes if len(boxes) > 1 else ())
        try:
            names, values = training_step(model, images, targets, position, criterion=criterion, dtype=dtype)
        except FloatingPointError as error:
            return losses, str(error)
        for name, value in zip(names, values.tolist()):
            losses[name] = losses.get(name, 0.0) + value
    losses.pop("non_finite_image", None)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return {**losses, "grad_norm": torch.nn.utils.get_total_norm(gradients).item()}, ""


def _watch_outputs(model: nn.Module) -> list[str]:
    """Records the name of the first module with non-finite output; a module inside another comes before it."""
    bad: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not bad and not all(map(_finite, _tensors(output))):
            before = "" if all(map(_finite, _tensors(inputs))) else ", whose input was not, either,"
            bad.append(f"{name} ({type(module).__name__}){before}")

    for name, module in model.named_modules():
        module.register_forward_hook(partial(look, name or "the model"))
    return bad


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for each in value if isinstance(value, (list, tuple)) else value.values() if isinstance(value, dict) else ():
        yield from _tensors(each)


def _finite(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def _non_finite_images(batches: list[Batch]) -> Iterator[str]:
    for batch in batches:
        for index, info in enumerate(batch.infos):
            for what, tensor in (("pixels", batch.images), ("boxes", batch.targets.boxes)):
                if not _finite(tensor[index]):
                    yield f"the {what} of {info.file_name} are not finite"


def replay(path: Path, device: torch.device) -> int:
    """Prints the result of the step in a failed_batch.pth; 1 if it fails again, else 0.
    Raises CheckpointError if the file is unusable."""
    content = read_torch_file(path)
    if not isinstance(content, dict) or not content.keys() >= PARTS:
        raise CheckpointError(f"{path}: not a failed step; --replay needs the failed_batch.pth of a run")
    cfg = config_from_dict(content["config"], str(path))
    precision = precision_on(device, cfg.train.precision)
    print(f"iteration {content['iteration']} (epoch {content['epoch']}) on {device}, {precision}")
    print("images: " + ", ".join(ImageInfo(*info).file_name for info in content["pictures"]))
    found = diagnose(content, cfg, device)
    print("\n".join(f"{name} = {value:g}" for name, value in found.losses.items()) or found.refused)
    print(found.text())
    print("the failure is reproduced" if found.failed else "the step succeeds here; the failure is not reproduced")
    return int(found.failed)
