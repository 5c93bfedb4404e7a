"""8-bit files by static quantisation: ONNX files by ONNX Runtime, programs for ExecuTorch and LiteRT by torchao."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import fx

from rtdetr.config import STRIDES
from rtdetr.export.cases import stack
from rtdetr.export.graph import Graph
from rtdetr.export.onnx import note
from rtdetr.export.quiet import quiet
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata
from rtdetr.models.rtdetrv3 import Network

BATCH = 4  # calibration images at once
QUANTISED = ("backbone", "encoder")  # the decoder's boxes and scores do not survive 8 bits
FIRST = "backbone.stem.0"  # in 8 bits it alone cost a nano 11 points of AP
MORE = 4 / 3  # times as many queries and detections as the model has: rounding changes which are the last ones
ANNOTATION = "quantization_annotation"  # where torchao looks for annotations
LEAST_SCALE = 2**-12  # XNNPACK's limit
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


def quantize_onnx(onnx_file: Path, metadata: Metadata, images: list[Image.Image], path: Path) -> None:
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
            SimpleNamespace(get_next=partial(next, batches(metadata, images), None)),  # one by one, then None
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


def quantize_program(graph: Graph, metadata: Metadata, images: list[Image.Image], extra: str) -> Graph:
    """The graph, of one image, with convolutions of backbone and encoder, except FIRST, in 8 bits, with ranges
    measured on the images. extra: executorch or litert; the latter takes the rounded weights as floats. Raises
    MissingPackage."""
    steps = optional("torchao.quantization.pt2e.quantize_pt2e", extra, "quantisation")
    program = torch.export.export(graph.module, graph.inputs, strict=False).module()
    prepared = steps.prepare_pt2e(program, _quantizer(extra))
    for feed in batches(metadata, images):
        prepared(*map(torch.as_tensor, feed.values()))
    return graph._replace(module=steps.convert_pt2e(prepared, fold_quantize=extra == "executorch"))


def _quantizer(extra: str) -> Any:
    tools: Any = optional("torchao.quantization.pt2e.quantizer", extra, "quantisation")
    observers = optional("torchao.quantization.pt2e", extra, "quantisation")
    features = tools.QuantizationSpec(  # one scale and zero for all
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=observers.MinMaxObserver.with_args(eps=LEAST_SCALE),
    )
    weights = tools.QuantizationSpec(  # one scale per output channel
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=observers.PerChannelMinMaxObserver.with_args(eps=LEAST_SCALE),
    )

    relus = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)

    class ConvolutionQuantizer(tools.Quantizer):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.find_nodes(op="call_function", target=torch.ops.aten.conv2d.default):
                *_, (innermost, _) = node.meta["nn_module_stack"].values()
                if stays_float(innermost):
                    continue
                inputs, users = {node.args[0]: features, node.args[1]: weights}, [*node.users]
                before_relu = len(users) == 1 and users[0].target in relus  # no levels for values that a ReLU removes
                node.meta[ANNOTATION] = tools.QuantizationAnnotation(
                    inputs, None if before_relu else features, _annotated=True
                )
                if before_relu:
                    users[0].meta[ANNOTATION] = tools.QuantizationAnnotation(output_qspec=features, _annotated=True)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            pass

    return ConvolutionQuantizer()
