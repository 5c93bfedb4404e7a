"""deformable_aggregation on every backend against a naive loop, numerical derivatives and itself, and its module."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from messages import message
from ops_cases import BACKENDS, TOLERANCE, Target, relative, require
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rtdetr.ops import DeformableFeatureAggregation, compiled, deformable_aggregation
from rtdetr.ops import backend as backend_module
from rtdetr.ops.deformable_aggregation import project_points

CameraShapes = tuple[tuple[tuple[int, int], ...], ...]
# Two cameras alike and one of another size.
CAMERAS: CameraShapes = (((6, 9), (3, 5)), ((6, 9), (3, 5)), ((4, 4), (1, 2)))
NAMES = ("output", "grad_features", "grad_locations", "grad_weights")


@dataclass(frozen=True)
class Views:
    """features (B, S, C), locations (B, A, P, N, 2), weights (B, A, P, N, L, G), grad (B, A, C), and the maps."""

    features: Tensor
    locations: Tensor
    weights: Tensor
    grad: Tensor
    shapes: CameraShapes

    def to(self, *to: object) -> Views:
        return Views(*(t.to(*to) for t in (self.features, self.locations, self.weights, self.grad)), self.shapes)

    def leaves(self) -> list[Tensor]:
        return [t.detach().clone().requires_grad_() for t in (self.features, self.locations, self.weights)]


def make_views(
    shapes: CameraShapes = CAMERAS, batch: int = 2, anchors: int = 5, points: int = 3, groups: int = 2,
    channels: int = 8, dtype: torch.dtype = torch.float32, spread: float = 1.5, seed: int = 0,
) -> Views:  # fmt: skip
    """Random inputs; locations fill [0.5 - spread / 2, 0.5 + spread / 2], so part of them lies outside the images."""
    generator = torch.Generator().manual_seed(seed)
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    cells, sizes = sum(h * w for camera in shapes for h, w in camera), (batch, anchors, points, len(shapes))

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, dtype=torch.float64)

    features = random(batch, cells, channels).to(dtype)
    locations = (torch.rand(*sizes, 2, generator=generator, dtype=torch.float64) - 0.5) * spread + 0.5
    weights = random(*sizes, len(shapes[0]), groups).to(compute)
    return Views(features, locations.to(compute), weights, random(batch, anchors, channels).to(dtype), shapes)


def naive(x: Views) -> tuple[Tensor, ...]:
    """Output and gradients in float64: each point against each cell, with the tent function max(0, 1 - |distance|)."""
    features, locations, weights, grad = (t.double().numpy() for t in (x.features, x.locations, x.weights, x.grad))
    output, grads = np.zeros_like(grad), [np.zeros_like(a) for a in (features, locations, weights)]
    groups = weights.shape[-1]
    width_of_group = features.shape[2] // groups
    starts = np.cumsum([0] + [h * w for camera in x.shapes for h, w in camera])
    for b, a, p, n in np.ndindex(locations.shape[:-1]):
        place = locations[b, a, p, n]
        if (place <= 0).any() or (place >= 1).any():
            continue
        for level, (height, width) in enumerate(x.shapes[n]):
            number = n * len(x.shapes[0]) + level
            cells = features[b, starts[number] : starts[number + 1]].reshape(height, width, -1)
            px, py = place[0] * width - 0.5, place[1] * height - 0.5
            columns, rows = np.arange(width), np.arange(height)
            tent_x, tent_y = np.maximum(0, 1 - abs(columns - px)), np.maximum(0, 1 - abs(rows - py))
            slope_x = (columns == np.floor(px) + 1) * 1.0 - (columns == np.floor(px))
            slope_y = (rows == np.floor(py) + 1) * 1.0 - (rows == np.floor(py))
            for g in range(groups):
                part = slice(g * width_of_group, (g + 1) * width_of_group)
                weight, to, here = weights[b, a, p, n, level, g], grad[b, a, part], cells[:, :, part]
                seen = np.einsum("i,j,ijc->c", tent_y, tent_x, here)
                output[b, a, part] += weight * seen
                patch = weight * np.einsum("i,j,c->ijc", tent_y, tent_x, to).reshape(height * width, -1)
                grads[0][b, starts[number] : starts[number + 1], part] += patch
                grads[1][b, a, p, n, 0] += weight * width * np.einsum("i,j,ijc,c->", tent_y, slope_x, here, to)
                grads[1][b, a, p, n, 1] += weight * height * np.einsum("i,j,ijc,c->", slope_y, tent_x, here, to)
                grads[2][b, a, p, n, level, g] = seen @ to
    return tuple(torch.from_numpy(array) for array in (output, *grads))


def run(x: Views, target: Target) -> tuple[Tensor, ...]:
    x = x.to(target[1])
    leaves = x.leaves()
    output = deformable_aggregation(leaves[0], x.shapes, None, *leaves[1:], backend=target[0])
    return output, *torch.autograd.grad(output, leaves, x.grad)


def assert_close(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...], tolerance: float) -> None:
    for name, a, e in zip(NAMES, actual, expected):
        assert relative(a, e) <= tolerance, f"{name}: {relative(a, e):.2e} > {tolerance}"


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("shapes", "groups", "channels"),
    [(CAMERAS, 2, 8), (CAMERAS, 1, 5), (CAMERAS, 4, 4), ((((7, 3),),), 2, 6), ((((3, 4),),) * 4, 8, 32)],
)
def test_equals_naive_loop(
    target: Target, dtype: torch.dtype, shapes: CameraShapes, groups: int, channels: int
) -> None:
    x = make_views(shapes, groups=groups, channels=channels, dtype=dtype)
    assert_close(run(x, target), naive(x), TOLERANCE[dtype])
    assert run(x, target)[0].dtype == dtype


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("maps", "anchors", "points", "groups", "channels"),
    [
        (((16, 44), (8, 22), (4, 11), (2, 6)), 40, 13, 8, 256),  # the sizes of Sparse4D, with smaller maps
        (((5, 4),), 3, 70, 2, 24),  # more points of an anchor than a block looks at together
        (((5, 4), (3, 3)), 3, 4, 40, 80),  # more groups than a block has for them
        (((5, 4), (3, 3)), 3, 4, 1, 300),  # more channels in a group than its lanes hold
        (((5, 4), (3, 3)), 3, 4, 3, 192),  # 64 channels in a group
        (((5, 4), (3, 3)), 3, 4, 260, 520),  # more groups than its CUDA kernel takes
    ],
)
def test_sizes_that_take_several_rounds(
    target: Target,
    dtype: torch.dtype,
    maps: tuple[tuple[int, int], ...],
    anchors: int,
    points: int,
    groups: int,
    channels: int,
) -> None:
    x = make_views((maps,) * 6, 2, anchors, points, groups, channels, dtype, spread=1.2)
    assert_close(run(x, target), run(x.to(torch.float64), ("torch", "cpu")), TOLERANCE[dtype])


@pytest.mark.gpu
def test_more_levels_than_the_cuda_kernel_takes() -> None:
    require("cuda", "cuda")
    x = make_views((((2, 3),) * 130,), 2, 3, 2, 2, 8)
    leaves = x.to("cuda").leaves()
    output = deformable_aggregation(leaves[0], torch.tensor(x.shapes, device="cuda"), None, *leaves[1:], backend="cuda")
    found = [output, *torch.autograd.grad(output, leaves, x.grad.cuda())]
    assert_close([each.cpu() for each in found], run(x.to(torch.float64), ("torch", "cpu")), TOLERANCE[torch.float32])


def test_limits_of_the_cuda_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Without a GPU: tensors that only pretend to lie on one. Above 128 levels and 256 groups the kernels of attention
    compute; `auto` falls back above 32 maps whose sizes are on the host."""
    monkeypatch.setitem(compiled.WHY_NOT, "cuda", None)
    monkeypatch.setattr(backend_module, "_why_not_this_gpu", lambda index: None)
    backend_module._log_once.cache_clear()

    def operators(levels: int, groups: int, on_device: bool) -> set[str]:
        x = make_views((((2, 3),) * levels,), 1, 3, 2, groups, groups)
        with FakeTensorMode(allow_non_fake_inputs=True), Recorder() as recorder:
            inputs = [torch.empty_like(each, device="cuda") for each in (x.features, x.locations, x.weights)]
            shapes = torch.empty(1, levels, 2, dtype=torch.int64, device="cuda") if on_device else x.shapes
            deformable_aggregation(inputs[0], shapes, None, *inputs[1:])
        return recorder.names & {"deformable_aggregation", "ms_deform_attn", "grid_sampler_2d"}

    assert operators(32, 256, False) == operators(128, 2, True) == {"deformable_aggregation"}
    assert operators(2, 257, False) == operators(129, 2, True) == {"ms_deform_attn"}
    assert not caplog.messages
    assert operators(33, 2, False) == {"grid_sampler_2d"}
    assert message("too many levels", "32", "33").search(caplog.text)


class Recorder(TorchDispatchMode):
    """Records the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_deterministic(target: Target) -> None:
    """On CUDA the kernels of attention do it then; switched on after the forward pass it is an error."""
    x = make_views()
    if target == ("torch", "cuda"):
        pytest.skip("grid_sample has no deterministic gradient on CUDA")
    torch.use_deterministic_algorithms(True)
    try:
        first, second = run(x, target), run(x, target)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    assert_close(first, naive(x), TOLERANCE[torch.float32])


@pytest.mark.gpu
def test_deterministic_after_forward_is_an_error() -> None:
    require("cuda", "cuda")
    x = make_views().to("cuda")
    leaves = x.leaves()
    output = deformable_aggregation(leaves[0], x.shapes, None, *leaves[1:])
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match=message("asked too late", "deterministic", "forward")):
            output.sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)


def test_vmap(target: Target) -> None:
    x, y = make_views(seed=1).to(target[1]), make_views(seed=2).to(target[1])

    def aggregate(*t: Tensor) -> Tensor:
        return deformable_aggregation(t[0], x.shapes, None, t[1], t[2], backend=target[0])

    pairs = zip((x.features, x.locations, x.weights), (y.features, y.locations, y.weights))
    mapped = torch.vmap(aggregate)(*(torch.stack(pair) for pair in pairs))
    for output, one in zip(mapped, (x, y)):
        assert relative(output, aggregate(one.features, one.locations, one.weights)) <= 1e-6


def test_gradcheck(target: Target) -> None:
    x = make_views((((4, 3), (2, 2)), ((3, 3), (2, 1))), 1, 2, 2, 2, 4, torch.float64).to(target[1])

    def aggregate(*t: Tensor) -> Tensor:
        return deformable_aggregation(t[0], x.shapes, None, t[1], t[2], backend=target[0])

    assert torch.autograd.gradcheck(aggregate, x.leaves())


@pytest.mark.parametrize("place", [0.0, 1.0, -1e-3, 1.001, float("inf"), -float("inf")])
@pytest.mark.parametrize("axis", [0, 1])
def test_points_on_and_beyond_the_border_count_for_nothing(target: Target, place: float, axis: int) -> None:
    """At 0 and 1 a border cell would be half in reach, and attention would count it."""
    x = make_views(spread=0.9)
    x.locations[0, 1, 2, 1, axis] = place
    x.weights[0, 1, 2, 1, 1, 0] = float("inf")  # counts for nothing either
    without = replace(x, weights=x.weights.clone(), locations=x.locations.clone())
    without.locations[0, 1, 2, 1], without.weights[0, 1, 2, 1] = 0.5, 0.0
    actual, expected = run(x, target), run(without, ("torch", "cpu"))
    assert relative(actual[0], expected[0]) <= 1e-5 and relative(actual[1], expected[1]) <= 1e-5
    assert not actual[2][0, 1, 2, 1].any() and not actual[3][0, 1, 2, 1].any()


def test_points_just_inside_the_border_count(target: Target) -> None:
    x = make_views((((4, 4),),), 1, 4, 1, 1, 3, torch.float64)
    near = torch.tensor([[1e-9, 0.5], [1 - 1e-9, 0.5], [0.5, 1e-9], [0.5, 1 - 1e-9]], dtype=torch.float64)
    x = replace(x, locations=near.view(1, 4, 1, 1, 2))
    assert_close(run(x, target)[:2], naive(x)[:2], 1e-8)
    assert run(x, target)[0].abs().amin() > 0


def test_nan_location_makes_its_anchor_nan_and_no_other(target: Target) -> None:
    x = make_views(spread=0.9)
    x.locations[1, 2, 0, 1, 0] = float("nan")
    output = run(x, target)[0].isnan()
    assert output[1, 2].all() and output.sum() == output.shape[2]


def test_all_ways_to_give_the_shapes_agree(target: Target) -> None:
    x = make_views().to(target[1])
    expected = deformable_aggregation(x.features, x.shapes, None, x.locations, x.weights, backend=target[0])
    shapes = torch.tensor(x.shapes)
    cells = shapes.prod(-1).flatten()
    starts = (cells.cumsum(0) - cells).view(3, 2)
    for given in (shapes, shapes.to(target[1]), shapes.int(), shapes.tolist()):
        for start in (None, starts, starts.to(target[1])):
            actual = deformable_aggregation(x.features, given, start, x.locations, x.weights, backend=target[0])
            assert relative(actual, expected) <= 1e-6


def test_autocast_takes_its_type_for_features_only(target: Target) -> None:
    x = make_views().to(target[1])
    with torch.autocast(target[1], torch.bfloat16):
        cast = deformable_aggregation(x.features, x.shapes, None, x.locations, x.weights, backend=target[0])
    low = deformable_aggregation(x.features.bfloat16(), x.shapes, None, x.locations, x.weights, backend=target[0])
    assert cast.dtype == torch.bfloat16 and torch.equal(cast, low)


@pytest.mark.parametrize("size", ["batch", "anchors"])
def test_empty(target: Target, size: str) -> None:
    x = make_views(**{size: 0})  # type: ignore[arg-type]
    output, *grads = run(x, target)
    assert output.shape == x.grad.shape and not grads[0].any()


@pytest.mark.slow
def test_compiles_in_one_graph_and_exports(target: Target) -> None:
    torch._dynamo.reset()
    x = make_views().to(target[1])

    class Aggregate(torch.nn.Module):
        def forward(self, features: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
            return deformable_aggregation(features, x.shapes, None, locations, weights, backend=target[0])

    leaves = x.leaves()
    expected = run(x, target)
    output = torch.compile(Aggregate(), fullgraph=True, backend="aot_eager")(*leaves)
    assert_close((output, *torch.autograd.grad(output, leaves, x.grad)), expected, 1e-5)
    exported = torch.export.export(Aggregate(), tuple(leaves))
    assert relative(exported.module()(*leaves), expected[0]) <= 1e-6


@pytest.mark.parametrize(
    ("case", "name"), [pytest.param(*BACKENDS[i].values, name, marks=BACKENDS[i].marks)
                       for i, name in ((1, "ms_deform_attn"), (3, "deformable_aggregation"))]
)  # fmt: skip
def test_opcheck_of_what_the_kernels_get(case: Target, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require(*case)
    calls: list[tuple[object, ...]] = []
    operator = getattr(torch.ops.rtdetr, name)
    monkeypatch.setattr(torch.ops.rtdetr, name, lambda *t: calls.append(t) or operator(*t))
    x = make_views().to(case[1])
    leaves = x.leaves()
    deformable_aggregation(leaves[0], x.shapes, None, *leaves[1:], backend=case[0])
    monkeypatch.undo()
    tensors = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in calls[0]]
    torch.library.opcheck(operator, tensors)


BAD = [
    (lambda x: (x.features[0], x.shapes, None, x.locations, x.weights), r"features: expected 3 dimensions"),
    (lambda x: (x.features, x.shapes[:2], None, x.locations, x.weights), r"sampling_locations: expected .* N=2"),
    (lambda x: (x.features, x.shapes, None, x.locations[..., 0], x.weights), r"sampling_locations: expected"),
    (lambda x: (x.features, x.shapes, None, x.locations, x.weights[:, :2]), r"weights: expected .* \(2, 5, 3, 3, 2\)"),
    (lambda x: (x.features[..., 1:], x.shapes, None, x.locations, x.weights), r"features: .* 2 equal groups, got 7"),
    (lambda x: (x.features[:, 1:], x.shapes, None, x.locations, x.weights), r"hold 156 cells, but \w+ has 155"),
    (lambda x: (x.features.long(), x.shapes, None, x.locations, x.weights), r"features: .* of torch.int64"),
    (lambda x: (x.features, x.shapes, None, x.locations, x.weights[..., :0]), r"weights: .* got \(2, 5, 3, 3, 2, 0\)"),
    (lambda x: (x.features, CAMERAS[0], None, x.locations, x.weights), r"equally many .* per camera"),
    (
        lambda x: (x.features, (*CAMERAS[:2], CAMERAS[2][:1]), None, x.locations, x.weights),
        r"equally many .* per camera",
    ),
    (
        lambda x: (x.features, (((6, 9, 1), (3, 5, 1)),) * 3, None, x.locations, x.weights),
        r"equally many .* per camera",
    ),
    (lambda x: (x.features, (), None, x.locations, x.weights), r"equally many .*, got \(\)"),
    (lambda x: (x.features, torch.tensor(CAMERAS)[0], None, x.locations, x.weights), r"integers \(N, L, 2\)"),
    (lambda x: (x.features, torch.tensor(CAMERAS) / 1, None, x.locations, x.weights), r"got .* torch.float32"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_wrong_sizes_are_named(target: Target, arguments: object, message: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=message):
        deformable_aggregation(*arguments(make_views().to(target[1])), backend=target[0])  # type: ignore[operator]


@pytest.mark.parametrize(
    ("size", "said"),
    [
        ((-6, -9), "positive sizes, got (-6, -9)"),
        ((0, 9), "positive sizes, got (0, 9)"),
        ((6.0, 9.0), "whole numbers"),
        ((np.float32(6), np.float32(9)), "whole numbers"),
        (("6", "9"), "whole numbers"),
        ((None, 9), "whole numbers"),
        ((True, 9), "whole numbers"),
        (None, "whole numbers"),
    ],
)
def test_sizes_that_are_none_are_named(target: Target, size: object, said: str) -> None:
    x = make_views().to(target[1])
    shapes = (((size, (3, 5))), *CAMERAS[1:])
    with pytest.raises(ValueError, match=rf"^spatial_shapes: expected .*{re.escape(said)}"):
        deformable_aggregation(x.features, shapes, None, x.locations, x.weights, backend=target[0])  # type: ignore[arg-type]


@pytest.mark.parametrize("shapes", [None, 5, "ab", [5], [None]])
def test_cameras_that_are_none_are_named(target: Target, shapes: object) -> None:
    x = make_views().to(target[1])
    with pytest.raises(ValueError, match=r"^spatial_shapes: expected .* per camera, got"):
        deformable_aggregation(x.features, shapes, None, x.locations, x.weights, backend=target[0])  # type: ignore[arg-type]


def test_sizes_in_an_array(target: Target) -> None:
    x = make_views().to(target[1])
    alike = ((6, 9), (3, 5))
    features = torch.cat((x.features, x.features), 1)[:, : 3 * 69]
    outputs = [
        deformable_aggregation(features, shapes, None, x.locations, x.weights, backend=target[0])
        for shapes in ((alike,) * 3, np.array((alike,) * 3))
    ]
    assert outputs[0].equal(outputs[1])


def test_meta() -> None:
    x = make_views().to("meta")
    for shapes in (x.shapes, torch.tensor(x.shapes), torch.tensor(x.shapes, device="meta")):
        assert deformable_aggregation(x.features, shapes, None, x.locations, x.weights).shape == x.grad.shape


# The module.


def block_inputs(cameras: int = 3) -> tuple[object, ...]:
    """Arguments of the module's forward: cameras in a row that look along z, and what they see."""
    generator = torch.Generator().manual_seed(0)
    instances, embedding = torch.randn(2, 2, 5, 8, generator=generator)
    key_points = torch.rand(2, 5, 3, 3, generator=generator) * 4 - torch.tensor([2.0, 2.0, -4.0])
    projection = torch.tensor([[8.0, 0, 6, 0], [0, 8.0, 4, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).repeat(2, cameras, 1, 1)
    projection[:, :, 0, 3] = torch.arange(cameras) - 1.0
    size = torch.tensor([12.0, 8.0]).expand(2, cameras, 2)
    shapes = (((4, 6), (2, 3)),) * cameras
    features = torch.randn(2, 30 * cameras, 8, generator=generator)
    return instances, embedding, key_points, features, shapes, None, projection, size


def block(**settings: object) -> DeformableFeatureAggregation:
    torch.manual_seed(0)
    made = DeformableFeatureAggregation(8, 2, 2, 3, 3, **settings)  # type: ignore[arg-type]
    torch.nn.init.normal_(made.weights_fc.weight)
    return made


def test_project_points_by_hand() -> None:
    """(1, 2, 4) and (1, 2, -4): x = (8 * 1 + 6 * z) / z / 12 and y = (8 * 2 + 4 * z) / z / 8, z no less than 1e-5."""
    projection = torch.tensor([[8.0, 0, 6, 0], [0, 8.0, 4, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).view(1, 1, 4, 4)
    points = torch.tensor([[1.0, 2.0, 4.0], [1.0, 2.0, -4.0]]).view(1, 1, 2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        places = project_points(points, projection, torch.tensor([[[12.0, 8.0]]]))
    assert places.shape == (1, 1, 2, 1, 2)
    torch.testing.assert_close(places[0, 0, 0, 0], torch.tensor([8 / 12, 1.0]))
    torch.testing.assert_close(places[0, 0, 1, 0], torch.tensor([-16 / 12, 0.0]) / 1e-5)


def test_block_on_every_backend_and_its_gradients(target: Target) -> None:
    arguments = [t.to(target[1]) if isinstance(t, Tensor) else t for t in block_inputs()]
    expected = block(backend="torch")(*block_inputs())
    made = block(backend=target[0]).to(target[1])
    output = made(*arguments)
    assert relative(output, expected) <= 1e-5
    output.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.any() for p in made.parameters())


def test_block_residuals() -> None:
    arguments = block_inputs()
    added, joined = block(residual="add")(*arguments), block(residual="cat")(*arguments)
    assert joined.shape == (2, 5, 16) and torch.equal(joined[..., 8:], arguments[0])
    torch.testing.assert_close(added, joined[..., :8] + joined[..., 8:])
    with pytest.raises(ValueError, match=message("expected", "residual", "add", "cat", "'sum'")):
        block(residual="sum")


def test_block_weights_are_shares_of_all_points_cameras_and_levels() -> None:
    instances, _, _, _, _, _, projection, _ = block_inputs()
    for made in (block(), block(camera_embedding=False)):
        shares = made.weights(instances, projection)
        assert shares.shape == (2, 5, 3, 3, 2, 2)
        torch.testing.assert_close(shares.sum((2, 3, 4)), torch.ones(2, 5, 2))
    one_camera = block()(*block_inputs(cameras=1))
    assert one_camera.shape == (2, 5, 8)


def test_block_without_anchors() -> None:
    for made in (block(), block(camera_embedding=False)):
        instances, embedding, key_points, *rest = block_inputs()
        assert made(instances[:, :0], embedding[:, :0], key_points[:, :0], *rest).shape == (2, 0, 8)


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (2, (2, 5, 4, 3), r"key_points: expected \(2, 5, 3, 3\), got \(2, 5, 4, 3\)"),
        (6, (2, 3, 3, 4), r"projection: expected \(2, 3, 4, 4\), got \(2, 3, 3, 4\)"),
        (6, (2, 2, 4, 4), r"projection: expected \(2, 3, 4, 4\), got \(2, 2, 4, 4\)"),
        (7, (3, 2), r"image_size: expected \(2, 3, 2\), got \(3, 2\)"),
    ],
)
def test_block_names_what_does_not_fit(index: int, wrong: tuple[int, ...], message: str) -> None:
    arguments = list(block_inputs())
    arguments[index] = torch.ones(wrong)
    with pytest.raises(ValueError, match=message):
        block()(*arguments)


def test_block_refuses_settings_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"channels: expected a multiple of groups=4, got 6"):
        DeformableFeatureAggregation(6, 4)
    for name, wrong in (("channels", 0), ("groups", 0), ("levels", -1), ("points", 1.5), ("cameras", "6")):
        with pytest.raises(ValueError, match=message("expected", name, "whole number", str(wrong))):
            DeformableFeatureAggregation(**{"channels": 8, name: wrong})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message("expected", "backend", "torch", "'gpu'")):
        block(backend="gpu")
    with pytest.raises(ValueError, match=message("expected", "attention_dropout", "0", "1", "1.0")):
        block(attention_dropout=1.0)


def test_block_order_of_its_weights() -> None:
    """weights_fc speaks camera by camera, in it level by level, point by point, group by group, as in Sparse4D."""
    made = block(camera_embedding=False)
    torch.nn.init.zeros_(made.weights_fc.weight)
    camera, level, point, group = 2, 1, 0, 1
    with torch.no_grad():
        made.weights_fc.bias.view(3, 2, 3, 2)[camera, level, point, group] = 50.0
    shares = made.weights(torch.zeros(1, 1, 8), torch.zeros(1, 3, 4, 4))
    assert shares[0, 0, point, camera, level, group] > 0.999


def test_block_attention_dropout_leaves_out_whole_points_of_a_camera() -> None:
    made = block(attention_dropout=0.5)
    instances, _, _, _, _, _, projection, _ = block_inputs()
    full = made.eval().weights(instances, projection)
    kept = made.train().weights(instances, projection) / full
    assert ((kept == 0) | (kept - 2).abs().le(1e-5)).all() and (kept == kept[..., :1, :1]).isfinite().all()
    assert 0.2 < (kept == 0).float().mean() < 0.8


def test_block_has_the_weight_names_of_sparse4d() -> None:
    names = {f"camera_encoder.{i}.{kind}" for i in (0, 2, 3, 5) for kind in ("weight", "bias")}
    names |= {f"{layer}.{kind}" for layer in ("weights_fc", "output_proj") for kind in ("weight", "bias")}
    assert set(block().state_dict()) == names


def test_block_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", "the cpu kernels are not built (no C++ compiler)")
    backend_module._log_once.cache_clear()
    with caplog.at_level(logging.WARNING, "rtdetr"):
        output = block()(*block_inputs())
    assert output.shape == (2, 5, 8)
    assert caplog.messages == [
        "deformable_aggregation takes the torch backend: the cpu kernels are not built (no C++ compiler)"
    ]
