"""rtdetr.losses.functional against golden numbers of the official code and against definitions written out."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from golden_files import golden_dir

from rtdetr.boxes import giou, iou
from rtdetr.losses import functional


def _golden(name: str) -> torch.Tensor:
    return torch.from_numpy(np.load(golden_dir() / "components.npz")[name])


def _plain(logits: torch.Tensor, scores: torch.Tensor, positive: torch.Tensor, bounded: bool) -> torch.Tensor:
    """Varifocal loss of every class. scores: 0 where not positive; bounded: logarithms of probabilities end at -100."""
    p = logits.sigmoid()
    if bounded:  # with finite gradients where a logarithm ends
        found, missed = (torch.where(x == 0, -100.0, x.where(x > 0, 1.0).log().clamp(min=-100.0)) for x in (p, 1 - p))
    else:
        found, missed = F.logsigmoid(logits), F.logsigmoid(-logits)
    return torch.where(positive, scores, 0.75 * p.pow(2)) * -(scores * found + (1 - scores) * missed)


def test_varifocal_equals_official_value_and_gradient() -> None:
    logits = _golden("vfl/logit").requires_grad_()
    hit, score, normalizer = _golden("vfl/label").bool(), _golden("vfl/score"), _golden("vfl/normalizer")
    matches = (hit.int().argmax(-1), (score * hit).sum(-1), hit.any(-1))
    # The official function averages over the queries of an image, sums the rest and divides by boxes per query.
    loss = functional.varifocal_loss(logits, *matches).mean(1).sum() / normalizer
    loss.backward()
    torch.testing.assert_close(loss, _golden("vfl/loss"), rtol=1e-13, atol=0)
    torch.testing.assert_close(logits.grad, _golden("vfl/grad_logit"), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("bounded", [False, True])
def test_varifocal_of_matches_is_varifocal_of_all_their_classes(bounded: bool) -> None:
    torch.manual_seed(3)
    logits = (4 * torch.randn(3, 2, 4, 6, 5, dtype=torch.float64)).requires_grad_()
    logits.data[0, 0] *= 60  # where logarithms end
    matched = torch.rand(logits.shape[:-1]) < 0.4
    labels, scores = torch.randint(5, matched.shape), torch.rand(matched.shape, dtype=torch.float64)
    is_class = matched[..., None] & (torch.arange(5) == labels[..., None])
    ours = functional.varifocal_loss(logits, labels, scores, matched, bounded)
    plain = _plain(logits, is_class * scores[..., None], is_class, bounded).sum(-1)
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-15)
    weight = torch.rand(ours.shape, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((weight * ours).sum(), logits)
    (expected,) = torch.autograd.grad((weight * plain).sum(), logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-15)


def test_varifocal_of_matches_at_the_ends() -> None:
    logits = torch.tensor([[-200.0, 30.0, 200.0, math.nan]]).unsqueeze(-1).requires_grad_()
    label, no = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.bool)
    loss = functional.varifocal_loss(logits, label, torch.zeros(1, 4), no)
    torch.testing.assert_close(loss[0, :3], torch.tensor([0.0, 22.5, 150.0]))
    loss[0, :3].sum().backward()
    assert loss[0, 3].isnan() and logits.grad is not None and logits.grad[0, :3].isfinite().all()


def test_bounded_varifocal_of_matches_at_the_ends() -> None:
    logits = torch.tensor([[-200.0, 30.0, 200.0, math.nan]]).unsqueeze(-1).requires_grad_()
    label, no = torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.bool)
    loss = functional.varifocal_loss(logits, label, torch.zeros(1, 4), no, True)
    torch.testing.assert_close(loss[0, :3], torch.tensor([0.0, 75.0, 75.0]))  # 0.75 * 1 * 100: the logarithm stops
    loss[0, :3].sum().backward()
    assert loss[0, 3].isnan() and logits.grad is not None and logits.grad[0, :3].isfinite().all()
    far = torch.tensor([[-70.0, -120.0]], dtype=torch.float64).unsqueeze(-1)
    missed = functional.varifocal_loss(far, label[:, :2], torch.ones_like(far[..., 0]), ~no[:, :2], True)
    torch.testing.assert_close(missed, torch.tensor([[70.0, 100.0]], dtype=torch.float64))


def test_giou_and_iou_equal_official_value_and_gradient() -> None:
    boxes = _golden("giou/box1").requires_grad_()
    others = _golden("giou/box2")
    loss = 1 - giou(boxes, others)
    torch.testing.assert_close(loss, _golden("giou/loss")[:, 0], rtol=1e-13, atol=0)
    torch.testing.assert_close(iou(boxes, others).detach(), _golden("giou/iou")[:, 0], rtol=1e-6, atol=1e-9)
    loss.sum().backward()
    torch.testing.assert_close(boxes.grad, _golden("giou/grad_box1"), rtol=1e-11, atol=1e-14)


def test_distribution_focal_loss_is_the_cross_entropy_of_two_bins() -> None:
    torch.manual_seed(1)
    logits = torch.randn(6, 17, dtype=torch.float64)
    target = torch.tensor([0.0, 0.25, 3.0, 7.6, 15.0, 15.99], dtype=torch.float64)
    soft = torch.zeros(6, 17, dtype=torch.float64)
    for i, value in enumerate(target.tolist()):
        soft[i, int(value)] = int(value) + 1 - value
        soft[i, int(value) + 1] = value - int(value)
    expected = F.cross_entropy(logits, soft, reduction="none")
    torch.testing.assert_close(functional.distribution_focal_loss(logits, target), expected, rtol=1e-13, atol=1e-15)


def test_focal_class_cost_equals_its_formula() -> None:
    for logit in (-9.0, -0.3, 0.0, 4.0):
        p = 1 / (1 + math.exp(-logit))
        expected = -0.25 * (1 - p) ** 2 * math.log(p + 1e-8) + 0.75 * p**2 * math.log(1 - p + 1e-8)
        ours = functional.focal_class_cost(torch.tensor(logit, dtype=torch.float64))
        assert float(ours) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_at_least_float32(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert functional.at_least_float32(torch.zeros(1, dtype=dtype)).dtype == expected


def test_mean_over_one_process_is_the_value() -> None:
    value = torch.tensor(3.0, requires_grad=True)
    mean = functional.mean_over_processes(value)
    assert float(mean) == 3.0 and not mean.requires_grad
