"""ONNX files: one graph of standard operators with dynamic batch, height and width. The exporter writes opset 18; for
runtimes that support no newer one, graphs are rewritten for older opsets. OpenVINO files are converted from them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.export.graph import Graph
from rtdetr.export.quiet import quiet
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata

HASH = "initializers_sha256"  # metadata entry, see initializers_sha256()
NEWEST, PORTABLE = 18, 17  # the default of portable files
OPSETS = {13: 7, 17: 8, NEWEST: 10}  # opset -> version of ONNX's file format released with it
# Attributes without effect here: splits are equal, one part per output; no axis has size zero.
NEEDLESS = (("Split", "num_outputs"), ("Reshape", "allowzero"))
REDUCTIONS = ("ReduceMax", "ReduceMean", "ReduceMin")  # their axes are an input since opset 18


def write_onnx(graph: Graph, metadata: Metadata, path: Path, opset: int = NEWEST) -> None:
    """Writes one file with weights and metadata. opset: a key of OPSETS. Raises MissingPackage."""
    onnx = optional("onnx", "onnx", "an ONNX file")
    optional("onnxscript", "onnx", "an ONNX file")
    with quiet():
        program = torch.onnx.export(
            graph.module if opset >= 17 else without_layer_norms(graph),
            graph.inputs,
            dynamo=True,
            opset_version=NEWEST,
            input_names=graph.names,
            output_names=graph.outputs,
            dynamic_shapes=graph.shapes,
            verbose=False,
        )
    assert program is not None  # never None without a path
    model = program.model_proto
    _forget_source(model.graph)
    if opset < NEWEST:
        lower(model, opset)
    note(model, metadata)
    onnx.checker.check_model(model)
    onnx.save(model, str(path))


def write_openvino(onnx_file: Path, metadata: Metadata, folder: Path) -> None:
    """Writes a folder with the graph (.xml) and the weights (.bin). With float16 the weights are stored in it; the CPU
    computes in float32. Raises MissingPackage."""
    ov = optional("openvino", "openvino", "an OpenVINO file")
    model = ov.Core().read_model(str(onnx_file))
    model.set_rt_info(json.dumps(metadata.entries()), "rtdetr")
    folder.mkdir()
    ov.save_model(model, str(folder / "model.xml"), compress_to_fp16=metadata.precision == "fp16")


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


def note(model: Any, metadata: Metadata) -> None:
    """Adds the metadata and the hash of the weights to an ONNX model, and removes unused operator sets, as some
    runtimes know only the standard one."""
    onnx = optional("onnx", "onnx", "an ONNX file")
    model.producer_name, model.producer_version = "rtdetr", metadata.version
    used = {node.domain for node in model.graph.node}
    for each in [each for each in model.opset_import if each.domain not in used]:
        model.opset_import.remove(each)
    onnx.helper.set_model_props(model, {**metadata.entries(), HASH: initializers_sha256(model)})


def _forget_source(graph: Any) -> None:
    """Removes the exporter's stack traces, which contain paths of this machine; the names of modules stay."""
    for node in graph.node:
        scopes = {each.key: each.value for each in node.metadata_props}.get("pkg.torch.onnx.name_scopes", "")
        names = [name for each in scopes.strip("[]").split(",") if (name := each.strip(" '\"")).startswith("model.")]
        scope = names[-1].removeprefix("model.") if names else ""
        node.name = f"{scope}/{node.name}" if scope else node.name
        node.doc_string = ""
        del node.metadata_props[:]
    for values in (graph.value_info, graph.input, graph.output):
        for value in values:
            del value.metadata_props[:]


def initializers_sha256(model: Any) -> str:
    """Hash of the names and numbers of all weights in an ONNX model."""
    onnx = optional("onnx", "onnx", "an ONNX file")
    digest = hashlib.sha256()
    for each in sorted(model.graph.initializer, key=lambda tensor: tensor.name):
        digest.update(each.name.encode() + onnx.numpy_helper.to_array(each).tobytes())
    return digest.hexdigest()


def changed_weights(path: Path) -> str:
    """The fault of a file whose weights are not those that were written, else empty."""
    model = _load(path)
    noted = {each.key: each.value for each in model.metadata_props}.get(HASH)
    return "" if noted == initializers_sha256(model) else "its weights are not those that were exported"


def onnx_facts(path: Path) -> str:
    """Opset, number of nodes and weights of a file, as text."""
    model = _load(path)
    opset = max(each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    return f"opset {opset}, {len(model.graph.node)} nodes, {len(model.graph.initializer)} weights"


def operators(path: Path) -> dict[str, int]:
    """Number of uses of each operator in a file, by name."""
    return dict(sorted(Counter(node.op_type for node in _load(path).graph.node).items()))


def float32_nodes(path: Path) -> dict[str, str]:
    """Name and operator of the nodes whose first output is float32."""
    graph, float32 = _load(path).graph, optional("onnx", "onnx", str(path)).TensorProto.FLOAT
    types = {value.name: value.type.tensor_type.elem_type for value in (*graph.value_info, *graph.output)}
    return {node.name: node.op_type for node in graph.node if types.get(node.output[0]) == float32}


def _load(path: Path) -> Any:
    """An ONNX model. Nothing beside the file is read: ours have their weights inside."""
    return optional("onnx", "onnx", str(path)).load(str(path), load_external_data=False)
