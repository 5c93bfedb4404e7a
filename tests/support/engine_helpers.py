"""A run small enough for tests: generated images, shrunk to 64 pixels, and the smallest model that has every part."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rtdetr.config import Config, load_config
from rtdetr.data.shapes import make_shapes
from rtdetr.models.denoising import Draws
from rtdetr.types import Batch, ImageInfo, Targets

NANO = Path(__file__).resolve().parents[2] / "configs" / "rtdetrv3_nano_shapes.yml"
NUM_TRAIN, NUM_VAL = 12, 4
# Keys whose `auto` depends on the weights, and what it is for weights that know much already.
KEYS_BY_WEIGHTS = (
    "model.backbone.freeze_stages",
    "optimizer.backbone_lr_multiplier",
    "optimizer.muon_lr_multiplier",
    "optimizer.warmup_iterations",
    "ema.warmup",
    "data.augment.zoom_ramp",
    "data.augment.turn_after",
    "train.accumulate",
)
KNOWING = (2, 0.1, 3.0, 50, 100.0, 0, 30, 1)


def tiny_updates(data: Path) -> list[str]:
    """`-u` arguments that make the nano config tiny and point it at `data`."""
    return [
        f"data.train.images={data}/train",
        f"data.train.annotations={data}/annotations/instances_train.json",
        f"data.val.images={data}/val",
        f"data.val.annotations={data}/annotations/instances_val.json",
        "data.image_size=[64, 64]",
        "data.augment.batch_sizes=[64]",
        "data.augment.interpolations=[nearest, linear, area, cubic, lanczos]",
        "data.augment.distort_prob=0.3",
        "data.augment.crop_prob=0.1",
        "data.train_batch_size=4",
        "data.num_workers=0",
        "model.backbone.width=0.125",
        "model.encoder.hidden_dim=32",
        "model.encoder.feedforward_dim=32",
        "model.decoder.hidden_dim=32",
        "model.decoder.feedforward_dim=32",
        "model.decoder.num_layers=2",
        "model.decoder.num_queries=12",
        "model.supervision.num_noise_groups=1",
        "model.supervision.num_one_to_many_queries=16",
        "model.supervision.num_denoising=20",
        "optimizer.warmup_iterations=0",
        "train.log_every=1",
        "train.eval_every=0",
        "train.loggers=[]",  # a fifth of the time of a run
        "train.epochs=2",
    ]


def tiny_config(data: Path, *updates: str) -> Config:
    return load_config(NANO, [*tiny_updates(data), *updates])


def tiny_data(folder: Path) -> Path:
    return make_shapes(folder, num_train=NUM_TRAIN, num_val=NUM_VAL, size=96)


def made_up_batch(counts: tuple[int, ...], seed: int = 0, size: int = 64) -> Batch:
    """Noise images with random boxes, `counts` of them in each."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.rand(len(counts), 3, size, size, generator=generator)
    boxes = [torch.rand(n, 4, generator=generator) * torch.tensor([0.2, 0.2, 0.3, 0.3]) for n in counts]
    boxes = [b + torch.tensor([0.4, 0.4, 0.5, 0.5]) for b in boxes]
    labels = [torch.randint(5, (n,), generator=generator) for n in counts]
    corners = [torch.cat((b[:, :2] - b[:, 2:] / 2, b[:, :2] + b[:, 2:] / 2), dim=1) * size for b in boxes]
    infos = tuple(ImageInfo(i, f"noise{seed}_{i}.png", size, size) for i in range(len(counts)))
    return Batch(images, Targets.stack(labels, boxes, corners), infos)


def part_of(batch: Batch, start: int, stop: int) -> Batch:
    """Images start..stop-1 of a batch."""
    labels, boxes, boxes_pixel, mask = (t[start:stop] for t in batch.targets[:4])
    targets = Targets(labels, boxes, boxes_pixel, mask, batch.targets.counts[start:stop])
    return Batch(batch.images[start:stop], targets, batch.infos[start:stop])


class PartialDraws(Draws):
    """Random numbers of images start..stop-1 of a batch of `total`: the same for an image whoever works on it."""

    def __init__(self, start: int, stop: int, total: int) -> None:
        self.start, self.stop, self.total = start, stop, total
        self.calls = 0

    def _uniform(self, like: Tensor) -> Tensor:
        self.calls += 1
        groups, _, *rest = like.shape
        generator = torch.Generator().manual_seed(self.calls)
        return torch.rand(groups, self.total, *rest, generator=generator)[:, self.start : self.stop]

    def label_flip(self, like: Tensor) -> Tensor:
        return self._uniform(like)

    def new_labels(self, flipped: Tensor, num_classes: int) -> Tensor:
        return (self._uniform(flipped) * num_classes).long()

    def box_sign(self, like: Tensor) -> Tensor:
        return self._uniform(like).round().long()

    def box_part(self, like: Tensor) -> Tensor:
        return self._uniform(like)

    def attention_keep(self, group: int, num_queries: int, mask_ratio: float, device: torch.device) -> Tensor:
        self.calls += 1
        generator = torch.Generator().manual_seed(self.calls)
        return torch.rand(num_queries, num_queries, generator=generator) > mask_ratio
