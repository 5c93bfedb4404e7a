"""Detections of one image as arrays, converted to Python objects on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rtdetr.data.classes import Classes
from rtdetr.inference.draw import Detection


class DetectionArrays(Sequence[Detection]):
    """The n detections of an image, best first.

    boxes: (n, 4) float32 xyxy, pixels of the image. scores: (n,) float32. class_ids: (n,) int64, category ids.
    best: the best score, including detections below the threshold.
    """

    def __init__(
        self,
        boxes: NDArray[np.float32],
        scores: NDArray[np.float32],
        labels: NDArray[np.int64],
        classes: Classes,
        best: float = 0.0,
    ) -> None:
        """labels: (n,) int64, indices into `classes`."""
        self.boxes, self.scores, self.best = boxes, scores, best
        self._labels, self._classes = labels, classes

    @classmethod
    def of(cls, detections: Sequence[Detection], classes: Classes) -> DetectionArrays:
        """Converts a list of detections."""
        if isinstance(detections, cls):
            return detections
        boxes = np.array([each.box for each in detections], np.float32).reshape(-1, 4)
        scores = np.array([each.score for each in detections], np.float32)
        places = {category_id: place for place, category_id in enumerate(classes.category_ids)}
        labels = np.array([places[each.category_id] for each in detections], np.int64)
        hits = cls(boxes, scores, labels, classes, max((each.score for each in detections), default=0.0))
        hits.detections = list(detections)  # exact: the arrays are float32
        return hits

    @cached_property
    def class_ids(self) -> NDArray[np.int64]:
        return np.array(self._classes.category_ids, np.int64)[self._labels]

    @cached_property
    def names(self) -> list[str]:
        names = self._classes.names
        return [names[label] for label in self._labels.tolist()]

    @cached_property
    def detections(self) -> list[Detection]:
        ids, names = self._classes.category_ids, self._classes.names
        columns = zip(self._labels.tolist(), self.scores.tolist(), self.boxes.tolist())
        return [
            Detection(ids[label], names[label], score, (x1, y1, x2, y2)) for label, score, (x1, y1, x2, y2) in columns
        ]

    def __len__(self) -> int:
        return len(self.scores)

    def __iter__(self) -> Iterator[Detection]:  # twice as fast as that of Sequence
        return iter(self.detections)

    def __getitem__(self, index: Any) -> Any:
        return self.detections[index]

    def __eq__(self, other: object) -> bool:
        return self.detections == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.detections)
