"""The search of `rtdetr predict` in images of any source: whole or in slices, in batches."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from PIL import Image

from rtdetr.commands.arguments import thresholds
from rtdetr.config import ConfigError
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import File, FileResult, Predictor
from rtdetr.inference.processes import Readers, ReadingProcesses
from rtdetr.inference.runtimes import is_exported, load
from rtdetr.inference.slicing import Slices, predict_files_sliced, predict_sliced
from rtdetr.inference.sources import Opener
from rtdetr.inference.thresholds import lowest_scores

logger = logging.getLogger(__name__)

HALF = {"auto": "auto", "on": True, "off": False}


class Search(NamedTuple):
    predictor: Predictor
    batch_size: int
    slices: Slices | None
    readers: Readers = Readers.choose()

    @classmethod
    def of(
        cls,
        args: argparse.Namespace,
        device: torch.device,
        slices: Slices | None,
        num_files: int = 0,
        in_threads: bool = False,
    ) -> Search:
        """Builds the search from the arguments of the command. num_files: that `files` will read; in_threads: not in
        processes. Raises CheckpointError or ConfigError."""
        processes = ReadingProcesses()  # they start while the model is loaded
        guess = Readers.choose(num_files, device.type == "cuda", started=True)
        number = args.processes if args.processes is not None else guess.processes
        processes.start(0 if in_threads or slices else number)
        if not is_exported(args.weights):
            options = {"half": HALF[args.half], "compile": args.compile}
            options |= {"kernels": args.kernels} if args.kernels else {}
            predictor = Predictor(args.weights, device, **options)
        elif args.half != "auto" or args.compile or args.kernels:
            raise ConfigError(
                f"{args.weights}: runs as it was exported; --half, --compile and --kernels are for checkpoints"
            )
        else:
            predictor = load(args.weights, device)
        predictor.threshold = lowest_scores(predictor.classes, *thresholds(args.threshold))
        predictor.processes = processes
        readers = Readers.choose()
        if processes.running:
            readers = readers._replace(processes=args.processes) if args.processes else predictor.readers(num_files)
        if readers.processes:
            predictor.warm_up(args.batch_size)  # while the processes start
        else:
            processes.end()
        return cls(predictor, args.batch_size, slices, readers)

    def files(self, files: Iterable[File], with_images: bool = True) -> Iterator[FileResult]:
        """Yields the result of each file or URL, in order."""
        limit = self.predictor.cfg.data.max_megapixels
        opener = Opener(limit, allow_private=True)  # the user entered the address, and so trusts it
        if self.slices is not None:
            return predict_files_sliced(self.predictor.predict, files, self.slices, self.batch_size, opener.pixels)
        logger.debug("files are read by %s", self.readers)
        return self.predictor.predict_files(
            files,
            self.batch_size,
            num_threads=self.readers.threads,
            read=None if self.readers.processes else opener.pixels,
            num_processes=self.readers.processes,
            with_images=with_images,
        )

    def images(self, images: list[Image.Image]) -> list[list[Detection]]:
        """Detections of each image, best first."""
        if self.slices is None:
            return self.predictor.predict(images)
        predict, overlap = self.predictor.predict, self.slices.overlap
        tiles = [self.slices.tile(each.size) for each in images]
        return [predict_sliced(predict, each, tile, self.batch_size, overlap) for each, tile in zip(images, tiles)]
