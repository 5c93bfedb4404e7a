"""Paths of an export: its files, and those beside it."""

from __future__ import annotations

import os
from pathlib import Path

from rtdetr.config import Config, ConfigError
from rtdetr.data.classes import Classes
from rtdetr.export.triton import CONFIG_FILE
from rtdetr.inference.export_metadata import METADATA_FILE, TRITON_MODEL
from rtdetr.inference.runtimes import COREML_WEIGHTS, NCNN_FILES, RUNTIMES, is_exported
from rtdetr.models.portable import Sampling
from rtdetr.models.rtdetrv3 import Network
from rtdetr.weights.catalogue import is_hub_name
from rtdetr.weights.checkpoint import CheckpointError
from rtdetr.weights.pretrained import CONFIG, PROCESSOR, WEIGHTS

FORMATS = {"onnx": ".onnx", "torch-export": ".pt2", "aot": ".aot.pt2", "openvino": "_openvino", "tensorrt": ".onnx"}
FORMATS |= {"transformers": "_transformers", "triton": "_triton", "ncnn": "_ncnn"}  # folders
FORMATS |= {"executorch": ".pte", "litert": ".tflite", "coreml": ".mlpackage"}  # the last one is a folder, too

CERTIFICATE = ".certificate.json"  # after the name of a file
FAILED = ".failed"  # after the name of a file that does not agree with the model

WeightSource = str | Path | tuple[Network, Config, Classes]  # of the model: a checkpoint, or the model itself


def default(
    weights: WeightSource, format: str, half: bool, int8: bool, raw: bool, portable: Sampling | None = None
) -> Path:
    """Default path of an export: `beside` the weights, with its kind and ending."""
    path = beside(weights)
    words = (("portable", portable), ("fp16", half), ("int8", int8), ("raw", raw))
    parts = [path.name, *(word for word, asked in words if asked)]
    return path.parent / ("-".join(parts) + FORMATS[format])


def beside(weights: WeightSource) -> Path:
    """How the paths of a model's exports begin: beside the checkpoint, with its name; in the current folder for models
    of the Hub and those without a file."""
    if isinstance(weights, tuple):
        return Path(weights[1].name)
    path = Path(weights)
    if is_hub_name(str(path)):
        return Path(path.name)
    path = path if path.name not in ("", "..") else path.resolve()
    return path.parent / path.stem


def check_source(weights: WeightSource) -> None:
    """Raises CheckpointError for an exported file instead of weights."""
    if not isinstance(weights, tuple) and is_exported(weights):
        raise CheckpointError(f"{weights}: is an exported file; expected the checkpoint that it came from")


def check(output: Path, format: str) -> None:
    """Raises ConfigError for a name whose ending does not belong to the format, and for a folder that does not exist,
    which is more often mistyped than new."""
    if not os.path.isdir(output.parent):
        raise ConfigError(
            f"output: {output.parent} is no folder, so {output.name} cannot be written there; make it first"
        )
    ending = Path(f"x{FORMATS[format]}").suffix  # none for the folder of openvino
    unfit = (".onnx", ".pt2", ".xml", *RUNTIMES)
    if (output.suffix != ending and (ending or output.suffix in unfit)) or output.name in ("", ".."):
        what = f"a file {ending}" if ending else "a folder with a name of its own"
        raise ConfigError(f"output: the format {format} writes {what}, got {output}")


def of(output: Path, format: str) -> list[Path]:
    """Every file of an export, its certificate last."""
    folders: dict[str, tuple[str | Path, ...]] = {
        **{"openvino": ("model.xml", "model.bin"), "transformers": (CONFIG, PROCESSOR, WEIGHTS)},
        **{"triton": (CONFIG_FILE, TRITON_MODEL)},
        **{"ncnn": (*NCNN_FILES, METADATA_FILE)},
        **{"coreml": ("Manifest.json", COREML_WEIGHTS, COREML_WEIGHTS.parents[1] / "model.mlmodel")},
    }
    files = [output / name for name in folders[format]] if format in folders else [output]
    beside = {"aot": [op_library_path(output)], "tensorrt": [script_path(output)]}.get(format, [])
    return [*files, *beside, certificate_path(output)]


def certificate_path(file: Path) -> Path:
    return file.with_name(f"{file.name}{CERTIFICATE}")


def whole(path: Path) -> Path:
    """The folder of an export in place of a file inside it, as the certificate is about all of them; every other path
    itself, `.` by its name."""
    folders = [each for each in path.absolute().parents if Path(f"{each}{CERTIFICATE}").is_file()]
    return folders[0] if folders else path if path.name not in ("", "..") else path.resolve()


def op_library_path(package: Path) -> Path:
    """The library of the deformable op that an AOTInductor package calls."""
    return package.with_suffix(".ops.so")


def script_path(onnx_file: Path) -> Path:
    """The script that builds a TensorRT engine."""
    return onnx_file.with_suffix(".tensorrt.py")
