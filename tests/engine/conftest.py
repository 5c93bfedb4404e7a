from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _no_curves(no_curves: None) -> None:
    """Of every run here."""
