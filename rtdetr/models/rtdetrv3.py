"""RT-DETRv3 on one page.

Images (B, 3, H, W), RGB in [0, 1], any height and width; boxes are cxcywh, normalised by the image's size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rtdetr.config import STRIDES, ModelConfig
from rtdetr.models.backbone import ResNetVd, build_backbone
from rtdetr.models.decoder import Decoder, build_decoder
from rtdetr.models.denoising import Draws
from rtdetr.models.dense_head import DenseHead
from rtdetr.models.deployed import DeployedModel, DeployOptions, deploy
from rtdetr.models.encoder import HybridEncoder, build_encoder
from rtdetr.models.query_groups import QueryGroups
from rtdetr.types import Predictions, Targets, TrainingOutputs


class Network(nn.Module):
    """Detector. Eval mode returns Predictions and uses only backbone, encoder and decoder; train mode returns
    TrainingOutputs and also uses `query_groups` and `dense_head`."""

    def __init__(
        self,
        backbone: ResNetVd,
        encoder: HybridEncoder,
        decoder: Decoder,
        query_groups: QueryGroups,
        dense_head: DenseHead | None,
    ) -> None:
        super().__init__()
        self.backbone, self.encoder, self.decoder = backbone, encoder, decoder
        self.query_groups, self.dense_head = query_groups, dense_head

    def forward(
        self, images: Tensor, targets: Targets | None = None, draws: Draws | None = None
    ) -> Predictions | TrainingOutputs:
        """images: (B, 3, H, W); targets: ground truth, needed in train mode; draws: replayed random numbers (tests)."""
        maps = self.encoder(self.backbone(images))
        memory = self.decoder.remember(maps)
        if self.training:
            if targets is None:
                raise ValueError("targets: train mode needs the ground truth, got None; use eval mode to detect")
            queries = self.query_groups(memory, self.decoder.selector, targets, draws or Draws())
            decoded = self.decoder(queries.content, queries.box_logits, memory, queries.groups)
            one_to_one, one_to_many, denoising = self.query_groups.split(decoded, queries)
            dense = self.dense_head(maps) if self.dense_head is not None else None
            return TrainingOutputs(one_to_one, one_to_many, denoising, dense)
        selected = self.decoder.selector(memory)
        decoded = self.decoder(selected.content, selected.box_logits, memory)
        return Predictions(decoded.logits[-1], decoded.boxes[-1])

    def deploy(self, options: DeployOptions | None = None) -> DeployedModel:
        """Builds an inference-only model with fewer layers and kernels."""
        return deploy(self.backbone, self.encoder, self.decoder, options or DeployOptions())


def build_model(cfg: ModelConfig, num_classes: int) -> Network:
    """Builds the model of a config, with newly initialised weights, in float32 whatever torch's default type is."""
    backbone = build_backbone(cfg.backbone)
    encoder = build_encoder(cfg.encoder, backbone.out_channels, cfg.official_rectangles)
    decoder = build_decoder(cfg.decoder, cfg.encoder.hidden_dim, num_classes, cfg.official_rectangles)
    groups = QueryGroups(cfg.supervision, cfg.decoder.hidden_dim, num_classes, cfg.decoder.num_queries)
    dense_head = DenseHead(cfg.encoder.hidden_dim, num_classes, STRIDES) if cfg.supervision.dense_head else None
    network = Network(backbone, encoder, decoder, groups, dense_head)
    return network if torch.get_default_dtype() == torch.float32 else network.float()
