"""torch.export programs and AOTInductor packages: files that need only torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

from rtdetr.export.graph import Graph
from rtdetr.export.targets import op_library_path
from rtdetr.inference.export_metadata import METADATA_FILE, Metadata
from rtdetr.ops.compiled import FOLDER


def trace(graph: Graph) -> torch.export.ExportedProgram:
    """The graph as a program with dynamic batch, height and width."""
    with torch.no_grad():
        return torch.export.export(graph.module, graph.inputs, dynamic_shapes=graph.shapes, strict=False)


def write_program(graph: Graph, metadata: Metadata, path: Path) -> None:
    """Writes a .pt2 file for torch.export.load."""
    torch.export.save(trace(graph), path, extra_files={METADATA_FILE: json.dumps(metadata.entries())})


def write_package(graph: Graph, metadata: Metadata, path: Path, with_op: bool) -> None:
    """Writes a .pt2 file with compiled code, and next to it the library of the deformable op if the code calls it."""
    entries = {**metadata.entries(), "op_library": op_library_path(path).name if with_op else ""}
    options = {"aot_inductor.metadata": {"rtdetr": json.dumps(entries)}}
    torch._inductor.aoti_compile_and_package(trace(graph), package_path=str(path), inductor_configs=options)
    if with_op:
        shutil.copyfile(FOLDER / "_cpu.so", op_library_path(path))
