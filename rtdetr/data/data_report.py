"""A report of the defects that a run found in its data, written to the run's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import count_dropped

NAME = "data_report.json"


def save_report(folder: Path, **sets: DetectionSet) -> None:
    """Writes the defects of each set, and how many images and boxes they dropped, to data_report.json."""
    report = {name: _report(each) for name, each in sets.items()}
    (folder / NAME).write_text(json.dumps(report, indent=1), encoding="utf-8")


def _report(source: DetectionSet) -> dict[str, Any]:
    gone = count_dropped(source.defects)
    return {
        "annotations": str(source.annotation_file),
        "images": str(source.folder),
        "summary": source.summary(),
        "dropped": {"pictures": gone.images, "boxes": gone.boxes},
        "defects": [each.plain() for each in source.defects],
    }
