"""AP of a model and of its exported file on the same validation set."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from rtdetr.config import Config, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.data.data_arguments import data_updates
from rtdetr.data.loader import DetectionLoader, build_val_loader
from rtdetr.engine.evaluation.evaluator import EvalResult, evaluate
from rtdetr.inference.deploy import DetectorModule
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.runtimes import ExportedModel
from rtdetr.models.rtdetrv3 import Network


class AveragePrecisions(NamedTuple):
    model: float
    file: float
    on: str  # which images


def validation_loader(data: str | os.PathLike[str], cfg: Config, classes: Classes) -> DetectionLoader:
    """Loads a folder or file with validation images in any known form. Raises DataError.

    Without data workers: a process must not fork after a converter has started threads.
    """
    updates = [*data_updates(data, ("val",)), "data.num_workers=0"]
    return build_val_loader(config_from_dict(config_to_dict(cfg), os.fspath(data), updates), classes)


def average_precisions(model: Network, file: ExportedModel, cfg: Config, loader: DetectionLoader) -> AveragePrecisions:
    """Measures both on the CPU."""
    device = torch.device("cpu")
    before, after = (
        result(Predictor.of(each, cfg, loader.classes, device), cfg, loader, device).figures["AP"]
        for each in (model, file)
    )
    return AveragePrecisions(before, after, loader.source.summary())


def result(predictor: Predictor, cfg: Config, loader: DetectionLoader, device: torch.device) -> EvalResult:
    """Evaluates in this process alone."""
    detector = DetectorModule(predictor.predict_tensors)
    found = evaluate(detector, loader, loader.source.origin, loader.classes, cfg.eval, device)
    assert found is not None
    return found
