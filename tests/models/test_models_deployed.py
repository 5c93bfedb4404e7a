"""The deployed model gives the answers of the model, and holds what detection needs and no more."""

from __future__ import annotations

import pytest
import torch
from deployed_cases import made_up
from messages import message
from torch import nn

from rtdetr.models.deployed import DeployOptions
from rtdetr.models.deployed_layers import MergedAttention
from rtdetr.models.layers import FrozenBatchNorm2d
from rtdetr.ops.conv_relu import conv_relu, conv_relu_reference, linear_relu, linear_relu_reference

SIZES = [(1, 640, 640), (3, 64, 96), (2, 96, 64)]  # batch, height, width


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("norm", ["train", "frozen", "frozen_affine"])
@pytest.mark.parametrize("depth", [18, 50])
def test_same_answers(depth: int, norm: str, channels_last: bool) -> None:
    """In float64, where no two cells have nearly the same score."""
    model = made_up(f"model.backbone.depth={depth}", f"model.backbone.norm={norm}").double()
    deployed = model.deploy(DeployOptions(dtype=torch.float64, channels_last=channels_last))
    for batch, height, width in SIZES[1:]:
        images = torch.rand(batch, 3, height, width, dtype=torch.float64)
        expected, found = model(images), deployed(images)
        torch.testing.assert_close(found.boxes, expected.boxes, atol=1e-9, rtol=0)
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-9, rtol=0)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("expansion", [0.5, 1.0])  # with and without a third convolution in CSP blocks
def test_float32(size: tuple[int, int, int], expansion: float) -> None:
    """Part by part, so that cells with nearly the same score may swap."""
    batch, height, width = size
    model = made_up(f"model.encoder.expansion={expansion}", "model.encoder.num_csp_blocks=2")
    deployed = model.deploy(DeployOptions(remember_sizes=True))
    images = torch.rand(batch, 3, height, width)
    maps = model.encoder(model.backbone(images))
    for ours, theirs in zip(deployed.encoder(deployed.backbone(images)), maps):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()
    memory = model.decoder.remember(maps)
    selected = model.decoder.selector(memory)
    expected = model.decoder(selected.content, selected.box_logits, memory)
    found = deployed.decoder(selected.content, selected.box_logits, deployed.decoder.remember(maps))
    torch.testing.assert_close(found.boxes, expected.boxes[-1], atol=1e-5, rtol=0)
    torch.testing.assert_close(found.logits, expected.logits[-1], atol=1e-4, rtol=0)
    scores = [each.logits.amax(2).sort().values for each in (deployed(images), model(images))]
    torch.testing.assert_close(*scores, atol=1e-3, rtol=0)


@pytest.mark.parametrize("norm", ["train", "frozen"])
def test_nothing_of_training_is_left_and_the_model_is_untouched(norm: str) -> None:
    model = made_up(f"model.backbone.norm={norm}")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    deployed = model.deploy(DeployOptions(fuse_relu=True))
    kinds = {type(module) for module in deployed.modules()}
    assert not kinds & {nn.BatchNorm2d, FrozenBatchNorm2d}
    assert not hasattr(deployed, "query_groups") and not hasattr(deployed, "dense_head")
    assert not any(parameter.requires_grad for parameter in deployed.parameters())
    numbers = [sum(p.numel() for p in each.parameters()) for each in (deployed, model)]
    assert numbers[0] < numbers[1] - sum(p.numel() for p in model.query_groups.parameters())
    own = {tensor.data_ptr() for tensor in deployed.state_dict().values()}
    assert not own & {tensor.data_ptr() for tensor in model.state_dict().values() if tensor.numel()}
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_with_float32_islands(dtype: torch.dtype) -> None:
    model = made_up()
    deployed = model.deploy(DeployOptions(dtype=dtype))
    decoder = deployed.decoder
    heads = [decoder.selector.box_head, *decoder.box_heads]
    if dtype == torch.float16:  # the result alone would be rounded to pixels
        heads = [head.layers[-1] for head in heads]
    islands = {name for head in [*heads, *decoder.score_heads] for name in map(id, head.parameters())}
    if dtype == torch.bfloat16:  # ranks cells, which float16 tells apart
        islands |= set(map(id, decoder.selector.score_head.parameters()))
    for name, parameter in deployed.named_parameters():
        assert parameter.dtype == (torch.float32 if id(parameter) in islands else dtype), name
    assert torch.equal(decoder.box_heads[0].layers[-1].weight, model.decoder.box_heads[0].linears()[-1].weight)
    found, expected = (each(torch.rand(2, 3, 64, 64)) for each in (deployed, model))
    assert found.boxes.dtype == found.logits.dtype == torch.float32
    scores = [each.logits.sigmoid().amax(2).sort().values for each in (found, expected)]
    torch.testing.assert_close(*scores, atol=0.05, rtol=0)


def test_a_bright_image_costs_float16_its_digits_and_not_with_exact_ends() -> None:
    """Products and bias of the first convolution, some 20, cancel but for 1."""
    model = made_up()
    first = model.backbone.stem[0]
    nn.init.uniform_(first.conv.weight, 0.5, 1)
    images = 0.9 + 0.1 * torch.rand(2, 3, 64, 96)
    first.norm.running_mean = first.conv(images)[:, :, 1:, 1:].mean(dim=(0, 2, 3))
    first.norm.running_var.fill_(0.04)
    expected, errors = model.backbone(images), []
    for exact in (False, True):
        deployed = model.deploy(DeployOptions(dtype=torch.float16, exact_ends=exact))
        maps = deployed.backbone(images.to(deployed.dtype))
        assert {each.dtype for each in maps} == {torch.float16}
        errors.append(max(float((ours - theirs).abs().mean()) for ours, theirs in zip(maps, expected)))
        assert deployed(images).logits.dtype == torch.float32
    assert errors[1] < errors[0] / 3


def test_answers_for_a_size_are_computed_once() -> None:
    model = made_up().double()
    deployed = model.deploy(DeployOptions(dtype=torch.float64, remember_sizes=True))
    for batch, height, width in (*SIZES[1:], *SIZES[1:]):
        images = torch.rand(batch, 3, height, width, dtype=torch.float64)
        torch.testing.assert_close(deployed(images).boxes, model(images).boxes, atol=1e-9, rtol=0)
    assert len(deployed.encoder.position_code.answers) == len(deployed.decoder.make_anchors.answers) == 2


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("option", ["fuse_relu", "fuse_linear", "for_compiler"])
def test_fused_layers_give_the_same(depth: int, option: str) -> None:
    model = made_up(f"model.backbone.depth={depth}").double()
    images = torch.rand(2, 3, 64, 96, dtype=torch.float64)
    fused = model.deploy(DeployOptions(dtype=torch.float64, **{option: True}))
    assert (option == "fuse_linear") == any(isinstance(module, MergedAttention) for module in fused.modules())
    torch.testing.assert_close(fused(images).boxes, model(images).boxes, atol=1e-9, rtol=0)


def test_nothing_of_the_model_is_copied_in_place() -> None:
    model, images = made_up().double(), torch.rand(1, 3, 64, 64, dtype=torch.float64)
    expected = model(images)
    stem = model.backbone.stem[0].conv
    deployed = model.deploy(DeployOptions(dtype=torch.float64, in_place=True))
    assert deployed.backbone.stem[0].conv is stem
    torch.testing.assert_close(deployed(images).boxes, expected.boxes, atol=1e-9, rtol=0)


def test_boxes_at_their_limits() -> None:
    """Where the sigmoid is 0 or 1 to its last digit, as for anchors of the border."""
    model = made_up().double()
    memory = model.decoder.remember(model.encoder(model.backbone(torch.rand(1, 3, 64, 64).double())))
    logits = torch.tensor([-1e4, -20, -11.6, -11.5, -3, 0, 3, 11.5, 11.6, 20, 1e4], dtype=torch.float64)
    logits = logits[:, None].expand(1, -1, 4)
    content = torch.randn(1, logits.shape[1], 32).double()
    deployed = model.deploy(DeployOptions(dtype=torch.float64))
    found, expected = (each(content, logits, memory) for each in (deployed.decoder, model.decoder))
    torch.testing.assert_close(found.boxes, expected.boxes[-1], atol=1e-8, rtol=0)
    torch.testing.assert_close(found.logits, expected.logits[-1], atol=1e-6, rtol=0)


def test_a_compiled_model_is_deployed_too() -> None:
    """As training leaves it, see engine/acceleration/accelerate.py."""
    model = made_up().double()
    images = torch.rand(1, 3, 64, 64, dtype=torch.float64)
    expected = model(images)

    def refuse(*_: object) -> None:
        raise AssertionError("the deployed model still runs what was compiled")

    for part in (model.backbone, model.encoder, model.decoder, model.decoder.selector):
        part.compile(backend=refuse)
    model.decoder.remember = torch.compile(model.decoder.remember, backend=refuse)
    torch.testing.assert_close(
        model.deploy(DeployOptions(dtype=torch.float64))(images).boxes, expected.boxes, atol=1e-9, rtol=0
    )


@pytest.mark.slow
def test_one_graph_for_the_compiler() -> None:
    """fullgraph=True: a break raises."""
    options = DeployOptions(remember_sizes=True, fuse_linear=True, for_compiler=True)
    deployed, images = made_up().deploy(options), torch.rand(2, 3, 64, 96)
    expected = deployed(images)  # first, as inference.deploy.Compiled does
    torch._dynamo.reset()
    for found, wanted in zip(torch.compile(deployed, fullgraph=True, backend="aot_eager")(images), expected):
        torch.testing.assert_close(found, wanted)


def test_no_method_is_replaced() -> None:
    """Deployed modules are built by their constructors."""
    every = dict.fromkeys(("remember_sizes", "fuse_linear", "fuse_relu", "for_compiler", "exact_ends"), True)
    for options in (DeployOptions(), DeployOptions(**every)):
        for name, module in made_up().deploy(options).named_modules():
            replaced = [key for key, value in vars(module).items() if callable(value) and hasattr(type(module), key)]
            assert not replaced, (name, replaced)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("stride,kernel,residual", [(1, 3, False), (2, 3, False), (1, 1, True), (1, 3, True)])
def test_cudnn_fuses(dtype: torch.dtype, stride: int, kernel: int, residual: bool) -> None:
    torch.manual_seed(0)
    for _ in range(5):
        x = torch.randn(2, 64, 40, 56).to("cuda", dtype).contiguous(memory_format=torch.channels_last)
        weight = (
            (torch.randn(32, 64, kernel, kernel) / 24).to("cuda", dtype).contiguous(memory_format=torch.channels_last)
        )
        bias = torch.randn(32).to("cuda", dtype)
        expected = conv_relu_reference(x.double(), weight.double(), bias.double(), None, stride, kernel // 2)
        other = torch.randn(expected.shape).to(x).contiguous(memory_format=torch.channels_last) if residual else None
        expected = conv_relu_reference(
            x.double(), weight.double(), bias.double(), other if other is None else other.double(), stride, kernel // 2
        )
        garbage = torch.full_like(x, torch.nan).repeat(4, 1, 1, 1)  # what the result's memory held before
        del garbage
        found = conv_relu(x, weight, bias, other, stride, kernel // 2)
        assert found.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(found.double(), expected, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(2, 300, 64), (1, 1, 64), (3, 64)], ids=str)
def test_linear_layers_fuse(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(shape), torch.randn(40, 64) / 8, torch.randn(40)
    expected = linear_relu_reference(x, weight, bias)
    found = linear_relu(*(each.to(device, dtype) for each in (x, weight, bias)))
    assert found.dtype == dtype and found.shape == expected.shape
    torch.testing.assert_close(found.float().cpu(), expected, atol=0.02, rtol=0.01)


def test_bytes_are_images_too() -> None:
    """As the predictor and the training take them: 255 is 1."""
    deployed = made_up().deploy()
    images = torch.randint(256, (2, 3, 64, 96), dtype=torch.uint8)
    for found, expected in zip(deployed(images), deployed(images * (1.0 / 255.0))):
        assert torch.equal(found, expected)


def test_what_is_no_type_of_weights_is_refused() -> None:
    for dtype in (torch.int8, "float16"):
        with pytest.raises(ValueError, match=message("expected", "dtype", "floating point")):
            DeployOptions(dtype=dtype)  # type: ignore[arg-type]


def test_an_image_with_fewer_cells_than_queries_is_refused() -> None:
    model = made_up("model.decoder.num_queries=40")
    for network in (model, model.deploy()):
        with pytest.raises(ValueError, match="expected a cell for each of 40 queries, got 21"):
            network(torch.zeros(1, 3, 32, 32))
