"""8-bit ExecuTorch and LiteRT files, by torchao's static quantisation of an exported program."""

from __future__ import annotations

from typing import Any

import torch
from PIL import Image
from torch import fx

from rtdetr.export.graph import Graph
from rtdetr.export.quantize import batches, stays_float
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata

NOTE = "quantization_annotation"  # where torchao looks for them
LEAST_SCALE = 2**-12  # XNNPACK's limit


def quantized(graph: Graph, metadata: Metadata, images: list[Image.Image], extra: str) -> Graph:
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
    features, weights = _specifications(extra)

    class ConvolutionQuantizer(tools.Quantizer):
        def annotate(self, model: fx.GraphModule) -> fx.GraphModule:
            for node in model.graph.nodes:
                if node.target is not torch.ops.aten.conv2d.default or stays_float(_module_of(node)):
                    continue
                last = _relu_after(node) or node  # so that no levels are spent on values that a ReLU removes
                inputs = {node.args[0]: features, node.args[1]: weights}
                node.meta[NOTE] = tools.QuantizationAnnotation(
                    inputs, features if last is node else None, _annotated=True
                )
                if last is not node:
                    last.meta[NOTE] = tools.QuantizationAnnotation(output_qspec=features, _annotated=True)
            return model

        def validate(self, model: fx.GraphModule) -> None:
            pass

    return ConvolutionQuantizer()


def _specifications(extra: str) -> tuple[Any, Any]:
    """Quantisation of features, with one scale and zero for all, and of weights, with one scale per output channel."""
    tools = optional("torchao.quantization.pt2e.quantizer", extra, "quantisation")
    observers = optional("torchao.quantization.pt2e", extra, "quantisation")
    features = tools.QuantizationSpec(
        dtype=torch.int8,
        quant_min=-128,
        quant_max=127,
        qscheme=torch.per_tensor_affine,
        observer_or_fake_quant_ctr=observers.MinMaxObserver.with_args(eps=LEAST_SCALE),
    )
    weights = tools.QuantizationSpec(
        dtype=torch.int8,
        quant_min=-127,
        quant_max=127,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
        observer_or_fake_quant_ctr=observers.PerChannelMinMaxObserver.with_args(eps=LEAST_SCALE),
    )
    return features, weights


def _module_of(node: fx.Node) -> str:
    """The name of the innermost module of a node."""
    return [name for name, _ in node.meta["nn_module_stack"].values()][-1]


def _relu_after(node: fx.Node) -> fx.Node | None:
    """The ReLU that is the only user of a node, if any."""
    users = [*node.users]
    relus = (torch.ops.aten.relu.default, torch.ops.aten.relu_.default)
    return users[0] if len(users) == 1 and users[0].target in relus else None
