"""A tiny RT-DETR as transformers saves it, made here without transformers: names, shapes, and what it answers.

`python tests/support/huggingface_cases.py` writes tests/golden/huggingface.json anew; transformers must be installed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from golden_formulas import unit
from safetensors.torch import save_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden" / "huggingface.json"
NAMES = {"0": "cat", "1": "dog", "2": "traffic light"}
BACKBONE = {
    **{"model_type": "rt_detr_resnet", "embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 2, 2]},
    **{"layer_type": "basic", "out_indices": [2, 3, 4]},
}
CONFIG: dict[str, Any] = {
    **{"model_type": "rt_detr", "backbone_config": BACKBONE, "id2label": NAMES, "hidden_expansion": 0.5},
    **{"encoder_in_channels": [16, 32, 64], "encoder_hidden_dim": 16, "encoder_ffn_dim": 24, "d_model": 16},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_in_channels": [16] * 3, "num_queries": 7},
    **{"decoder_ffn_dim": 24, "decoder_layers": 2, "decoder_n_points": 2},
}
PROCESSOR = {"size": {"height": 64, "width": 96}, "resample": 2, "do_resize": True, "do_normalize": False}
IMAGES = torch.from_numpy(unit("huggingface images", (2, 3, 64, 96)))


def golden() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text(encoding="utf-8"))


def formula_entry(name: str, shape: list[int]) -> Tensor:
    """Numbers that make a network of ordinary values; batch norm statistics are not trivial."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(3)
    z = torch.from_numpy(unit(name, shape)).float()
    if name.endswith("running_var"):
        return 1 + 0.2 * z
    if name.endswith("weight") and z.dim() == 1:
        return 1 + 0.1 * z
    return z * (0.1 if z.dim() < 2 else z[0].numel() ** -0.5)


def formula_entries() -> dict[str, Tensor]:
    return {name: formula_entry(name, shape) for name, shape in golden()["entries"].items()}


def write_model(
    folder: Path, config: dict[str, Any] | None = None, processor: dict[str, Any] | None = None, pickled: bool = False
) -> Path:
    """A folder as transformers saves it; config, processor: changed keys."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | (processor or {})), encoding="utf-8")
    if pickled:
        torch.save(formula_entries(), folder / "pytorch_model.bin")
    else:
        save_file(formula_entries(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_golden() -> None:
    import tempfile

    import transformers
    from safetensors import safe_open

    model = transformers.RTDetrForObjectDetection(transformers.RTDetrConfig(**CONFIG))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            entries = {name: list(file.get_slice(name).get_shape()) for name in sorted(file.keys())}
        content: dict[str, Any] = {"transformers": transformers.__version__, "entries": entries}
        GOLDEN.write_text(json.dumps(content), encoding="utf-8")
        write_model(Path(folder))
        model = transformers.RTDetrForObjectDetection.from_pretrained(folder).eval().double()
    with torch.no_grad():
        outputs = model(IMAGES)
    content |= {"logits": outputs.logits.tolist(), "boxes": outputs.pred_boxes.tolist()}
    GOLDEN.write_text(json.dumps(content), encoding="utf-8")


if __name__ == "__main__":
    make_golden()
