"""Exported files for phones and small boards: ExecuTorch, LiteRT, Core ML, ncnn. One image at a time, of one size.

An ExecuTorch or LiteRT file ends with a zip archive, which those runtimes ignore. Its member METADATA_FILE holds the
metadata and the hash of all bytes before it. These runtimes do not check a file, so it is checked before loading.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import platform
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rtdetr.config import ConfigError
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import METADATA_FILE, Metadata, read_metadata
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.digest import file_sha256

RUNTIMES = {".pte": "executorch", ".tflite": "litert", ".mlpackage": "coreml"}  # by suffix
CONTENT = "content_sha256"  # metadata entry: hash of what the runtime reads
COREML_WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
NCNN_FILES = ("model.ncnn.param", "model.ncnn.bin")  # in a folder with METADATA_FILE
Run = Callable[[dict[str, Tensor]], Sequence[Tensor]]  # inputs by name -> outputs in order
Opened = tuple[Metadata, Run]


@contextmanager
def load_errors(path: Path, what: str, *errors: type[Exception], line: int = 0) -> Iterator[None]:
    """Context manager: turns these errors of a runtime that opens a file into a CheckpointError. what: is wrong with
    it. line: see `line_of`."""
    try:
        yield
    except errors as error:
        raise CheckpointError(f"{path}: {what} ({line_of(error, line)}); export it again") from error


def line_of(error: BaseException, number: int = 0) -> str:
    """Returns one line of an error: the first, or the last, -1, of OpenVINO, which begins with source locations."""
    return (str(error).strip().splitlines() or [type(error).__name__])[number][:200]


def append_metadata(path: Path, entries: dict[str, str]) -> None:
    """Appends the metadata to a file; `unzip -p FILE rtdetr.json` prints them."""
    noted = {**entries, CONTENT: file_sha256(path)}
    with zipfile.ZipFile(path, "a") as parts:
        parts.writestr(METADATA_FILE, json.dumps(noted, indent=1))


def appended_metadata(path: Path) -> dict[str, str]:
    """Returns what `append_metadata` wrote; empty for other files. Raises CheckpointError if the file is damaged."""
    if not zipfile.is_zipfile(path):
        return {}
    what = "damaged, the metadata at its end cannot be read"
    with load_errors(path, what, KeyError, ValueError, zipfile.BadZipFile), zipfile.ZipFile(path) as parts:
        start = parts.getinfo(METADATA_FILE).header_offset
        entries: dict[str, str] = json.loads(parts.read(METADATA_FILE))
    with open(path, "rb") as file:
        content = hashlib.sha256(file.read(start)).hexdigest()
    if content != entries.get(CONTENT):
        raise CheckpointError(f"{path}: damaged, it has other bytes than were written; copy or export it again")
    return entries


def open_executorch(path: Path, device: torch.device) -> Opened:
    metadata = read_metadata(appended_metadata(path), path)
    runtime = optional("executorch.runtime", "executorch", str(path)).Runtime.get()
    with load_errors(path, "ExecuTorch cannot load it", RuntimeError):
        program = runtime.load_program(path)
        method = program.load_method("forward")

    def run(feed: dict[str, Tensor], program: Any = program) -> Sequence[Tensor]:  # keeps the program alive
        return method.execute([*feed.values()])

    return metadata, run


def open_litert(path: Path, device: torch.device) -> Opened:
    metadata = read_metadata(appended_metadata(path), path)
    litert = optional("ai_edge_litert.interpreter", "litert", str(path))
    with load_errors(path, "LiteRT cannot load it", RuntimeError, ValueError):
        interpreter = litert.Interpreter(model_path=str(path), num_threads=torch.get_num_threads())
        runner = interpreter.get_signature_runner()

    def run(feed: dict[str, Tensor]) -> list[Tensor]:
        found = runner(**{name: in_32_bits(tensor).numpy() for name, tensor in feed.items()})
        return [in_64_bits(torch.from_numpy(found[name].copy())) for name in sorted(found)]  # output_0, output_1, ...

    return metadata, run


def in_32_bits(tensor: Tensor) -> Tensor:
    """Casts int64 to int32, as LiteRT and Core ML have no int64."""
    return tensor.to(torch.int32) if tensor.dtype == torch.int64 else tensor


def in_64_bits(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_floating_point() else tensor.to(torch.int64)


def why_not_run(path: Path) -> str:
    """Returns the reason why this machine cannot run a file, whatever is installed; empty if it can."""
    if RUNTIMES.get(path.suffix) == "coreml" and platform.system() != "Darwin":
        return "Core ML runs on macOS alone"
    return ""


def open_coreml(path: Path, device: torch.device) -> Opened:
    """Opens a Core ML package. On systems other than macOS its metadata can be read, but it does not run."""
    models = optional("coremltools", "coreml", str(path)).models
    damage = importlib.import_module("google.protobuf.message").DecodeError
    reason = why_not_run(path)
    with load_errors(path, "damaged, or no Core ML package", OSError, RuntimeError, ValueError, damage):
        package = models.MLModel(str(path), skip_model_load=bool(reason))
        description = package.get_spec().description
        entries: dict[str, str] = json.loads(package.user_defined_metadata.get("rtdetr", "{}"))
        content = file_sha256(path / COREML_WEIGHTS)
    metadata = read_metadata(entries, path)
    if content != entries.get(CONTENT):
        raise CheckpointError(f"{path}: damaged, its weights are not those that were written; export it again")
    names = [each.name for each in description.output]
    expected = ["logits", "boxes"] if metadata.raw else ["labels", "boxes", "scores"]
    if names != expected:
        raise CheckpointError(f"{path}: its outputs are {', '.join(names)}, expected {', '.join(expected)}")

    def run(feed: dict[str, Tensor]) -> list[Tensor]:
        if reason:
            raise ConfigError(f"{path}: {reason}; use the checkpoint or another format here")
        given: dict[str, Any] = {name: in_32_bits(tensor).numpy() for name, tensor in feed.items()}
        if metadata.input == "uint8":  # Core ML's own image type
            given["images"] = Image.fromarray(given["images"][0].transpose(1, 2, 0))
        found = package.predict(given)
        return [in_64_bits(torch.as_tensor(found[name])) for name in names]

    return metadata, run


def note_ncnn(folder: Path, entries: dict[str, str]) -> None:
    """Writes the metadata and the hash of NCNN_FILES to their folder."""
    noted = {**entries, CONTENT: _ncnn_sha256(folder)}
    (folder / METADATA_FILE).write_text(json.dumps(noted, indent=1), encoding="utf-8")


def _ncnn_sha256(folder: Path) -> str:
    return hashlib.sha256("".join(file_sha256(folder / name) for name in NCNN_FILES).encode()).hexdigest()


def open_ncnn(path: Path, device: torch.device) -> Opened:
    with load_errors(path, "damaged, or no ncnn folder of this program", OSError, ValueError):
        entries: dict[str, str] = json.loads((path / METADATA_FILE).read_bytes())
        content = _ncnn_sha256(path)
    metadata = read_metadata(entries, path)
    if content != entries.get(CONTENT):
        raise CheckpointError(f"{path}: damaged, it has other bytes than were written; copy or export it again")
    ncnn = optional("ncnn", "ncnn", str(path))
    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    if net.load_param(str(path / NCNN_FILES[0])) or net.load_model(str(path / NCNN_FILES[1])):
        raise CheckpointError(f"{path}: ncnn cannot load it; export it again")

    def run(feed: dict[str, Tensor]) -> list[Tensor]:
        extractor = net.create_extractor()
        extractor.input("in0", ncnn.Mat(feed["images"][0].numpy()).clone())
        return [torch.from_numpy(np.array(extractor.extract(name)[1]))[None] for name in ("out0", "out1")]

    return metadata, run


OPENERS = {"executorch": open_executorch, "litert": open_litert, "coreml": open_coreml, "ncnn": open_ncnn}
