"""ncnn files, by pnnx: a folder with the graph, its weights and the metadata. One image of one size, float32, raw."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rtdetr.export.graph import Graph
from rtdetr.export.quiet import quiet
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata
from rtdetr.inference.runtimes import NCNN_FILES, note_ncnn

STEEP = 1e30  # times the difference of two different logits: above 1
# ncnn rounds to 16 bits where it can, too coarse for numbers of cells: of each layer, not for arithmetic, not in
# storage, not to bfloat16.
EXACT = "31=7"


def write_ncnn(graph: Graph, metadata: Metadata, folder: Path) -> None:
    """graph: portable, by products, raw, of float images. Raises MissingPackage."""
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
