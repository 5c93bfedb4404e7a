"""How `rtdetr predict` searches, whatever pictures come from: whole or in slices, so many at a time."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from PIL import Image

from rtdetr.config import ConfigError
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import File, Found, Predictor
from rtdetr.inference.runtimes import is_exported, load
from rtdetr.inference.slicing import Slices, predict_files_sliced, predict_sliced
from rtdetr.inference.sources import Opener

HALF = {"auto": "auto", "on": True, "off": False}


class Search(NamedTuple):
    predictor: Predictor
    batch_size: int
    slices: Slices | None

    @classmethod
    def of(cls, args: argparse.Namespace, device: torch.device, slices: Slices | None) -> Search:
        """As the arguments of the command say. Raises CheckpointError or ConfigError."""
        if not is_exported(args.weights):
            options = {"half": HALF[args.half], "compile": args.compile}
            return cls(Predictor(args.weights, device, args.threshold, **options), args.batch_size, slices)
        if args.half != "auto" or args.compile:
            raise ConfigError(f"{args.weights}: runs as it was exported; --half and --compile are for checkpoints")
        return cls(load(args.weights, device, args.threshold), args.batch_size, slices)

    def files(self, files: Iterable[File], num_processes: int = 0) -> Iterator[Found]:
        """What becomes of each file or address, in their order. num_processes: see `Predictor.predict_files`."""
        limit = self.predictor.cfg.data.max_megapixels
        opener = Opener(limit, allow_private=True)  # whoever types an address trusts it
        if self.slices is not None:
            return predict_files_sliced(self.predictor.predict, files, self.slices, self.batch_size, opener.picture)
        return self.predictor.predict_files(files, self.batch_size, read=opener.pixels, num_processes=num_processes)

    def pictures(self, pictures: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each picture, best first."""
        if self.slices is None:
            return self.predictor.predict(pictures)
        predict, overlap = self.predictor.predict, self.slices.overlap
        tiles = [self.slices.tile(each.size) for each in pictures]
        return [predict_sliced(predict, each, tile, self.batch_size, overlap) for each, tile in zip(pictures, tiles)]
