"""A folder for transformers, and the same model opened there for the comparison."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from rtdetr.extras import optional
from rtdetr.inference.export_metadata import Metadata
from rtdetr.models.postprocess import EndToEnd
from rtdetr.models.rtdetrv3 import Network
from rtdetr.types import Detections
from rtdetr.weights.checkpoint import make_checkpoint
from rtdetr.weights.huggingface import read_huggingface, save_huggingface
from rtdetr.weights.huggingface_names import to_theirs


class TransformersModel(EndToEnd):
    """Detections of images, computed by `AutoModelForObjectDetection` and the processor beside it."""

    runtime = "transformers"

    def __init__(self, folder: Path) -> None:
        super().__init__()
        transformers = optional("transformers", "transformers", "the format transformers")
        self.model = transformers.AutoModelForObjectDetection.from_pretrained(str(folder)).eval()
        self.processor = transformers.AutoImageProcessor.from_pretrained(str(folder))

    def forward(self, images: Tensor, sizes: Tensor) -> Detections:
        """images: (B, 3, H, W) in [0, 1]; sizes: (B, 2) height, width of the originals."""
        outputs = self.model(pixel_values=images)
        found = self.processor.post_process_object_detection(outputs, threshold=-1.0, target_sizes=sizes)
        return Detections(*(torch.stack([each[key] for each in found]) for key in ("scores", "labels", "boxes")))


def write_folder(model: Network, metadata: Metadata, folder: Path) -> None:
    save_huggingface(folder, make_checkpoint(metadata.config, metadata.classes, model.state_dict()))


def changed_entries(folder: Path, model: Network) -> str:
    """Why the weights in a folder are not those of this model, empty if they are. Raises CheckpointError."""
    there, own = to_theirs(read_huggingface(folder)["model"]), to_theirs(model.state_dict())
    names = [name for name in own if not name.endswith("num_batches_tracked")]
    wrong = [name for name in names if name not in there or not torch.equal(there[name], own[name])]
    return f"it holds other weights, {wrong[0]} for one" if wrong else ""
