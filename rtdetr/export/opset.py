"""Rewrites ONNX graphs of opset 18, which the exporter writes, for older opsets, for runtimes that support no newer
one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtdetr.export.graph import Graph
from rtdetr.extras import optional

NEWEST, PORTABLE = 18, 17  # the default of portable files
OPSETS = {13: 7, 17: 8, NEWEST: 10}  # opset -> version of ONNX's file format released with it
# Attributes without effect here: splits are equal, one part per output; no axis has size zero.
NEEDLESS = (("Split", "num_outputs"), ("Reshape", "allowzero"))
REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin")  # their axes are an input since opset 18


def without_layer_norms(graph: Graph) -> torch.export.ExportedProgram:
    """Replaces layer norms, operators of opset 17, by arithmetic."""
    program = torch.export.export(graph.module, graph.inputs, dynamic_shapes=graph.shapes, strict=False)
    return program.run_decompositions({torch.ops.aten.layer_norm.default: _layer_norm})


def _layer_norm(
    x: Tensor, shape: list[int], weight: Tensor, bias: Tensor, eps: float = 1e-5, cudnn_enable: bool = True
) -> Tensor:
    centred = x - x.mean(dim=-1, keepdim=True)
    return centred / ((centred * centred).mean(dim=-1, keepdim=True) + eps).sqrt() * weight + bias


def lower(model: Any, opset: int) -> None:
    """Rewrites an ONNX model of opset NEWEST in place; onnx.checker then verifies that nothing newer is left."""
    onnx = optional("onnx", "onnx", "an ONNX file")
    numbers = {each.name: onnx.numpy_helper.to_array(each) for each in model.graph.initializer}
    for node in model.graph.node:
        for attribute in [each for each in node.attribute if _asks_for_the_usual(onnx, node.op_type, each, opset)]:
            node.attribute.remove(attribute)
        if node.op_type in REDUCTIONS and len(node.input) == 2:
            node.attribute.append(onnx.helper.make_attribute("axes", numbers[node.input.pop()].tolist()))
    used = {name for node in model.graph.node for name in node.input}
    for each in [each for each in model.graph.initializer if each.name not in used]:
        model.graph.initializer.remove(each)
    next(each for each in model.opset_import if each.domain in ("", "ai.onnx")).version = opset
    model.ir_version = OPSETS[opset]


def _asks_for_the_usual(onnx: Any, operator: str, attribute: Any, opset: int) -> bool:
    """Whether an attribute that the older opset lacks has the value that opset implies."""
    if attribute.name in onnx.defs.get_schema(operator, opset).attributes:
        return False
    if (operator, attribute.name) in NEEDLESS:
        return True
    usual = onnx.defs.get_schema(operator, NEWEST).attributes[attribute.name].default_value
    value = onnx.helper.get_attribute_value
    return bool(usual.name) and value(usual) == value(attribute)
