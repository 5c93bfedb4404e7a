"""Parts of a deployed model for one image size, from operators that small runtimes support: no grid sampling, no top-k,
no gather along several axes, no tensor of more than four axes, no infinite values.

Letters: B images, S cells of all levels, Q queries, C classes, H heads, D channels of a head, L levels, P points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.config import STRIDES
from rtdetr.models.decoder import Memory, QuerySelector, Shapes
from rtdetr.models.deformable_attention import MSDeformAttn
from rtdetr.models.layers import Linear, in_weight_type
from rtdetr.types import Detections, Predictions

Sampling = Literal["gather", "products"]


@dataclass(frozen=True, kw_only=True)
class Portable:
    """The image size, and how rows are looked up: by index (`gather`, faster on CPUs), or as products with matrices of
    bilinear weights (`products`, for runtimes without gather)."""

    height: int
    width: int
    sampling: Sampling = "gather"

    @property
    def shapes(self) -> Shapes:
        return tuple((self.height // stride, self.width // stride) for stride in STRIDES)


class Constant(nn.Module):
    """Precomputed results that stand in for a function; arguments are ignored."""

    def __init__(self, *answers: Tensor) -> None:
        super().__init__()
        for i, answer in enumerate(answers):
            self.register_buffer(f"answer{i}", answer, persistent=False)

    def forward(self, *arguments: object) -> Tensor | tuple[Tensor, ...]:
        answers = tuple(self.buffers())
        return answers if len(answers) > 1 else answers[0]


class PortableAttention(nn.Module):
    """An MSDeformAttn that samples by looking up rows of the memory, or by products with bilinear weight matrices."""

    def __init__(self, attention: MSDeformAttn, sampling: Sampling) -> None:
        super().__init__()
        self.num_heads, self.num_points, self.sampling = attention.num_heads, attention.num_points, sampling
        self.value_proj, self.output_proj = attention.value_proj, attention.output_proj
        self.attention_weights = attention.attention_weights
        self.offsets_x, self.offsets_y = (every_second(attention.sampling_offsets, axis) for axis in (0, 1))

    def forward(self, query: Tensor, reference: Tensor, memory: Tensor, spatial_shapes: Shapes) -> Tensor:
        """As MSDeformAttn."""
        value = self.by_head(self.value_proj(memory))  # (B * H, S, D)
        weights = self.by_head(self.attention_weights(query)).softmax(dim=-1)  # (B * H, Q, L * P)
        cx, cy, width, height = reference.split(1, dim=-1)  # (B, Q, 1)
        x = self.by_head(cx + self.offsets_x(query) * (width * (0.5 / self.num_points)))  # (B * H, Q, L * P)
        y = self.by_head(cy + self.offsets_y(query) * (height * (0.5 / self.num_points)))
        sample = sample_by_products if self.sampling == "products" else sample_by_gather
        sampled = sample(value, spatial_shapes, x, y, weights)  # (B * H, Q, D)
        return self.output_proj(sampled.unflatten(0, (-1, self.num_heads)).transpose(1, 2).flatten(2))

    def by_head(self, x: Tensor) -> Tensor:
        """Rearranges (B, N, H * n) to (B * H, N, n)."""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2).flatten(0, 1)


def every_second(linear: nn.Linear, first: int) -> Linear:
    """Linear layer of every second output row, from `first` on."""
    half = Linear(linear.in_features, linear.out_features // 2)
    half.weight, half.bias = (
        nn.Parameter(each.detach()[first::2].clone(), requires_grad=False) for each in (linear.weight, linear.bias)
    )
    return half


def sample_by_products(value: Tensor, shapes: Shapes, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """As `ms_deform_attn_reference`, (B * H, Q, D): bilinear weights are products of two triangle functions.

    value: (B * H, S, D); x, y: (B * H, Q, L * P) normalised; weights: (B * H, Q, L * P).
    """
    points = x.shape[-1] // len(shapes)
    sampled, start = [], 0
    for level, (height, width) in enumerate(shapes):
        here = slice(level * points, (level + 1) * points)
        columns = triangle(x[..., here].unsqueeze(-1) * width - 0.5 - numbers(width, x))  # (B * H, Q, P, width)
        rows = triangle(y[..., here].unsqueeze(-2) * height - 0.5 - numbers(height, x)[:, None])  # (..., height, P)
        cells = rows @ (columns * weights[..., here].unsqueeze(-1))  # (B * H, Q, height, width)
        sampled.append(cells.flatten(2) @ value[:, start : start + height * width])
        start += height * width
    return torch.stack(sampled).sum(dim=0)


def sample_by_gather(value: Tensor, shapes: Shapes, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
    """As `sample_by_products`, by gathering four rows of the value for each location."""
    points = x.shape[-1] // len(shapes)
    places, shares, start = [], [], 0
    for level, (height, width) in enumerate(shapes):
        here = slice(level * points, (level + 1) * points)
        column, row = x[..., here] * width - 0.5, y[..., here] * height - 0.5
        left, upper = column.floor(), row.floor()
        for cell_x, cell_y in ((left, upper), (left + 1, upper), (left, upper + 1), (left + 1, upper + 1)):
            # Float bounds: with integer bounds torch's ONNX optimiser writes nodes in an invalid order.
            inside_x, inside_y = cell_x.clamp(0.0, width - 1.0), cell_y.clamp(0.0, height - 1.0)
            inside = (inside_x == cell_x).to(x.dtype) * (inside_y == cell_y).to(x.dtype)
            share = triangle(column - cell_x) * triangle(row - cell_y) * inside
            shares.append(share * weights[..., here])
            places.append(inside_y * width + inside_x + start)
        start += height * width
    rows = take_rows(value, torch.cat(places, dim=2).flatten(1))  # (B * H, Q * 4 * L * P, D)
    share = torch.cat(shares, dim=2)  # (B * H, Q, 4 * L * P)
    together = share.flatten(0, 1).unsqueeze(1) @ rows.reshape(-1, share.shape[2], value.shape[2])  # (B * H * Q, 1, D)
    return together.reshape(*share.shape[:2], -1)


def triangle(distance: Tensor) -> Tensor:
    """Triangle function: 1 at a distance of 0, falling linearly to 0 at 1 and beyond."""
    return F.relu(1 - distance.abs())


def take_rows(x: Tensor, places: Tensor) -> Tensor:
    """Rows (B, n, D) of x (B, N, D) at places (B, n), integers stored as floats, by a gather along one axis."""
    places = places + numbers(x.shape[0], x)[:, None] * x.shape[1]
    return x.flatten(0, 1).index_select(0, places.flatten().to(torch.int64)).unflatten(0, places.shape)


def numbers(count: int, like: Tensor) -> Tensor:
    """0, 1, ... (count) in the type of `like`."""
    return torch.arange(count, dtype=like.dtype, device=like.device)


class PortableSelector(nn.Module):
    """A DeployedSelector that returns queries in the order of their cells."""

    def __init__(self, selector: QuerySelector, box_head: nn.Module, sampling: Sampling) -> None:
        super().__init__()
        self.num_queries, self.sampling = selector.num_queries, sampling
        self.proj, self.norm, self.score_head = selector.proj, selector.norm, selector.score_head
        self.box_head = box_head

    def forward(self, memory: Memory) -> tuple[Tensor, Tensor]:
        features = self.norm(self.proj(memory.tokens * memory.valid))
        cells = best_places(self.score_head(features).amax(dim=-1), self.num_queries)
        anchors = memory.anchors.expand(features.shape[0], -1, -1)
        content = look_up(features, cells, self.sampling)
        return content, in_weight_type(self.box_head, content) + look_up(anchors, cells, self.sampling)


def portable_postprocess(
    predictions: Predictions, sizes: Tensor, max_detections: int, sampling: Sampling
) -> Detections:
    """As `postprocess`."""
    num_queries, num_classes = predictions.logits.shape[1:]
    logits = predictions.logits.flatten(1)  # (B, Q * C)
    places = best_places(logits, min(max_detections, num_queries * num_classes))
    best = look_up(logits.unsqueeze(-1), places, sampling).squeeze(-1)
    order = descending(best)
    best, places = ((order @ each.unsqueeze(-1)).squeeze(-1) for each in (best, places))
    query = ((places + 0.5) * (1 / num_classes)).floor()
    boxes = look_up(cxcywh_to_xyxy(predictions.boxes), query, sampling)
    height, width = sizes.to(boxes).split(1, dim=1)
    scale = torch.cat((width, height, width, height), dim=1)  # (B, 4)
    return Detections(best.sigmoid(), (places - query * num_classes).to(torch.int64), boxes * scale[:, None])


ROUNDS, PARTS = 6, 32  # the k-th largest value is enclosed to 2^-30 of the range, which is finer than float32


def best_places(values: Tensor, k: int) -> Tensor:
    """Indices (B, k), as floats in ascending order, of the k largest values of each row of (B, N), the first of equals.

    Searches by counting: the k-th largest value is above `low` and at most `high`.
    """
    low, high = values.amin(dim=1, keepdim=True) - 1, values.amax(dim=1, keepdim=True)
    between = numbers(PARTS, values)[1:] / PARTS
    for _ in range(ROUNDS):
        limits = low + (high - low) * between  # (B, PARTS - 1)
        above = (values.unsqueeze(1) > limits.unsqueeze(2)).to(values.dtype).sum(dim=2)
        many = (above >= k).to(values.dtype)
        low = torch.maximum(low, (limits * many + low * (1 - many)).amax(dim=1, keepdim=True))
        high = torch.minimum(high, (limits * (1 - many) + high * many).amin(dim=1, keepdim=True))
    sure = (values > high).to(values.dtype)
    equal = (values > low).to(values.dtype) - sure
    room = k - sure.sum(dim=1, keepdim=True)
    count = running_sum(sure + equal * (running_sum(equal) <= room).to(values.dtype))
    return (count.unsqueeze(1) <= numbers(k, values)[:, None]).to(values.dtype).sum(dim=2)


def running_sum(x: Tensor) -> Tensor:
    """Cumulative sums of the rows of (B, N), by products with triangles of ones."""
    columns = next(each for each in range(math.ceil(math.sqrt(x.shape[1])), x.shape[1] + 1) if x.shape[1] % each == 0)
    table = x.unflatten(1, (-1, columns))  # (B, rows, columns)
    own, others = numbers(columns, x), numbers(table.shape[1], x)
    within = table @ (own[:, None] <= own).to(x.dtype)
    before = (others[:, None] > others).to(x.dtype) @ within[..., -1:]
    return (within + before).flatten(1)


def descending(values: Tensor) -> Tensor:
    """Permutation matrices (B, k, k) that sort values (B, k), largest first; the sort is stable."""
    own, other = values.unsqueeze(2), values.unsqueeze(1)
    places = numbers(values.shape[1], values)
    earlier = (places[:, None] > places).to(values.dtype)
    before = (other > own).to(values.dtype) + (other == own).to(values.dtype) * earlier
    return one_hot(before.sum(dim=2), values.shape[1]).transpose(1, 2)


def one_hot(places: Tensor, count: int) -> Tensor:
    """(B, n, count), 1 at the places (B, n), which are integers stored as floats."""
    return (places.unsqueeze(2) == numbers(count, places)).to(places.dtype)


def look_up(x: Tensor, places: Tensor, sampling: Sampling) -> Tensor:
    """Rows (B, n, D) of x (B, N, D) at places (B, n)."""
    return one_hot(places, x.shape[1]) @ x if sampling == "products" else take_rows(x, places)
