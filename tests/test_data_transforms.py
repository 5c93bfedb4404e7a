"""Augmentation: wherever a marked rectangle goes, its box must go too, and the drawn parameters obey the rules."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data import transforms as T

MARK = (255, 0, 255)


def marked_picture(box: tuple[int, int, int, int], size: tuple[int, int] = (120, 80)) -> Image.Image:
    """A grey picture (width, height) with one magenta rectangle."""
    pixels = np.full((size[1], size[0], 3), 40, np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = MARK
    return Image.fromarray(pixels)


def where_marked(pixels: NDArray[np.uint8]) -> list[int]:
    """xyxy of the pixels that are more magenta than grey."""
    far = np.abs(pixels.astype(int) - MARK).sum(axis=-1) < 250
    rows, columns = np.flatnonzero(far.any(axis=1)), np.flatnonzero(far.any(axis=0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


def one_box(*box: float) -> tuple[T.Boxes, T.Labels]:
    return np.array([box], np.float32), np.array([4])


@pytest.mark.parametrize(
    "window",
    [
        T.Window(0, 0, 120, 80),
        T.Window(20, 10, 60, 50),  # all of the rectangle
        T.Window(40, 20, 30, 30),  # cuts it on the left and at the top
        T.Window(-25, -31, 240, 160),  # expanded
        T.Window(-10, 20, 90, 100),  # beyond the left and the lower border
        T.Window(100, -5, 40, 200),  # beyond the right border
    ],
)
def test_cut_moves_pixels_and_boxes_alike(window: T.Window) -> None:
    box = (30, 15, 110, 44)
    image, boxes = T.cut(marked_picture(box), one_box(*box)[0], window)
    assert image.size == (window.width, window.height)
    assert boxes.tolist() == [where_marked(np.asarray(image))]


def test_cut_fills_with_the_mean_colour() -> None:
    pixels = np.asarray(T.cut(marked_picture((0, 0, 5, 5)), one_box(0, 0, 5, 5)[0], T.Window(-3, -2, 130, 90))[0])
    outside = np.ones(pixels.shape[:2], bool)
    outside[2:82, 3:123] = False
    assert (pixels[outside] == T.FILL).all() and not (pixels[~outside] == T.FILL).all(axis=-1).any()


def test_flip() -> None:
    box = (30, 15, 110, 44)
    image, boxes = T.flip(marked_picture(box), one_box(*box)[0])
    assert boxes.tolist() == [[10, 15, 90, 44]] == [where_marked(np.asarray(image))]


@pytest.mark.parametrize("interpolation", list(T.INTERPOLATIONS))
@pytest.mark.parametrize("size", [(160, 160), (64, 96)])
def test_resize_moves_pixels_and_boxes_alike(interpolation: str, size: tuple[int, int]) -> None:
    box = (30, 20, 90, 60)
    image, boxes, labels = T.resize(marked_picture(box), *one_box(*box), size, interpolation)
    assert image.shape == (3, *size) and image.dtype == boxes.dtype and labels.tolist() == [4]
    assert image.min() >= 0 and 0.99 < image.max() <= 1
    found = where_marked((image.permute(1, 2, 0).numpy() * 255).round().astype(np.uint8))
    expected = np.array(box) * np.tile([size[1] / 120, size[0] / 80], 2)
    np.testing.assert_allclose(boxes.numpy()[0], expected, rtol=1e-6)
    np.testing.assert_allclose(found, expected, atol=1.01)


def test_the_five_interpolations_are_five() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8))
    empty = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)
    results = {name: T.resize(noise, *empty, (32, 32), name)[0] for name in T.INTERPOLATIONS}
    names = list(results)
    assert not any((results[a] == results[b]).all() for i, a in enumerate(names) for b in names[:i])
    plain = cv2.resize(np.asarray(noise), (32, 32), interpolation=cv2.INTER_LANCZOS4)
    np.testing.assert_allclose(results["lanczos"].permute(1, 2, 0).numpy() * 255, plain, atol=1e-4)


def test_resize_drops_boxes_that_vanish() -> None:
    boxes = np.array([[0, 0, 60, 40], [10, 10, 10.01, 30]], np.float32)
    _, kept, labels = T.resize(marked_picture((0, 0, 9, 9)), boxes, np.array([1, 2]), (32, 32), "linear")
    assert kept.tolist() == [[0, 0, 16, 16]] and labels.tolist() == [1]


def test_expand_keeps_the_old_window_inside() -> None:
    ratios = []
    for i in range(300):
        left, top, width, height = T.expand(T.Window(0, 0, 120, 80), 4.0, np.random.default_rng(i))
        assert left <= 0 and top <= 0 and left + width >= 120 and top + height >= 80
        assert abs(width / 120 - height / 80) < 0.02  # one ratio for both sides
        ratios.append(width / 120)
    assert 1 <= min(ratios) < 1.1 and 3.9 < max(ratios) <= 4 and 2.3 < np.mean(ratios) < 2.7


def test_crop_obeys_its_rule() -> None:
    boxes = np.array([[10, 10, 60, 50], [70, 30, 115, 75]], np.float32)
    window = T.Window(-30, -20, 200, 150)
    best, unchanged = [], 0
    for i in range(400):
        tried = T.crop(window, boxes, np.random.default_rng(i))
        if tried == window:
            unchanged += 1
            continue
        assert tried.left >= -30 and tried.top >= -20
        assert tried.left + tried.width <= 170 and tried.top + tried.height <= 130
        assert 0.25 < tried.width / tried.height * 150 / 200 < 2.1
        assert tried.width / 200 >= 0.2 and tried.height / 150 >= 0.2
        assert T.inside(tried, boxes).any()
        best.append(T._best_iou(tried, boxes))
    # "no crop" is one of seven; 0.9 and 0.7 almost never succeed within 50 tries and hand on to the next threshold
    assert 20 < unchanged < 120
    assert min(best) < 0.1 and max(best) > 0.5


@pytest.mark.parametrize("threshold", [0.3, 0.5])
def test_crop_reaches_its_threshold(threshold: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(T, "CROP_THRESHOLDS", (threshold,))
    boxes = np.array([[10, 10, 60, 50], [70, 30, 115, 75]], np.float32)
    window = T.Window(0, 0, 120, 80)
    tried = [T.crop(window, boxes, np.random.default_rng(i)) for i in range(60)]
    reached = [T._best_iou(each, boxes) for each in tried if each != window]
    assert len(reached) > 10 and min(reached) >= threshold


def test_crop_leaves_a_picture_without_boxes() -> None:
    window = T.Window(0, 0, 120, 80)
    assert all(T.crop(window, np.zeros((0, 4), np.float32), np.random.default_rng(i)) == window for i in range(20))


def test_best_iou_by_hand() -> None:
    boxes = np.array([[0, 0, 10, 10], [5, 5, 15, 25]], np.float32)
    assert T._best_iou(T.Window(5, 5, 10, 10), boxes) == pytest.approx(100 / 200)


def test_distort_changes_colours_within_limits() -> None:
    picture = marked_picture((10, 10, 60, 60))
    changed = [np.asarray(T.distort(picture, np.random.default_rng(i))) for i in range(64)]
    same = sum((each == np.asarray(picture)).all() for each in changed)
    assert 0 < same < 16  # all four steps stay out once in 16
    levels = [each[70, 100].mean() for each in changed]  # grey of 40: brightness alone gives 20 to 60
    assert min(levels) < 35 < 45 < max(levels)


def test_whole_augmentation_keeps_boxes_on_their_pixels() -> None:
    """Colour off; everything else on: the box must stay the rectangle, or go with its centre."""
    augmentation = T.Augmentation(0.0, 0.5, 4.0, 0.8, 0.5)
    sizes = set()
    for i in range(200):
        box = (30, 15, 110, 44)
        image, boxes, labels = augmentation(marked_picture(box), *one_box(*box), np.random.default_rng(i))
        sizes.add(image.size)
        assert boxes.tolist() == [where_marked(np.asarray(image))] and labels.tolist() == [4]
    assert len(sizes) > 100


def test_boxes_with_their_centre_outside_go() -> None:
    image = marked_picture((0, 0, 20, 20))
    boxes = np.array([[0, 0, 20, 20], [70, 40, 110, 76]], np.float32)
    augmentation = T.Augmentation(0.0, 0.0, 4.0, 1.0, 0.0)
    seen = set()
    for i in range(200):
        _, kept, labels = augmentation(image, boxes, np.array([0, 1]), np.random.default_rng(i))
        assert len(kept) == len(labels) >= 1 and (kept[:, 2:] > kept[:, :2]).all()
        seen.add(tuple(labels.tolist()))
    assert seen == {(0,), (1,), (0, 1)}


def test_probabilities_zero_change_nothing() -> None:
    picture = marked_picture((30, 15, 110, 44))
    image, boxes, _ = T.Augmentation(0, 0, 4.0, 0, 0)(picture, *one_box(30, 15, 110, 44), np.random.default_rng(0))
    assert (np.asarray(image) == np.asarray(picture)).all() and boxes.tolist() == [[30, 15, 110, 44]]
