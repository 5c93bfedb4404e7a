"""Files of phones and small boards: ExecuTorch with XNNPACK, LiteRT, Core ML, ncnn. One image of one size, float32."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rtdetr.data.preprocess import SCALE
from rtdetr.export.graph import Graph
from rtdetr.export.quiet import quiet
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata
from rtdetr.inference.runtimes import CONTENT, COREML_WEIGHTS, NCNN_FILES, append_metadata, note_ncnn
from rtdetr.weights.digest import file_sha256

STEEP = 1e30  # times the difference of two different logits: above 1
# ncnn rounds to 16 bits where it can, too coarse for numbers of cells: of each layer, not for arithmetic, not in
# storage, not to bfloat16.
EXACT = "31=7"


def of_one_image(graph: Graph, size: tuple[int, int]) -> Graph:
    """The graph with fixed batch and sides. size: H, W."""
    height, width = size
    images = torch.zeros(1, 3, height, width, dtype=graph.inputs[0].dtype)
    for parameter in graph.module.parameters():  # a slice has other strides, which ExecuTorch takes for channels_last
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    inputs = (images, torch.tensor([[height, width]]))[: len(graph.inputs)]
    return graph._replace(inputs=inputs, shapes=({},) * len(inputs))


def write_executorch(graph: Graph, metadata: Metadata, path: Path) -> None:
    """Writes a .pte file: operators that XNNPACK supports run there, the rest in ExecuTorch's portable kernels. Raises
    MissingPackage."""
    exir = optional("executorch.exir", "executorch", "an ExecuTorch file")
    folding = optional("executorch.exir.passes.constant_prop_pass", "executorch", "an ExecuTorch file")
    xnnpack = optional("executorch.backends.xnnpack.partition.xnnpack_partitioner", "executorch", "an ExecuTorch file")
    with quiet():
        program = torch.export.export(graph.module, graph.inputs, strict=False)
        # XNNPACK takes products with constants only, not with slices of parameters, as in SelfAttention.
        quantisers = {node.target for node in program.graph.nodes if "quantize" in str(node.target)}
        program = folding.constant_prop_pass(program, quantisers)
        copies = {name: each.clone() for name, each in program.constants.items()}  # ExecuTorch ignores a view's offset
        program.constants.update(copies)
        lowered = exir.to_edge_transform_and_lower(program, partitioner=[xnnpack.XnnpackPartitioner()])
        path.write_bytes(lowered.to_executorch().buffer)
    append_metadata(path, metadata.entries())


def write_litert(graph: Graph, metadata: Metadata, path: Path) -> None:
    """Writes a .tflite file. graph: portable, as LiteRT has no tensors of six axes. Raises MissingPackage."""
    litert = optional("litert_torch", "litert", "a LiteRT file")
    with quiet():
        inputs = dict(zip(graph.names, graph.inputs))
        converted = litert.convert(graph.module, sample_kwargs=inputs, quant_config=_quant_config(metadata))
        converted.export(str(path))
    append_metadata(path, metadata.entries())


def _quant_config(metadata: Metadata) -> Any:
    """The setting by which LiteRT's converter accepts a program that is already quantised."""
    if metadata.precision != "int8":
        return None
    told = optional("litert_torch.quantize.quant_config", "litert", "an 8-bit LiteRT file")
    tools = optional("litert_torch.quantize.pt2e_quantizer", "litert", "an 8-bit LiteRT file")
    static = tools.PT2EQuantizer().set_global(tools.get_symmetric_quantization_config())
    return told.QuantConfig(pt2e_quantizer=static)


class FromFloats(nn.Module):
    """A module for images in [0, 255], given as floats."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, images: Tensor, *sizes: Tensor) -> tuple[Tensor, ...]:
        return self.module(images * float(SCALE), *sizes)


def write_coreml(graph: Graph, metadata: Metadata, path: Path) -> None:
    """Writes an .mlpackage for iOS 17 and macOS 14. graph: portable, of float images; uint8 images become Core ML's
    image type. Raises MissingPackage."""
    with quiet():
        ct = optional("coremltools", "coreml", "a Core ML package")
        given, *sizes = (ct.TensorType(name=name, shape=each.shape) for name, each in zip(graph.names, graph.inputs))
        module = graph.module
        if metadata.input == "uint8":
            given = ct.ImageType(name="images", shape=graph.inputs[0].shape, color_layout=ct.colorlayout.RGB)
            module = FromFloats(module).eval()
        program = torch.export.export(module, graph.inputs, strict=False).run_decompositions({})
        package = ct.convert(
            program,
            inputs=[given, *sizes],
            outputs=[ct.TensorType(name=name) for name in graph.outputs],
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS17,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
        )
        package.save(str(path))
        noted = {**metadata.entries(), CONTENT: file_sha256(path / COREML_WEIGHTS)}
        package.user_defined_metadata["rtdetr"] = json.dumps(noted)
        package.save(str(path))
    (path / "executorch_debug_handle_mapping.json").unlink()  # the manifest does not name it


def write_ncnn(graph: Graph, metadata: Metadata, folder: Path) -> None:
    """Writes a folder by pnnx: graph, weights and metadata. graph: portable, by products, raw, of float images. Raises
    MissingPackage."""
    pnnx = optional("pnnx", "ncnn", "an ncnn file")
    with tempfile.TemporaryDirectory() as name:
        with quiet(), WithoutComparisons():
            torch.jit.trace(graph.module, graph.inputs, check_trace=False).save(f"{name}/model.pt")
        shape = ",".join(map(str, graph.inputs[0].shape))
        command = [pnnx.EXEC_PATH, "model.pt", f"inputshape=[{shape}]", "fp16=0"]
        done = subprocess.run(command, cwd=name, capture_output=True, text=True)
        parts = [Path(name, each) for each in NCNN_FILES]
        if done.returncode or not all(each.is_file() for each in parts):
            raise RuntimeError(f"pnnx ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
        folder.mkdir()
        graph_file, weights = parts
        magic, counts, *layers = graph_file.read_text().splitlines()
        text = "\n".join([magic, counts, *(f"{layer} {EXACT}" for layer in layers)])
        (folder / graph_file.name).write_text(f"{text}\n")
        (folder / weights.name).write_bytes(weights.read_bytes())
    note_ncnn(folder, metadata.entries())


class WithoutComparisons(TorchFunctionMode):
    """Replaces comparisons of floats, for which ncnn has no layer, by arithmetic with results 0.0 and 1.0. All except
    `>` compare whole numbers."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        a, b = (*arguments[:2], None, None)[:2]
        name = getattr(function, "__name__", "").strip("_")
        if name == "gt":
            return ((a - b) * STEEP).clamp(0.0, 1.0)
        if name == "ge":
            return (a - b + 1.0).clamp(0.0, 1.0)
        if name == "le":
            return (b - a + 1.0).clamp(0.0, 1.0)
        if name == "eq":
            return (1.0 - (a - b).abs()).clamp(0.0, 1.0)
        if name == "to" and isinstance(a, Tensor) and b is a.dtype:  # of what was a comparison
            return a
        return function(*arguments, **(options or {}))
