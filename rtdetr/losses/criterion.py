"""The training loss: set losses of all query groups and layers, of the denoising queries and of the dense head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rtdetr.boxes import cxcywh_to_xyxy, giou, iou
from rtdetr.config import Config, LossConfig
from rtdetr.losses.dense_criterion import dense_losses
from rtdetr.losses.functional import at_least_float32, mean_over_processes, varifocal_loss
from rtdetr.losses.matcher import match_together
from rtdetr.ops.fused import box_losses
from rtdetr.types import CROWD_LIMIT, DenoisingOutputs, QueryOutputs, Targets, TrainingOutputs

ONE_TO_MANY_REPEATS = 4  # queries matched to each box in the one-to-many group
DENSE_WEIGHTS = 2.5, 0.5  # of the dense head's IoU loss and distribution focal loss


@dataclass(eq=False)
class Criterion:
    """All losses; names of the official repo: ppdet/modeling/losses/detr_loss.py, ppdet/modeling/heads/detr_head.py."""

    cfg: LossConfig
    num_classes: int
    one_to_many_repeats: int
    crowd_limit: int = CROWD_LIMIT

    def __call__(
        self, outputs: TrainingOutputs, targets: Targets, epoch: int, group: Sequence[int] = ()
    ) -> dict[str, Tensor]:
        """Scalars by name, and "loss", their total. `epoch` counts from 0 and selects the assigner of the dense head.

        group: number of boxes of each batch, including this one, that an optimiser step accumulates. The mean of their
        set losses then equals the set loss of one batch with all their images. For the dense loss this is approximate:
        its divisor is a score of the predictions, and the score per box of this batch is assumed for the whole group.

        Computes in float32, or in float64 if the predictions are. Does not wait for a GPU. Raises ValueError if
        outputs do not match targets or the number of classes. A query to be matched whose prediction is not finite
        raises FloatingPointError on a CPU; on a GPU it makes the total NaN, and "non_finite_image" is the image's
        number, counted from 1 (0: none, or an image without boxes if the host does not know the counts).
        """
        self._check(outputs, targets)
        with torch.autocast(outputs.one_to_one.logits.device.type, enabled=False):
            return self._losses(outputs, targets, epoch, group)

    def _losses(
        self, outputs: TrainingOutputs, targets: Targets, epoch: int, group: Sequence[int]
    ) -> dict[str, Tensor]:
        one_to_one, one_to_many, denoising, dense = outputs
        problems = [(one_to_one, 1)]
        offers = self.one_to_many_repeats * self.crowd_limit
        repeats = min(self.one_to_many_repeats, max(1, offers // targets.labels.shape[1]))
        if one_to_many is not None:
            problems.append((one_to_many, repeats))
        indices, non_finite = match_together(problems, targets, self.cfg)  # of each problem, see set_losses

        num_groups = one_to_one.logits.shape[1]
        sums = {"": set_losses(one_to_one, indices[0], targets)}
        if denoising is not None:
            sums["_dn"] = set_losses(denoising, denoising_index(denoising, targets), targets)
        if one_to_many is not None:
            sums["_o2m_branch"] = set_losses(one_to_many, indices[1], targets)
        of_cells: dict[str, Tensor] = {}
        if dense is not None:
            task_aligned = epoch >= self.cfg.atss_epochs
            share = self._mean_num_boxes(targets, 1) / self._mean_num_boxes(targets, 1, group) if group else 1.0
            of_cells = dense_losses(dense, targets, task_aligned, *DENSE_WEIGHTS, share)

        # Averages over processes come this late because each waits for the slowest process. One whose images have
        # more boxes matches longer but denoises less, so waiting between the two would cost time.
        num_boxes = self._mean_num_boxes(targets, 1, group)
        losses = self._entries(sums[""], 1 / (num_boxes * num_groups), "")
        if denoising is not None:
            # A batch without boxes has only padding to denoise. Its loss times zero has no effect, but gives every
            # parameter a gradient on every process, which DDP requires.
            switch = targets.mask.any()
            if denoising.crowd is not None:  # the denoised boxes represent the others
                switch = targets.mask.sum() / targets.of(denoising.crowd).mask.sum().clamp(min=1)
            losses |= self._entries(sums["_dn"], switch / (num_boxes * denoising.num_copies * num_groups), "_dn")
        if one_to_many is not None:
            scale = 1 / self._mean_num_boxes(targets, repeats, group)
            losses |= self._entries(sums["_o2m_branch"], scale, "_o2m_branch")
        total = torch.stack(list(losses.values())).sum()
        if dense is not None:
            total = total + of_cells["loss_aux_o2m"]
        losses |= of_cells
        if non_finite is not None:  # checked with the losses, as raising here would wait for the device
            total = total.masked_fill(non_finite.any(), torch.nan)
            losses["non_finite_image"] = torch.where(non_finite.any(), non_finite.int().argmax() + 1, 0).to(total.dtype)
        losses["loss"] = total
        return losses

    def _entries(self, sums: tuple[Tensor, ...], scale: Tensor, suffix: str) -> dict[str, Tensor]:
        """Weighted losses of the last layer, and of all layers before it together. sums: from set_losses."""
        entries = {}
        for name, weight, value in zip(("class", "bbox", "giou"), self.cfg.weights, sums):
            value = value * (weight * scale)
            entries[f"loss_{name}{suffix}"] = value[-1]
            entries[f"loss_{name}_aux{suffix}"] = value[:-1].sum()
        return entries

    @staticmethod
    def _mean_num_boxes(targets: Targets, repeats: int, group: Sequence[int] = ()) -> Tensor:
        """Number of boxes () float64 of the batch, or of all batches of a group, times `repeats`, averaged over
        processes, at least 1, divided by the number of batches. Includes boxes without a query (one-to-many with more
        boxes than queries)."""
        own = targets.mask.sum(dtype=torch.float64)
        count = torch.full_like(own, float(sum(group))) if group else own
        return mean_over_processes(repeats * count).clamp(min=1) / max(1, len(group))

    def _check(self, outputs: TrainingOutputs, targets: Targets) -> None:
        shape = outputs.one_to_one.logits.shape
        if shape[-1] != self.num_classes or shape[2] != len(targets.labels):
            raise ValueError(
                f"Criterion expects logits (K, G, {len(targets.labels)}, Q, {self.num_classes}) for these targets, "
                f"got {tuple(shape)}; build model and criterion with the same num_classes."
            )


def set_losses(
    outputs: QueryOutputs | DenoisingOutputs, index: Tensor, targets: Targets
) -> tuple[Tensor, Tensor, Tensor]:
    """Varifocal, L1 (on cxcywh normalised) and GIoU losses, (K,) each: sums over groups, images and queries.

    index (K, G, B, Q) is the matched box within the image, or -1 for background; it may broadcast over K and G.
    """
    logits, boxes = at_least_float32(outputs.logits), at_least_float32(outputs.boxes)
    index = index.expand(logits.shape[:-1])
    matched = index >= 0
    image = torch.arange(logits.shape[2], device=logits.device)[:, None]
    safe_index = index.clamp(min=0)
    if box_losses.why_not(boxes) is None:
        l1, overlap, scores = box_losses.box_losses(boxes, targets.boxes.to(boxes.dtype), index)
    else:
        l1, overlap, scores = _box_losses(boxes, targets.boxes[image, safe_index].to(boxes.dtype), matched)
    labels = targets.labels[image, safe_index]
    classes = varifocal_loss(logits, labels, scores.to(logits.dtype), matched)
    return classes.sum((1, 2, 3)), l1.flatten(1).sum(1), overlap.sum((1, 2, 3))


def _box_losses(boxes: Tensor, wanted: Tensor, matched: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """L1 distances (..., 4), 1 - GIoU (...) and IoU (...), the last without gradient, between boxes (..., 4) and the
    wanted boxes; 0 if not matched (...)."""
    # An unmatched query is compared with itself, so that its masked terms have finite gradients.
    wanted = torch.where(matched[..., None], wanted, boxes.detach())
    corners, wanted_corners = cxcywh_to_xyxy(boxes), cxcywh_to_xyxy(wanted)
    scores = torch.where(matched, iou(corners.detach(), wanted_corners), 0)
    l1 = torch.where(matched[..., None], (boxes - wanted).abs(), 0)
    return l1, torch.where(matched, 1 - giou(corners, wanted_corners), 0), scores


def denoising_index(outputs: DenoisingOutputs, targets: Targets) -> Tensor:
    """Index (B, N) of every denoising query's box: its original for positives, -1 for negatives and padding."""
    batch, size = targets.mask.shape
    slots = torch.arange(size, device=targets.mask.device).expand(batch, -1)
    if outputs.crowd is not None:
        slots, size = outputs.crowd, outputs.crowd.shape[1]
    num_queries = outputs.logits.shape[3]
    if num_queries != outputs.num_copies * 2 * size:
        raise ValueError(
            f"denoising outputs must hold num_copies * 2 * {size} = {outputs.num_copies * 2 * size} queries for these "
            f"targets, got {num_queries}; make them from the same targets."
        )
    positives = torch.where(targets.mask.gather(1, slots), slots, -1)  # (B, S)
    return torch.cat((positives, torch.full_like(positives, -1)), dim=1).repeat(1, outputs.num_copies)


def build_criterion(cfg: Config, num_classes: int) -> Criterion:
    """Builds the criterion of a config."""
    return Criterion(cfg.loss, num_classes, ONE_TO_MANY_REPEATS)
