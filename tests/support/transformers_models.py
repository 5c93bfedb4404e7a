"""Every model of transformers with deformable attention, tiny and with random weights, and inputs for it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STAGES = ["stage1", "stage2", "stage3", "stage4"]
SIZE, DIM, QUERIES, TOKENS = 128, 32, 6, 7
DETR = {
    **{"d_model": DIM, "encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_queries": QUERIES, "num_feature_levels": 4},
    **{"encoder_n_points": 2, "decoder_n_points": 3, "two_stage": True, "with_box_refine": True},
}
HYBRID = {
    **{"encoder_hidden_dim": DIM, "encoder_in_channels": [8, 8, 8], "encoder_layers": 1, "encoder_ffn_dim": 16},
    **{"encoder_attention_heads": 2, "d_model": DIM, "num_queries": QUERIES, "decoder_in_channels": [DIM] * 3},
    **{"decoder_ffn_dim": 16, "decoder_layers": 2, "decoder_attention_heads": 2, "num_denoising": 0},
}
MASKS = {
    **{"hidden_dim": DIM, "encoder_layers": 2, "decoder_layers": 2, "num_attention_heads": 2, "num_queries": QUERIES},
    **{"encoder_feedforward_dim": 16, "dim_feedforward": 16},
}
GROUPED = {
    **{"d_model": DIM, "decoder_ffn_dim": 16, "decoder_layers": 2, "decoder_self_attention_heads": 2, "group_detr": 2},
    **{"decoder_cross_attention_heads": 4, "num_queries": QUERIES, "projector_scale_factors": [2.0, 0.5]},
}
TRUNK = {"hidden_size": DIM, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": SIZE, "patch_size": 16}
WORDS = {"num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 8, "vocab_size": 50}
BERT = {"model_type": "bert", "hidden_size": 8, "intermediate_size": 8, **WORDS}
READING = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
READING |= {"coordinate_size": 2, "shape_size": 2}
CLIP = {"model_type": "clip_text_model", "hidden_size": 16, "intermediate_size": 16, **WORDS}
CLIP |= {"bos_token_id": 48, "eos_token_id": 49}


def _make(name: str, **settings: Any) -> Any:
    return getattr(importlib.import_module("transformers"), name)(**settings)


def _build(name: str, head: str = "ForObjectDetection", **settings: Any) -> nn.Module:
    return _make(name + head, config=_make(name + "Config", **settings))


def _resnet(name: str = "ResNetConfig") -> Any:
    sizes = {"embedding_size": 8, "hidden_sizes": [8] * 4, "depths": [1] * 4, "layer_type": "basic"}
    return _make(name, **sizes, out_features=STAGES[1:])


def _hgnet(stages: list[str]) -> Any:
    channels = {f"stage_{part}_channels": [8] * 4 for part in ("in", "mid", "out")}
    shape = {"stage_num_blocks": [1] * 4, "stage_light_block": [False] * 4, "stage_kernel_size": [3] * 4}
    rest = {"stage_downsample": [False, True, True, True], "stage_numb_of_layers": [2] * 4, "hidden_sizes": [8] * 4}
    return _make(
        "HGNetV2Config",
        stem_channels=[3, 8, 8],
        embedding_size=8,
        depths=[1] * 4,
        out_features=stages,
        **channels,
        **shape,
        **rest,
    )


def _swin(stages: list[str]) -> Any:
    sizes = {"embed_dim": 8, "depths": [1] * 4, "num_heads": [1] * 4, "window_size": 4}
    return _make("SwinConfig", image_size=SIZE, **sizes, out_features=stages)


def _omdet() -> nn.Module:
    names = ("encoder_dim_feedforward", "task_encoder_hidden_dim", "decoder_dim_feedforward", "class_embed_dim")
    return _build(
        "OmDetTurbo",
        **dict.fromkeys(names, 16),
        **dict.fromkeys(("text_projection_in_dim", "text_projection_out_dim"), 16),
        **{"encoder_hidden_dim": DIM, "decoder_hidden_dim": DIM, "vision_features_channels": [DIM] * 3},
        **{"encoder_in_channels": (16, 32, 64), "num_feature_levels": 3, "decoder_num_points": 4},
        **{"encoder_layers": 1, "decoder_num_layers": 2, "encoder_attention_heads": 2, "decoder_num_heads": 2},
        **{"use_timm_backbone": False, "backbone": None, "apply_layernorm_after_vision_backbone": False},
        **{"encoder_projection_indices": [2], "num_queries": QUERIES, "image_size": SIZE},
        text_config=CLIP, backbone_config=_swin(STAGES[1:]),
    )  # fmt: skip


def _grounding(name: str) -> nn.Module:
    backbone = {"use_timm_backbone": False, "backbone": None, "backbone_config": _swin(STAGES[1:])}
    return _build(name, **DETR, **backbone, text_config=BERT, max_text_len=TOKENS)


def _oneformer() -> nn.Module:
    text = {f"text_encoder_{k}": v for k, v in (("vocab_size", 50), ("width", DIM), ("num_layers", 1), ("n_ctx", 2))}
    text |= {"text_encoder_context_length": TOKENS, "task_seq_len": TOKENS, "max_seq_len": TOKENS}
    more = {"conv_dim": DIM, "mask_dim": DIM, "backbone_config": _swin(STAGES)}
    return _build("OneFormer", "ForUniversalSegmentation", **MASKS, **text, **more)


def _layout(version: int) -> nn.Module:
    stages = STAGES if version == 3 else STAGES[1:]
    more = {
        2: {"class_thresholds": [0.5] * 25, "class_order": list(range(25)), "reading_order_config": READING},
        3: {"mask_feature_channels": [8, 8], "x4_feat_dim": 8},
    }
    return _build(f"PPDocLayoutV{version}", **HYBRID, backbone_config=_hgnet(stages), **more.get(version, {}))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "d_fine": lambda: _build("DFine", **HYBRID, backbone_config=_hgnet(STAGES[1:]), decoder_n_points=[3, 6, 3]),
    "deformable_detr": lambda: _build(
        "DeformableDetr",
        **{**DETR, "use_timm_backbone": False, "backbone": None, "two_stage_num_proposals": QUERIES},
        backbone_config=_resnet(),
    ),
    "deimv2": lambda: _build("Deimv2", **HYBRID, backbone_config=_hgnet(STAGES[1:]), decoder_n_points=[3, 6, 3]),
    "grounding_dino": lambda: _grounding("GroundingDino"),
    "lw_detr": lambda: _build(
        "LwDetr",
        **GROUPED,
        backbone_config=_make(
            "LwDetrViTConfig",
            **TRUNK,
            pretrain_image_size=SIZE,
            window_block_indices=[0],
            num_windows=4,
            out_indices=[1, 2],
        ),
    ),
    "mask2former": lambda: _build(
        "Mask2Former",
        "ForUniversalSegmentation",
        **MASKS,
        **{"backbone_config": _swin(STAGES), "feature_size": DIM, "mask_feature_size": DIM},
    ),
    "mm_grounding_dino": lambda: _grounding("MMGroundingDino"),
    "omdet_turbo": _omdet,
    "oneformer": _oneformer,
    "pp_doclayout_v2": lambda: _layout(2),
    "pp_doclayout_v3": lambda: _layout(3),
    "pp_doclayout_v4": lambda: _layout(4),
    "rf_detr": lambda: _build(
        "RfDetr",
        **GROUPED,
        backbone_config=_make("RfDetrDinov2Config", **TRUNK, num_windows=2, out_features=STAGES[:2]),
    ),
    "rt_detr": lambda: _build("RTDetr", **HYBRID, backbone_config=_resnet("RTDetrResNetConfig")),
    "rt_detr_v2": lambda: _build("RTDetrV2", **HYBRID, backbone_config=_resnet("RTDetrResNetConfig")),
}


def tiny_model(family: str) -> nn.Module:
    """A model in evaluation mode whose weights are all random: fresh ones have offsets that do not see the query."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def inputs(family: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.rand(2, 3, SIZE, SIZE, generator=generator)
    words = torch.tensor([[1, 5, 6, 7, 8, 2, 49]] * 2)
    text = {"grounding_dino": "input_ids", "mm_grounding_dino": "input_ids", "oneformer": "task_inputs"}
    more = {text[family]: words} if family in text else {}
    if family == "omdet_turbo":
        tasks = {"tasks_input_ids": words, "tasks_attention_mask": torch.ones_like(words)}
        classes = words.repeat(2, 1)
        more = {"classes_input_ids": classes, "classes_attention_mask": torch.ones_like(classes), **tasks}
        more["classes_structure"] = torch.tensor([2, 2])
    return {"pixel_values": pixels, **more}
