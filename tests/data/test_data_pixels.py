"""Pixels: both backends make the same image, and a marked rectangle stays under its box."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from rtdetr.config import AugmentConfig
from rtdetr.data import pixels as P
from rtdetr.data import transforms as T
from rtdetr.data.preprocess import SCALE, to_planes, to_tensor
from rtdetr.data.shapes import draw_image

MARK = (255, 0, 255)
WINDOWS = [
    T.Window(0, 0, 120, 80),
    T.Window(20, 10, 60, 50),  # all of the rectangle
    T.Window(40, 20, 30, 30),  # cuts it on the left and at the top
    T.Window(-25, -31, 240, 160),  # expanded
    T.Window(-200, -131, 480, 320),  # fourfold
    T.Window(-10, 20, 90, 100),  # beyond the left and the lower border
    T.Window(100, -5, 40, 200),  # beyond the right border
]
Apply = Callable[[np.ndarray, T.Recipe, tuple[int, int], str], np.ndarray]


def apply_plain(pixels: P.Pixels, recipe: T.Recipe, size: tuple[int, int], interpolation: str) -> P.Pixels:
    return P.plain(Image.fromarray(pixels), recipe, size, interpolation)


BACKENDS: dict[str, Apply] = {"plain": apply_plain, "fused": P.fused}


def marked(box: tuple[int, int, int, int], size: tuple[int, int] = (120, 80)) -> P.Pixels:
    """A grey image (width, height) with one magenta rectangle."""
    pixels = np.full((size[1], size[0], 3), 40, np.uint8)
    pixels[box[1] : box[3], box[0] : box[2]] = MARK
    return pixels


def where_marked(pixels: P.Pixels) -> list[int]:
    """xyxy of the pixels that are more magenta than grey."""
    far = np.abs(pixels.astype(int) - MARK).sum(axis=-1) < 250
    rows, columns = np.flatnonzero(far.any(axis=1)), np.flatnonzero(far.any(axis=0))
    return [int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1]


@pytest.fixture(scope="module")
def photo() -> P.Pixels:
    """Cluttered, coloured, and of the size of COCO's images."""
    return draw_image(640, np.random.default_rng(0))[0][:427]


@pytest.mark.parametrize("backend", BACKENDS)
class TestWhere:
    @pytest.mark.parametrize("flip", [False, True])
    @pytest.mark.parametrize("window", WINDOWS)
    def test_pixels_and_boxes_move_alike(self, backend: str, window: T.Window, flip: bool) -> None:
        box = (30, 15, 110, 44)
        recipe, size = T.Recipe((), window, flip), (window.height, window.width)
        pixels = BACKENDS[backend](marked(box), recipe, size, "linear")
        boxes, _ = T.move_boxes(np.array([box], np.float32), np.array([0]), recipe, size)
        if len(boxes):
            assert boxes.tolist() == [where_marked(pixels)]

    @pytest.mark.parametrize("turns", [1, 2, 3])
    @pytest.mark.parametrize("window", WINDOWS[:4])
    def test_pixels_and_boxes_turn_alike(self, backend: str, window: T.Window, turns: int) -> None:
        box, whole = (30, 15, 110, 44), (window.height, window.width)
        size = whole if turns == 2 else whole[::-1]
        recipe = T.Recipe((), window, True, turns)
        pixels = BACKENDS[backend](marked(box), recipe, size, "linear")
        boxes, labels = T.move_boxes(np.array([box], np.float32), np.array([7]), recipe, size)
        assert pixels.shape == (*size, 3) and labels.tolist() == [7] * len(boxes)
        if len(boxes):
            assert boxes.tolist() == [where_marked(pixels)]

    @pytest.mark.parametrize("interpolation", list(P.INTERPOLATIONS))
    @pytest.mark.parametrize("size", [(160, 160), (64, 96)])
    def test_resize_moves_pixels_and_boxes_alike(self, backend: str, interpolation: str, size: tuple[int, int]) -> None:
        box, recipe = (30, 20, 90, 60), T.Recipe((), T.Window(0, 0, 120, 80), False)
        pixels = BACKENDS[backend](marked(box), recipe, size, interpolation)
        assert pixels.shape == (*size, 3) and pixels.dtype == np.uint8
        expected = np.array(box) * np.tile([size[1] / 120, size[0] / 80], 2)
        np.testing.assert_allclose(where_marked(pixels), expected, atol=1.01)

    def test_fills_with_the_mean_colour(self, backend: str) -> None:
        recipe = T.Recipe((), T.Window(-3, -2, 130, 90), False)
        pixels = BACKENDS[backend](marked((0, 0, 5, 5)), recipe, (90, 130), "nearest")
        outside = np.ones(pixels.shape[:2], bool)
        outside[2:82, 3:123] = False
        assert (pixels[outside] == P.FILL).all() and not (pixels[~outside] == P.FILL).all(axis=-1).any()

    def test_whole_augmentation_keeps_boxes_on_their_pixels(self, backend: str) -> None:
        """Colour off; everything else on, at the window's own size: the box must stay the rectangle."""
        augment, box = AugmentConfig(distort_prob=0.0), (30, 15, 110, 44)
        sizes = set()
        for i in range(100):
            given = np.array([box], np.float32), np.array([4])
            recipe = T.draw_recipe(augment, (80, 120), given[0], np.random.default_rng(i))
            size = (recipe.window.height, recipe.window.width)
            boxes, labels = T.move_boxes(*given, recipe, size)
            pixels = BACKENDS[backend](marked(box), recipe, size, "nearest")
            sizes.add(size)
            assert boxes.tolist() == [where_marked(pixels)] and labels.tolist() == [4]
        assert len(sizes) > 50

    def test_the_five_interpolations_are_five(self, backend: str) -> None:
        noise = np.random.default_rng(0).integers(0, 256, (50, 70, 3), np.uint8)
        recipe = T.Recipe((), T.Window(0, 0, 70, 50), False)
        results = [BACKENDS[backend](noise, recipe, (32, 32), name) for name in P.INTERPOLATIONS]
        assert not any((a == b).all() for i, a in enumerate(results) for b in results[:i])


# The largest mean and 99.9 percentile of the differences in grey levels, and margins for other versions of OpenCV and
# Pillow. Measured over 164 recipes on 41 photographs of COCO: (.11, 3) without colours, from samples up to 1/64 of a
# pixel beside their places and the rounding of "lanczos"; (.19, 3) with brightness, contrast and saturation, which
# round once where PIL rounds twice; (.69, 9) with the hue, which has 255 steps in PIL and 256 in OpenCV, and PIL cuts
# fractions off that OpenCV rounds: one step in a bright colour is six levels.
BOUNDS = {"": (0.3, 6.0), "saturation": (0.5, 6.0), "hue": (1.2, 14.0)}


def bound_of(recipe: T.Recipe) -> tuple[float, float]:
    names = dict(recipe.colours)
    return BOUNDS["hue" if "hue" in names else "saturation" if len(names) else ""]


class TestTwins:
    @pytest.mark.parametrize("interpolation", list(P.INTERPOLATIONS))
    def test_the_same_up_to_rounding(self, photo: P.Pixels, interpolation: str) -> None:
        boxes = np.array([[30, 20, 300, 200], [350, 100, 420, 300]], np.float32)
        for i in range(12):
            recipe = T.draw_recipe(AugmentConfig(), photo.shape[:2], boxes, np.random.default_rng(i))
            size = (160 + 32 * i, 480 - 32 * (i % 4))
            difference = np.abs(
                P.fused(photo, recipe, size, interpolation).astype(int)
                - apply_plain(photo, recipe, size, interpolation)
            )
            mean, most = bound_of(recipe)
            assert difference.mean() <= mean and np.percentile(difference, 99.9) <= most, recipe

    @pytest.mark.parametrize("interpolation", list(P.INTERPOLATIONS))
    @pytest.mark.parametrize("window", WINDOWS)
    @pytest.mark.parametrize("size", [(64, 64), (61, 103), (240, 200)])
    def test_the_canvas_is_sampled_as_if_it_were_whole(
        self, interpolation: str, window: T.Window, size: tuple[int, int]
    ) -> None:
        """On noise, where a shift by a tenth of a pixel changes values by up to 40 levels, and 7 on average. Where the
        samples are off by 1/64 of a pixel at most, they may differ by as much of the step between two pixels."""
        noise = np.random.default_rng(1).integers(0, 256, (80, 120, 3), np.uint8)
        for flip in (False, True):
            recipe = T.Recipe((), window, flip)
            ours = P.fused(noise, recipe, size, interpolation).astype(int)
            difference = np.abs(ours - apply_plain(noise, recipe, size, interpolation))
            assert difference.max() <= (1 if interpolation == "nearest" else 8) and difference.mean() <= 0.5

    @pytest.mark.parametrize("window", [(-149, -62, 1075, 676), (-58, -58, 639, 898)])
    def test_area_that_shrinks_one_side_and_enlarges_the_other(self, window: tuple[int, int, int, int]) -> None:
        """OpenCV takes one pixel or the next there, and mixes little."""
        noise = np.random.default_rng(2).integers(0, 256, (423, 640, 3), np.uint8)
        recipe = T.Recipe((), T.Window(*window), False)
        difference = np.abs(
            P.fused(noise, recipe, (704, 704), "area").astype(int) - apply_plain(noise, recipe, (704, 704), "area")
        )
        assert difference.max() <= 1

    @pytest.mark.parametrize("amount", [0.5, 0.93, 1.5])
    @pytest.mark.parametrize("colour", ["brightness", "contrast", "saturation", "hue"])
    def test_each_colour(self, photo: P.Pixels, colour: T.Colour, amount: float) -> None:
        amount = (amount - 1) * 36 if colour == "hue" else amount
        recipe = T.Recipe(((colour, amount),), T.Window(0, 0, 640, 427), False)
        ours = P.recolour(photo, recipe.colours, photo).astype(int)
        difference = np.abs(ours - np.asarray(P.distort(Image.fromarray(photo), recipe)))
        mean, most = bound_of(recipe)
        assert difference.mean() <= mean and np.percentile(difference, 99.9) <= most
        assert np.abs(ours - photo).mean() > 1 or abs(amount) == pytest.approx(36 * 0.07)

    def test_contrast_goes_by_the_whole_image_at_that_moment(self, photo: P.Pixels) -> None:
        """A dark corner of a bright image turns darker, and brightness before moves the centre."""
        bright = photo.copy()
        bright[100:] = 250
        recipe = T.Recipe((("brightness", 0.6), ("contrast", 1.5)), T.Window(0, 0, 80, 60), False)
        ours = P.fused(bright, recipe, (60, 80), "nearest").astype(int)
        assert np.abs(ours - apply_plain(bright, recipe, (60, 80), "nearest")).max() <= 2
        alone = P.recolour(bright[:60, :80], recipe.colours, bright[:60, :80]).astype(int)
        assert (alone - ours).mean() > 10

    def test_grey_images_stay_grey(self) -> None:
        grey = np.repeat(np.arange(256, dtype=np.uint8).reshape(16, 16, 1), 3, axis=2)
        for colour, amount in (("saturation", 1.5), ("hue", 18.0)):
            assert np.abs(P.adjusted(grey, colour, amount, 0).astype(int) - grey).max() <= 1

    def test_the_given_pixels_are_left_alone(self, photo: P.Pixels) -> None:
        before = photo.copy()
        for colour, amount in (("hue", 9.0), ("contrast", 1.5), ("saturation", 0.5), ("brightness", 0.5)):
            P.fused(photo, T.Recipe(((colour, amount),), T.Window(0, 0, 640, 427), True), (64, 64), "linear")
        assert np.array_equal(photo, before)


def test_distort_changes_colours_within_limits() -> None:
    image = marked((10, 10, 60, 60))
    whole = T.Window(0, 0, 120, 80)
    for name, apply in BACKENDS.items():
        recipes = [T.Recipe(T.draw_colours(np.random.default_rng(i)), whole, False) for i in range(64)]
        changed = [apply(image, recipe, (80, 120), "nearest") for recipe in recipes]
        same = sum((each == image).all() for each in changed)
        assert 0 < same < 16, name  # all four steps stay out once in 16
        levels = [each[70, 100].mean() for each in changed]  # grey of 40: brightness alone gives 20 to 60
        assert min(levels) < 35 < 45 < max(levels)


def test_tensors_are_the_pixels_over_255() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (33, 47, 3), np.uint8)
    pixels[:2, :].reshape(-1)[:256] = np.arange(256)
    expected = pixels.transpose(2, 0, 1).astype(np.float32) * SCALE
    assert np.array_equal(to_tensor(pixels).numpy(), expected)
    assert np.array_equal(to_tensor(pixels[..., ::-1]).numpy(), expected[::-1])
    planes = to_planes(pixels)
    assert planes.dtype == torch.uint8 and planes.is_contiguous()
    assert np.array_equal(planes.numpy(), pixels.transpose(2, 0, 1))


def test_opencv_reads_the_bytes_of_a_jpeg_as_pil_does(tmp_path: Path, photo: P.Pixels) -> None:
    from rtdetr.data.images import read_image, read_pixels

    for quality, subsampling, progressive in ((95, 0, False), (75, 2, True)):
        path = tmp_path / f"{quality}.jpg"
        Image.fromarray(photo).save(path, quality=quality, subsampling=subsampling, progressive=progressive)
        difference = np.abs(read_pixels(path).astype(int) - np.asarray(read_image(path)))
        assert (difference <= 2).mean() >= 0.999  # 0 where both have the same libjpeg
    assert cv2.imread(str(path)) is not None


def test_a_jpeg_becomes_one_array(tmp_path: Path, photo: P.Pixels) -> None:
    from rtdetr.data.images import read_pixels

    Image.fromarray(photo).save(tmp_path / "a.jpg")
    tracemalloc.start()
    try:
        pixels = read_pixels(tmp_path / "a.jpg")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert pixels.nbytes < peak < 1.8 * pixels.nbytes  # with the file's bytes
