"""What ms_deform_attn refuses with a ValueError of one sentence: arrays, meta tensors, sizes that the kernels check."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from messages import message
from ops_cases import Target, make_inputs

from rtdetr.ops import compat, ms_deform_attn, ms_deform_attn_fused

SHAPES = ((9, 7), (5, 4), (1, 3))


NUMPY = "expected a tensor, got ndarray"
META = "expected on .*, got meta"
NO_TENSORS = [
    (lambda x, s: (x.value.cpu().numpy(), SHAPES, None, x.locations, x.weights), f"value: {NUMPY}"),
    (lambda x, s: (x.value, SHAPES, None, x.locations.cpu().numpy(), x.weights), f"sampling_locations: {NUMPY}"),
    (lambda x, s: (x.value, SHAPES, None, x.locations, x.weights.cpu().numpy()), f"attention_weights: {NUMPY}"),
    (lambda x, s: (x.value, s, np.array([0, 63, 83]), x.locations, x.weights), f"level_start_index: {NUMPY}"),
    (lambda x, s: (x.value, SHAPES, None, x.locations.to("meta"), x.weights), f"sampling_locations: {META}"),
    (lambda x, s: (x.value, SHAPES, None, x.locations, x.weights.to("meta")), f"attention_weights: {META}"),
    (lambda x, s: (x.value, s.to("meta"), None, x.locations, x.weights), "spatial_shapes: .* one on the meta device"),
    (lambda x, s: (x.value, s, torch.empty(3, device="meta"), x.locations, x.weights), "level_start_index: .* meta"),
    (lambda x, s: (x.value, SHAPES, None, x.locations + 0j, x.weights), "sampling_locations: .* got .*complex64"),
    (lambda x, s: (x.value.to_sparse(), SHAPES, None, x.locations, x.weights), "value: .* got .*sparse"),
    (lambda x, s: (x.value, s + 0j, None, x.locations, x.weights), "spatial_shapes: .* got .*complex64"),
    (lambda x, s: (x.value, s.to_sparse(), None, x.locations, x.weights), "spatial_shapes: .* got .*sparse"),
    (lambda x, s: (x.value, None, None, x.locations, x.weights), r"spatial_shapes: expected pairs .* got None"),
    (lambda x, s: (x.value, (9, 7), None, x.locations, x.weights), r"spatial_shapes: expected pairs .* got \(9, 7\)"),
]


@pytest.mark.parametrize(("arguments", "message"), NO_TENSORS)
def test_arrays_and_meta_tensors_are_named(target: Target, arguments: Any, message: str) -> None:
    if target[0] == "torch" and "level_start_index" in message:
        pytest.skip("this backend does not look at it")
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3).to(target[1])
    with pytest.raises(ValueError, match=message):
        ms_deform_attn(*arguments(x, torch.tensor(SHAPES, device=target[1])), backend=target[0])  # type: ignore[arg-type]


def test_arrays_and_meta_tensors_of_the_fused_call_are_named(target: Target) -> None:
    x = make_inputs(SHAPES, 3, 4, 2, 8, 3).to(target[1])
    names = ("value", "reference", "offsets", "logits")
    sizes = ((3, 4, 3, 4), x.locations.shape, x.weights.shape)
    tensors = [x.value, *(torch.rand(size, device=target[1]) for size in sizes)]
    for i, name in enumerate(names):
        meta = "expected on" if i else "reference: expected on meta"  # value is what the others go by
        for non_finite, sentence in ((tensors[i].cpu().numpy(), f"{name}: {NUMPY}"), (tensors[i].to("meta"), meta)):
            value, *points = [non_finite if i == k else each for k, each in enumerate(tensors)]
            with pytest.raises(ValueError, match=sentence):
                ms_deform_attn_fused(value, SHAPES, *points, backend=target[0])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shapes", "starts", "sentence"),
    [
        (((9, 7), (5, 4), (1, 4)), None, message("cells differ", "spatial_shapes", "87", "86")),
        (((9, 7), (5, 4)), None, message("expected", "sampling_locations")),
        (((-9, -7), (5, 4), (1, 3)), None, message("expected", "spatial_shapes", "positive", "(-9, -7)", "level 0")),
        (((np.float32(9), 7), (5, 4), (1, 3)), None, message("expected", "spatial_shapes", "whole numbers")),
        (((None, 7), (5, 4), (1, 3)), None, message("expected", "spatial_shapes", "whole numbers", "None")),
        (((9.5, 7), (5, 4), (1, 3)), None, message("expected", "spatial_shapes", "whole numbers", "9.5")),
        (SHAPES, (0, 1, 2), message("expected", "level_start_index", "level 1", "cell 63")),
        (SHAPES, (0, 63), message("expected", "level_start_index", "shape (3)", "(2)")),
    ],
)
def test_what_the_compiled_op_refuses_is_one_sentence(shapes: Any, starts: Any, sentence: re.Pattern[str]) -> None:
    """Without the place in the source, and with it the folder of the build, that such errors bring along."""
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3)
    sizes = torch.tensor(shapes) if starts else shapes
    with pytest.raises(ValueError) as refused:
        ms_deform_attn(x.value, sizes, torch.tensor(starts) if starts else None, x.locations, x.weights)
    said = str(refused.value)
    assert sentence.search(said) and said.startswith(("spatial_shapes", "sampling_locations", "level_start_index")), (
        said
    )


def test_sizes_of_points_of_the_fused_call_are_named(target: Target) -> None:
    """Offsets from points are divided by the sizes."""
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3).to(target[1])
    points = torch.rand(1, 4, 1, 2, device=target[1])
    for empty in ((0, 7), (9, -7)):
        shapes = (empty, *SHAPES[1:])
        with pytest.raises(ValueError, match=rf"positive sizes, got \({empty[0]}, {empty[1]}\) at level 0"):
            ms_deform_attn_fused(x.value, shapes, points, x.locations, x.weights, backend=target[0])  # type: ignore[arg-type]


def test_the_backward_call_of_old_extensions_refuses_them_as_well() -> None:
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3)
    shapes, starts, grad = torch.tensor(SHAPES), torch.tensor((0, 63, 83)), torch.rand(1, 4, 16)
    good = [x.value, shapes, starts, x.locations, x.weights, grad]
    for place, non_finite, sentence in (
        (0, x.value.numpy(), f"value: {NUMPY}"),
        (4, x.weights.to("meta"), f"attention_weights: {META}"),
        (5, grad.numpy(), f"grad_output: {NUMPY}"),
        (5, grad[:, 1:], r"^grad_output: expected shape \(1, 4, 16\), got \(1, 3, 16\)$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            compat.ms_deform_attn_backward(*good[:place], non_finite, *good[place + 1 :])
