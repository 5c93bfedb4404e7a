"""Training and evaluation batches. Random decisions depend only on (seed, epoch, image) or (seed, epoch, batch, rank),
so results do not depend on the number of workers and any epoch can be replayed from any batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from rtdetr.boxes import xyxy_to_cxcywh
from rtdetr.config import AugmentConfig, Config, DataConfig, Resize, settled
from rtdetr.data.classes import Classes, DataError, Match
from rtdetr.data.custom import CustomAugmentation
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.formats.sources import open_set
from rtdetr.data.pasting import paste
from rtdetr.data.pixels import Pixels, fused, plain
from rtdetr.data.preprocess import preprocess, to_planes
from rtdetr.data.sampling import repeat_factors, repeated_order, samples_per_epoch
from rtdetr.data.transforms import Boxes, Labels, draw_recipe, move_boxes
from rtdetr.data.workers import memory_shared, prepare_worker, signals_held_back
from rtdetr.types import Batch, ImageInfo, Targets
from rtdetr.wording import counted, option

EVALUATED = 8  # largest batch in evaluation
MOST_IN_A_ROW = 10  # consecutive unusable images before the whole data set is considered unusable

# Each purpose has its own random stream, so that the streams are independent.
_ORDER, _BATCH, _SAMPLE, _REPEATS = 0, 1, 2, 3


class SampleKey(NamedTuple):
    """Everything that a worker needs to build one training sample."""

    image: int  # index in the set
    epoch: int
    size: int
    interpolation: str
    before: int = 0  # earlier samples of this image in the epoch; each is augmented differently


class LoadedImage(NamedTuple):
    image: Tensor  # (3, h, w) uint8 in training, else float32 in [0, 1]
    boxes: Tensor  # (n, 4) xyxy, pixels of `image`
    labels: Tensor  # (n,) int64
    info: ImageInfo
    unreadable: tuple[str, ...] = ()  # errors of the images that this one replaces


@dataclass(eq=False)
class TrainingSamples(Dataset[LoadedImage]):
    """Augmented images of a set. An unusable image is replaced by the next usable one in the epoch's order. The
    backends produce the same boxes, and pixels that differ by rounding."""

    source: DetectionSet
    augment: AugmentConfig
    seed: int
    backend: Literal["fused", "plain"]
    custom: CustomAugmentation | None

    def __getitem__(self, key: SampleKey) -> LoadedImage:
        again = (key.before,) if key.before else ()
        rng = np.random.default_rng((self.seed, _SAMPLE, key.epoch, key.image, *again))
        pixels, boxes, labels, info, unreadable = self._augmented(key, rng)
        if self.augment.paste_prob > 0 and rng.random() < self.augment.paste_prob:  # no draw if pasting is off
            donor = key._replace(image=int(rng.integers(len(self.source))))
            donor_pixels, donor_boxes, donor_labels, _, more = self._augmented(donor, rng)
            others = donor_pixels, donor_boxes, donor_labels
            pixels, boxes, labels = paste(pixels, boxes, labels, others, rng)
            unreadable += more
        return LoadedImage(to_planes(pixels), torch.from_numpy(boxes), torch.from_numpy(labels), info, unreadable)

    def _augmented(self, key: SampleKey, rng: Generator) -> tuple[Pixels, Boxes, Labels, ImageInfo, tuple[str, ...]]:
        """Augmented pixels, boxes and labels of an image, its `info`, and the errors of those tried before it."""
        index, pixels, unreadable = self._usable(key)
        info, (boxes, labels) = self.source.info(index), self.source.targets(index)
        if self.custom is not None:  # no draw without a custom augmentation
            seed, num_classes = int(rng.integers(2**32)), len(self.source.classes)
            pixels, boxes, labels = self.custom(pixels, boxes, labels, seed, info.file_name, num_classes)
        recipe = draw_recipe(self.augment, pixels.shape[:2], boxes, rng, key.epoch)
        size = (key.size, key.size)
        if self.backend == "plain":
            pixels = plain(Image.fromarray(pixels), recipe, size, key.interpolation)
        else:
            pixels = fused(pixels, recipe, size, key.interpolation)
        return pixels, *move_boxes(boxes, labels, recipe, size), info, unreadable

    def _usable(self, key: SampleKey) -> tuple[int, Pixels, tuple[str, ...]]:
        """Index and pixels of a usable image, and the errors of those tried before it. Raises DataError after ten
        unusable images."""
        read = self.source.pixels if self.backend == "fused" else self.source.image
        wrong: list[str] = []
        for index in itertools.islice(self._from(key), MOST_IN_A_ROW):
            try:
                return index, np.asarray(read(index)), tuple(wrong)
            except DataError as error:
                wrong.append(str(error))
        raise DataError(
            f"{wrong[0]}; nor can the {counted(len(wrong) - 1, 'image')} tried instead; `rtdetr doctor` lists them all"
        )

    def _from(self, key: SampleKey) -> Iterator[int]:
        """Yields this image, then cyclically those after it in the epoch's order, which is computed only if needed."""
        yield key.image
        order = epoch_order(self.seed, key.epoch, len(self.source))
        yield from np.roll(order, -int(np.flatnonzero(order == key.image)[0]))[1:].tolist()


@dataclass(eq=False)
class EvaluationSamples(Dataset[LoadedImage]):
    """Images preprocessed for evaluation; size: (h, w). go_on: an unusable image becomes a black one without boxes
    whose `info` has height and width 0; otherwise it raises DataError."""

    source: DetectionSet
    size: tuple[int, int]
    go_on: bool
    interpolation: Resize

    def __getitem__(self, index: int) -> LoadedImage:
        try:
            image = self.source.image(index)
        except DataError as error:
            if not self.go_on:
                raise
            info = self.source.info(index)._replace(height=0, width=0)
            nothing = torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)
            return LoadedImage(torch.zeros(3, *self.size), *nothing, info, (str(error),))
        boxes, labels = self.source.targets(index)
        scale = np.array([self.size[1] / image.width, self.size[0] / image.height] * 2, np.float32)
        pixels = preprocess(image, self.size, self.interpolation)
        return LoadedImage(pixels, torch.from_numpy(boxes * scale), torch.from_numpy(labels), self.source.info(index))


def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    return np.random.default_rng((seed, _ORDER, epoch)).permutation(num_samples)


@dataclass(eq=False)
class TrainingBatches(Sampler[list[SampleKey]]):
    """The batches of an epoch for one of `world_size` processes: shuffled, without the incomplete last one.

    factors: samples per epoch of each image, see rtdetr/data/sampling.py; None: one each. A global batch is
    `world_size` consecutive slices of one shuffled order, so the images of global batch b are the same for one process
    with batch size n and for k processes with batch size n / k. As in the official run, each process draws its own
    image size and interpolation.
    """

    num_images: int
    batch_size: int
    sizes: tuple[int, ...]
    interpolations: tuple[str, ...]
    seed: int
    rank: int = 0
    world_size: int = 1
    factors: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        self.num_samples = samples_per_epoch(self.factors, self.num_images)  # per epoch, over all processes
        self.epoch = 0
        self.start_batch = 0
        self.endless = False  # iterate over one epoch after another

    def __len__(self) -> int:
        """Batches of a whole epoch, regardless of `start_batch`."""
        return self.num_samples // (self.batch_size * self.world_size)

    def __iter__(self) -> Iterator[list[SampleKey]]:
        yield from self._of_epoch(self.epoch, self.start_batch)
        for epoch in itertools.count(self.epoch + 1) if self.endless else ():
            yield from self._of_epoch(epoch, 0)

    def _of_epoch(self, epoch: int, start_batch: int) -> Iterator[list[SampleKey]]:
        order = self._order(epoch)
        for batch in range(start_batch, len(self)):
            rng = np.random.default_rng((self.seed, _BATCH, epoch, batch, self.rank))
            size = self.sizes[rng.integers(len(self.sizes))]
            interpolation = self.interpolations[rng.integers(len(self.interpolations))]
            start = (batch * self.world_size + self.rank) * self.batch_size
            chosen = order[start : start + self.batch_size]
            yield [SampleKey(image, epoch, size, interpolation, before) for image, before in chosen]

    def _order(self, epoch: int) -> list[tuple[int, int]]:
        """The samples of an epoch: image index, and how many earlier samples of the epoch show it."""
        if self.factors is None:
            return [(image, 0) for image in epoch_order(self.seed, epoch, self.num_images).tolist()]
        rng = np.random.default_rng((self.seed, _REPEATS, epoch))
        return [(image, before) for image, before in repeated_order(rng, self.factors).tolist()]


class DetectionLoader(DataLoader[LoadedImage]):
    """Iterates over Batch. `source` is the underlying data set, `classes` its classes."""

    def __init__(self, source: DetectionSet, num_workers: int, seed: int = 0, **arguments: Any) -> None:
        super().__init__(
            num_workers=num_workers,
            collate_fn=collate,
            persistent_workers=num_workers > 0,
            pin_memory=torch.cuda.is_available(),
            worker_init_fn=prepare_worker,
            # Without its own generator, a loader draws from torch's global generator whenever an epoch starts.
            generator=torch.Generator().manual_seed(seed),
            **arguments,
        )
        self.source = source
        self.classes = source.classes
        self.num_samples = len(source)  # per epoch, over all processes
        self.seconds_waited = 0.0  # time that `stream` waited for batches

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]
        try:
            starting = self.num_workers > 0 and self._iterator is None
            with signals_held_back(), memory_shared() if starting else nullcontext():
                batches = super().__iter__()
            yield from batches
        except DataError as error:
            # An error raised in a worker carries its traceback in the message; keep the last line only.
            sentence = str(error).strip().splitlines()[-1]
            raise DataError(sentence.removeprefix(f"{DataError.__module__}.{DataError.__qualname__}: ")) from error

    def stream(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """Yields the batches of a training loader from the given one on, epoch after epoch without end. The workers do
        not pause between epochs, which would take most of the time on a small set."""
        self.set_epoch(epoch, start_batch, endless=True)
        batches = iter(self)
        while True:
            started = time.perf_counter()
            batch = next(batches)
            self.seconds_waited += time.perf_counter() - started
            yield batch

    def close(self) -> None:
        """Stops the workers; the next iteration starts new ones. Workers left running at program exit would be stopped
        during interpreter shutdown."""
        if self._iterator is not None:
            self._iterator._shutdown_workers()  # type: ignore[attr-defined]
            self._iterator = None

    def set_epoch(self, epoch: int, start_batch: int = 0, endless: bool = False) -> None:
        """Makes the next iteration over a training loader start at this epoch and batch, see `stream` for `endless`."""
        batches = self.batch_sampler
        if not isinstance(batches, TrainingBatches):
            raise TypeError("set_epoch: only a training loader has epochs")
        if not 0 <= start_batch <= len(self):
            raise ValueError(f"set_epoch: start_batch must be in 0..{len(self)}, got {start_batch}")
        batches.epoch, batches.start_batch, batches.endless = epoch, start_batch, endless


def collate(items: Sequence[LoadedImage]) -> Batch:
    """Builds a batch of samples that have the same image size."""
    images = torch.stack([item.image for item in items])
    height, width = images.shape[-2:]
    extent = torch.tensor([width, height, width, height], dtype=torch.float32)
    normalised = [xyxy_to_cxcywh(item.boxes) / extent for item in items]
    targets = Targets.stack([item.labels for item in items], normalised, [item.boxes for item in items])
    return Batch(images, targets, tuple(item.info for item in items), sum((item.unreadable for item in items), ()))


def build_train_loader(
    cfg: Config, seed: int, rank: int = 0, world_size: int = 1, function: Any = None
) -> DetectionLoader:
    """Augmented training batches of this process. Call `set_epoch` before each epoch. The classes are those of the
    data. function: the callable that data.augment.custom names, if the caller has it.

    Raises DataError if the data are unusable, ConfigError if data.augment.custom cannot be found.
    """
    data, augment = cfg.data, cfg.data.augment
    source = open_train_set(cfg)
    factors, batch_size = repeat_factors(source, data), settled(data.train_batch_size)
    batches = TrainingBatches(
        len(source), batch_size, augment.batch_sizes, augment.interpolations, seed, rank, world_size, factors
    )
    if len(batches) == 0:
        most = batches.num_samples // world_size
        each = f" in each of {world_size} processes" if world_size > 1 else ""
        advice = f"lower data.train_batch_size to {most}" if most else "train with fewer processes"
        raise DataError(
            f"{source.annotation_file}: {counted(batches.num_samples, 'image')} cannot fill one batch of "
            f"{data.train_batch_size}{each}; {advice}"
        )
    backend: Literal["fused", "plain"] = "plain" if cfg.kernels == "plain" else "fused"
    custom = CustomAugmentation(augment.custom, function) if augment.custom else None
    samples = TrainingSamples(source, augment, seed, backend, custom)
    loader = DetectionLoader(source, data.num_workers, seed, dataset=samples, batch_sampler=batches)
    loader.num_samples = batches.num_samples
    return loader


def open_train_set(cfg: Config) -> DetectionSet:
    """Opens the training set. Raises DataError if it is unusable."""
    source = _open(cfg, "train", None, cfg.data.drop_images_without_boxes)
    source.refuse_losses(cfg.data.max_defects)  # here, boxes without area count as well
    return source


def build_val_loader(
    cfg: Config, classes: Classes, rank: int = 0, world_size: int = 1, match: Match = "id", go_on: bool = False
) -> DetectionLoader:
    """Evaluation batches of this process: every `world_size`-th image, each exactly once; the last batch may be
    smaller, and the processes may differ by one image.

    classes: those of the model; the set may use any of them, matched by category id or by name according to `match`.
    The loader's own `classes` have the ids that detections on this set use. go_on: continue past unusable images, see
    EvaluationSamples. Raises DataError if the data are unusable.
    """
    data = cfg.data
    source = _open(cfg, "val", classes, False, match)
    samples = EvaluationSamples(source, data.image_size, go_on, data.interpolation)
    shard = range(rank, len(source), world_size)
    return DetectionLoader(
        source, data.num_workers, dataset=samples, batch_size=evaluated_together(data), sampler=shard
    )


def evaluated_together(data: DataConfig) -> int:
    """Batch size in evaluation: at most EVALUATED and, unless automatic, that of training, which fits."""
    return EVALUATED if data.train_batch_size == "auto" else min(EVALUATED, data.train_batch_size)


def _open(
    cfg: Config, name: Literal["train", "val"], classes: Classes | None, drop_empty: bool, match: Match = "id"
) -> DetectionSet:
    split, data = (cfg.data.train if name == "train" else cfg.data.val), cfg.data
    if not split.annotations:
        given = option(f"-u data.{name}.annotations=PATH", "data=")
        raise DataError(f"data.{name}.annotations is empty; set it in the config or with {given}")
    chosen, limits = split.split or name, (data.max_megapixels, match, data.max_defects)
    return open_set(split.annotations, split.images, chosen, classes, drop_empty, *limits)
