"""Model output to scored boxes in pixels. Source: official repo: ppdet/modeling/post_process.py:490-585."""

from __future__ import annotations

from torch import Tensor, nn

from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.ops.fused.top_k import top_k
from rtdetr.types import Detections, Predictions


def postprocess(predictions: Predictions, sizes: Tensor, max_detections: int = 300) -> Detections:
    """The best (query, class) pairs of each image, best first. A query may appear with several classes.

    sizes: (B, 2) height, width of the original images, pixels. No NMS, no clipping, no score threshold.
    """
    scores = predictions.logits.sigmoid()  # (B, Q, C)
    num_queries, num_classes = scores.shape[1:]
    best, index = top_k(scores.flatten(1), min(max_detections, num_queries * num_classes))
    query = index // num_classes
    boxes = cxcywh_to_xyxy(predictions.boxes).gather(1, query.unsqueeze(-1).expand(-1, -1, 4))
    scale = sizes.flip(1).repeat(1, 2).to(boxes)  # (B, 4) width, height, width, height
    return Detections(best, index % num_classes, boxes * scale[:, None])


class EndToEnd(nn.Module):
    """A model that includes post-processing, as exported files do: forward(images, sizes) -> Detections."""


def detections(model: nn.Module, images: Tensor, sizes: Tensor, max_detections: int = 300) -> Detections:
    """Detections of a model in eval mode on images (B, 3, H, W); sizes as in `postprocess`."""
    if isinstance(model, EndToEnd):
        return model(images, sizes)
    return postprocess(model(images), sizes, max_detections)
