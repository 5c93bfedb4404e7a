"""Multi-scale deformable attention as a module: four projections around rtdetr.ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rtdetr.models.layers import Linear
from rtdetr.ops import Backend, ms_deform_attn_fused


class MSDeformAttn(nn.Module):
    """Each query samples `num_points` locations per level and head, around its reference box.

    A location is `box centre + offset / num_points * box size / 2`; weights of a head are one softmax over all levels
    and points (official repo: ppdet/modeling/transformers/rtdetr_transformerv3.py and deformable_transformer.py).
    """

    def __init__(self, dim: int, num_heads: int, num_levels: int, num_points: int, backend: Backend = "auto") -> None:
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"dim: expected a multiple of num_heads={num_heads}, got {dim}")
        self.num_heads, self.num_levels, self.num_points = num_heads, num_levels, num_points
        self.backend: Backend = backend
        self.sampling_offsets = Linear(dim, num_heads * num_levels * num_points * 2)
        self.attention_weights = Linear(dim, num_heads * num_levels * num_points)
        self.value_proj = Linear(dim, dim)
        self.output_proj = Linear(dim, dim)
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        nn.init.zeros_(self.sampling_offsets.weight)
        angle = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
        direction = torch.stack((angle.cos(), angle.sin()), dim=-1)  # (heads, 2)
        direction = direction / direction.abs().amax(dim=-1, keepdim=True)  # onto the unit square
        reach = torch.arange(1, self.num_points + 1, dtype=torch.float32)
        grid = direction[:, None, None] * reach[:, None]  # (heads, 1, points, 2)
        with torch.no_grad():
            self.sampling_offsets.bias.copy_(grid.expand(-1, self.num_levels, -1, -1).flatten())
        nn.init.zeros_(self.attention_weights.weight)
        nn.init.zeros_(self.attention_weights.bias)
        for projection in (self.value_proj, self.output_proj):
            nn.init.xavier_uniform_(projection.weight)
            nn.init.zeros_(projection.bias)

    def forward(
        self, query: Tensor, reference: Tensor, memory: Tensor, spatial_shapes: tuple[tuple[int, int], ...]
    ) -> Tensor:
        """Attended features (B, Q, dim).

        query: (B, Q, dim); reference: (B, Q, 4) cxcywh normalised; memory: (B, S, dim), levels one after another;
        spatial_shapes: height and width of each level.
        """
        value = self.value_proj(memory).unflatten(2, (self.num_heads, -1))  # (B, S, heads, head_dim)
        split = (self.num_heads, self.num_levels, self.num_points)
        offsets = self.sampling_offsets(query).unflatten(2, (*split, 2))  # (B, Q, heads, levels, points, 2)
        logits = self.attention_weights(query).unflatten(2, split)  # (B, Q, heads, levels, points)
        sampled = ms_deform_attn_fused(
            value, spatial_shapes, reference.unsqueeze(2), offsets, logits, offset_scale=0.5, backend=self.backend
        )
        return self.output_proj(sampled)

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, levels={self.num_levels}, points={self.num_points}, backend={self.backend}"
