"""AP of a model and of its exported files on the same validation set, their speed and size."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rtdetr.config import Config, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.data.data_arguments import data_updates
from rtdetr.data.loader import DetectionLoader, build_val_loader
from rtdetr.engine.evaluation.evaluator import evaluate
from rtdetr.export.certificate import OTHER_WEIGHTS, AveragePrecisions, read_stored_certificate
from rtdetr.export.targets import certificate_path, whole
from rtdetr.extras import MissingPackage
from rtdetr.inference.deploy import DetectorModule
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.runtimes import ExportedModel, load_model, why_not_run
from rtdetr.models.rtdetrv3 import Network
from rtdetr.weights.catalogue import located
from rtdetr.weights.checkpoint import CheckpointError, exists
from rtdetr.weights.digest import file_sha256, num_bytes, weights_sha256

CALLS = 9  # timed calls, after two that are not timed
BATCH = 8  # batch size for images/s

Row = dict[str, Any]  # by the keys of HEADS in rtdetr/commands/compare.py


def validation_loader(data: str | os.PathLike[str], cfg: Config, classes: Classes) -> DetectionLoader:
    """Loads a folder or file with validation images in any known form. Raises DataError.

    Without data workers: a process must not fork after a converter has started threads.
    """
    updates = [*data_updates(data, ("val",)), "data.num_workers=0"]
    return build_val_loader(config_from_dict(config_to_dict(cfg), os.fspath(data), updates), classes)


def average_precisions(model: Network, file: ExportedModel, cfg: Config, loader: DetectionLoader) -> AveragePrecisions:
    """Measures both on the CPU."""
    predictors = (Predictor.of(each, cfg, loader.classes, "cpu") for each in (model, file))
    before, after = (_figures(each, loader)["AP"] for each in predictors)
    return AveragePrecisions(before, after, loader.source.summary())


def _figures(predictor: Predictor, loader: DetectionLoader) -> dict[str, float]:
    """Evaluates in this process alone."""
    detector = DetectorModule(predictor.predict_tensors)
    found = evaluate(detector, loader, loader.source.origin, loader.classes, predictor.cfg.eval, predictor.device)
    assert found is not None
    return found.figures


def measure(
    weights: Path, files: Sequence[Path], device: torch.device, updates: list[str], cfg: Config | None, others: bool
) -> tuple[list[Row], str]:
    """The rows of `rtdetr compare`, the checkpoint's first, and what they were measured on.

    cfg, updates: as in `model_from_checkpoint`. others: files whose certificate is about other weights are an error,
    else they are left out, which is printed: `last-1.onnx` is not of last.pth. So are those of a runtime that is not
    installed. Raises CheckpointError or ConfigError.
    """
    weights, *files = map(whole, (weights, *files))
    if missing := [each for each in files if not exists(located(each))]:
        raise CheckpointError(f"{missing[0]}: no such file")
    first, cfg, classes = load_model(weights, device, updates, cfg)
    digest = weights_sha256(first.state_dict()) if isinstance(first, Network) else first.metadata.weights_sha256
    if not others:
        files = [each for each in files if not _left_out(each, digest)]
    names = [each.name for each in (weights, *files)]
    loader = build_val_loader(cfg, classes)
    rows = []
    for file in (weights, *files):
        try:
            model, _, own = load_model(file, device, cfg=cfg)
        except MissingPackage as error:
            if others:
                raise
            print(f"{error}; left out")
            continue
        if (own.names, own.category_ids) != (classes.names, classes.category_ids):
            raise CheckpointError(f"{file}: detects {own.listed()}, not {classes.listed()} as {weights}")
        predictor = Predictor.of(model, cfg, classes, device)
        figures = _figures(predictor, loader)
        rows.append(
            {
                "file": file.name if names.count(file.name) == 1 else str(file),
                "runtime": getattr(model, "runtime", "PyTorch"),
                "AP": figures["AP"],
                "AP50": figures["AP50"],
                "megabytes": num_bytes(located(file)) / 1e6,
                **_speed(predictor),
                **_certified(file, digest if isinstance(first, Network) else None),
            }
        )
    on = f"{loader.source.summary()}; {device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return rows, on


def _left_out(file: Path, digest: str) -> bool:
    """Whether a file cannot run here, or its certificate is about other weights, which is printed. Raises
    CheckpointError if the certificate is damaged."""
    stored, why = read_stored_certificate(file), why_not_run(file)
    if stored.weights_sha256 not in ("", digest):
        why = f"{OTHER_WEIGHTS}, by its certificate"
    if why:
        print(f"{file}: left out, as {why}")
    return bool(why)


def _speed(predictor: Predictor) -> Row:
    """The median time of an image of the network's size, from tensor to detections, and images per second."""
    seconds = {}
    for batch in (1, BATCH):
        size = (batch, 3, *predictor.cfg.data.image_size)
        images = torch.randint(0, 256, size, dtype=torch.uint8, device=predictor.device)
        times = []
        for _ in range(CALLS + 2):
            start = time.perf_counter()
            predictor.predict_tensors(images)[0].cpu()  # waits for the device
            times.append(time.perf_counter() - start)
        seconds[batch] = statistics.median(times[2:])
    return {"latency_ms": seconds[1] * 1e3, "images_per_second": BATCH / seconds[BATCH]}


def _certified(file: Path, digest: str | None) -> Row:
    """The largest differences from PyTorch in the certificate of a file, None without one. digest: of the weights, if
    known. Raises CheckpointError if the file has changed, was not certified or has other weights, or if the certificate
    is damaged."""
    stored = read_stored_certificate(file)
    if stored.weights_sha256 and stored.sha256 != file_sha256(file):
        name = certificate_path(file).name
        raise CheckpointError(f"{file}: is not the file of {name}; `rtdetr export --check` compares it again")
    if digest is not None and stored.weights_sha256 not in ("", digest):
        raise CheckpointError(f"{file}: {OTHER_WEIGHTS}, by its certificate; export it again, or leave it out")
    return {"score": stored.score, "box": stored.box}
