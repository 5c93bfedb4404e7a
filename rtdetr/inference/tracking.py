"""Track ids of objects across frames, by ByteTrack of the package `trackers`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from rtdetr.extras import optional
from rtdetr.inference.draw import Detection

MEMORY = 1.0  # seconds that an object may be hidden and keep its id


class Tracker:
    """Tracks the objects of one video. rate: searched frames per second. threshold: lowest score that starts a track.
    Raises MissingPackage."""

    def __init__(self, rate: Fraction, threshold: float) -> None:
        trackers = optional("trackers", "track", "--track")
        self.supervision: Any = optional("supervision", "track", "--track")
        buffer = round(MEMORY * 30)  # ByteTrack counts frames at 30 per second
        self.tracker = trackers.ByteTrackTracker(
            lost_track_buffer=buffer,
            frame_rate=float(rate),
            track_activation_threshold=threshold,
            high_conf_det_threshold=threshold,
            minimum_consecutive_frames=1,
        )

    def update(self, detections: list[Detection]) -> list[int | None]:
        """Returns the track id of each detection of the next frame; None if it belongs to no track."""
        found = self.supervision.Detections(
            xyxy=np.array([each.box for each in detections], np.float32).reshape(-1, 4),
            confidence=np.array([each.score for each in detections], np.float32),
            class_id=np.array([each.category_id for each in detections], int),
            data={"place": np.arange(len(detections))},
        )
        tracked = self.tracker.update(found)
        numbers: list[int | None] = [None] * len(detections)
        for place, number in zip(tracked.data.get("place", ()), tracked.tracker_id):
            numbers[place] = int(number) if number >= 0 else None
        return numbers
