"""The lowest scores in an answer: those of the server, and those that a request sets."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from fastapi import HTTPException

from rtdetr.inference.draw import Detection


class Thresholds(NamedTuple):
    """of_all: for classes without their own; by_id: of the server, by category id; by_name: of a request."""

    of_all: float
    by_id: Mapping[int, float]
    by_name: Mapping[str, float] = MappingProxyType({})

    def changed(self, texts: Sequence[str], class_names: Sequence[str]) -> Thresholds:
        """Returns the thresholds with those of a request: X for all classes, CLASS=X for one. Raises HTTPException."""
        given = {}
        for text in texts:
            name, _, number = text.rpartition("=")
            if name and name not in class_names:
                near = difflib.get_close_matches(name, class_names, n=1, cutoff=0.0)[0]
                raise HTTPException(422, f"threshold: the model has no class {name!r}; did you mean {near!r}?")
            given[name] = _score(number, text)
        of_all = given.pop("", None)
        return self._replace(by_name=given) if of_all is None else Thresholds(of_all, {}, given)

    def reached_by(self, detection: Detection) -> bool:
        lowest = self.by_id.get(detection.category_id, self.of_all)
        return detection.score >= self.by_name.get(detection.name, lowest)


def _score(number: str, text: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:  # NaN, too
        raise HTTPException(422, f"threshold: expected a number from 0 to 1, or CLASS=X, got {text!r}")
    return value
