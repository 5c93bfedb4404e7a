"""Copy-paste: objects arrive where their boxes say, and hide little of what was there."""

from __future__ import annotations

import numpy as np
import pytest

from rtdetr.data.pasting import HIDDEN, MOST_PASTED, paste
from rtdetr.data.pixels import Pixels
from rtdetr.data.transforms import Boxes, Labels

SIZE = (120, 160)
NOTHING = np.zeros((0, 4), np.float32), np.zeros(0, np.int64)


def painted(boxes: list[tuple[int, int, int, int]], first: int) -> tuple[Pixels, Boxes, Labels]:
    """A black image whose objects have colours of their own, first, first + 1, ..., which are their classes too."""
    pixels = np.zeros((*SIZE, 3), np.uint8)
    for colour, (x1, y1, x2, y2) in enumerate(boxes, first):
        pixels[y1:y2, x1:x2] = colour
    return pixels, np.array(boxes, np.float32).reshape(-1, 4), np.arange(first, first + len(boxes))


def test_objects_come_with_their_pixels_and_classes() -> None:
    onto = painted([(5, 5, 45, 35), (90, 60, 150, 110)], 1)
    others = painted([(0, 0, 20, 30), (40, 50, 52, 60), (100, 100, 160, 120), (150, 0, 160, 80)], 101)
    seen = set()
    for seed in range(40):
        pixels, boxes, labels = paste(*onto, others, np.random.default_rng(seed))
        assert boxes[:2].tolist() == onto[1].tolist() and labels[:2].tolist() == [1, 2]
        assert boxes.dtype == np.float32 and labels.dtype == np.int64 and len(boxes) == len(labels)
        for (x1, y1, x2, y2), label in zip(boxes[2:].astype(int).tolist(), labels[2:].tolist()):
            shown = pixels[y1:y2, x1:x2, 0]
            later = labels[labels.tolist().index(label) + 1 :]  # may lie on top
            assert np.isin(shown, [label, *later]).all() and (shown == label).mean() >= 1 - HIDDEN
            seen.add(label)
        assert [(pixels == label).any() for label in (1, 2)] == [True, True]
        for (x1, y1, x2, y2), label in zip(onto[1].astype(int).tolist(), (1, 2)):
            assert (pixels[y1:y2, x1:x2] == label).mean() >= 1 - len(labels[2:]) * HIDDEN
    assert seen == {101, 102, 103, 104}
    assert not np.isin(onto[0], others[2]).any()  # the image that was given is as before


def test_no_more_than_four_and_none_too_thin_or_wide() -> None:
    many = painted([(x, y, x + 10, y + 10) for x in range(0, 160, 20) for y in (0, 50)], 101)
    assert max(len(paste(many[0], *NOTHING, many, np.random.default_rng(i))[1]) for i in range(9)) == MOST_PASTED
    odd = painted([(0, 0, 5, 40), (0, 0, 60, 5), (0, 0, 113, 10), (0, 0, 10, 85)], 101)
    assert len(paste(many[0], *NOTHING, odd, np.random.default_rng(0))[1]) == 0


@pytest.mark.parametrize("number", [0, 1])
def test_images_without_boxes(number: int) -> None:
    onto, others = painted([(5, 5, 45, 35)][:number], 1), painted([(5, 5, 45, 35)][: 1 - number], 101)
    _, boxes, labels = paste(*onto, others, np.random.default_rng(0))
    assert (boxes.shape, labels.shape) == ((1, 4), (1,))


def test_what_would_be_hidden_stays_in_sight() -> None:
    onto, others = (
        painted([(x, y, x + 20, y + 20) for x in range(0, 160, 20) for y in range(0, 120, 20)], 1),
        painted([(0, 0, 40, 40)], 101),
    )
    for seed in range(20):  # wherever it went, it would hide a box wholly
        assert len(paste(*onto, others, np.random.default_rng(seed))[1]) == len(onto[1])
