"""8-bit ONNX files by ONNX Runtime's static quantisation."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rtdetr.export.cases import stack
from rtdetr.export.onnx import note
from rtdetr.export.quiet import quiet
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata
from rtdetr.models.backbone import STRIDES
from rtdetr.models.rtdetrv3 import Network

BATCH = 4  # calibration images at once
QUANTISED = ("backbone", "encoder")  # the decoder's boxes and scores do not survive 8 bits
FIRST = "backbone.stem.0"  # in 8 bits it alone cost a nano 11 points of AP
MORE = 4 / 3  # times as many queries and detections as the model has: rounding changes which are the last ones
LEFT_OUT = (
    f"in 8 bits: the convolutions of {' and '.join(QUANTISED)}; in float32: {FIRST} and all else; "
    f"{MORE:.2f} times as many queries and detections"
)


def with_more_queries(model: Network, metadata: Metadata) -> tuple[Network, Metadata]:
    """A model for an 8-bit file, with MORE queries and detections, so that those of the model are among them."""
    cfg, (height, width) = metadata.config, metadata.config.data.image_size
    cells = sum((height // stride) * (width // stride) for stride in STRIDES)
    own = cfg.model.decoder.num_queries
    decoder = replace(cfg.model.decoder, num_queries=min(math.ceil(MORE * own), max(cells, own)))
    evaluation = replace(cfg.eval, max_detections=math.ceil(MORE * cfg.eval.max_detections))
    cfg = replace(cfg, model=replace(cfg.model, decoder=decoder), eval=evaluation)
    model = copy.deepcopy(model)
    model.decoder.selector.num_queries = decoder.num_queries
    return model, replace(metadata, config=cfg)


def quantize(onnx_file: Path, metadata: Metadata, images: list[Image.Image], path: Path) -> None:
    """Writes `path`: convolutions of backbone and encoder, except FIRST, in 8 bits, with ranges measured on the
    images."""
    onnx = optional("onnx", "onnx", "quantisation")
    tools = optional("onnxruntime.quantization", "onnx", "quantisation")
    prepared = onnx_file.with_suffix(".prepared.onnx")
    tools.quant_pre_process(str(onnx_file), str(prepared), skip_symbolic_shape=True)
    nodes = onnx.load(str(prepared)).graph.node
    kept = [node.name for node in nodes if stays_float(node.name)]
    with quiet():
        tools.quantize_static(
            str(prepared),
            str(path),
            _reader(tools, metadata, images),
            quant_format=tools.QuantFormat.QDQ,
            per_channel=True,
            op_types_to_quantize=["Conv", "Relu"],  # so that no levels are spent on values that a Relu removes
            nodes_to_exclude=kept,
            activation_type=tools.QuantType.QUInt8,
            weight_type=tools.QuantType.QInt8,
            calibrate_method=tools.CalibrationMethod.MinMax,
        )
    prepared.unlink()
    model = onnx.load(str(path))
    note(model, metadata)
    onnx.save(model, str(path))


def stays_float(name: str) -> bool:
    """Whether the convolution of this name is left in float32."""
    return FIRST in name or not any(f"{part}." in name for part in QUANTISED)


def _reader(tools: Any, metadata: Metadata, images: list[Image.Image]) -> Any:
    """Batches as the quantiser asks for them: one by one, then None."""

    feeds = batches(metadata, images)

    class Reader(tools.CalibrationDataReader):
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    return Reader()


def batches(metadata: Metadata, originals: list[Image.Image]) -> Iterator[dict[str, Any]]:
    """Inputs of a file: one image at a time if it takes no more."""
    count = 1 if metadata.fixed else BATCH
    for start in range(0, len(originals), count):
        chosen = originals[start : start + count]
        pixels = stack(chosen, metadata.config.data.image_size, metadata.config.data.interpolation)
        images = pixels if metadata.input == "uint8" else pixels.float() / 255
        feed = {"images": images.numpy()}
        if not metadata.raw:
            feed["sizes"] = np.array([(each.height, each.width) for each in chosen])
        yield feed
