"""Detection with a checkpoint alone: it knows its model, classes and preprocessing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

from rtdetr.config import Config
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.pictures import read_picture
from rtdetr.data.preprocess import preprocess
from rtdetr.inference.draw import Detection
from rtdetr.models.postprocess import EndToEnd, detections
from rtdetr.models.rtdetrv3 import RTDETRv3, check_backend
from rtdetr.weights.load import model_from_checkpoint


class Found(NamedTuple):
    """What became of one file: a picture with detections, or the sentence why there is none."""

    file: Path
    picture: Image.Image | None
    detections: list[Detection]
    best_score: float = 0.0  # of all detections, those below the threshold included
    error: str = ""


class Predictor:
    """Finds objects in pictures.

    device: "cpu", "cuda" or a torch.device. threshold: lowest score that is reported, 0 to 1.
    Raises CheckpointError or ConfigError.
    """

    def __init__(self, checkpoint: str | Path, device: torch.device | str = "cpu", threshold: float = 0.5) -> None:
        self._set_up(*model_from_checkpoint(checkpoint), device, threshold)

    @classmethod
    def of(
        cls,
        model: RTDETRv3 | EndToEnd,
        cfg: Config,
        classes: Classes,
        device: torch.device | str = "cpu",
        threshold: float = 0.5,
    ) -> Predictor:
        """The predictor of a model at hand. Raises ConfigError."""
        predictor = cls.__new__(cls)
        predictor._set_up(model, cfg, classes, device, threshold)
        return predictor

    def _set_up(
        self, model: RTDETRv3 | EndToEnd, cfg: Config, classes: Classes, device: torch.device | str, threshold: float
    ) -> None:
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold: expected a number in [0, 1], got {threshold}")
        self.device, self.threshold = torch.device(device), threshold
        self.cfg, self.classes = cfg, classes
        check_backend(cfg.model, self.device)
        self.model = model.to(self.device).eval()

    def predict(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each picture of one batch, best first. Boxes end where the picture ends; what lies wholly
        outside is left out."""
        return [self._reported(candidates) for candidates in self._candidates(pictures)]

    def predict_files(self, files: Iterable[Path], batch_size: int = 8) -> Iterator[Found]:
        """One after the other. A file that is no picture costs that file alone."""
        remaining = iter(files)
        while batch := list(islice(remaining, batch_size)):
            read = [self._read(file) for file in batch]
            pictures = [picture for picture in read if isinstance(picture, Image.Image)]
            candidates = iter(self._candidates(pictures) if pictures else [])
            for file, picture in zip(batch, read):
                if isinstance(picture, DataError):
                    yield Found(file, None, [], error=str(picture))
                    continue
                of_picture = next(candidates)
                best = of_picture[0].score if of_picture else 0.0
                yield Found(file, picture, self._reported(of_picture), best)

    @torch.inference_mode()
    def _candidates(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """All that the model offers, whatever the score."""
        images = torch.stack([preprocess(picture, self.cfg.data.image_size) for picture in pictures])
        sizes = torch.tensor([(picture.height, picture.width) for picture in pictures], dtype=torch.float32)
        found = detections(self.model, images.to(self.device), sizes.to(self.device), self.cfg.eval.max_detections)
        extent = sizes.flip(1).repeat(1, 2)[:, None]  # (B, 1, 4) width, height, width, height
        boxes = found.boxes.cpu().clamp(min=0).minimum(extent)
        return [
            [
                Detection(self.classes.category_ids[label], self.classes.names[label], score, (x1, y1, x2, y2))
                for score, label, (x1, y1, x2, y2) in zip(*picture)
                if x1 < x2 and y1 < y2
            ]
            for picture in zip(found.scores.tolist(), found.labels.tolist(), boxes.tolist())
        ]

    def _reported(self, candidates: list[Detection]) -> list[Detection]:
        return [each for each in candidates if each.score >= self.threshold]

    def _read(self, file: Path) -> Image.Image | DataError:
        try:
            return read_picture(file, max_megapixels=self.cfg.data.max_megapixels)
        except DataError as error:
            return error
