"""Single parts against the official ones: anchors, position codes, denoising, losses, matcher, post-process.

The deformable attention op has its own file, test_ops.py.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
from golden_formulas import Array
from parity import Checks, StoredDraws, deviation, golden_file
from tolerances import COMPONENTS
from torch import Tensor

from rtdetr.boxes import giou, iou
from rtdetr.config import LossConfig, SupervisionConfig
from rtdetr.losses.assigners import assign_atss
from rtdetr.losses.criterion import Criterion, denoising_index
from rtdetr.losses.functional import varifocal_loss
from rtdetr.losses.matcher import match_together
from rtdetr.models.decoder import make_anchors
from rtdetr.models.denoising import noise_targets
from rtdetr.models.dense_head import cell_centres
from rtdetr.models.layers import position_code
from rtdetr.models.postprocess import postprocess
from rtdetr.models.query_groups import QueryGroups
from rtdetr.types import DenoisingOutputs, Predictions, QueryOutputs, Targets, TrainingOutputs

DENOISING_CASES = ("3_7", "5_0", "120_2", "1_1")


@lru_cache
def components() -> dict[str, Array]:
    return dict(np.load(golden_file("components.npz")))


def tensor(key: str) -> Tensor:
    return torch.from_numpy(components()[key])


def checks(where: str) -> Checks:
    return Checks("components", where, COMPONENTS)


def match(outputs: QueryOutputs, targets: Targets, cfg: LossConfig, repeats: int = 1) -> Tensor:
    return match_together([(outputs, repeats)], targets, cfg)[0][0]


class TestGeometry:
    @pytest.mark.parametrize(("height", "width"), [(640, 640), (512, 640), (640, 512)])
    def test_anchors(self, height: int, width: int) -> None:
        """O1: the official rectangles divide x by the height. Border cells are +inf there and large here (O9)."""
        key = "sq640" if height == width else f"rect{height}x{width}"
        shapes = tuple((height // stride, width // stride) for stride in (8, 16, 32))
        logits, valid = make_anchors(shapes, torch.zeros(1), official_rectangles=height != width)
        golden, golden_valid = components()[f"anchors/{key}.logit"][0], components()[f"anchors/{key}.valid"][0]
        assert np.array_equal(valid.numpy(), golden_valid)
        border = ~golden_valid[:, 0]
        assert np.isinf(golden[border]).all() and bool((logits[torch.from_numpy(border)].sigmoid() == 1).all())
        check = checks(f"anchors {key}")
        check.near("anchors", deviation(logits.numpy()[~border], golden[~border]))
        check.done()

    @pytest.mark.parametrize(("height", "width"), [(16, 20), (20, 20)])
    def test_position_codes(self, height: int, width: int) -> None:
        """O2: on a rectangle the official code is not that of the pixel."""
        check = checks(f"position code {height}x{width}")
        code = position_code(height, width, 256, torch.zeros(1), official_rectangles=height != width)
        check.near("position codes", deviation(code, components()[f"pos_embed/w{width}_h{height}"][0]))
        check.done()

    def test_rectangles_are_right_by_default(self) -> None:
        """The other side of O1 and O2: by default a cell's anchor and code are those of its own place."""
        logits, _ = make_anchors(((4, 8),), torch.zeros(1, dtype=torch.float64))
        boxes = logits.sigmoid().unflatten(0, (4, 8))
        assert torch.allclose(boxes[1, 6, :2], torch.tensor([6.5 / 8, 1.5 / 4], dtype=torch.float64))
        code = position_code(4, 8, 8, torch.zeros(1, dtype=torch.float64)).unflatten(0, (4, 8))
        assert torch.allclose(code[3, 5, [0, 4]].asin().sin(), torch.tensor([3.0, 5.0], dtype=torch.float64).sin())


class TestDenoising:
    @pytest.mark.parametrize("case", DENOISING_CASES)
    def test_queries_and_masks(self, case: str) -> None:
        arrays = {k.split(".", 1)[1]: v for k, v in components().items() if k.startswith(f"dn/{case}.")}
        targets = self.targets(arrays)
        draws = StoredDraws([{k.removeprefix("draw_"): v for k, v in arrays.items() if k.startswith("draw_")}])
        noised = noise_targets(
            targets,
            draws,
            num_groups=1,
            num_classes=80,
            num_denoising=100,
        )
        copies, num_dn, num_queries = (int(n) for n in arrays["num_group_split"])
        assert (noised.num_copies, noised.labels.shape[2]) == (copies, num_dn)
        check = checks(f"denoising {case}")
        table = torch.cat((tensor("dn.class_embed"), torch.zeros(1, 4)))
        check.near("denoising", deviation(table[noised.labels[0]], arrays["query_embed"]), "content")
        # compared as boxes: the logit of a corner that was clipped to the border amplifies the last bit of its box
        check.near(
            "denoising",
            deviation(noised.box_logits[0].sigmoid(), torch.from_numpy(arrays["box_unact"]).double().sigmoid()),
            "boxes",
        )
        check.near("denoising", deviation(noised.box_logits[0], arrays["box_unact"]) / 10, "box logits over 10")
        check.done()
        self.compare_positives(noised.num_copies, num_dn, targets, arrays)
        groups = QueryGroups(SupervisionConfig(num_noise_groups=0, num_one_to_many_queries=0), 4, 80, num_queries)
        (only,) = groups._groups(copies, num_dn, targets.mask.any(0), draws)
        assert only.visible is not None
        size = int(arrays["attn_mask_shape"][0])
        golden = np.unpackbits(arrays["attn_mask_bits"])[: size * size].reshape(size, size).astype(bool)
        assert np.array_equal(only.visible.numpy(), golden)

    def targets(self, arrays: dict[str, Array]) -> Targets:
        labels = [torch.from_numpy(arrays[f"gt_class{i}"].astype(np.int64)).flatten() for i in range(2)]
        boxes = [torch.from_numpy(arrays[f"gt_box{i}"]) for i in range(2)]
        return Targets.stack(labels, boxes, boxes)

    def compare_positives(self, copies: int, num_dn: int, targets: Targets, arrays: dict[str, Array]) -> None:
        logits = torch.zeros(1, 1, 2, num_dn, 80)
        index = denoising_index(DenoisingOutputs(logits, logits[..., :4], copies), targets)
        for i in range(2):
            positive = (index[i] >= 0).nonzero().flatten()
            assert positive.tolist() == arrays[f"positive_index{i}"].tolist()
            count = targets.counts[i]
            assert index[i][positive].tolist() == [j % count for j in range(len(positive))]


class TestLosses:
    def test_varifocal_and_its_gradient(self) -> None:
        logits = tensor("vfl/logit").requires_grad_()
        positive = tensor("vfl/label").bool()
        scores = (tensor("vfl/score") * positive).sum(-1)
        loss = varifocal_loss(logits, positive.int().argmax(-1), scores, positive.any(-1))
        # the official function takes the mean over queries, sums the rest and divides by `normalizer`
        total = loss.mean(1).sum() / float(components()["vfl/normalizer"])
        total.backward()
        check = checks("varifocal")
        check.near("varifocal", abs(float(total.detach()) - float(components()["vfl/loss"])))
        check.near("varifocal", deviation(logits.grad, components()["vfl/grad_logit"]), "gradient")
        check.done()

    def test_giou_and_its_gradient(self) -> None:
        boxes = tensor("giou/box1").requires_grad_()
        loss = 1 - giou(boxes, tensor("giou/box2"))
        loss.sum().backward()
        check = checks("giou")
        check.near("giou", deviation(loss, components()["giou/loss"][:, 0]))
        check.near("giou", deviation(boxes.grad, components()["giou/grad_box1"]), "gradient")
        overlap = iou(tensor("giou/box1"), tensor("giou/box2"))
        check.near("giou", deviation(overlap, components()["giou/iou"][:, 0]) / 1e4, "iou over 1e4: other eps")
        check.done()

    def test_matcher(self) -> None:
        labels = [tensor(f"match/gt_class{i}").flatten() for i in range(2)]
        boxes = [tensor(f"match/gt_box{i}") for i in range(2)]
        targets = Targets.stack(labels, boxes, boxes)
        outputs = QueryOutputs(tensor("match/logit")[None, None], tensor("match/box")[None, None])
        found = match(outputs, targets, LossConfig())[0, 0]
        for i in range(2):
            query = (found[i] >= 0).nonzero().flatten()
            golden = components()[f"match/pair{i}"]
            assert sorted(zip(query.tolist(), found[i][query].tolist())) == sorted(zip(*golden.tolist()))

    def test_postprocess(self) -> None:
        sizes = torch.from_numpy(np.floor(640 / components()["post/scale_factor"] + 0.5))
        found = postprocess(Predictions(tensor("match/logit"), tensor("match/box")), sizes, max_detections=7)
        golden = components()["post/bbox"].reshape(2, 7, 6)
        assert np.array_equal(found.labels.numpy(), golden[..., 0])
        check = checks("postprocess")
        check.near("postprocess", deviation(found.scores, golden[..., 1]), "scores")
        check.near("postprocess", deviation(found.boxes, golden[..., 2:]), "boxes")
        check.done()


def test_copies_without_a_query_still_count() -> None:
    """O12: with more copies than one-to-many queries the rest goes unmatched, yet the losses are divided by all."""
    generator = torch.Generator().manual_seed(0)
    count, num_queries = 7, 20

    def boxes(*shape: int) -> Tensor:
        return 0.1 + 0.4 * torch.rand(*shape, 4, generator=generator, dtype=torch.float64)

    wanted = boxes(count)
    targets = Targets.stack([torch.zeros(count, dtype=torch.int64)], [wanted], [wanted])
    logits = torch.zeros(2, 1, 1, num_queries, 3, dtype=torch.float64)
    main, many = QueryOutputs(logits, boxes(2, 1, 1, num_queries)), QueryOutputs(logits, boxes(2, 1, 1, num_queries))
    losses = Criterion(LossConfig(), 3, 4)(TrainingOutputs(main, many, None, None), targets, 0)
    index = match(many, targets, LossConfig(), repeats=4)
    assert bool((index >= 0).all()), "every query is taken, so 28 - 20 copies are left"
    distance = (many.boxes - wanted[index]).abs().sum((1, 2, 3, 4))
    assert float(losses["loss_bbox_o2m_branch"]) == pytest.approx(5 * float(distance[1]) / (4 * count), rel=1e-12)


def test_atss_threshold_is_mean_plus_unbiased_deviation() -> None:
    """ATSS by a plain loop over boxes, on boxes among which the biased deviation would decide otherwise for some."""
    strides = (8, 16, 32)
    centres = [cell_centres(256 // s, 256 // s, s, torch.zeros(1, dtype=torch.float64)) for s in strides]
    points, cells = torch.cat(centres), tuple(len(each) for each in centres)
    sizes = torch.cat([torch.full((n, 1), float(s), dtype=torch.float64) for n, s in zip(cells, strides)])
    generator = torch.Generator().manual_seed(0)
    low = 140 * torch.rand(60, 2, generator=generator, dtype=torch.float64)
    boxes = torch.cat((low, low + 20 + 90 * torch.rand(60, 2, generator=generator, dtype=torch.float64)), dim=1)
    targets = Targets.stack([torch.zeros(1, dtype=torch.int64)] * 60, list(boxes[:, None]), list(boxes[:, None]))
    found = assign_atss(points, sizes, cells, torch.rand(60, len(points), 4, generator=generator).double(), targets)
    would_differ = 0
    for box, positive in zip(boxes.numpy(), found.positive.numpy()):
        unbiased, biased = (naive_atss(box, points.numpy(), sizes.numpy()[:, 0], cells, ddof) for ddof in (1, 0))
        assert np.array_equal(positive, unbiased)
        would_differ += not np.array_equal(unbiased, biased)
    assert would_differ >= 3


def naive_atss(box: Array, points: Array, strides: Array, cells: tuple[int, ...], ddof: int) -> Array:
    """Positive cells (A,) bool of one box xyxy, pixels: written from the description, sharing no code with ours."""
    candidates, overlaps, first = [], [], 0
    middle = (box[:2] + box[2:]) / 2
    for count in cells:
        distance = [math.dist(middle, points[a]) for a in range(first, first + count)]
        candidates += [first + int(a) for a in np.argsort(distance, kind="stable")[:9]]
        first += count
    for a in candidates:
        half = 2.5 * strides[a]
        width = min(box[2], points[a][0] + half) - max(box[0], points[a][0] - half)
        height = min(box[3], points[a][1] + half) - max(box[1], points[a][1] - half)
        overlap = max(width, 0) * max(height, 0)
        overlaps.append(overlap / ((box[2] - box[0]) * (box[3] - box[1]) + 4 * half**2 - overlap + 1e-9))
    threshold = np.mean(overlaps) + np.std(overlaps, ddof=ddof)
    positive = np.zeros(len(points), bool)
    for a, overlap in zip(candidates, overlaps):
        inside = min(points[a][0] - box[0], points[a][1] - box[1], box[2] - points[a][0], box[3] - points[a][1])
        positive[a] = overlap > threshold and inside > 1e-9
    return positive
