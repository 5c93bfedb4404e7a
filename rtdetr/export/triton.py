"""A model repository of the Triton Inference Server: an ONNX file and its configuration."""

from __future__ import annotations

from pathlib import Path

from rtdetr.inference.export_metadata import TRITON_MODEL, Metadata

NAME = TRITON_MODEL.parts[0]  # name of the model in client requests
CONFIG_FILE = Path(NAME, "config.pbtxt")  # in the repository, with TRITON_MODEL
MAX_BATCH = 8  # requests of one size that Triton joins to a batch
QUEUE_MICROSECONDS = 500  # longest time that the first request waits for others


def config_text(metadata: Metadata) -> str:
    """The content of config.pbtxt, in the text format of Triton's ModelConfig. Shapes exclude the batch; -1 is any.

    Images of different sizes cannot be a batch: Triton refuses them in one request and does not join two such requests.
    """
    inputs = [("images", "TYPE_UINT8" if metadata.input == "uint8" else "TYPE_FP32", "3, -1, -1")]
    outputs = [("logits", "TYPE_FP32", "-1, -1"), ("boxes", "TYPE_FP32", "-1, 4")]
    if not metadata.raw:
        inputs.append(("sizes", "TYPE_INT64", "2"))
        outputs = [("labels", "TYPE_INT64", "-1"), ("boxes", "TYPE_FP32", "-1, 4"), ("scores", "TYPE_FP32", "-1")]
    return "\n".join(
        [
            f'name: "{NAME}"',
            'backend: "onnxruntime"',
            f"max_batch_size: {MAX_BATCH}",
            *(f'input {{ name: "{name}" data_type: {kind} dims: [ {dims} ] }}' for name, kind, dims in inputs),
            *(f'output {{ name: "{name}" data_type: {kind} dims: [ {dims} ] }}' for name, kind, dims in outputs),
            f"dynamic_batching {{ max_queue_delay_microseconds: {QUEUE_MICROSECONDS} }}",
            "",
        ]
    )


def write_config(repository: Path, metadata: Metadata) -> None:
    (repository / CONFIG_FILE).write_text(config_text(metadata), encoding="utf-8")
