"""Detection with a checkpoint alone: it knows its model, classes and preprocessing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import torch
from PIL import Image

from rtdetr.data.pictures import read_picture
from rtdetr.data.preprocess import preprocess
from rtdetr.inference.draw import Detection
from rtdetr.models.postprocess import postprocess
from rtdetr.models.rtdetrv3 import check_backend
from rtdetr.weights.load import model_from_checkpoint


class Detector:
    """Finds objects in pictures.

    device: "cpu", "cuda" or a torch.device. threshold: lowest score that is reported.
    Raises CheckpointError or ConfigError.
    """

    def __init__(self, checkpoint: str | Path, device: torch.device | str = "cpu", threshold: float = 0.5) -> None:
        self.device = torch.device(device)
        self.threshold = threshold
        model, self.cfg, self.classes = model_from_checkpoint(checkpoint)
        check_backend(self.cfg.model, self.device)
        self.model = model.to(self.device)

    @torch.inference_mode()
    def predict(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each picture of one batch, best first."""
        images = torch.stack([preprocess(picture, self.cfg.data.image_size) for picture in pictures])
        sizes = torch.tensor([(picture.height, picture.width) for picture in pictures], dtype=torch.float32)
        predictions = self.model(images.to(self.device))
        found = postprocess(predictions, sizes.to(self.device), self.cfg.eval.max_detections)
        return [
            [
                Detection(self.classes.category_ids[label], self.classes.names[label], score, tuple(box))
                for score, label, box in zip(*picture)
                if score >= self.threshold
            ]
            for picture in zip(found.scores.tolist(), found.labels.tolist(), found.boxes.tolist())
        ]

    def predict_files(
        self, files: Iterable[Path], batch_size: int = 8
    ) -> Iterator[tuple[Path, Image.Image, list[Detection]]]:
        """File, picture and detections, one after the other. Raises DataError for a file that is no picture."""
        remaining = iter(files)
        while batch := list(islice(remaining, batch_size)):
            pictures = [read_picture(file, max_megapixels=self.cfg.data.max_megapixels) for file in batch]
            yield from zip(batch, pictures, self.predict(pictures))
