"""The model as a whole: shapes, rectangles, what eval mode touches, initial values."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from messages import message
from torch import Tensor, nn

from rtdetr.config import Depth, ModelConfig, load_config
from rtdetr.models.backbone import Shortcut, build_backbone, project_averages
from rtdetr.models.decoder import BORDER_LOGIT, make_anchors
from rtdetr.models.denoising import noise_targets
from rtdetr.models.dense_head import EffectiveSqueezeExcite, project_scaled
from rtdetr.models.layers import FrozenBatchNorm2d, Group, SelfAttention, position_code
from rtdetr.models.postprocess import postprocess
from rtdetr.models.query_groups import QueryGroups
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.types import Predictions, Targets, TrainingOutputs

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = load_config(CONFIGS / "rtdetrv3_nano_shapes.yml").model
NANO = dataclasses.replace(  # sizes that the tests count with, whatever the shipped file says
    SHIPPED,
    decoder=dataclasses.replace(SHIPPED.decoder, num_queries=60),
    supervision=dataclasses.replace(
        SHIPPED.supervision, num_noise_groups=1, num_one_to_many_queries=90, num_denoising=30
    ),
)


def nano(num_classes: int = 5, **supervision: object) -> Network:
    torch.manual_seed(0)
    changed = dataclasses.replace(NANO.supervision, **supervision)  # type: ignore[arg-type]
    return build_model(dataclasses.replace(NANO, supervision=changed), num_classes)


def targets_of(*counts: int, size: int = 128) -> Targets:
    generator = torch.Generator().manual_seed(1)
    boxes = [torch.rand(n, 4, generator=generator) * 0.3 + 0.2 for n in counts]
    labels = [torch.randint(5, (n,), generator=generator) for n in counts]
    return Targets.stack(labels, boxes, [b * size for b in boxes])


def train_step(model: Network, targets: Targets, height: int = 128, width: int = 128) -> TrainingOutputs:
    outputs = model.train()(torch.rand(len(targets.counts), 3, height, width), targets)
    assert isinstance(outputs, TrainingOutputs)
    return outputs


@pytest.mark.parametrize(("height", "width"), [(128, 128), (96, 160), (100, 132), (64, 256)])
def test_any_height_and_width(height: int, width: int) -> None:
    with torch.no_grad():
        predictions = nano().eval()(torch.rand(2, 3, height, width))
    assert predictions.logits.shape == (2, 60, 5)
    assert predictions.boxes.shape == (2, 60, 4)
    assert torch.isfinite(predictions.boxes).all() and (predictions.boxes >= 0).all() and (predictions.boxes <= 1).all()


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    model, images = nano().eval().double(), torch.rand(3, 3, 96, 128, dtype=torch.float64)
    with torch.no_grad():
        together, alone = model(images), model(images[1:2])
    torch.testing.assert_close(together.boxes[1:2], alone.boxes, rtol=0, atol=1e-12)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("train", [False, True])
def test_one_image_has_half_of_the_gradients_of_two_of_it(train: bool, device: str) -> None:
    """Also on a processor, where batch norm misreads some layouts of gradients in a batch of one."""
    model = nano().train(train).double().to(device)
    image = torch.rand(1, 3, 96, 128, dtype=torch.float64, device=device)

    def gradients(images: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        tokens = model.decoder.remember(model.encoder(model.backbone(images))).tokens
        weights = torch.linspace(-1, 1, tokens[0].numel(), dtype=tokens.dtype, device=device)
        (tokens * weights.view(tokens.shape[1:])).sum().backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    two = gradients(image.repeat(2, 1, 1, 1))
    for name, one in gradients(image).items():
        assert (two[name] / 2 - one).norm() <= 1e-6 * one.norm() + 1e-9, name


def test_training_outputs_have_the_stated_shapes() -> None:
    outputs = train_step(nano(), targets_of(2, 4))
    assert outputs.one_to_one.logits.shape == (4, 2, 2, 60, 5)
    assert outputs.one_to_many is not None and outputs.one_to_many.boxes.shape == (4, 1, 2, 90, 4)
    assert outputs.denoising is not None and outputs.denoising.num_copies == 30 // 4
    assert outputs.denoising.boxes.shape == (3, 2, 2, 7 * 2 * 4, 4)
    assert outputs.dense is not None and outputs.dense.level_cells == (256, 64, 16)
    assert outputs.dense.distances.shape == (2, 336, 4, 17)


@pytest.mark.parametrize(("counts", "slots"), [((7, 3), 7), ((8, 3), 8), ((9, 3), 8), ((200, 3), 8)])
def test_queries_of_a_crowd_are_bounded(counts: tuple[int, ...], slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight boxes are denoised at most: no random number is drawn below that, and real ones come first."""
    torch.manual_seed(3)
    targets = targets_of(*counts)
    monkeypatch.setattr("rtdetr.models.query_groups.noise_targets", partial(noise_targets, crowd_limit=8))
    denoising = train_step(nano(num_denoising=7), targets).denoising
    assert denoising is not None and denoising.boxes.shape[3] == 2 * slots
    assert (denoising.crowd is None) == (max(counts) <= 8)
    if denoising.crowd is not None:
        assert targets.mask.gather(1, denoising.crowd).sum(1).tolist() == [8, 3]
        assert all(len(set(row)) == 8 for row in denoising.crowd.tolist())


@pytest.mark.parametrize("counts", [(3, 0), (0, 0)])
def test_every_parameter_has_a_gradient_also_without_boxes(counts: tuple[int, ...]) -> None:
    model = nano()
    outputs = train_step(model, targets_of(*counts))
    tensors = [outputs.one_to_one, outputs.one_to_many, outputs.denoising, outputs.dense]
    total = sum(t.double().sum() for part in tensors if part for t in part[:2] if isinstance(t, Tensor))
    assert isinstance(total, Tensor)
    total.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None] == []
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize(
    "off",
    [{"num_noise_groups": 0}, {"num_one_to_many_queries": 0}, {"num_denoising": 0}, {"dense_head": False}],
    ids=lambda off: next(iter(off)),
)
def test_each_training_part_can_be_switched_off(off: dict[str, object]) -> None:
    outputs = train_step(nano(**off), targets_of(2, 1))
    assert outputs.one_to_one.logits.shape[1] == (1 if "num_noise_groups" in off else 2)
    assert (outputs.one_to_many is None) == ("num_one_to_many_queries" in off)
    assert (outputs.denoising is None) == ("num_denoising" in off)
    assert (outputs.dense is None) == ("dense_head" in off)


def test_attention_within_groups_is_masked_attention() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(16, num_heads=2).double()
    tokens, position = torch.rand(2, 2, 12, 16, dtype=torch.float64).unbind(0)
    groups = (Group(4, None), Group(5, torch.rand(5, 5) > 0.4), Group(3, torch.eye(3, dtype=torch.bool)))
    visible = torch.block_diag(*(torch.ones(g.size, g.size) if g.visible is None else g.visible for g in groups)).bool()
    query = tokens + position
    masked = nn.MultiheadAttention.forward(attention, query, query, tokens, attn_mask=~visible, need_weights=False)[0]
    torch.testing.assert_close(attention(tokens, position, groups), masked)
    whole = nn.MultiheadAttention.forward(attention, query, query, tokens, need_weights=False)[0]
    torch.testing.assert_close(attention(tokens, position), whole)


def test_who_sees_whom() -> None:
    used = torch.tensor([True, False])
    groups = nano().query_groups._groups(3, 12, used, _KeepAll())  # three copies of 2 * 2 slots
    assert [group.size for group in groups] == [12 + 60] * (len(groups) - 1) + [groups[-1].size]
    assert groups[-1].visible is None, "one-to-many"
    for group in groups[:-1]:
        visible = group.visible
        assert visible is not None
        assert visible[:12, :12].sum() == 3 * 4 * 2, "a denoising copy sees itself alone, and no slot that nobody uses"
        assert not visible[:, 1:12:2].any() and visible[:4, [0, 2]].all()
        assert visible[:12, 12:].all() and not visible[12:, :12].any()


class _KeepAll:
    def attention_keep(self, group: int, num_queries: int, mask_ratio: float, device: torch.device) -> Tensor:
        return torch.ones(num_queries, num_queries, dtype=torch.bool)


def test_noise_masks_hide_the_stated_share_and_spare_group_0() -> None:
    from rtdetr.models.denoising import Draws

    torch.manual_seed(3)
    first, second, *_ = nano().query_groups._groups(1, 2, torch.ones(1, dtype=torch.bool), Draws())
    assert first.visible is not None and second.visible is not None
    assert first.visible[2:62, 2:62].all()
    noisy = second.visible[2:62, 2:62].float()
    assert 0.87 < noisy.mean() < 0.93
    assert noisy.diagonal().mean() < 1, "a query may lose sight of itself"


def test_eval_uses_neither_groups_nor_dense_head() -> None:
    model, images = nano().eval(), torch.rand(1, 3, 128, 128)
    with torch.no_grad():
        before = model(images)
        for part in (model.query_groups, model.dense_head):
            for parameter in part.parameters():
                parameter.fill_(float("nan"))
        after = model(images)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.boxes, after.boxes)


def test_train_mode_without_targets_says_so() -> None:
    with pytest.raises(ValueError, match=message("needs", "targets", "ground truth")):
        nano().train()(torch.rand(1, 3, 64, 64))


@pytest.mark.parametrize("train", [True, False])
def test_images_with_fewer_cells_than_queries_are_refused(train: bool) -> None:
    with pytest.raises(ValueError, match=message("expected", "60 queries", 21)):
        nano().train(train)(torch.rand(2, 3, 32, 32), targets_of(2, 1) if train else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_float_types_run_in_eval(dtype: torch.dtype) -> None:
    model = nano().eval().to(dtype)
    with torch.no_grad():
        predictions = model(torch.rand(1, 3, 96, 96, dtype=dtype))
    assert torch.isfinite(predictions.boxes.float()).all()
    if dtype == torch.float64:
        assert predictions.boxes.dtype == predictions.logits.dtype == torch.float64


def test_position_code_is_row_then_column_on_rectangles() -> None:
    code = position_code(2, 3, 8, torch.zeros((), dtype=torch.float64))
    rows, columns = np.divmod(np.arange(6), 3)
    np.testing.assert_allclose(code[:, 0], np.sin(rows), atol=1e-15)
    np.testing.assert_allclose(code[:, 4], np.sin(columns), atol=1e-15)
    np.testing.assert_allclose(code[:, 7], np.cos(columns * 10000**-0.5), atol=1e-15)


def test_anchors_sit_on_their_cells_on_rectangles() -> None:
    logits, valid = make_anchors(((4, 8),), torch.zeros((), dtype=torch.float64))
    boxes = logits.sigmoid()
    assert valid.all()
    torch.testing.assert_close(boxes[8 * 1 + 5, :2], torch.tensor([5.5 / 8, 1.5 / 4], dtype=torch.float64))
    border, ok = make_anchors(((80, 80),), torch.zeros(()))
    assert int((~ok).sum()) == 316 and (border[~ok.squeeze()] == BORDER_LOGIT).all()


def test_postprocess_ranks_pairs_and_scales_to_pixels() -> None:
    logits = torch.tensor([[[3.0, -9.0], [1.0, 2.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.25, 0.5, 0.5, 1.0]]])
    found = postprocess(Predictions(logits, boxes), torch.tensor([[100, 200]]), max_detections=3)
    assert found.labels.tolist() == [[0, 1, 0]]
    torch.testing.assert_close(found.scores[0], torch.tensor([3.0, 2.0, 1.0]).sigmoid())
    torch.testing.assert_close(found.boxes[0, :2], torch.tensor([[80.0, 30, 120, 70], [0, 0, 100, 100]]))


def test_unknown_depth_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected one of .*, got 19"):
        build_model(ModelConfig(backbone=dataclasses.replace(NANO.backbone, depth=19)), 3)


def test_frozen_parts_stay() -> None:
    cfg = dataclasses.replace(NANO, backbone=dataclasses.replace(NANO.backbone, norm="frozen", freeze_stages=1))
    model = build_model(cfg, 5)
    before = {k: v.clone() for k, v in model.backbone.state_dict().items() if "norm" in k}
    train_step(model, targets_of(1, 1))
    after = model.backbone.state_dict()
    assert before and all(torch.equal(v, after[k]) for k, v in before.items())
    assert not any(p.requires_grad for p in model.backbone.stem.parameters())


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize("norm", ["train", "frozen", "frozen_affine"])
def test_deep_blocks_start_as_their_shortcuts_where_they_can_learn(
    depth: Depth, norm: Literal["train", "frozen", "frozen_affine"]
) -> None:
    cfg = dataclasses.replace(NANO.backbone, depth=depth, norm=norm)
    backbone = build_backbone(cfg).train()
    for stage in backbone.stages:
        x = torch.rand(2, stage[0].conv1.conv.in_channels, 8, 8)
        for block in stage:
            assert torch.equal(block(x), F.relu(block.shortcut(x))) == (norm == "train" and depth == 50)
            x = block(x)
    if norm == "train" and depth == 50:
        torch.stack([m.square().sum() for m in backbone(torch.rand(2, 3, 64, 64))]).sum().backward()
        assert all(block.get_parameter(block.last_norm).grad.any() for stage in backbone.stages for block in stage)


def test_look_forward_twice_reaches_the_previous_head() -> None:
    model = nano(num_noise_groups=0, num_one_to_many_queries=0, num_denoising=0, dense_head=False)
    with torch.no_grad():  # heads start at zero, which would hide the path
        for parameter in model.decoder.box_heads.parameters():
            parameter.normal_(std=0.1)
    outputs = train_step(model, targets_of(1, 1))
    outputs.one_to_one.boxes[-1].sum().backward()
    grad = model.decoder.box_heads[1].layers[0].weight.grad
    assert grad is not None and grad.abs().sum() > 0
    first = model.decoder.box_heads[0].layers[0].weight.grad
    assert first is None or first.abs().sum() == 0, "twice, not thrice"


def test_denoising_teaches_embedding_decoder_and_encoder() -> None:
    model = nano()
    denoising = train_step(model, targets_of(2, 1)).denoising
    assert denoising is not None and denoising.logits.requires_grad
    (denoising.logits.square().mean() + denoising.boxes.mean()).backward()
    embedding = model.query_groups.label_embedding
    assert embedding is not None
    for part in (embedding, model.decoder.layers[0], model.encoder):
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in part.parameters()), part


def test_query_groups_without_selectors_have_no_idle_parameters() -> None:
    groups = nano(num_noise_groups=0, num_one_to_many_queries=0).query_groups
    assert isinstance(groups, QueryGroups) and groups.memory_proj is None


@pytest.mark.gpu
@pytest.mark.parametrize("autocast", [False, True])
def test_eval_forward_never_waits_for_the_device(autocast: bool) -> None:
    model, images = nano().eval().cuda(), torch.rand(2, 3, 96, 160, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        expected = model(images)  # the first call may load libraries, which waits
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = model(images)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(found.boxes, expected.boxes)


@pytest.mark.gpu
def test_eval_forward_can_be_captured_in_a_cuda_graph() -> None:
    model, images = nano().eval().cuda(), torch.rand(2, 3, 128, 128, device="cuda")
    with torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = model(images)
        images.copy_(torch.rand_like(images))
        graph.replay()
        expected = model(images)
    torch.testing.assert_close(captured.boxes, expected.boxes, atol=1e-5, rtol=1e-4)


@pytest.mark.gpu
def test_half_precision_model_runs_on_the_gpu() -> None:
    model = nano().eval().cuda().half()
    with torch.no_grad():
        predictions = model(torch.rand(1, 3, 128, 128, device="cuda", dtype=torch.float16))
    assert torch.isfinite(predictions.boxes).all() and torch.isfinite(predictions.logits).all()


def test_frozen_batch_norm_is_that_of_torchvision() -> None:
    ours, theirs, trained = FrozenBatchNorm2d(5), torchvision.ops.FrozenBatchNorm2d(5), nn.BatchNorm2d(5)
    for values in (trained.weight, trained.bias, trained.running_mean, trained.running_var):
        nn.init.uniform_(values, 0.3, 2.0)
    for each in (ours, theirs):
        each.load_state_dict(trained.state_dict())
    assert list(ours.state_dict()) == list(theirs.state_dict())
    x = torch.randn(2, 5, 4, 3)
    assert torch.equal(ours(x), theirs(x))


def test_recomputed_layers_give_the_same_gradients_from_less_memory() -> None:
    kept, gradients = [], []
    for recompute in (False, True):
        model = nano()
        model.decoder.recompute = recompute
        sizes: list[int] = []

        def keep(x: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(x.numel())
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            outputs = train_step(model, targets_of(3, 2))
        loss = outputs.one_to_one.logits.square().mean() + outputs.one_to_one.boxes.mean()
        loss.backward()
        kept.append(sum(sizes))
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert kept[1] < 0.9 * kept[0]
    assert gradients[0].keys() == gradients[1].keys()
    for name, wanted in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], wanted)


def test_one_convolution_averages_and_projects() -> None:
    shortcut, x = Shortcut(4, 8, 2, "train").double(), torch.randn(2, 4, 8, 6, dtype=torch.float64)
    weight, gradients = shortcut.project.conv.weight, []
    wanted, found = shortcut.project.conv(F.avg_pool2d(x, 2)), project_averages(x, weight)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    for each in (wanted, found):
        gradients += torch.autograd.grad(each.square().sum(), weight)
    torch.testing.assert_close(*gradients, atol=1e-9, rtol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(8, 6), (7, 6), (5, 5)])
def test_a_shortcut_averages_and_projects(size: tuple[int, int]) -> None:
    shortcut, x = Shortcut(4, 8, 2, "train").double().cuda(), torch.randn(2, 4, *size, dtype=torch.float64).cuda()
    wanted = shortcut.project(F.avg_pool2d(x, 2, 2, ceil_mode=True))
    torch.testing.assert_close(shortcut(x), wanted, atol=1e-12, rtol=1e-12)


def test_weights_of_each_image_do_what_scaled_maps_do() -> None:
    conv = nn.Conv2d(6, 4, 1, bias=False).double()
    x, scale = (torch.randn(3, 6, *size, dtype=torch.float64, requires_grad=True) for size in ((5, 7), (1, 1)))
    x = x.contiguous(memory_format=torch.channels_last)
    wanted, found = conv(x * scale), project_scaled(x, scale, conv.weight)
    assert found.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-12)
    inputs = (x, scale, conv.weight)
    gradients = [torch.autograd.grad(each.square().sum(), inputs) for each in (wanted, found)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-10)


@pytest.mark.gpu
def test_squeeze_excite_on_a_gpu_is_that_of_a_processor() -> None:
    stem, x = EffectiveSqueezeExcite(8).double(), torch.randn(2, 8, 6, 5, dtype=torch.float64)
    wanted = stem(x)
    torch.testing.assert_close(stem.cuda()(x.cuda()).cpu(), wanted, atol=1e-12, rtol=1e-12)
