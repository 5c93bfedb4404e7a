"""The op as a citizen of PyTorch: opcheck, compile, export, checkpoint, autocast, vmap, FLOPs, CUDA graphs."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from messages import message
from ops_cases import BACKENDS, Shapes, Target, make_inputs, relative, require
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from rtdetr.ops import Backend, ms_deform_attn, ms_deform_attn_fused

SHAPES: Shapes = ((9, 7), (5, 4), (2, 3))
COMPILED = [BACKENDS[1], BACKENDS[3]]


@pytest.fixture(params=COMPILED)
def compiled(request: pytest.FixtureRequest) -> str:
    """The device of a compiled backend."""
    require(*request.param)
    return request.param[1]


class Attention(nn.Module):
    """Projections around the fused call, as in a decoder layer."""

    def __init__(self, backend: Backend, channels: int = 32, heads: int = 4, levels: int = 3, points: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.backend, self.sizes = backend, (heads, levels, points)
        self.value, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)
        self.offsets = nn.Linear(channels, heads * levels * points * 2)
        self.logits = nn.Linear(channels, heads * levels * points)

    def forward(self, query: Tensor, boxes: Tensor, memory: Tensor, shapes: Shapes) -> Tensor:
        heads, levels, points = self.sizes
        value = self.value(memory).unflatten(-1, (heads, -1))
        offsets = self.offsets(query).unflatten(-1, (heads, levels, points, 2))
        logits = self.logits(query).unflatten(-1, (heads, levels * points))
        return self.out(ms_deform_attn_fused(value, shapes, boxes.unsqueeze(2), offsets, logits, backend=self.backend))


class Fixed(nn.Module):
    """Attention with map sizes that are part of the module, as an exported file has them."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, query: Tensor, boxes: Tensor, memory: Tensor) -> Tensor:
        return self.attention(query, boxes, memory, SHAPES)


def layer_inputs(batch: int, queries: int, shapes: Shapes, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * queries)
    cells = sum(h * w for h, w in shapes)
    query, boxes, memory = (
        torch.rand(batch, n, c, generator=generator).to(device) for n, c in ((queries, 32), (queries, 4), (cells, 32))
    )
    return query.requires_grad_(), boxes, memory.requires_grad_()


def opcheck_arguments(device: str, tensors: bool) -> tuple[tuple[object, ...], tuple[object, ...], Tensor]:
    x = make_inputs(SHAPES, 2, 5, 3, 8, 2).to(device)
    starts = torch.tensor([0, 63, 83], device=device)
    levels = ([], torch.tensor(x.shapes, device=device), starts) if tensors else ([9, 7, 5, 4, 2, 3], None, None)
    return levels, tuple(x.leaves()), x.grad


@pytest.mark.parametrize("tensors", [False, True])
def test_opcheck(compiled: str, tensors: bool) -> None:
    levels, (value, locations, weights), _ = opcheck_arguments(compiled, tensors)
    torch.library.opcheck(torch.ops.rtdetr.ms_deform_attn, (value, *levels, locations, weights))


@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, True)])
def test_opcheck_backward(compiled: str, needed: tuple[bool, bool, bool]) -> None:
    levels, leaves, grad = opcheck_arguments(compiled, False)
    value, locations, weights = (t.detach() for t in leaves)
    arguments = (grad, value, *levels, locations, weights, *needed, False)
    torch.library.opcheck(torch.ops.rtdetr.ms_deform_attn_backward, arguments)


@pytest.mark.gpu
def test_opcheck_fused() -> None:
    require("cuda", "cuda")
    levels, (value, locations, weights), _ = opcheck_arguments("cuda", False)
    boxes = torch.rand(2, 5, 1, 4, device="cuda", requires_grad=True)
    arguments = (value, *levels, boxes, locations, weights, 0.5)
    torch.library.opcheck(torch.ops.rtdetr.ms_deform_attn_fused, arguments)


@pytest.mark.gpu
@pytest.mark.parametrize("needed", [(True, True, True, True), (True, False, False, True), (False, True, True, False)])
def test_opcheck_fused_backward(needed: tuple[bool, bool, bool, bool]) -> None:
    require("cuda", "cuda")
    levels, leaves, grad = opcheck_arguments("cuda", False)
    value, offsets, logits = (t.detach() for t in leaves)
    boxes = torch.rand(2, 5, 3, 4, device="cuda")
    arguments = (grad, value, *levels, boxes, offsets, logits, 0.5, *needed, True)
    torch.library.opcheck(torch.ops.rtdetr.ms_deform_attn_fused_backward, arguments)


FIVE_SIZES = [
    (1, 6, ((8, 10), (4, 5), (2, 3))),
    (2, 7, ((12, 9), (6, 4), (3, 2))),
    (3, 11, ((10, 14), (5, 7), (3, 4))),
    (2, 13, ((16, 7), (8, 4), (4, 2))),
    (5, 9, ((11, 13), (6, 8), (3, 5))),
]


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
def test_compile_once_for_all_sizes(target: Target, train: bool) -> None:
    """fullgraph: a graph break would raise. One compilation for fixed sizes, one more for all others."""
    torch._dynamo.reset()
    # On the CPU only the tracing is of interest, and inductor would spend minutes in the C++ compiler.
    kind = "inductor" if target[1] == "cuda" else "aot_eager"
    module = Attention(target[0]).to(target[1])
    count = 0

    def backend(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., object]:
        nonlocal count
        count += 1
        return torch._dynamo.lookup_backend(kind)(graph, examples)

    fast = torch.compile(module, fullgraph=True, backend=backend)
    for batch, queries, shapes in FIVE_SIZES:
        query, boxes, memory = layer_inputs(batch, queries, shapes, target[1])
        with torch.set_grad_enabled(train):
            actual, expected = fast(query, boxes, memory, shapes), module(query, boxes, memory, shapes)
        assert relative(actual, expected.detach()) <= 1e-5
        if train:
            grads = [
                torch.autograd.grad(y.square().sum(), [query, memory, *module.parameters()]) for y in (actual, expected)
            ]
            assert all(relative(a, e) <= 1e-4 for a, e in zip(*grads, strict=True))
    assert count <= 2


def test_export(target: Target) -> None:
    module = Attention(target[0]).to(target[1]).eval()
    query, boxes, memory = layer_inputs(2, 7, SHAPES, target[1])
    queries = {1: torch.export.Dim.DYNAMIC}
    dynamic = {"query": queries, "boxes": queries, "memory": None, "shapes": ((None, None),) * 3}
    program = torch.export.export(module, (query, boxes, memory, SHAPES), dynamic_shapes=dynamic)
    names = {str(node.target) for node in program.graph.nodes}
    kernel = {"torch": "grid_sampler", "cpu": "rtdetr.ms_deform_attn", "cuda": "rtdetr.ms_deform_attn_fused"}[target[0]]
    assert any(kernel in name for name in names)
    query, boxes, _ = layer_inputs(2, 19, SHAPES, target[1])
    assert (
        relative(program.module()(query, boxes, memory, SHAPES), module(query, boxes, memory, SHAPES).detach()) <= 1e-6
    )


def test_checkpoint(target: Target) -> None:
    module = Attention(target[0]).to(target[1])
    query, boxes, memory = layer_inputs(2, 7, SHAPES, target[1])
    grads = [
        torch.autograd.grad(output.square().sum(), [query, memory])
        for output in (
            checkpoint(module, query, boxes, memory, SHAPES, use_reentrant=False),
            module(query, boxes, memory, SHAPES),
        )
    ]
    assert all(relative(a, e) <= 1e-6 for a, e in zip(*grads, strict=True))


@pytest.mark.parametrize("where", ["pairs", "cpu", "meta"])
def test_meta_tensors(where: str) -> None:
    """Shapes of results and gradients, without a number anywhere."""
    shapes = SHAPES if where == "pairs" else torch.tensor(SHAPES, device=where)
    x = make_inputs(SHAPES, 2, 5, 3, 8, 4).to("meta")
    leaves = x.leaves()
    output = ms_deform_attn(leaves[0], shapes, None, leaves[1], leaves[2])
    assert output.is_meta and output.shape == (2, 5, 24)
    grads = torch.autograd.grad(output, leaves, x.grad)
    assert [g.shape for g in grads] == [t.shape for t in leaves]
    for size in ((2, 5, 1, 4), (1, 5, 3, 2)):
        tensors = [leaves[0], torch.empty(size, device="meta", requires_grad=True), leaves[1], leaves[2]]
        output = ms_deform_attn_fused(tensors[0], shapes, *tensors[1:])
        assert output.is_meta and output.shape == (2, 5, 24)
        assert [g.shape for g in torch.autograd.grad(output, tensors, x.grad)] == [t.shape for t in tensors]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_casts_values_and_keeps_locations(target: Target, dtype: torch.dtype) -> None:
    x = make_inputs(((200, 200),), 1, 50, 2, 8, 4).to(target[1])
    with torch.autocast(target[1], dtype):
        actual = ms_deform_attn(x.value, x.shapes, None, x.locations, x.weights, backend=target[0])
    rounded = x.value.to(dtype)
    assert actual.dtype == dtype
    expected = ms_deform_attn(
        rounded.double(), x.shapes, None, x.locations.double(), x.weights.double(), backend="torch"
    )
    assert relative(actual, expected) <= (5e-4 if dtype == torch.float16 else 4e-3)


def test_autocast_rule_of_the_operator_itself(compiled: str) -> None:
    levels, (value, locations, weights), _ = opcheck_arguments(compiled, False)
    with torch.autocast(compiled, torch.bfloat16):
        output = torch.ops.rtdetr.ms_deform_attn(value, *levels, locations, weights.bfloat16())
    output.sum().backward()
    assert output.dtype == torch.bfloat16 and value.grad is not None and value.grad.dtype == torch.float32


def test_vmap(compiled: str) -> None:
    levels, leaves, _ = opcheck_arguments(compiled, False)
    value, locations, weights = (t.detach() for t in leaves)

    def call(v: Tensor, w: Tensor) -> Tensor:
        return torch.ops.rtdetr.ms_deform_attn(v, *levels, locations, w)

    values, weightings = torch.stack([value, 2 * value, -value]), torch.stack([weights, weights, 3 * weights], dim=2)
    actual = torch.func.vmap(call, in_dims=(0, 2))(values, weightings)
    expected = torch.stack([call(values[i], weightings.select(2, i)) for i in range(3)])
    assert relative(actual, expected) <= 1e-6


def test_flop_formula(compiled: str) -> None:
    import rtdetr.ops.flops  # noqa: F401  which registers the formulas

    levels, (value, locations, weights), _ = opcheck_arguments(compiled, False)
    channels_of_points = 2 * 5 * 3 * 3 * 2 * 8
    with FlopCounterMode(display=False) as counter:
        output = torch.ops.rtdetr.ms_deform_attn(value, *levels, locations, weights)
    assert counter.get_total_flops() == 8 * channels_of_points
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == 40 * channels_of_points


def test_no_second_derivative(compiled: str) -> None:
    levels, (value, locations, weights), _ = opcheck_arguments(compiled, False)
    output = torch.ops.rtdetr.ms_deform_attn(value, *levels, locations, weights)
    (grad,) = torch.autograd.grad(output.square().sum(), locations, create_graph=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        grad.sum().backward()


def test_operator_names_wrong_arguments(compiled: str) -> None:
    levels, (value, locations, weights), _ = opcheck_arguments(compiled, True)
    op = torch.ops.rtdetr.ms_deform_attn
    with pytest.raises(RuntimeError, match=message("expected", "sampling_locations", "Float", "Double")):
        op(value, *levels, locations.double(), weights)
    with pytest.raises(RuntimeError, match=message("expected", "level_start_index", "int64")):
        op(value, levels[0], levels[1], None, locations, weights)
    if compiled == "cpu":  # on a GPU the numbers stay on the device
        with pytest.raises(RuntimeError, match="expected level 1 to start at cell 63"):
            op(value, levels[0], levels[1], levels[2] + 1 - torch.tensor([1, 0, 0]), locations, weights)


@pytest.mark.gpu
def test_cuda_graph_of_the_layer() -> None:
    """Capture fails on any synchronisation; the replay must follow new inputs."""
    require("cuda", "cuda")
    module = Attention("cuda").cuda()
    query, boxes, memory = layer_inputs(2, 7, SHAPES, "cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            torch.autograd.grad(module(query, boxes, memory, SHAPES).square().sum(), [query, memory])
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = module(query, boxes, memory, SHAPES)
        grads = torch.autograd.grad(output.square().sum(), [query, memory])
    with torch.no_grad():
        query.add_(0.3)
    graph.replay()
    expected = module(query, boxes, memory, SHAPES)
    expected_grads = torch.autograd.grad(expected.square().sum(), [query, memory])
    for a, e in zip((output, *grads), (expected, *expected_grads), strict=True):
        assert relative(a, e.detach()) <= 1e-5


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("size", [(1, 50), (2, 2500)], ids=["reductions", "sorted"])
def test_ten_thousand_calls_leave_the_memory_as_it_was(size: tuple[int, int]) -> None:
    require("cuda", "cuda")
    x = make_inputs(((20, 20), (10, 10)), *size, 8, 32, 4, dtype=torch.float16).to("cuda")
    leaves = x.leaves()

    def step() -> None:
        output = ms_deform_attn(leaves[0], x.shapes, None, leaves[1], leaves[2], backend="cuda")
        torch.autograd.grad(output, leaves, x.grad)

    step()
    gc.collect()  # what other tests left behind must not go in between
    before = torch.cuda.memory_allocated()
    for _ in range(10_000):
        step()
    for _ in range(100):  # the engine's own thread may still hold the last gradients
        if torch.cuda.memory_allocated() <= before:
            break
        time.sleep(0.02)
    assert torch.cuda.memory_allocated() <= before  # less, where the engine let go of other tests' meanwhile


@pytest.mark.parametrize("asked", ["auto", "torch"])
def test_onnx_export_is_grid_sample(asked: Backend, tmp_path: Path) -> None:
    """No operator of ours is in the file, also where the kernels are built, and onnxruntime computes the same."""
    runtime = pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    module, inputs = Fixed(Attention(asked)).eval(), layer_inputs(2, 7, SHAPES, "cpu")
    path = str(tmp_path / "attention.onnx")
    torch.onnx.export(module, inputs, path, dynamo=True, opset_version=18, verbose=False)
    nodes = onnx.load(path).graph.node
    assert sum(node.op_type == "GridSample" for node in nodes) == len(SHAPES)
    assert all(node.domain in ("", "ai.onnx") for node in nodes)
    session = runtime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]
    feed = {name: tensor.detach().numpy() for name, tensor in zip(names, inputs, strict=True)}
    (actual,) = session.run(None, feed)
    assert relative(torch.from_numpy(actual), module(*inputs).detach()) <= 1e-5
