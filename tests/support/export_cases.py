"""What the tests of exported files share: a model with detections to compare, noise, a TensorRT for scripts."""

from __future__ import annotations

import os
import types
from pathlib import Path
from types import SimpleNamespace

import torch
from engine_helpers import tiny_config, tiny_data

from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

# Operators that portable files do without.
REFUSED = {"GridSample", "TopK", "GatherND", "GatherElements", "ScatterND", "ScatterElements", "NonZero", "CumSum"}
CLASSES = Classes(("mug", "pen", "cup", "jar", 'a "lid"'), (2, 3, 5, 7, 11))


def write_checkpoint(folder: Path) -> None:
    """model.pth, made so that many scores lie above 0.05; shapes/."""
    cfg = tiny_config(tiny_data(folder / "shapes"), "data.image_size=[64, 96]", "model.decoder.num_layers=1")
    torch.manual_seed(0)
    model = build_model(cfg.model, len(CLASSES))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "score_head" in name:
                parameter.copy_(0.4 * torch.randn_like(parameter) - (1.0 if parameter.dim() == 1 else 0.0))
            elif "box_head" in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    save_checkpoint(folder / "model.pth", make_checkpoint(cfg, CLASSES, model.state_dict()))


def noise(batch: int, height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * width + batch)
    return torch.randint(0, 256, (batch, 3, height, width), generator=generator).to(torch.uint8)


class FakeTensorRT(types.ModuleType):
    """What TensorRT 10 and 11 both have of the names that the script uses, and what it did with them."""

    def __init__(self, layers: dict[str, str]) -> None:
        super().__init__("tensorrt")
        self.float16, self.shapes, self.flags = "half", {}, 0
        outputs = {name: SimpleNamespace(name=name, get_output=lambda j, type=type: SimpleNamespace(dtype=type))
                   for name, type in layers.items()}  # fmt: skip
        network = SimpleNamespace(num_layers=len(outputs), get_layer=[*outputs.values()].__getitem__)
        profile = SimpleNamespace(set_shape=lambda name, *shapes: self.shapes.update({name: shapes}))
        config = SimpleNamespace(clear_flag=lambda flag: None, add_optimization_profile=lambda profile: None)
        builder = SimpleNamespace(
            create_network=lambda flags: setattr(self, "flags", flags) or network,
            create_builder_config=lambda: config,
            create_optimization_profile=lambda: profile,
            build_serialized_network=lambda network, config: b"engine",
        )
        self.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
        self.Builder = lambda logger: builder
        self.OnnxParser = lambda network, logger: SimpleNamespace(parse_from_file=os.path.isfile)
        self.NetworkDefinitionCreationFlag = SimpleNamespace(STRONGLY_TYPED=1)
        self.BuilderFlag = SimpleNamespace(TF32=7)
