"""A report of the defects that a run found in its data, written to the run's folder."""

from __future__ import annotations

import json
from pathlib import Path

from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import count_dropped
from rtdetr.outputs import atomic_write

NAME = "data_report.json"


def save_report(folder: Path, **sets: DetectionSet) -> None:
    """Writes the defects of each set, and how many images and boxes they dropped, to data_report.json."""
    report = {}
    for name, source in sets.items():
        images, boxes = count_dropped(source.defects)
        report[name] = {
            "annotations": str(source.annotation_file),
            "images": str(source.folder),
            "summary": source.summary(),
            "dropped": {"pictures": images, "boxes": boxes},
            "defects": [each.plain() for each in source.defects],
        }
    with atomic_write(folder / NAME) as beside:
        beside.write_text(json.dumps(report, indent=1), encoding="utf-8")
