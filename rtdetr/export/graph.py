"""The module that is exported: the model with its pre- and post-processing.

Letters: B images, Q queries, C classes, T detections of an image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rtdetr.config import ConfigError
from rtdetr.data.preprocess import SCALE
from rtdetr.inference.export_metadata import Metadata
from rtdetr.inference.runtimes import SMALLEST, STRIDE
from rtdetr.models.deformable_attention import MSDeformAttn
from rtdetr.models.deployed import DeployedModel, DeployOptions
from rtdetr.models.portable import Portable, Sampling, portable_postprocess
from rtdetr.models.postprocess import postprocess
from rtdetr.models.rtdetrv3 import Network
from rtdetr.ops.backend import Backend


class Graph(NamedTuple):
    """The input of the writers of all formats."""

    module: nn.Module  # in eval mode
    inputs: tuple[Tensor, ...]  # examples: images (B, 3, H, W) and, unless raw, sizes (B, 2)
    names: tuple[str, ...]  # of the inputs
    outputs: tuple[str, ...]
    shapes: tuple[dict[int, torch.export.Dim], ...]  # the dynamic dimensions of each input


class ExportedDetector(nn.Module):
    """Labels (B, T) int64, boxes (B, T, 4) xyxy in pixels of the original and scores (B, T), best first; without sizes,
    logits (B, Q, C) and boxes (B, Q, 4) cxcywh normalised, both float32.

    portable: uses only the operators of rtdetr/models/portable.py, and samples that way."""

    def __init__(self, model: DeployedModel, max_detections: int, portable: Sampling | None = None) -> None:
        super().__init__()
        self.model, self.max_detections, self.portable = model, max_detections, portable

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
        """images: (B, 3, H, W) uint8, or float32 in [0, 1]; sizes: (B, 2) int64, height and width of the originals."""
        if images.dtype == torch.uint8:
            images = images.to(torch.float32) * float(SCALE)
        predictions = self.model(images)
        if sizes is None:
            return tuple(predictions)
        if self.portable is None:
            found = postprocess(predictions, sizes, self.max_detections)
        else:
            found = portable_postprocess(predictions, sizes, self.max_detections, self.portable)
        return found.labels, found.boxes, found.scores


def own_size(model: Network, metadata: Metadata) -> tuple[int, int]:
    """Height and width for a file of one size. Raises ConfigError."""
    height, width = size = metadata.config.data.image_size
    if fitting(height, width, model.decoder.selector.num_queries) != size:
        raise ConfigError(
            f"data.image_size: a file for one size takes multiples of {STRIDE} from {SMALLEST} with a cell for every "
            f"query, got {height} x {width}"
        )
    return height, width


def make_portable_graph(model: Network, metadata: Metadata, sampling: Sampling = "gather") -> Graph:
    """The folded model for one image of its own size, from operators that small runtimes support, in float32.

    metadata: with `fixed`. Raises ConfigError if exported files do not support the image size.
    """
    height, width = size = own_size(model, metadata)
    portable = Portable(height=height, width=width, sampling=sampling)
    deployed = model.deploy(DeployOptions(channels_last=False, portable=portable))
    module = ExportedDetector(deployed, metadata.config.eval.max_detections, sampling)
    return _graph(module, metadata, 1, size, ({}, {}))


def make_graph(model: Network, metadata: Metadata, backend: Backend) -> Graph:
    """The folded model, as the metadata require. backend: of deformable attention."""
    dtype = torch.float16 if metadata.precision == "fp16" else torch.float32
    deployed = model.deploy(DeployOptions(dtype=dtype, channels_last=False, exact_ends=dtype != torch.float32))
    set_backend(deployed, backend)
    height, width = fitting(*metadata.config.data.image_size, model.decoder.selector.num_queries)
    width += STRIDE * (height == width)  # the exporter would take equal numbers for a constraint
    batch = torch.export.Dim("batch", min=1)
    down, across = (STRIDE * torch.export.Dim(f"{side}_in_32", min=2, max=512) for side in ("height", "width"))
    module = ExportedDetector(deployed, metadata.config.eval.max_detections)
    return _graph(module, metadata, 2, (height, width), ({0: batch, 2: down, 3: across}, {0: batch}))


def _graph(
    module: nn.Module, metadata: Metadata, batch: int, size: tuple[int, int], shapes: tuple[dict[int, Any], ...]
) -> Graph:
    images = torch.zeros(batch, 3, *size, dtype=torch.uint8 if metadata.input == "uint8" else torch.float32)
    if metadata.raw:
        return Graph(module, (images,), ("images",), ("logits", "boxes"), shapes[:1])
    inputs = (images, torch.tensor([size] * batch))
    return Graph(module, inputs, ("images", "sizes"), ("labels", "boxes", "scores"), shapes)


def set_backend(model: nn.Module, backend: Backend) -> None:
    """Sets the backend of deformable attention everywhere in the model."""
    for module in model.modules():
        if isinstance(module, MSDeformAttn):
            module.backend = backend


def fitting(height: float, width: float, num_queries: int) -> tuple[int, int]:
    """The nearest height and width that a file accepts: multiples of STRIDE from SMALLEST, with a cell for every
    query."""
    height, width = (max(SMALLEST // STRIDE, round(side / STRIDE)) for side in (height, width))
    while height * width * (16 + 4 + 1) < num_queries:  # cells of the three levels
        height, width = height + (height <= width), width + (width < height)
    return height * STRIDE, width * STRIDE
