"""A garbage collector that waits."""

from __future__ import annotations

import gc

import pytest

from rtdetr.garbage_collection import collection_paused


@pytest.mark.parametrize("was_on", [True, False])
def test_the_collector_is_as_it_was(was_on: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if was_on else gc.disable)()
        with collection_paused():
            assert not gc.isenabled()
        assert gc.isenabled() == was_on
        with pytest.raises(ValueError), collection_paused():
            raise ValueError
        assert gc.isenabled() == was_on
    finally:
        (gc.enable if before else gc.disable)()


def is_young(value: object) -> bool:
    return any(each is value for each in gc.get_objects(generation=0))


def test_what_came_meanwhile_is_old() -> None:
    with collection_paused():
        kept = [[]]
        assert is_young(kept)
    assert not is_young(kept) and gc.get_freeze_count() == 0


def test_what_somebody_froze_stays_frozen() -> None:
    kept = [[]]
    gc.freeze()
    try:
        with collection_paused():
            pass
        assert gc.get_freeze_count() > 0
        assert not any(each is kept for each in gc.get_objects())
    finally:
        gc.unfreeze()
