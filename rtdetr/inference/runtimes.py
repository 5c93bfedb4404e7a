"""Exported files as detectors, used like a checkpoint whatever their runtime.

Letters: B images, T detections of an image.
"""

from __future__ import annotations

import importlib
import json
import logging
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.extras import optional
from rtdetr.inference.edge_runtimes import NCNN_FILES, OPENERS, RUNTIMES, Opened, Run, line_of, load_errors
from rtdetr.inference.export_metadata import METADATA_FILE, TRITON_MODEL, Metadata, read_metadata
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.thresholds import Lowest
from rtdetr.models.postprocess import EndToEnd, postprocess
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Detections, Predictions
from rtdetr.weights.checkpoint import DAMAGE, CheckpointError, exists
from rtdetr.weights.load import model_from_checkpoint

logger = logging.getLogger("rtdetr")

STRIDE, SMALLEST = 32, 64  # sides of an exported file's images: multiples of STRIDE from SMALLEST


class ExportedModel(EndToEnd):
    """Detects in images with another runtime."""

    def __init__(self, path: Path, metadata: Metadata, runtime: str, run: Run) -> None:
        super().__init__()
        self.path, self.metadata, self.runtime, self.run = path, metadata, runtime, run

    def forward(self, images: Tensor, sizes: Tensor) -> Detections:
        """images: (B, 3, H, W) in [0, 1], converted from uint8; sizes: (B, 2) height, width of the originals."""
        height, width = images.shape[2:]
        if height % STRIDE or width % STRIDE or min(height, width) < SMALLEST:
            raise ConfigError(
                f"{self.path}: takes images whose sides are multiples of {STRIDE} from {SMALLEST}, got {height} x "
                f"{width}; data.image_size sets them"
            )
        if not self.metadata.fixed:
            return self._run(images, sizes)
        own = self.metadata.config.data.image_size
        if (height, width) != own:
            raise ConfigError(f"{self.path}: takes images of {own[0]} x {own[1]} alone, got {height} x {width}")
        found = [self._run(*one) for one in zip(images.split(1), sizes.split(1))]
        return Detections(*(torch.cat(each) for each in zip(*found)))

    def _run(self, images: Tensor, sizes: Tensor) -> Detections:
        device = images.device
        images = images.cpu()
        if self.metadata.input == "uint8":
            images = images.mul(255).round().to(torch.uint8)
        feed = {"images": images.contiguous()}
        if not self.metadata.raw:
            feed["sizes"] = sizes.cpu().to(torch.int64)
        outputs = [torch.as_tensor(each).to(device) for each in self.run(feed)]
        if any(each.shape[:1] != images.shape[:1] for each in outputs):
            raise CheckpointError(f"{self.path}: damaged, its outputs are not those of {len(images)} images")
        if self.metadata.raw:
            return postprocess(Predictions(*outputs), sizes, self.metadata.config.eval.max_detections)
        labels, boxes, scores = outputs
        return Detections(scores, labels, boxes)


def load(path: str | Path, device: torch.device | str = "cpu", threshold: Lowest | None = None) -> Predictor:
    """Returns a predictor from a checkpoint or an exported file. Raises CheckpointError or ConfigError."""
    if not is_exported(path):
        return Predictor(path, device, threshold)
    return Predictor.of(*load_model(path, device), device, threshold)


def load_model(
    path: str | Path, device: torch.device | str = "cpu", updates: list[str] | None = None, cfg: Config | None = None
) -> tuple[Network | ExportedModel, Config, Classes]:
    """Like `model_from_checkpoint`, also for exported files."""
    if not is_exported(path):
        return model_from_checkpoint(path, updates, cfg)
    model = open_exported(path, device)
    asked = cfg or config_from_dict(config_to_dict(model.metadata.config), str(path), updates)
    return model, asked, model.metadata.classes


def is_exported(path: str | Path) -> bool:
    """Whether a path names an exported file rather than weights. Raises CheckpointError if it cannot be accessed."""
    exists(Path(path))
    return runtime_of(Path(path)) is not None


def runtime_of(path: Path) -> str | None:
    """Returns onnxruntime, openvino, torch or one of edge_runtimes, by the name of the file; None for weights."""
    if path.suffix == ".xml" or (path.is_dir() and [*path.glob("*.xml")]):
        return "openvino"
    if (path / NCNN_FILES[0]).is_file():
        return "ncnn"
    path = model_file(path)
    return {".onnx": "onnxruntime", ".pt2": "torch", **RUNTIMES}.get(path.suffix)


def model_file(path: Path) -> Path:
    """Returns the file that a runtime opens: the ONNX file in a repository of Triton, else the path itself."""
    return path / TRITON_MODEL if (path / TRITON_MODEL).is_file() else path


def open_exported(path: str | Path, device: torch.device | str = "cpu", runtime: str | None = None) -> ExportedModel:
    """Opens an exported file. runtime: as returned by `runtime_of`, which is the default.

    Raises CheckpointError if the file cannot be used, MissingPackage if the runtime is not installed.
    """
    path = Path(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file")
    openers = {"onnxruntime": _open_onnx, "openvino": _open_openvino, "torch": _open_torch, **OPENERS}
    runtime = runtime or runtime_of(path) or "onnxruntime"
    metadata, run = openers[runtime](model_file(path), torch.device(device))
    return ExportedModel(path, metadata, runtime, run)


def _open_onnx(path: Path, device: torch.device) -> Opened:
    ort = optional("onnxruntime", "onnx", str(path))
    state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    damage = tuple(getattr(state, name) for name in ("Fail", "InvalidGraph", "InvalidProtobuf", "RuntimeException"))
    damage += (state.InvalidArgument, state.NotImplemented, state.NoSuchFile, state.NoModel, UnicodeDecodeError)
    options = ort.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    providers = ["CPUExecutionProvider"]
    if device.type == "cuda":
        if "CUDAExecutionProvider" in ort.get_available_providers():
            providers.insert(0, "CUDAExecutionProvider")
        else:
            logger.warning("%s: this onnxruntime has no CUDA, so the CPU computes; onnxruntime-gpu has it", path)
    with load_errors(path, "damaged, or no ONNX file that onnxruntime can run", *damage):
        session = ort.InferenceSession(str(path), options, providers)
        entries = session.get_modelmeta().custom_metadata_map
    metadata = read_metadata(entries, path)

    def run(feed: dict[str, Tensor]) -> list[Tensor]:
        try:
            return session.run(None, {name: tensor.numpy() for name, tensor in feed.items()})
        except damage as error:  # such as row numbers that come from NaN
            raise CheckpointError(f"{path}: onnxruntime cannot run it ({line_of(error)}); export it again") from error

    return metadata, run


def _open_openvino(path: Path, device: torch.device) -> Opened:
    ov = optional("openvino", "openvino", str(path))
    file = path if path.is_file() else min(path.glob("*.xml"))
    core = ov.Core()
    # by default, some CPUs compute in bfloat16
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    with load_errors(path, "damaged, or no model that OpenVINO can run", RuntimeError, line=-1):
        model = core.read_model(file)
        entries = _openvino_entries(model, path)
        compiled = core.compile_model(model, "CPU", hints)
    metadata = read_metadata(entries, path)

    def run(feed: dict[str, Tensor]) -> list[Tensor]:
        try:
            result = compiled({name: tensor.numpy() for name, tensor in feed.items()})
        except RuntimeError as error:
            raise CheckpointError(f"{path}: OpenVINO cannot run it ({line_of(error, -1)}); export it again") from error
        return [torch.from_numpy(result[i].copy()) for i in range(len(compiled.outputs))]

    return metadata, run


def _openvino_entries(model: Any, path: Path) -> dict[str, str]:
    """Returns the metadata of an OpenVINO file, or of an ONNX file that OpenVINO reads."""
    if path.suffix == ".onnx":
        onnx = optional("onnx", "onnx", str(path))
        return {each.key: each.value for each in onnx.load(path, load_external_data=False).metadata_props}
    if not model.has_rt_info("rtdetr"):
        return {}
    entries: dict[str, str] = json.loads(model.get_rt_info("rtdetr").value)
    return entries


def _open_torch(path: Path, device: torch.device) -> Opened:
    entries, packaged = _entries_of_zip(path)
    metadata = read_metadata(entries, path)
    _load_op(path, entries.get("op_library", ""))
    program: Callable[..., Any]
    with load_errors(path, f"torch {torch.__version__} cannot load it", *DAMAGE):
        program = torch._inductor.aoti_load_package(str(path)) if packaged else torch.export.load(path).module()
    return metadata, lambda feed: program(*feed.values())


def _entries_of_zip(path: Path) -> tuple[dict[str, str], bool]:
    """Returns the metadata of a .pt2 file, and whether it is a package of compiled code. Checks every byte."""
    try:
        torch._C.PyTorchFileReader(str(path))  # zipfile ignores fields that torch needs
        with zipfile.ZipFile(path) as parts:
            if damaged := parts.testzip():
                raise CheckpointError(f"{path}: damaged, its part {damaged} has other bytes than were written")
            names = parts.namelist()
            packaged = any("/aotinductor/" in name for name in names)
            ending = "_metadata.json" if packaged else f"/{METADATA_FILE}"
            found = [json.loads(parts.read(name)) for name in names if name.endswith(ending)]
    except (OSError, zipfile.BadZipFile, *DAMAGE) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: damaged, or not a file of torch.export; copy it again") from error
    entries: dict[str, str] = next(iter(found), {})
    return (json.loads(entries.get("rtdetr", "{}")) if packaged else entries), packaged


def _load_op(path: Path, library: str) -> None:
    """Registers the deformable attention op with torch, from the library next to a package that calls it."""
    if not library:
        return
    from rtdetr.ops import compiled  # noqa: F401  here, because it loads our library, which declares the same op

    if hasattr(torch.ops.rtdetr, "ms_deform_attn"):
        return
    try:
        torch.ops.load_library(str(path.with_name(library)))
    except OSError as error:
        raise CheckpointError(f"{path}: its op library {library} does not load ({line_of(error)})") from error
