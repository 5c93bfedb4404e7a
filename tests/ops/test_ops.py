"""ms_deform_attn on every backend: against a naive loop, the golden data, numerical derivatives and itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from golden_files import golden_file, shared_golden
from golden_formulas import unit
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_cases import (
    BACKENDS,
    LOW,
    NAMES,
    PYRAMID,
    TOLERANCE,
    Inputs,
    Shapes,
    Target,
    make_inputs,
    misaligned,
    naive,
    off_borders,
    relative,
    require,
)
from torch import Tensor

from rtdetr.ops import MSDeformAttnFunction, ms_deform_attn, ms_deform_attn_fused
from rtdetr.ops.reference import locations_from_offsets, ms_deform_attn_reference, softmax_weights

SHAPES: Shapes = ((9, 7), (5, 4), (1, 3))


def run(x: Inputs, target: Target) -> tuple[Tensor, ...]:
    """Output and the three gradients, on the target's device."""
    x = x.to(target[1])
    leaves = x.leaves()
    output = ms_deform_attn(leaves[0], x.shapes, None, leaves[1], leaves[2], backend=target[0])
    return (output, *torch.autograd.grad(output, leaves, x.grad))


def reference64(x: Inputs) -> tuple[Tensor, ...]:
    x = x.double()
    leaves = x.leaves()
    output = ms_deform_attn_reference(leaves[0], x.shapes, leaves[1], leaves[2])
    return (output, *torch.autograd.grad(output, leaves, x.grad))


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert relative(a, e) <= tolerance, f"{name}: {relative(a, e):.2e} > {tolerance}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("shapes", "channels", "points"),
    [(SHAPES, 8, 2), (((6, 4), (3, 2)), 5, 3), (((1, 1),), 1, 1), (((7, 2),), 32, 4), (((2, 3),) * 5, 40, 1)],
)
def test_equals_naive_loop(target: Target, dtype: torch.dtype, shapes: Shapes, channels: int, points: int) -> None:
    x = make_inputs(shapes, 2, 5, 3, channels, points, dtype=dtype)
    assert_close(run(x, target), naive(x), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", LOW)
def test_16_bit_against_float64(target: Target, dtype: torch.dtype) -> None:
    x = make_inputs(PYRAMID, 1, 300, 8, 32, 4, dtype=dtype, spread=1.1)
    assert_close(run(x, target), reference64(x), TOLERANCE[dtype])


def test_locations_are_not_rounded_with_the_values(target: Target) -> None:
    """16-bit values beside float32 locations: rounding those to 16 bits would cost an error of 1e-2."""
    x = make_inputs(((200, 200),), 1, 50, 2, 8, 4, dtype=torch.float16)
    assert relative(run(x, target)[0], reference64(x)[0]) <= TOLERANCE[torch.float16]


@pytest.mark.parametrize("name", ["tiny", "edge"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden(target: Target, name: str, dtype: torch.dtype) -> None:
    golden = np.load(golden_file(f"op_deform_{name}.npz"))
    keys = ("value", "sampling_locations", "attention_weights", "grad_output")
    x = Inputs(*(torch.from_numpy(golden[k]).to(dtype) for k in keys), tuple(map(tuple, golden["shapes"].tolist())))
    actual, suffix = run(x, target), str(dtype).removeprefix("torch.")
    outputs = ("output", "grad_value", "grad_sampling_locations", "grad_attention_weights")
    expected = tuple(torch.from_numpy(golden[f"{k}_{suffix}"]) for k in outputs)
    assert_close(actual, expected, TOLERANCE[dtype])
    if dtype == torch.float32:
        assert (actual[0].cpu() - expected[0]).abs().max() <= 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_decoder(target: Target, dtype: torch.dtype) -> None:
    golden = np.load(golden_file("op_deform_dec320.npz"))

    def noise(tag: str, *shape: int) -> Tensor:
        return torch.from_numpy(unit(f"op-dec320:{tag}", shape))

    locations = 0.5 + 0.3 * noise("loc", 1, 300, 8, 3, 4, 2)
    weights = noise("attn", 1, 300, 8, 12).softmax(-1).unflatten(-1, (3, 4))
    made = (noise("value", 1, 2100, 8, 32), locations, weights, noise("gout", 1, 300, 256))
    # The golden inputs are float32 numbers, in the float64 run too.
    value, locations, weights, grad = (t.float().to(dtype) for t in made)
    x = Inputs(value, locations, weights, grad, ((40, 40), (20, 20), (10, 10)))
    suffix = str(dtype).removeprefix("torch.")
    names = ("output", "grad_value", "grad_sampling_locations", "grad_attention_weights")
    for name, actual in zip(names, run(x, target), strict=True):
        index = torch.from_numpy(golden[f"{name}_{suffix}.idx"]).long()
        expected = torch.from_numpy(golden[f"{name}_{suffix}.val"])
        assert relative(actual.flatten().cpu()[index], expected) <= TOLERANCE[dtype], name


def test_official_cuda_kernel(target: Target) -> None:
    folder = shared_golden("paddle_op")
    keys = ("value", "sampling_locations", "attention_weights", "output_cuda", "spatial_shapes", "level_start_index")
    value, locations, weights, expected, shapes, starts = (torch.from_numpy(np.load(folder / f"{k}.npy")) for k in keys)
    tensors = [t.to(target[1]) for t in (value, shapes, starts, locations, weights)]
    actual = ms_deform_attn(*tensors, backend=target[0]).cpu()
    assert (actual - expected.reshape(actual.shape)).abs().max() <= 1e-6


def test_forward_mode_is_right_or_refused(target: Target) -> None:
    """torch takes an operator without a formula for one whose result does not change."""
    x = make_inputs(((4, 3), (2, 2)), 2, 3, 2, 3, 2, dtype=torch.float64).to(target[1])
    value, locations, weights = x.leaves()

    def call(weights: Tensor) -> Tensor:
        return ms_deform_attn(value, x.shapes, None, locations, weights, backend=target[0])

    if target[0] != "torch":
        with pytest.raises(NotImplementedError, match="forward-mode"):
            torch.func.jvp(call, (weights,), (weights,))
        with pytest.raises(NotImplementedError, match="only differentiate"):
            torch.func.grad(lambda x: call(x).sum())(weights)
        return
    output, tangent = torch.func.jvp(call, (weights,), (weights,))
    torch.testing.assert_close(tangent, output)  # the op is linear in the weights


def test_gradcheck(target: Target) -> None:
    x = make_inputs(((4, 3), (2, 2)), 2, 3, 2, 3, 2, dtype=torch.float64).to(target[1])
    assert torch.autograd.gradcheck(
        lambda *t: ms_deform_attn(t[0], x.shapes, None, t[1], t[2], backend=target[0]), x.leaves()
    )


sizes = st.integers(1, 9)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    shapes=st.lists(st.tuples(sizes, sizes), min_size=1, max_size=5).map(tuple),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 70), st.integers(1, 6)),
    dtype=st.sampled_from(list(TOLERANCE)),
    spread=st.sampled_from([0.5, 1.0, 3.0, 1e6]),
    seed=st.integers(0, 1000),
)
@pytest.mark.parametrize("case", BACKENDS)
def test_any_shape(
    case: Target, shapes: Shapes, sizes: tuple[int, ...], dtype: torch.dtype, spread: float, seed: int
) -> None:
    require(*case)
    x = make_inputs(shapes, *sizes, dtype=dtype, spread=spread, seed=seed)
    actual, expected = run(x, case), reference64(x)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        # Rounding of a location moves a point by about 1e-6 of its map, so near-cancelling sums need an absolute floor.
        floor = 0.0 if dtype == torch.float64 else 1e-5 * e.numel() ** 0.5
        error = (a.detach().double().cpu() - e).norm()
        assert error <= 2 * TOLERANCE[dtype] * e.norm() + floor, f"{name}: {error:.2e} beside {e.norm():.2e}"


def test_non_contiguous_inputs(target: Target) -> None:
    x = make_inputs(SHAPES, 2, 6, 3, 8, 4)
    turned = Inputs(
        x.value.transpose(1, 3).contiguous().transpose(1, 3),
        x.locations.flip(0).contiguous().flip(0).transpose(1, 2).contiguous().transpose(1, 2),
        x.weights.transpose(0, 4).contiguous().transpose(0, 4),
        x.grad.t() if x.grad.dim() == 2 else x.grad.transpose(0, 2).contiguous().transpose(0, 2),
        x.shapes,
    )
    assert not turned.value.is_contiguous() and not turned.weights.is_contiguous()
    assert_close(run(turned, target), tuple(t.cpu() for t in run(x, target)), 1e-6)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("channels", [8, 40])
def test_contiguous_inputs_need_no_alignment(target: Target, dtype: torch.dtype, channels: int) -> None:
    x = make_inputs(SHAPES, 2, 6, 3, channels, 4, dtype=dtype).to(target[1])
    expected = tuple(t.detach().cpu() for t in run(x, target))
    tensors = (x.value, x.locations, x.weights, x.grad)
    for odd in range(4):
        moved = [misaligned(t) if i == odd else t for i, t in enumerate(tensors)]
        leaves = [t.detach().requires_grad_() for t in moved[:3]]
        output = ms_deform_attn(leaves[0], x.shapes, None, leaves[1], leaves[2], backend=target[0])
        assert_close((output, *torch.autograd.grad(output, leaves, moved[3])), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_fused_inputs_need_no_alignment(target: Target, dtype: torch.dtype) -> None:
    x = make_inputs(SHAPES, 2, 6, 3, 8, 4, dtype=dtype).to(target[1])
    reference, offsets, logits = (t.to(target[1]) for t in fused_points(x, 1, 4))
    tensors = (x.value, reference, offsets, logits, x.grad)

    def results(given: list[Tensor]) -> tuple[Tensor, ...]:
        leaves = [t.detach().requires_grad_() for t in given[:4]]
        output = ms_deform_attn_fused(leaves[0], x.shapes, *leaves[1:], backend=target[0])
        return (output.detach(), *torch.autograd.grad(output, leaves, given[4]))

    expected = results(list(tensors))
    for odd in range(5):
        actual = results([misaligned(t) if i == odd else t for i, t in enumerate(tensors)])
        assert all(relative(a, e) <= TOLERANCE[dtype] for a, e in zip(actual, expected, strict=True))


def test_numbers_that_straddle_their_own_size() -> None:
    """The memory of a file may begin at any byte."""
    require("cpu", "cpu")
    x = make_inputs(SHAPES, 2, 6, 3, 8, 4)
    expected = run(x, ("cpu", "cpu"))[0]
    odd = [
        torch.frombuffer(bytearray(b"_" + t.numpy().tobytes()), dtype=t.dtype, offset=1).view(t.shape)
        for t in (x.value, x.locations, x.weights)
    ]
    assert all(t.data_ptr() % 4 for t in odd)
    assert torch.equal(ms_deform_attn(odd[0], x.shapes, None, odd[1], odd[2], backend="cpu"), expected)


@pytest.mark.parametrize(("batch", "queries"), [(0, 4), (2, 0), (0, 0)])
def test_empty_batch_and_queries(target: Target, batch: int, queries: int) -> None:
    x = make_inputs(SHAPES, batch, queries, 3, 8, 2)
    output, grad_value, grad_locations, grad_weights = run(x, target)
    assert output.shape == (batch, queries, 24) and grad_locations.shape == x.locations.shape
    assert grad_value.shape == x.value.shape and not grad_value.any() and grad_weights.shape == x.weights.shape


@pytest.mark.parametrize("empty", [0, 1, 2, 3, 4], ids=["batch", "queries", "heads", "channels", "points"])
@pytest.mark.parametrize("coordinates", [2, 4])
def test_fused_sizes_of_zero(target: Target, empty: int, coordinates: int) -> None:
    sizes = [0 if i == empty else n for i, n in enumerate((2, 4, 3, 8, 2))]
    x = make_inputs(SHAPES, *sizes)
    points = fused_points(x, 1, coordinates)
    leaves = [t.to(target[1]).requires_grad_() for t in (x.value, *points)]
    output = ms_deform_attn_fused(leaves[0], x.shapes, *leaves[1:], backend=target[0])
    assert output.shape == (sizes[0], sizes[1], sizes[2] * sizes[3]) and not output.any()
    assert not any(g.any() for g in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("far", [float("inf"), -float("inf"), 1e30, -1e9, 3.0, -2.0])
def test_points_far_outside_sample_zeros(target: Target, far: float) -> None:
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3, spread=0.9)
    x.locations[0, 1, 1, 0, 2] = torch.tensor([far, 0.5])
    x.locations[0, 2, 0, 1, 1] = torch.tensor([0.5, far])
    without = Inputs(x.value, x.locations.clone(), x.weights.clone(), x.grad, x.shapes)
    for where in ((0, 1, 1, 0, 2), (0, 2, 0, 1, 1)):
        without.locations[where] = 0.5
        without.weights[where] = 0.0
    actual, expected = run(x, target), reference64(without)
    assert relative(actual[0], expected[0]) <= 1e-5 and relative(actual[1], expected[1]) <= 1e-5
    for where in ((0, 1, 1, 0, 2), (0, 2, 0, 1, 1)):
        assert not actual[2][where].any() and not actual[3][where].any()


def test_nan_location_makes_nan_and_harms_no_neighbour(target: Target) -> None:
    x = make_inputs(SHAPES, 2, 4, 2, 8, 3, spread=0.9)
    clean = run(x, target)[0].cpu()
    x.locations[1, 2, 1, 0, 1, 0] = float("nan")
    output, grad_value, *_ = run(x, target)
    broken = torch.zeros_like(clean, dtype=torch.bool)
    broken[1, 2, 8:] = True
    assert torch.equal(output.cpu().isnan(), broken)
    assert relative(output.cpu()[~broken], clean[~broken]) <= 1e-6
    assert grad_value[0].isfinite().all()


def test_nan_and_inf_values_stay_where_they_are_sampled(target: Target) -> None:
    x = make_inputs(((4, 4),), 1, 2, 1, 8, 1)
    x.locations[0, 0, 0, 0, 0] = torch.tensor([0.125, 0.125])  # the centre of the first cell
    x.locations[0, 1, 0, 0, 0] = torch.tensor([0.8, 0.8])
    x.value[0, 0, 0, 3] = float("nan")
    output = run(x, target)[0].detach().cpu()
    assert output[0, 0, 3].isnan() and output.isnan().sum() == 1


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_only_where_needed(target: Target, needed: tuple[int, ...]) -> None:
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3)
    everything = run(x, target)[1:]
    x = x.to(target[1])
    tensors = [t.clone().requires_grad_(i in needed) for i, t in enumerate((x.value, x.locations, x.weights))]
    output = ms_deform_attn(tensors[0], x.shapes, None, tensors[1], tensors[2], backend=target[0])
    output.backward(x.grad)
    for i, tensor in enumerate(tensors):
        assert (tensor.grad is not None) == (i in needed)
        if tensor.grad is not None:
            assert relative(tensor.grad, everything[i]) <= 1e-6


def test_all_ways_to_give_the_shapes_agree(target: Target) -> None:
    x = make_inputs(SHAPES, 2, 4, 2, 8, 3).to(target[1])
    expected = ms_deform_attn(x.value, x.shapes, None, x.locations, x.weights, backend=target[0])
    host = torch.tensor(x.shapes)
    starts = torch.tensor([0, 63, 83])
    for shapes in ([list(s) for s in x.shapes], host, host.to(target[1]), host.int()):
        for start in (None, starts, starts.to(target[1])):
            actual = ms_deform_attn(x.value, shapes, start, x.locations, x.weights, backend=target[0])
            assert relative(actual, expected) <= 1e-6
    known = MSDeformAttnFunction.apply(x.value, host, starts, x.locations, x.weights, 64)
    assert relative(known, expected) <= 1e-6


def fused_points(x: Inputs, levels: int, coordinates: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference, offsets and logits to go with the inputs, on the host; the points lie off the borders of cells."""
    batch, queries, heads, maps, points, _ = x.locations.shape
    generator = torch.Generator().manual_seed(1)
    size = (batch, queries, levels, coordinates)
    reference = torch.rand(size, dtype=torch.float64, generator=generator) * 0.6 + 0.2
    offsets = torch.rand(x.locations.shape, dtype=torch.float64, generator=generator) * 8 - 4
    logits = torch.rand(batch, queries, heads, maps, points, dtype=torch.float64, generator=generator) * 4 - 2
    compute = x.locations.dtype
    reference = reference.to(compute)
    at_zero = locations_from_offsets(reference.double(), torch.zeros_like(offsets), x.shapes, 0.5)
    step = locations_from_offsets(reference.double(), torch.ones_like(offsets), x.shapes, 0.5) - at_zero
    offsets = (off_borders(at_zero + offsets * step, x.shapes) - at_zero) / step
    return reference, offsets.to(x.value.dtype), logits.to(x.value.dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(("levels", "coordinates"), [(1, 4), (3, 4), (1, 2), (3, 2)])
def test_fused_equals_composition(target: Target, levels: int, coordinates: int, dtype: torch.dtype) -> None:
    x = make_inputs(SHAPES, 2, 5, 3, 8, 4, dtype=dtype).to(target[1])
    reference, offsets, logits = (t.to(target[1]) for t in fused_points(x, levels, coordinates))
    leaves = [t.requires_grad_() for t in (x.value.clone(), reference, offsets, logits)]
    actual = ms_deform_attn_fused(leaves[0], x.shapes, *leaves[1:3], leaves[3].flatten(3), backend=target[0])
    grads = torch.autograd.grad(actual, leaves, x.grad)

    wide = [t.detach().double().cpu().requires_grad_() for t in leaves]
    locations = locations_from_offsets(wide[1], wide[2], x.shapes, 0.5)
    expected = ms_deform_attn_reference(wide[0], x.shapes, locations, softmax_weights(wide[3], 3, 4))
    expected_grads = torch.autograd.grad(expected, wide, x.grad.double().cpu())
    names = ("output", "value", "reference", "offsets", "logits")
    for name, a, e in zip(names, (actual, *grads), (expected, *expected_grads), strict=True):
        assert relative(a, e) <= TOLERANCE[dtype], f"{name}: {relative(a, e):.2e}"


@pytest.mark.parametrize("coordinates", [2, 4])
def test_one_reference_for_the_whole_batch(target: Target, coordinates: int) -> None:
    x = make_inputs(SHAPES, 3, 5, 2, 8, 4).to(target[1])
    reference, offsets, logits = (t.to(target[1]) for t in fused_points(x, 1, coordinates))
    shared, repeated = reference[:1].clone().requires_grad_(), reference[:1].repeat(3, 1, 1, 1).requires_grad_()
    results = [
        ms_deform_attn_fused(x.value, x.shapes, given, offsets, logits, backend=target[0])
        for given in (shared, repeated)
    ]
    assert relative(results[0], results[1]) <= 1e-6
    grads = [torch.autograd.grad(r, g, x.grad)[0] for r, g in zip(results, (shared, repeated), strict=True)]
    assert grads[0].shape == shared.shape and relative(grads[0], grads[1].sum(0, keepdim=True)) <= 1e-5


def test_points_on_cell_borders_belong_to_the_next_cell(target: Target) -> None:
    """The pixel coordinate is rounded twice, on every processor: a pixel's centre begins a cell, with the slope to its
    right. Locations are rounded too, so some centres lie a little before their cell all the same."""
    if target[0] == "torch":
        pytest.skip("grid_sample has a formula of its own")
    for width in range(3, 150):
        centres = ((torch.arange(width).double() + 0.5) / width).float()
        value = torch.arange(width).float().square()
        locations = torch.stack([centres, torch.full_like(centres, 0.5)], -1).view(1, width, 1, 1, 1, 2).to(target[1])
        locations.requires_grad_()
        weights = torch.ones(1, width, 1, 1, 1, device=target[1])
        maps = value.view(1, width, 1, 1).to(target[1])
        output = ms_deform_attn(maps, ((1, width),), None, locations, weights, backend=target[0])
        slopes = torch.autograd.grad(output.sum(), locations)[0][..., 0].flatten().cpu() / width
        cell = (centres * width - 0.5).floor().long() + 1
        padded = torch.nn.functional.pad(value, (1, 1))
        torch.testing.assert_close(slopes, padded[cell + 1] - padded[cell], rtol=1e-5, atol=1e-3)


def test_location_formula_of_boxes_and_points() -> None:
    """One offset by hand: (0.5, 0.25) + (3, -2) / 4 * (0.4, 0.2) * 0.5, and + (3 / 8, -2 / 4) on a map of 4 x 8."""
    offsets = torch.tensor([3.0, -2.0]).expand(1, 1, 1, 1, 4, 2)
    box = torch.tensor([0.5, 0.25, 0.4, 0.2]).view(1, 1, 1, 4)
    boxed = locations_from_offsets(box, offsets, ((4, 8),), 0.5)[0, 0, 0, 0, 0]
    pointed = locations_from_offsets(box[..., :2], offsets, ((4, 8),), 0.5)[0, 0, 0, 0, 0]
    torch.testing.assert_close(boxed, torch.tensor([0.65, 0.2]))
    torch.testing.assert_close(pointed, torch.tensor([0.875, -0.25]))


def test_cpu_kernel_is_bitwise_the_same_with_any_number_of_threads() -> None:
    require("cpu", "cpu")
    x = make_inputs(((20, 20), (10, 10)), 2, 40, 4, 32, 4)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(run(x, ("cpu", "cpu")))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


BAD = [
    (lambda x: (x.value[0], x.shapes, None, x.locations, x.weights), "value: expected 4 dimensions"),
    (lambda x: (x.value, x.shapes[:2], None, x.locations, x.weights), "sampling_locations: expected .* L=2"),
    (lambda x: (x.value, x.shapes, None, x.locations[..., 0], x.weights), "sampling_locations"),
    (lambda x: (x.value, x.shapes, None, x.locations, x.weights[:, :2]), "attention_weights: expected"),
    (lambda x: (x.value, x.shapes, None, x.locations[..., :1], x.weights), "sampling_locations: expected"),
    (lambda x: (x.value.int(), x.shapes, None, x.locations, x.weights), "value: expected floating.*got torch.int32"),
    (lambda x: (x.value[:, 1:], x.shapes, None, x.locations, x.weights), "spatial_shapes: the levels hold 86 cells"),
]


HUGE = [
    (((2**32, 2**32),) * 3, "spatial_shapes: the levels hold"),  # 0 cells in 64 bits
    (((2**32, 2**32), (9, 7), (1, 23)), "spatial_shapes: the levels hold"),
    (((2**62, 2), (2**62, 2), (1, 86)), "spatial_shapes: the levels hold"),  # it is the sum that wraps round
    (((-9, -7), (5, 4), (1, 3)), r"spatial_shapes: expected positive sizes, got \(-9, -7\) at level 0"),
    (((9, 7), (5, 0), (1, 23)), r"spatial_shapes: expected positive sizes, got \(5, 0\) at level 1"),
    (((9, 7), (5, 4, 1), (1, 3)), r"spatial_shapes: expected "),
    ((), "spatial_shapes: expected"),
]


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("shapes", "message"), HUGE)
def test_sizes_that_no_map_has(target: Target, shapes: Shapes, message: str, as_tensor: bool) -> None:
    if as_tensor and (target == ("cuda", "cuda") or len({len(pair) for pair in shapes}) > 1):
        pytest.skip("sizes in device memory are not read: test_ops_cuda.py; no tensor has rows of two lengths")
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3).to(target[1])
    given = torch.tensor(shapes, dtype=torch.int64, device=target[1]) if as_tensor else shapes
    for starts in (None, torch.zeros(len(shapes), dtype=torch.int64, device=target[1])):
        with pytest.raises((ValueError, RuntimeError), match=message):
            ms_deform_attn(x.value, given, starts, x.locations, x.weights, backend=target[0])


BAD_FUSED = [
    (lambda r, o, lg: (r[0], o, lg), r"reference: expected \(B or 1, Q, 1 or L, 2 or 4\)"),
    (lambda r, o, lg: (r.repeat(2, 1, 1, 1), o, lg), r"reference: .* B=3, Q=4, L=3, got \(6, 4, 3, 4\)"),
    (lambda r, o, lg: (r[:, :1], o, lg), r"reference: .* got \(3, 1, 3, 4\)"),
    (lambda r, o, lg: (r[:, :, :2], o, lg), r"reference: .* got \(3, 4, 2, 4\)"),
    (lambda r, o, lg: (r[..., :3], o, lg), r"reference: .* got \(3, 4, 3, 3\)"),
    (lambda r, o, lg: (r, o[..., :2, :, :], lg), "offsets: expected .* L=3"),
    (lambda r, o, lg: (r, o, lg[..., :2]), "logits: expected"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_FUSED)
def test_wrong_sizes_of_the_fused_call_are_named(target: Target, arguments: object, message: str) -> None:
    x = make_inputs(SHAPES, 3, 4, 2, 8, 3)
    points = (t.to(target[1]) for t in arguments(*fused_points(x, 3, 4)))  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        ms_deform_attn_fused(x.value.to(target[1]), SHAPES, *points, backend=target[0])


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_sizes_are_named(target: Target, arguments: object, message: str) -> None:
    x = make_inputs(SHAPES, 1, 4, 2, 8, 3).to(target[1])
    with pytest.raises((ValueError, RuntimeError), match=message):
        ms_deform_attn(*arguments(x), backend=target[0])  # type: ignore[operator]
