"""Deformable aggregation (Sparse4D): key points of every anchor gather features from several cameras and scales.

Letters: B batch, A anchors, P key points per anchor, N cameras, L levels, G groups of channels, C channels,
S cells of all cameras and levels: camera after camera, within it level after level, rows before columns.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.ops.backend import (
    Backend,
    SpatialShapes,
    as_autocast,
    check_name,
    check_readable,
    check_tensors,
    is_pair,
    operator_levels,
    resolve_backend,
    run,
    without_autocast,
)
from rtdetr.ops.reference import check_sizes, compute_dtype

CameraShapes = Tensor | Sequence[Sequence[tuple[int, int]]]
MAX_LEVELS, MAX_GROUPS = 128, 256  # kEntries and kMoves of csrc/cuda/deformable_aggregation.cu


def deformable_aggregation(
    features: Tensor,
    spatial_shapes: CameraShapes,
    level_start_index: Tensor | None,
    sampling_locations: Tensor,
    weights: Tensor,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Return (B, A, C), of the type of `features`: the weighted sum of the samples at all points of an anchor.

    features:           (B, S, C) float32, float64, float16 or bfloat16
    spatial_shapes:     for every camera its L pairs (height, width), or a tensor (N, L, 2)
    level_start_index:  (N, L) first cell of each map, or None; the maps follow one another in any case
    sampling_locations: (B, A, P, N, 2) x before y, normalised: 0 and 1 are the outer edges of an image
    weights:            (B, A, P, N, L, G); group g weighs the g-th of G equal runs of channels
    backend:            auto, cuda, cpu or torch, as in `ms_deform_attn`

    A point with x or y <= 0 or >= 1 is ignored in that camera. Locations, weights and sums are float32 (float64 for
    float64 features). Raises ValueError if sizes do not match, RuntimeError if a named backend cannot run. On
    CUDA more than 32 maps need a tensor of `spatial_shapes` on the device.
    """
    check_tensors(features=features, sampling_locations=sampling_locations, weights=weights)
    check_readable("spatial_shapes", spatial_shapes, features.is_meta)
    if level_start_index is not None:
        check_tensors(level_start_index=level_start_index)
        level_start_index = level_start_index.flatten()
    features = as_autocast(features)
    _check(features, spatial_shapes, sampling_locations, weights)
    dtype = compute_dtype(features)
    locations, weights = sampling_locations.to(dtype), weights.to(dtype)
    cameras, levels, groups = weights.shape[3:]
    host_levels = 0 if isinstance(spatial_shapes, Tensor) else cameras * levels
    chosen = resolve_backend(backend, features, host_levels, "deformable_aggregation")
    has_kernel = levels <= MAX_LEVELS and groups <= MAX_GROUPS and not torch.are_deterministic_algorithms_enabled()
    if chosen == "cuda" and has_kernel:
        maps = operator_levels(_maps(spatial_shapes), level_start_index, features)
        return run(torch.ops.rtdetr.deformable_aggregation, features, *maps, locations, weights)
    # A NaN is not outside, and makes its anchor NaN. `where`, not a product, so that infinite and NaN weights of points
    # outside are ignored, too.
    outside = ((locations <= 0) | (locations >= 1)).any(-1)  # (B, A, P, N)
    weights = torch.where(outside[..., None, None], 0, weights)
    if chosen == "torch":
        if isinstance(spatial_shapes, Tensor) and spatial_shapes.is_meta:  # any sizes that fill features
            spatial_shapes = torch.ones(spatial_shapes.shape, dtype=torch.int64)
            spatial_shapes[-1, -1, -1] += features.shape[1] - cameras * levels
        with without_autocast(features):  # einsum would round weights and samples
            on_host = spatial_shapes.tolist() if isinstance(spatial_shapes, Tensor) else spatial_shapes
            return deformable_aggregation_reference(features, on_host, locations, weights)
    return _by_attention(features, spatial_shapes, level_start_index, locations, weights)


def _by_attention(
    features: Tensor, spatial_shapes: CameraShapes, starts: Tensor | None, locations: Tensor, weights: Tensor
) -> Tensor:
    """Computes by the attention kernels: groups are heads, anchors queries, maps levels. Locations are expanded for
    every group and level. Used on the CPU, and on CUDA for more levels or groups than its own kernel takes, or if the
    sums of the gradient must be deterministic."""
    groups, levels = weights.shape[5], weights.shape[4]
    value = features.unflatten(2, (groups, -1))  # (B, S, G, C / G)
    # (B, A, P, N, 2) -> (B, A, G, N * L, P, 2), and (B, A, P, N, L, G) -> (B, A, G, N * L, P)
    places = locations.transpose(2, 3)[:, :, None, :, None].expand(-1, -1, groups, -1, levels, -1, -1).flatten(3, 4)
    shares = weights.permute(0, 1, 5, 3, 4, 2).flatten(3, 4)
    maps = operator_levels(_maps(spatial_shapes), starts, features)
    return run(torch.ops.rtdetr.ms_deform_attn, value, *maps, places, shares)


def _maps(spatial_shapes: CameraShapes) -> SpatialShapes:
    """The sizes of all maps, one camera after another."""
    if isinstance(spatial_shapes, Tensor):
        return spatial_shapes.flatten(0, 1)
    return [pair for camera in spatial_shapes for pair in camera]


def deformable_aggregation_reference(
    features: Tensor, shapes: Sequence[Sequence[tuple[int, int]]], locations: Tensor, weights: Tensor
) -> Tensor:
    """As `deformable_aggregation`, by grid_sample for each map. Points outside must have weight 0 already."""
    dtype, groups = compute_dtype(features), weights.shape[5]
    check_sizes(pair for camera in shapes for pair in camera)
    sizes = [h * w for camera in shapes for h, w in camera]
    if sum(sizes) != features.shape[1]:
        raise ValueError(f"spatial_shapes: the maps hold {sum(sizes)} cells, but features has {features.shape[1]}")
    maps = iter(features.to(dtype).transpose(1, 2).split(sizes, 2))  # N * L times (B, C, h * w)
    # -1 and 2 are out of reach of any cell, so clamping changes no result; it only makes infinite locations finite.
    grid = 2 * locations.clamp(-1, 2) - 1
    if grid.is_cuda:  # on CUDA grid_sample treats NaN as outside
        weights = weights + (grid * 0).sum(-1)[..., None, None]
    output = features.new_zeros(*locations.shape[:2], groups, features.shape[2] // groups, dtype=dtype)
    for n, camera in enumerate(shapes):
        for level, (h, w) in enumerate(camera):
            samples = F.grid_sample(next(maps).unflatten(2, (h, w)), grid[:, :, :, n], align_corners=False)
            seen = samples.unflatten(1, (groups, -1))  # (B, G, C / G, A, P)
            output = output + torch.einsum("bgcap,bapg->bagc", seen, weights[:, :, :, n, level])
    return output.flatten(2).to(features.dtype)


class DeformableFeatureAggregation(nn.Module):
    """Sparse4D's block, with its weight names: features sampled at anchors' key points, weighted by anchor features.

    channels, groups, levels, cameras, points: C, G, L, N, P
    camera_embedding:  weights also depend on the camera's projection, and the number of cameras may vary between calls
    residual:          "add" the instance features to the output, or "cat" them after it
    attention_dropout: share of the (camera, point) pairs that are dropped in training; dropout: of the output
    """

    def __init__(
        self,
        channels: int = 256,
        groups: int = 8,
        levels: int = 4,
        cameras: int = 6,
        points: int = 13,
        *,
        camera_embedding: bool = True,
        residual: Literal["add", "cat"] = "add",
        attention_dropout: float = 0.0,
        dropout: float = 0.0,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        check_name(backend)
        sizes = {"channels": channels, "groups": groups, "levels": levels, "cameras": cameras, "points": points}
        for name, size in sizes.items():
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(f"{name}: expected a whole number from 1, got {size!r}")
        if channels % groups:
            raise ValueError(f"channels: expected a multiple of {groups=}, got {channels}")
        if not 0 <= attention_dropout < 1:
            raise ValueError(f"attention_dropout: expected a share from 0 to below 1, got {attention_dropout}")
        if residual not in ("add", "cat"):
            raise ValueError(f"residual: expected add or cat, got {residual!r}")
        self.groups, self.levels, self.points = groups, levels, points
        self.residual, self.attention_dropout, self.backend = residual, attention_dropout, backend
        self.camera_encoder = _camera_encoder(channels) if camera_embedding else None
        self.weights_fc = nn.Linear(channels, groups * levels * points * (1 if camera_embedding else cameras))
        self.output_proj = nn.Linear(channels, channels)
        self.proj_drop = nn.Dropout(dropout)
        for zero in (self.weights_fc.weight, self.weights_fc.bias, self.output_proj.bias):
            nn.init.zeros_(zero)
        nn.init.xavier_uniform_(self.output_proj.weight)

    def forward(
        self,
        instances: Tensor,
        anchor_embedding: Tensor,
        key_points: Tensor,
        features: Tensor,
        spatial_shapes: CameraShapes,
        level_start_index: Tensor | None,
        projection: Tensor,
        image_size: Tensor,
    ) -> Tensor:
        """Return (B, A, C), with residual "cat" (B, A, 2 * C).

        instances, anchor_embedding: (B, A, C)
        key_points: (B, A, P, 3) in the source frame of `projection`
        features, spatial_shapes, level_start_index: as in `deformable_aggregation`
        projection: (B, N, 4, 4) from that frame to pixels times depth; image_size: (B, N, 2) width, height in pixels
        """
        batch, cameras = len(instances), len(spatial_shapes)
        _check_shape("key_points", key_points, (batch, instances.shape[1], self.points, 3))
        _check_shape("projection", projection, (batch, cameras, 4, 4))
        _check_shape("image_size", image_size, (batch, cameras, 2))
        weights = self.weights(instances + anchor_embedding, projection)
        locations = project_points(key_points, projection, image_size)
        levels = (spatial_shapes, level_start_index)
        seen = deformable_aggregation(features, *levels, locations, weights, backend=self.backend)
        output = self.proj_drop(self.output_proj(seen))
        return output + instances if self.residual == "add" else torch.cat((output, instances), -1)

    def weights(self, query: Tensor, projection: Tensor) -> Tensor:
        """Return (B, A, P, N, L, G), for each group a softmax over the points in all cameras and levels."""
        if self.camera_encoder is not None:
            query = query[:, :, None] + self.camera_encoder(projection[:, :, :3].flatten(2).to(query))[:, None]
        logits = self.weights_fc(query).flatten(2).unflatten(2, (-1, self.levels, self.points, self.groups))
        shares = logits.flatten(2, 4).softmax(2).view_as(logits).permute(0, 1, 4, 2, 3, 5)
        if self.training and self.attention_dropout > 0:
            kept = torch.rand_like(shares[..., :1, :1]) >= self.attention_dropout
            shares = shares * kept / (1 - self.attention_dropout)
        return shares

    def extra_repr(self) -> str:
        return f"groups={self.groups}, levels={self.levels}, points={self.points}, backend={self.backend!r}"


def project_points(key_points: Tensor, projection: Tensor, image_size: Tensor) -> Tensor:
    """Return (B, A, P, N, 2) normalised locations in every image, x before y: at least float32, also under autocast.

    Depths below 1e-5, also behind the camera, are clamped to 1e-5, which moves nearly every such point far outside.
    """
    with torch.autocast(key_points.device.type, enabled=False):
        dtype = compute_dtype(key_points)
        points = F.pad(key_points.to(dtype), (0, 1), value=1.0)
        x, y, depth, _ = torch.einsum("bnij,bapj->ibapn", projection.to(dtype), points)
        return torch.stack((x, y), -1) / depth.clamp(min=1e-5)[..., None] / image_size[:, None, None].to(dtype)


def _camera_encoder(channels: int) -> nn.Sequential:
    first = (nn.Linear(12, channels), nn.ReLU(), nn.LayerNorm(channels))
    return nn.Sequential(*first, nn.Linear(channels, channels), nn.ReLU(), nn.LayerNorm(channels))


def _check(features: Tensor, spatial_shapes: CameraShapes, locations: Tensor, weights: Tensor) -> None:
    if features.dim() != 3 or not features.is_floating_point():
        got = f"{tuple(features.shape)} of {features.dtype}"
        raise ValueError(f"features: expected 3 dimensions (B, S, C) of floating-point numbers, got {got}")
    cameras, levels = _count_maps(spatial_shapes)
    if locations.dim() != 5 or locations.shape[::3] != (features.shape[0], cameras) or locations.shape[4] != 2:
        wanted = f"(B, A, P, N, 2) with B={features.shape[0]}, N={cameras}"
        raise ValueError(f"sampling_locations: expected {wanted}, got {tuple(locations.shape)}")
    if weights.dim() != 6 or weights.shape[:5] != (*locations.shape[:4], levels) or weights.shape[5] == 0:
        wanted = f"(B, A, P, N, L, G) that starts with {(*locations.shape[:4], levels)}"
        raise ValueError(f"weights: expected {wanted}, got {tuple(weights.shape)}")
    if features.shape[2] % weights.shape[5]:
        raise ValueError(f"features: expected channels in {weights.shape[5]} equal groups, got {features.shape[2]}")


def _count_maps(spatial_shapes: CameraShapes) -> tuple[int, int]:
    """Returns the number of cameras and the number of levels of each."""
    if isinstance(spatial_shapes, Tensor):
        if spatial_shapes.dim() == 3 and spatial_shapes.shape[2] == 2 and not spatial_shapes.is_floating_point():
            return spatial_shapes.shape[0], spatial_shapes.shape[1]
        shape, kind = tuple(spatial_shapes.shape), spatial_shapes.dtype
        raise ValueError(f"spatial_shapes: expected integers (N, L, 2), got {shape} of {kind}")
    cameras = spatial_shapes if isinstance(spatial_shapes, Collection) else ()
    lengths = {len(each) if isinstance(each, Collection) and all(map(is_pair, each)) else 0 for each in cameras}
    if len(lengths) != 1 or 0 in lengths:
        wanted = "equally many pairs of whole numbers (height, width) per camera"
        raise ValueError(f"spatial_shapes: expected {wanted}, got {spatial_shapes}")
    return len(spatial_shapes), lengths.pop()


def _check_shape(name: str, tensor: Tensor, expected: tuple[int, ...]) -> None:
    if tensor.shape != expected:
        raise ValueError(f"{name}: expected {expected}, got {tuple(tensor.shape)}")
