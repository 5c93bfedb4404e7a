"""Recipes: what is drawn follows the documented distribution, and boxes go where their pixels go."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from rtdetr.config import AugmentConfig
from rtdetr.data import transforms as T

# Seeds are fixed, so that a test either holds or not. With so small a p-value none of today's seeds is a lucky one.
UNLIKELY = 1e-3


def one_box(*box: float) -> tuple[T.Boxes, T.Labels]:
    return np.array([box], np.float32), np.array([4])


def recipe(window: T.Window, flip: bool = False) -> T.Recipe:
    return T.Recipe((), window, flip)


NOTHING = AugmentConfig(distort_prob=0.0, expand_prob=0.0, crop_prob=0.0, flip_prob=0.0)


def assert_shares(counted: Counter[object], expected: dict[object, float]) -> None:
    """chi-square of counts against shares."""
    assert set(counted) <= set(expected)
    total = sum(counted.values())
    observed = [counted[key] for key in expected]
    assert stats.chisquare(observed, [share * total for share in expected.values()]).pvalue > UNLIKELY


def assert_uniform(values: list[float], low: float, high: float) -> None:
    assert stats.kstest(values, stats.uniform(low, high - low).cdf).pvalue > UNLIKELY


class TestDistribution:
    """Against the official reader: probabilities .8, .5, .8 and .5; see docs/training.md."""

    def test_steps_and_their_probabilities(self) -> None:
        rng = np.random.default_rng(0)
        boxes, drawn = one_box(100, 100, 500, 400)[0], 4000
        recipes = [T.draw_recipe(AugmentConfig(), (480, 640), boxes, rng) for _ in range(drawn)]
        assert_shares(Counter(each.flip for each in recipes), {True: 0.5, False: 0.5})
        sizes = stats.binom(4, 0.5).pmf(range(5)) * 0.8  # each of four steps in half of the .8
        sizes[0] += 0.2
        assert_shares(Counter(len(each.colours) for each in recipes), dict(enumerate(sizes)))
        for colour, _ in T.COLOURS:
            has = Counter(colour in dict(each.colours) for each in recipes)
            assert_shares(has, {True: 0.4, False: 0.6})

    def test_colour_amounts(self) -> None:
        rng = np.random.default_rng(1)
        drawn = [step for _ in range(3000) for step in T.draw_colours(rng)]
        for colour, (low, high) in (*((name, (0.5, 1.5)) for name, _ in T.COLOURS[:3]), ("hue", (-18.0, 18.0))):
            assert_uniform([amount for name, amount in drawn if name == colour], low, high)

    def test_colours_come_in_any_order(self) -> None:
        rng = np.random.default_rng(2)
        full = [tuple(name for name, _ in colours) for colours in (T.draw_colours(rng) for _ in range(8000))]
        orders = Counter(each for each in full if len(each) == 4)
        assert len(orders) == 24
        assert_shares(orders, dict.fromkeys(orders, 1 / 24))

    def test_expand(self) -> None:
        rng = np.random.default_rng(3)
        windows = [T.expand(T.Window(0, 0, 640, 480), 4.0, rng) for _ in range(3000)]
        assert_uniform([each.width / 640 for each in windows], 1.0, 4.0)
        large = [each for each in windows if each.width > 900]  # where whole pixels do not show
        assert_uniform([-each.left / (each.width - 640) for each in large], 0.0, 1.0)
        assert_uniform([-each.top / (each.height - 480) for each in large], 0.0, 1.0)
        assert abs(np.corrcoef([-e.left / (e.width - 640) for e in large], [e.width for e in large])[0, 1]) < 0.05

    def test_expand_and_crop_and_their_probabilities(self) -> None:
        """Without boxes there are no crops, so the window tells expansion; "no crop" is one of seven."""
        rng = np.random.default_rng(4)
        empty = np.zeros((0, 4), np.float32)
        windows = [T.draw_recipe(AugmentConfig(), (480, 640), empty, rng).window for _ in range(3000)]
        assert_shares(Counter(each != (0, 0, 640, 480) for each in windows), {True: 0.5, False: 0.5})
        crops = replace(NOTHING, crop_prob=0.8)
        whole = one_box(0, 0, 640, 480)[0]  # every threshold up to .7 finds a crop at once
        windows = [T.draw_recipe(crops, (480, 640), whole, rng).window for _ in range(3000)]
        stays = Counter(each == (0, 0, 640, 480) for each in windows)
        # .9 succeeds within 50 tries nearly always here: a crop stays out in .2, and in 1/7 of the .8
        assert_shares(stays, {True: 0.2 + 0.8 / 7, False: 0.8 - 0.8 / 7})

    def test_crop_sides(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threshold 0 and a box whose centre is everywhere: the first try is taken, and shows the raw distribution."""
        monkeypatch.setattr(T, "CROP_THRESHOLDS", (0.0,))
        monkeypatch.setattr(T, "_fits", lambda *_: True)
        rng = np.random.default_rng(5)
        side = 100_000  # so large that whole pixels do not show
        drawn = [T.crop(T.Window(0, 0, side, side), one_box(0, 0, 9, 9)[0], rng) for _ in range(3000)]
        scales = [(each.width * each.height) ** 0.5 / side for each in drawn]
        assert_uniform(scales, 0.3, 1.0)
        low = np.maximum(0.5, np.square(scales))
        high = np.minimum(2.0, 1 / np.square(scales))
        aspects = [each.width / each.height for each in drawn]
        assert_uniform(((aspects - low) / (high - low)).tolist(), 0.0, 1.0)
        assert_uniform([each.left / (side - each.width) for each in drawn], 0.0, 1.0)
        assert_uniform([each.top / (side - each.height) for each in drawn], 0.0, 1.0)

    def test_crop_thresholds_come_in_any_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        first: list[float] = []
        monkeypatch.setattr(T, "_fits", lambda window, threshold, boxes: first.append(threshold) or True)
        rng = np.random.default_rng(6)
        window = T.Window(0, 0, 640, 480)
        for _ in range(3500):
            if T.crop(window, one_box(0, 0, 9, 9)[0], rng) == window:
                first.append(-1.0)  # no crop
        assert_shares(Counter(first), dict.fromkeys((-1.0, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9), 1 / 7))


def test_expand_keeps_the_old_window_inside() -> None:
    for i in range(300):
        left, top, width, height = T.expand(T.Window(0, 0, 120, 80), 4.0, np.random.default_rng(i))
        assert left <= 0 and top <= 0 and left + width >= 120 and top + height >= 80
        assert abs(width / 120 - height / 80) < 0.02  # one ratio for both sides


def ious(window: T.Window, boxes: T.Boxes) -> list[float]:
    """Pixel by pixel, of boxes with whole corners."""
    canvas = np.zeros((280, 280), bool)
    found = []
    for box in boxes.astype(int) + 100:
        own, other = canvas.copy(), canvas.copy()
        own[box[1] : box[3], box[0] : box[2]] = True
        left, top = window.left + 100, window.top + 100
        other[top : top + window.height, left : left + window.width] = True
        found.append((own & other).sum() / (own | other).sum())
    return found


BOXES = np.array([[10, 10, 60, 50], [70, 30, 115, 75]], np.float32)


def test_crop_obeys_its_rule() -> None:
    window = T.Window(-30, -20, 200, 150)
    best, unchanged = [], 0
    for i in range(400):
        tried = T.crop(window, BOXES, np.random.default_rng(i))
        if tried == window:
            unchanged += 1
            continue
        assert tried.left >= -30 and tried.top >= -20
        assert tried.left + tried.width <= 170 and tried.top + tried.height <= 130
        assert 0.25 < tried.width / tried.height * 150 / 200 < 2.1
        assert tried.width / 200 >= 0.2 and tried.height / 150 >= 0.2
        assert T.inside(tried, BOXES).any()
        best.append(max(ious(tried, BOXES)))
    # "no crop" is one of seven; 0.9 and 0.7 almost never succeed within 50 tries and hand on to the next threshold
    assert 20 < unchanged < 120
    assert min(best) < 0.1 and max(best) > 0.5


@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_crop_reaches_its_threshold(threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T, "CROP_THRESHOLDS", (threshold,))
    window = T.Window(0, 0, 120, 80)
    tried = [T.crop(window, BOXES, np.random.default_rng(i)) for i in range(60)]
    reached = [max(ious(each, BOXES)) for each in tried if each != window]
    assert len(reached) > 10 and min(reached) >= threshold


def test_crop_leaves_an_image_without_boxes() -> None:
    window = T.Window(0, 0, 120, 80)
    assert all(T.crop(window, np.zeros((0, 4), np.float32), np.random.default_rng(i)) == window for i in range(20))


def test_moving_boxes_by_hand() -> None:
    boxes, labels = np.array([[10, 20, 50, 60], [0, 0, 4, 4]], np.float32), np.array([1, 2])
    moved, kept = T.move_boxes(boxes, labels, recipe(T.Window(20, 10, 40, 80)), (160, 120))  # the second lies outside
    assert moved.tolist() == [[0, 20, 90, 100]] and kept.tolist() == [1]
    moved, _ = T.move_boxes(boxes, labels, recipe(T.Window(20, 10, 40, 80), flip=True), (160, 120))
    assert moved.tolist() == [[30, 20, 120, 100]]


def test_boxes_that_vanish_go() -> None:
    boxes = np.array([[0, 0, 60, 40], [10, 10, 10.01, 30]], np.float32)
    kept, labels = T.move_boxes(boxes, np.array([1, 2]), recipe(T.Window(0, 0, 120, 80)), (32, 32))
    assert kept.tolist() == [[0, 0, 16, 16]] and labels.tolist() == [1]


def test_boxes_with_their_centre_outside_go() -> None:
    boxes = np.array([[0, 0, 20, 20], [70, 40, 110, 76]], np.float32)
    crops = replace(NOTHING, crop_prob=1.0)
    seen = set()
    for i in range(200):
        drawn = T.draw_recipe(crops, (80, 120), boxes, np.random.default_rng(i))
        kept, labels = T.move_boxes(boxes, np.array([0, 1]), drawn, (64, 64))
        assert len(kept) == len(labels) >= 1 and (kept[:, 2:] > kept[:, :2]).all()
        seen.add(tuple(labels.tolist()))
    assert seen == {(0,), (1,), (0, 1)}


def test_probabilities_zero_change_nothing() -> None:
    drawn = T.draw_recipe(NOTHING, (80, 120), BOXES, np.random.default_rng(0))
    assert drawn == ((), (0, 0, 120, 80), False, 0)


def test_turns_and_their_probabilities() -> None:
    turning, rng = replace(NOTHING, turn_prob=0.6), np.random.default_rng(7)
    drawn = Counter(T.draw_recipe(turning, (80, 120), BOXES, rng).turns for _ in range(4000))
    assert_shares(drawn, {0: 0.4, 1: 0.2, 2: 0.2, 3: 0.2})


@pytest.mark.parametrize(("prob", "epoch"), [(0.0, 9), (1.0, 4)])
def test_what_does_not_turn_draws_nothing_for_it(prob: float, epoch: int) -> None:
    turning = replace(NOTHING, turn_prob=prob, turn_after=5)
    rng, expected = np.random.default_rng(8), np.random.default_rng(8)
    assert T.draw_recipe(turning, (80, 120), BOXES, rng, epoch).turns == 0
    for _ in range(4):  # the four other steps
        expected.random()
    assert rng.random() == expected.random()


def test_zoom_out_and_crops_come_in_over_the_ramp() -> None:
    """None in the first epoch, half of them in its middle; from its end on, and without one, all, of the same draws."""
    everywhere = T.Window(0, 0, 120, 80)

    def windows(epoch: int, ramp: int, expand: float = 0.0, crop: float = 0.0) -> list[T.Window]:
        zoom = replace(NOTHING, expand_prob=expand, expand_max_ratio=2.0, crop_prob=crop, zoom_ramp=ramp)
        rng = np.random.default_rng(9)
        return [T.draw_recipe(zoom, (80, 120), BOXES, rng, epoch).window for _ in range(2000)]

    assert set(windows(0, 10, 1.0, 1.0)) == {everywhere}
    for probs in ((1.0, 0.0), (0.0, 1.0)):
        kept = [windows(epoch, 10, *probs).count(everywhere) for epoch in (5, 10)]
        assert 2000 - kept[0] == pytest.approx((2000 - kept[1]) / 2, rel=0.1)
        assert windows(10, 10, *probs) == windows(99, 10, *probs) == windows(0, 0, *probs)


def test_turning_boxes_by_hand() -> None:
    boxes, size = np.array([[10, 20, 50, 60]], np.float32), (80, 120)
    assert [T.turn(boxes, turns, size).tolist()[0] for turns in range(5)] == [
        [10, 20, 50, 60],
        [20, 70, 60, 110],
        [70, 20, 110, 60],
        [20, 10, 60, 50],
        [10, 20, 50, 60],
    ]


def crop_by_the_book(window: T.Window, boxes: T.Boxes, rng: np.random.Generator) -> T.Window:
    """The rule in numpy, with the generator's own uniform()."""
    for i in rng.permutation(7):
        threshold = (0.0, 0.1, 0.3, 0.5, 0.7, 0.9, None)[i]
        if threshold is None:
            return window
        for _ in range(50):
            scale = rng.uniform(0.3, 1.0)
            aspect = rng.uniform(max(0.5, scale**2), min(2.0, scale**-2))
            width = max(1, int(window.width * scale * aspect**0.5))
            height = max(1, int(window.height * scale * aspect**-0.5))
            left = window.left + int(rng.integers(window.width - width, endpoint=True))
            top = window.top + int(rng.integers(window.height - height, endpoint=True))
            low, high = np.array([left, top]), np.array([left + width, top + height])
            shared = (np.minimum(boxes[:, 2:], high) - np.maximum(boxes[:, :2], low)).clip(min=0).prod(axis=1)
            union = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1) + width * height - shared
            tried = T.Window(left, top, width, height)
            if (shared / union).max() >= threshold and T.inside(tried, boxes).any():
                return tried
    return window


def test_crop_equals_its_plain_twin() -> None:
    for i in range(300):
        rng = np.random.default_rng(i)
        corners = rng.uniform(0, 300, (1 + i % 9, 2))
        boxes = np.concatenate((corners, corners + rng.uniform(1, 200, corners.shape)), axis=1).astype(np.float32)
        window = T.Window(-17, 0, 520, 480)
        ours, expected = np.random.default_rng(i), np.random.default_rng(i)
        assert T.crop(window, boxes, ours) == crop_by_the_book(window, boxes, expected)
        assert ours.random() == expected.random()  # both have drawn as often
