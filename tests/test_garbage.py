"""A garbage collector that waits."""

from __future__ import annotations

import gc

import pytest

from rtdetr.garbage import uncollected


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(ValueError), uncollected():
            raise ValueError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def test_for_good() -> None:
    try:
        with uncollected(for_good=True):
            kept = [[]]
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()
