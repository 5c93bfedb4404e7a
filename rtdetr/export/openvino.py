"""OpenVINO files: a folder with the graph (.xml) and the weights (.bin)."""

from __future__ import annotations

import json
from pathlib import Path

from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata


def write_openvino(onnx_file: Path, metadata: Metadata, folder: Path) -> None:
    """Converts an ONNX file. With float16 the weights are stored in it; the CPU computes in float32.

    Raises MissingPackage.
    """
    ov = optional("openvino", "openvino", "an OpenVINO file")
    model = ov.Core().read_model(str(onnx_file))
    model.set_rt_info(json.dumps(metadata.entries()), "rtdetr")
    folder.mkdir()
    ov.save_model(model, str(folder / "model.xml"), compress_to_fp16=metadata.precision == "fp16")
