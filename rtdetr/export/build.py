"""Runs an export: writes the files, compares them with PyTorch, and only then moves them to their place."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from PIL import Image

from rtdetr.config import ConfigError
from rtdetr.export import targets
from rtdetr.export.cases import calibration_images, example_images
from rtdetr.export.certificate import OTHER_CLASSES, OTHER_WEIGHTS, Certificate, certify, read_stored_certificate
from rtdetr.export.edge import of_one_image, write_coreml, write_executorch, write_litert, write_ncnn
from rtdetr.export.graph import Graph, make_graph, make_portable_graph, own_size, set_backend
from rtdetr.export.measure import average_precisions, validation_loader
from rtdetr.export.onnx import NEWEST, OPSETS, PORTABLE, onnx_facts, write_onnx, write_openvino
from rtdetr.export.quantize import LEFT_OUT, quantize_onnx, quantize_program, with_more_queries
from rtdetr.export.quiet import quiet
from rtdetr.export.targets import FORMATS, WeightSource
from rtdetr.export.tensorrt import check_script, write_script
from rtdetr.export.torch_export import write_package, write_program
from rtdetr.export.transformers import write_folder
from rtdetr.export.triton import write_config
from rtdetr.extras import optional
from rtdetr.foreign_names import unknown_format
from rtdetr.inference.export_metadata import TRITON_MODEL, InputType, Metadata, Precision
from rtdetr.inference.runtimes import SMALLEST, is_exported, model_file, open_exported, why_not_run
from rtdetr.models.portable import Sampling
from rtdetr.models.rtdetrv3 import Network
from rtdetr.ops import Backend, why_not_compiled
from rtdetr.ops.kernels import are_plain
from rtdetr.weights.catalogue import located
from rtdetr.weights.checkpoint import CheckpointError, exists
from rtdetr.weights.digest import file_sha256, weights_sha256
from rtdetr.weights.huggingface import is_huggingface
from rtdetr.weights.load import model_from_checkpoint

ONNX_FILES = ("onnx", "tensorrt", "triton")  # formats that contain an ONNX file
NEEDS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(ONNX_FILES, ("onnx", "onnxscript", "onnxruntime")),
    **{"openvino": ("onnx", "onnxscript", "openvino")},
    **{"transformers": ("transformers", "safetensors"), "executorch": ("executorch.runtime",)},
    **{"litert": ("litert_torch", "ai_edge_litert"), "coreml": ("coremltools",)},
    **{"ncnn": ("pnnx", "ncnn")},
}
INT8 = ("onnx", "triton", "executorch", "litert")
EDGE = {"executorch": write_executorch, "litert": write_litert, "coreml": write_coreml, "ncnn": write_ncnn}


class ExportFailed(RuntimeError):
    """The exported file does not agree with the model; the message is one sentence."""

    exit_code = 1


class Exported(NamedTuple):
    path: Path  # file, or folder for openvino
    certificate: Certificate


def export_model(
    weights: WeightSource,
    format: str = "onnx",
    output: str | Path | None = None,
    half: bool = False,
    raw: bool = False,
    *,
    int8: bool = False,
    calibrate: str | Path | None = None,
    input_type: InputType = "uint8",
    portable: Sampling | None = None,
    opset: int | None = None,
    images: str | Path | None = None,
    ap: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Writes a model in another format, with a certificate that it agrees with PyTorch.

    weights: a checkpoint, or (model, config, classes). format: a key of FORMATS. output: default: beside the
    checkpoint, under its name. half: float16; int8: 8-bit integers, with a folder of images to calibrate on (INT8).
    raw: logits and boxes in place of detections. input_type: uint8 images or float32 in [0, 1]. portable: one image of
    one size at a time, by operators that small runtimes have (onnx, torch-export, openvino), with gather or products
    for look-ups. opset: of a portable ONNX file, 13, 17 (default) or 18. images: a folder to compare on, by default
    that of `calibrate`, else generated images. ap: a validation set, on which AP is measured before and after, as part
    of the certificate. say: receives progress lines. An existing export at `output` is replaced. Raises ExportFailed if
    the comparison fails; CheckpointError, ConfigError or DataError before anything is written.
    """
    _check_portable(format, half, portable, opset)
    _check(format, half, int8, calibrate, input_type, ap)
    if format == "transformers" and (half or raw or input_type != "uint8"):
        raise ConfigError("half, raw, input_type: a folder for transformers is float32 and as transformers runs it")
    target = Path(output) if output is not None else targets.default(weights, format, half, int8, raw, portable)
    targets.check(target, format)
    model, metadata = describe(weights, "fp16" if half else "int8" if int8 else "fp32", raw, input_type)
    metadata = replace(metadata, fixed=portable is not None or format in EDGE)
    if format == "ncnn":  # has no integer tensors
        metadata = replace(metadata, raw=True, input="float")
    examples = example_images(images or calibrate, metadata.config)  # the calibration is valid for such images only
    calibration = calibration_images(calibrate, metadata.config) if calibrate is not None else []
    validation = validation_loader(ap, metadata.config, metadata.classes) if ap is not None else None
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent, ignore_cleanup_errors=True) as folder:
        path = Path(folder, target.name)
        say(f"writing {metadata.config.name} as {format}, {metadata.precision}")
        _write(format, model, metadata, calibration, path, portable, opset or (PORTABLE if portable else NEWEST))
        if not why_not_run(path):
            say(f"comparing with PyTorch on {examples.says}, and on random ones")
        certificate = certify(path, format, model, metadata, examples)
        _complete(certificate, format, model_file(path))
        if validation is not None:
            certificate.ap = average_precisions(model, open_exported(path), metadata.config, validation)
            certificate.certified_sha256 = certificate.sha256 if certificate.passed else ""
        say(certificate.table())
        return _put_in_place(path, target, certificate)


def check_file(
    weights: WeightSource,
    file: str | Path,
    images: str | Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Compares an exported file with the model again and writes a new certificate.

    A valid certificate of another model is kept, and a file of another model gets none. Raises ExportFailed if they
    disagree, or if the file is not the certified one or has changed weights.
    """
    file = targets.whole(Path(file))
    if not exists(file):
        raise CheckpointError(f"{file}: no such file")
    if not is_exported(file) and not is_huggingface(file):
        raise CheckpointError(
            f"{file}: expected an exported file by its name: .onnx, .pt2, .pte, .tflite, .mlpackage, or a folder "
            "of openvino, ncnn, triton or transformers"
        )
    noted = read_stored_certificate(file)
    model, metadata = describe(weights, "fp32", raw=False, input_type="uint8")
    good = noted.sha256
    if good and noted.weights_sha256 != metadata.weights_sha256:
        raise ExportFailed(
            f"{file}: {targets.certificate_path(file)} is about other weights than those of {_named(weights)} and was "
            "left as it is; name the checkpoint that the file was exported from, or remove the certificate"
        )
    examples = example_images(images, metadata.config)
    say(f"comparing {file} with PyTorch on {examples.says}, and on random ones")
    certificate = certify(file, noted.format, model, metadata, examples)
    if not good and certificate.fault in (OTHER_WEIGHTS, OTHER_CLASSES):
        raise ExportFailed(f"{file}: {certificate.fault} than those of {_named(weights)}; no certificate was written")
    if not certificate.fault and good not in ("", certificate.sha256):
        certificate.fault = "the file has other bytes than when it was certified"
    certificate.notes, certificate.ap = [*noted.notes], noted.ap if good else None
    certificate.certified_sha256 = good or (certificate.sha256 if certificate.passed else "")
    say(certificate.table())
    certificate.save(targets.certificate_path(file))
    if not certificate.passed:
        raise ExportFailed(f"{file}: {certificate.reason()}; {targets.certificate_path(file)} has the details")
    return Exported(file, certificate)


def _named(weights: WeightSource) -> str:
    return "the model" if isinstance(weights, tuple) else str(weights)


def describe(weights: WeightSource, precision: Precision, raw: bool, input_type: InputType) -> tuple[Network, Metadata]:
    """The model in eval mode on the CPU, and the metadata of its file. Raises CheckpointError or ConfigError."""
    targets.check_source(weights)
    if isinstance(weights, tuple):
        model, cfg, classes = weights
        model, digest = copy.deepcopy(model).cpu().eval(), ""
    else:
        weights = located(weights)
        model, cfg, classes = model_from_checkpoint(weights)
        digest = file_sha256(Path(weights))
    cfg = replace(cfg, kernels="auto")  # suits any device
    set_backend(model, "auto")
    if min(cfg.data.image_size) < SMALLEST:
        raise ConfigError(f"data.image_size: exported files take sides from {SMALLEST}, got {cfg.data.image_size}")
    return model, Metadata(cfg, classes, input_type, raw, precision, weights_sha256(model.state_dict()), digest)


def _check(
    format: str, half: bool, int8: bool, calibrate: str | Path | None, input_type: InputType, ap: str | Path | None
) -> None:
    """Raises ConfigError for arguments that exclude each other."""
    if format not in FORMATS:
        raise ConfigError(f"format: {unknown_format(format, FORMATS)}")
    if input_type not in get_args(InputType):
        raise ConfigError(f"input_type: expected one of {', '.join(get_args(InputType))}, got {input_type!r}")
    if not isinstance(half, bool):
        raise ConfigError(f"half: expected True or False, got {half!r}")
    if int8 and half:
        raise ConfigError("half, int8: a file has one precision, got both")
    if int8 and format not in INT8:
        raise ConfigError(f"int8: expected a format of {', '.join(INT8)}, got {format}")
    if half and format in EDGE:
        raise ConfigError(f"half: files of {format} are float32")
    if int8 != (calibrate is not None):
        raise ConfigError("int8 and calibrate (a folder of some 100 typical images) go together, got one of them")
    if ap is not None and (format == "transformers" or why_not_run(Path(f"x{FORMATS[format]}"))):
        raise ConfigError(f"ap: files of {format} are not run here")
    for package in NEEDS.get(format, ()):
        with quiet():  # some packages warn on import, of missing parts or a newer torch
            optional(package, "onnx" if format in ONNX_FILES else format, f"the format {format}")


def _check_portable(format: str, half: bool, portable: Sampling | None, opset: int | None) -> None:
    """Raises ConfigError for arguments that exclude each other."""
    if portable not in (None, *get_args(Sampling)):
        raise ConfigError(f"portable: expected one of {', '.join(get_args(Sampling))}, got {portable!r}")
    if portable and half:
        raise ConfigError("half: portable files are float32 or int8")
    if portable and format not in ("onnx", "torch-export", "openvino"):
        raise ConfigError(f"portable: expected the format onnx, torch-export or openvino, got {format}")
    if opset is not None and not (portable and format == "onnx"):
        raise ConfigError("opset: can only be chosen for portable files of the format onnx; leave it out otherwise")
    if opset not in (None, *OPSETS):
        raise ConfigError(f"opset: expected one of {', '.join(map(str, OPSETS))}, got {opset}")


def _write(
    format: str,
    model: Network,
    metadata: Metadata,
    calibration: list[Image.Image],
    path: Path,
    portable: Sampling | None,
    opset: int,
) -> None:
    """Writes all files of the export, at `path` and beside it."""
    if metadata.precision == "int8":
        model, metadata = with_more_queries(model, metadata)

    def graph_of(metadata: Metadata, backend: Backend) -> Graph:
        return make_portable_graph(model, metadata, portable) if portable else make_graph(model, metadata, backend)

    if format == "transformers":
        write_folder(model, metadata, path)
        return
    if format in EDGE:
        _write_edge(format, model, metadata, calibration, path)
        return
    if format in ("torch-export", "aot"):
        with_op = format == "aot" and not are_plain() and why_not_compiled(torch.empty(0)) is None
        graph = graph_of(metadata, "cpu" if with_op else "torch")
        if format == "aot":
            write_package(graph, metadata, path, with_op)
        else:
            write_program(graph, metadata, path)
        return
    converted = format == "openvino" or metadata.precision == "int8"  # converted from a float32 ONNX file
    graph = graph_of(replace(metadata, precision="fp32") if converted else metadata, "torch")
    file = path / TRITON_MODEL if format == "triton" else path
    file.parent.mkdir(parents=True, exist_ok=True)
    first = path.with_name("float32.onnx") if converted else file
    write_onnx(graph, metadata, first, opset)
    if format == "openvino":
        write_openvino(first, metadata, path)
    elif format == "tensorrt":
        write_script(path, metadata)
    elif metadata.precision == "int8":
        quantize_onnx(first, metadata, calibration, file)
    if format == "triton":
        write_config(path, metadata)


def _write_edge(format: str, model: Network, metadata: Metadata, calibration: list[Image.Image], path: Path) -> None:
    if format == "executorch":
        graph = of_one_image(make_graph(model, metadata, "torch"), own_size(model, metadata))
    elif format == "ncnn":
        graph = make_portable_graph(model, metadata, "products")
    else:
        graph = make_portable_graph(model, replace(metadata, input="float") if format == "coreml" else metadata)
    if metadata.precision == "int8":
        with quiet():
            graph = quantize_program(graph, metadata, calibration, format)
    EDGE[format](graph, metadata, path)


def _complete(certificate: Certificate, format: str, path: Path) -> None:
    """Adds the notes and checks of a single format."""
    if certificate.precision == "int8":
        certificate.notes.append(LEFT_OUT)
    if path.suffix == ".onnx":
        certificate.notes.append(onnx_facts(path))
    if format == "tensorrt":
        certificate.fault = certificate.fault or check_script(targets.script_path(path), path)
        certificate.notes.append(
            f"{targets.script_path(path).name}: parses, and its layers are in the ONNX file; there was no TensorRT, so "
            "no engine has been built or compared"
        )


def _put_in_place(path: Path, target: Path, certificate: Certificate) -> Exported:
    """Moves the finished files to their place. Raises ExportFailed for a failed comparison, whose files get another
    name."""
    ending = "" if certificate.passed else targets.FAILED
    place = target.with_name(target.name + ending)
    for file in targets.of(path, certificate.format):
        if file.exists():
            goal = place / file.relative_to(path) if path in file.parents else place.with_name(file.name + ending)
            goal.parent.mkdir(parents=True, exist_ok=True)
            os.replace(file, goal)
    certificate.save(targets.certificate_path(place))
    if not certificate.passed:
        raise ExportFailed(f"{place}: does not agree with the model: {certificate.reason()}")
    return Exported(place, certificate)
