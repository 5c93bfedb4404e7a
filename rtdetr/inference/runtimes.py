"""Exported files as detectors, used like a checkpoint whatever their runtime.

Those for phones and small boards (ExecuTorch, LiteRT, Core ML, ncnn) take one image at a time, of one size. Their
runtimes do not check a file, so it is checked before loading. An ExecuTorch or LiteRT file ends with a zip archive that
they ignore. Its member METADATA_FILE holds the metadata and the hash of all bytes before it.

Letters: B images, T detections of an image.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
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

from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.extras import optional
from rtdetr.inference.export_metadata import METADATA_FILE, TRITON_MODEL, Metadata, read_metadata
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.thresholds import Lowest
from rtdetr.models.postprocess import EndToEnd, postprocess
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Detections, Predictions
from rtdetr.weights.checkpoint import DAMAGE, CheckpointError, exists
from rtdetr.weights.digest import file_sha256
from rtdetr.weights.load import model_from_checkpoint

logger = logging.getLogger("rtdetr")

STRIDE, SMALLEST = 32, 64  # sides of an exported file's images: multiples of STRIDE from SMALLEST
RUNTIMES = {  # by suffix
    ".onnx": "onnxruntime", ".pt2": "torch", ".pte": "executorch", ".tflite": "litert", ".mlpackage": "coreml",
}  # fmt: skip
CONTENT = "content_sha256"  # metadata entry: hash of what the runtime reads
COREML_WEIGHTS = Path("Data/com.apple.CoreML/weights/weight.bin")
NCNN_FILES = ("model.ncnn.param", "model.ncnn.bin")  # in a folder with METADATA_FILE
Run = Callable[[dict[str, Tensor]], Sequence[Tensor]]  # inputs by name -> outputs in order
Opened = tuple[Metadata, Run]


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
    """Returns the runtime of an exported file, by its name; None for weights."""
    if path.suffix == ".xml" or any(each.with_suffix(".bin").exists() for each in path.glob("*.xml")):
        return "openvino"
    if (path / NCNN_FILES[0]).is_file():
        return "ncnn"
    return RUNTIMES.get(model_file(path).suffix)


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
    openers = {
        "onnxruntime": _open_onnx,
        "openvino": _open_openvino,
        "torch": _open_torch,
        "executorch": _open_executorch,
        "litert": _open_litert,
        "coreml": _open_coreml,
        "ncnn": _open_ncnn,
    }
    runtime = runtime or runtime_of(path) or "onnxruntime"
    metadata, run = openers[runtime](model_file(path), torch.device(device))
    return ExportedModel(path, metadata, runtime, run)


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
    return json.loads(model.get_rt_info("rtdetr").value)


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


def _open_executorch(path: Path, device: torch.device) -> Opened:
    metadata = read_metadata(appended_metadata(path), path)
    runtime = optional("executorch.runtime", "executorch", str(path)).Runtime.get()
    with load_errors(path, "ExecuTorch cannot load it", RuntimeError):
        program = runtime.load_program(path)
        method = program.load_method("forward")

    def run(feed: dict[str, Tensor], program: Any = program) -> Sequence[Tensor]:  # keeps the program alive
        return method.execute([*feed.values()])

    return metadata, run


def _open_litert(path: Path, device: torch.device) -> Opened:
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


def _open_coreml(path: Path, device: torch.device) -> Opened:
    """Opens a Core ML package. On systems other than macOS its metadata can be read, but it does not run."""
    models = optional("coremltools", "coreml", str(path)).models
    damage = importlib.import_module("google.protobuf.message").DecodeError, AttributeError  # no such root model
    reason = why_not_run(path)
    with load_errors(path, "damaged, or no Core ML package", OSError, RuntimeError, ValueError, *damage):
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


def _open_ncnn(path: Path, device: torch.device) -> Opened:
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
