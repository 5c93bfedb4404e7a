"""The lowest score that is reported: one number for all classes, or one per class."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from numbers import Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import Classes, DataError, shown
from rtdetr.wording import option

Lowest = float | NDArray[np.float64]  # for all classes, or (C,) per class
DEFAULT = 0.5


def lowest_scores(
    classes: Classes, threshold: float | None = None, thresholds: Mapping[str, float] | None = None
) -> Lowest:
    """Returns the thresholds. threshold: for all classes; None: those in the model's file, else DEFAULT. thresholds: by
    class name, for these classes instead. Raises DataError."""
    own = classes.thresholds if threshold is None else ()
    lowest = DEFAULT if threshold is None else _score("threshold", threshold)
    if not own and not thresholds:
        return lowest
    if not isinstance(thresholds, Mapping | None):
        raise DataError(f"thresholds: expected class names with numbers, {{'cat': 0.4}}, got {shown(thresholds)}")
    scores = np.array(own or [lowest] * len(classes), np.float64)
    names = np.array(classes.names)
    for name, value in (thresholds or {}).items():
        if name not in classes.names:
            near = difflib.get_close_matches(str(name), classes.names, n=1, cutoff=0.0)[0]
            raise DataError(f"{_argument()}: the model has no class {shown(name)}; did you mean {near!r}?")
        scores[names == name] = _score(f"{_argument()} of {name}", value)
    return scores


def _argument() -> str:
    return option("--threshold", "thresholds")


def _score(argument: str, value: Any) -> float:
    if isinstance(value, Mapping):
        raise DataError(f"{argument}: expected a number from 0 to 1; those of classes are thresholds={shown(value)}")
    if not isinstance(value, Real) or not 0 <= float(value) <= 1:
        raise DataError(f"{argument}: expected a number from 0 to 1, got {value!r}")
    return float(value)
