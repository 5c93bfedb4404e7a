"""The metrics of a server, in the text format of Prometheus. Only the event loop uses them."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Callable, Sequence

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64)


class Histogram:
    """Counts of values up to each of the bounds, and their sum."""

    def __init__(self, name: str, says: str, bounds: Sequence[float]) -> None:
        self.name, self.says, self.bounds = name, says, bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def lines(self) -> list[str]:
        lines = [f"# HELP {self.name} {self.says}", f"# TYPE {self.name} histogram"]
        total = 0
        for bound, count in zip((*(f"{each:g}" for each in self.bounds), "+Inf"), self.counts):
            total += count
            lines.append(f'{self.name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{self.name}_sum {self.sum:.6f}", f"{self.name}_count {total}"]


class Figures:
    """All metrics of a server. gauges: name -> description and function that returns the current value."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()  # by path and status
        self.seconds = Histogram("rtdetr_detect_seconds", "From request to detections of POST /detect.", SECONDS)
        self.batches = Histogram("rtdetr_batch_size", "Images that were detected together.", SIZES)
        self.gauges: dict[str, tuple[str, Callable[[], int]]] = {}

    def request(self, path: str, status: int, seconds: float) -> None:
        self.requests[path, status] += 1
        if path == "/detect" and status == 200:  # a refusal takes no time, and there are most under load
            self.seconds.add(seconds)

    def text(self) -> str:
        lines = ["# HELP rtdetr_requests_total Answered requests.", "# TYPE rtdetr_requests_total counter"]
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'rtdetr_requests_total{{path="{path}",status="{status}"}} {count}')
        for name, (says, value) in self.gauges.items():
            lines += [f"# HELP {name} {says}", f"# TYPE {name} gauge", f"{name} {value()}"]
        return "\n".join([*lines, *self.seconds.lines(), *self.batches.lines(), ""])
