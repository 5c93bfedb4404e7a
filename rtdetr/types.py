"""The small structures that are passed between data, model, losses and engine.

Letters: B images in a batch, M boxes of the fullest image (at least 1), C classes, Q queries of a group, G groups, K
prediction layers, N denoising queries of a group, A cells of all levels. Boxes are either `cxcywh` normalised by the
input size or `xyxy` in pixels of the network input; each field says which.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

# Of an image with more boxes so many are denoised, drawn at random, and boxes are repeated less often, so that memory
# stays bounded. The official code knows no such limit, and COCO no such image (docs/training.md).
CROWD_LIMIT = 200


class Targets(NamedTuple):
    """Ground truth of a batch, padded to the fullest image. A batch without any box has M = 1 and an empty mask."""

    labels: Tensor  # (B, M) int64 contiguous class index, 0 in padding
    boxes: Tensor  # (B, M, 4) cxcywh, normalised; 0 in padding
    boxes_pixel: Tensor  # (B, M, 4) xyxy, pixels of the network input; 0 in padding
    mask: Tensor  # (B, M) bool, True for a real box
    counts: tuple[int, ...]  # boxes per image, known on the host so that nobody has to ask the device; () in a CUDA
    # graph, which serves batches of any counts, and for a part of the boxes: there the mask alone tells

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Targets:
        return Targets._make((*(t.to(device, non_blocking=non_blocking) for t in self[:4]), self.counts))

    def pin_memory(self) -> Targets:
        return Targets._make((*(t.pin_memory() for t in self[:4]), self.counts))

    def padded(self, size: int) -> Targets:
        """A copy with `size` box slots per image."""
        room = size - self.labels.shape[1]
        labels, mask = (F.pad(tensor, (0, room)) for tensor in (self.labels, self.mask))
        boxes, boxes_pixel = (F.pad(tensor, (0, 0, 0, room)) for tensor in (self.boxes, self.boxes_pixel))
        return Targets(labels, boxes, boxes_pixel, mask, self.counts)

    def part(self, start: int, stop: int) -> Targets:
        """The targets of images start to stop - 1."""
        labels, boxes, boxes_pixel, mask = (t[start:stop] for t in self[:4])
        return Targets(labels, boxes, boxes_pixel, mask, self.counts[start:stop])

    def of(self, slots: Tensor) -> Targets:
        """The targets in slots (B, S) int64 of each image; the mask tells which of them are real boxes."""
        labels, mask = self.labels.gather(1, slots), self.mask.gather(1, slots)
        boxes, boxes_pixel = (x.gather(1, slots[..., None].expand(-1, -1, 4)) for x in (self.boxes, self.boxes_pixel))
        return Targets(labels, boxes, boxes_pixel, mask, counts=())

    @staticmethod
    def stack(labels: list[Tensor], boxes: list[Tensor], boxes_pixel: list[Tensor]) -> Targets:
        """Pads per-image labels (n,), boxes (n, 4) cxcywh normalised and boxes_pixel (n, 4) xyxy into one batch."""
        counts = tuple(len(each) for each in labels)
        mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]
        padded, padded_boxes, padded_pixel = (pad_sequence(x, batch_first=True) for x in (labels, boxes, boxes_pixel))
        targets = Targets(padded, padded_boxes, padded_pixel, mask, counts)
        return targets if any(counts) else targets.padded(1)


def as_floats(images: Tensor) -> Tensor:
    """Images as the network takes them, float32 in [0, 1], bit for bit as preprocess.to_tensor computes them."""
    return images * (1.0 / 255.0) if images.dtype == torch.uint8 else images


class ImageInfo(NamedTuple):
    """Everything about an image except its pixels."""

    image_id: int
    file_name: str
    height: int  # pixels of the decoded image; 0: it could not be read
    width: int


class Batch(NamedTuple):
    """One item of a data loader."""

    images: Tensor  # (B, 3, H, W) RGB: uint8 in training, a quarter of the bytes to pass on; else float32 in [0, 1]
    targets: Targets
    infos: tuple[ImageInfo, ...]
    unreadable: tuple[str, ...] = ()  # about images that could not be used

    def pin_memory(self) -> Batch:
        return Batch(self.images.pin_memory(), self.targets.pin_memory(), self.infos, self.unreadable)


class Predictions(NamedTuple):
    """Output in eval mode: the last decoder layer of the main group."""

    logits: Tensor  # (B, Q, C)
    boxes: Tensor  # (B, Q, 4) cxcywh, normalised


class Detections(NamedTuple):
    """Scored boxes after post-processing, best first."""

    scores: Tensor  # (B, T) in [0, 1]
    labels: Tensor  # (B, T) int64 contiguous class index
    boxes: Tensor  # (B, T, 4) xyxy, pixels of the original image


class QueryOutputs(NamedTuple):
    """Predictions of G groups of Q matching queries. Layer 0: the selected encoder cells; then the decoder layers."""

    logits: Tensor  # (K, G, B, Q, C)
    boxes: Tensor  # (K, G, B, Q, 4) cxcywh, normalised


class DenoisingOutputs(NamedTuple):
    """Predictions for the noised ground truth, decoder layers only. N = num_copies * 2 * S slots, laid out as
    [copy][positives, negatives][box], so that slot s of a copy's positives belongs to ground-truth box crowd[:, s]."""

    logits: Tensor  # (K - 1, G, B, N, C)
    boxes: Tensor  # (K - 1, G, B, N, 4) cxcywh, normalised
    num_copies: int
    crowd: Tensor | None = None  # (B, S) int64; None: all boxes in their order, S = M


class DenseOutputs(NamedTuple):
    """Predictions of the auxiliary dense head for the A cells of all levels, fine to coarse, row-major."""

    logits: Tensor  # (B, A, C)
    distances: Tensor  # (B, A, 4, bins) logits of the distance to left, top, right, bottom, in strides
    points: Tensor  # (A, 2) centre x, y in pixels of the network input
    strides: Tensor  # (A, 1) pixels
    level_cells: tuple[int, ...]  # cells per level; they add up to A


class TrainingOutputs(NamedTuple):
    """Output in train mode. A part that is switched off is None."""

    one_to_one: QueryOutputs
    one_to_many: QueryOutputs | None  # G = 1
    denoising: DenoisingOutputs | None
    dense: DenseOutputs | None
