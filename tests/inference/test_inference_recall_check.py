"""The share of objects that a detection run found: classes, overlaps, each object once, files that do not belong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rtdetr.inference import recall_check as found


def files(folder: Path, detections: list[dict[str, Any]], extra: list[dict[str, Any]] | None = None) -> tuple[str, str]:
    """a.jpg has a circle (id 2) and a square (id 3) of 10 x 10 pixels and a crowd, b.jpg has nothing."""
    objects = [(2, [0, 0, 10, 10], 0), (3, [20, 20, 10, 10], 0), (2, [50, 50, 40, 40], 1)]
    truth = {
        "images": [{"id": 7, "file_name": "sub/a.jpg"}, {"id": 8, "file_name": "b.jpg"}],
        "annotations": [{"image_id": 7, "category_id": c, "bbox": box, "iscrowd": crowd} for c, box, crowd in objects],
    }
    results = [{"file": "val/a.jpg", "detections": detections}, {"file": "val/b.jpg", "detections": []}, *(extra or [])]
    paths = folder / "results.json", folder / "truth.json"
    for path, content in zip(paths, (results, truth)):
        path.write_text(json.dumps(content), encoding="utf-8")
    return str(paths[0]), str(paths[1])


def detection(category_id: int, *box: float, score: float = 0.9) -> dict[str, Any]:
    return {"category_id": category_id, "score": score, "box": list(box)}


@pytest.mark.parametrize(
    ("detections", "hits", "others"),
    [
        ([], 0, 0),
        ([detection(2, 0, 0, 10, 10), detection(3, 21, 20, 30, 30)], 2, 0),
        ([detection(3, 0, 0, 10, 10)], 0, 1),  # another class
        ([detection(2, 0, 0, 10, 5), detection(3, 20, 20, 30, 24.9)], 1, 1),  # IoU 0.5 and just below
        ([detection(2, 0, 0, 10, 10), detection(2, 0, 0, 10, 9, score=0.8)], 1, 1),  # an object counts once
        ([detection(2, 5, 5, 5, 5)], 0, 1),  # no area
    ],
)
def test_counts(tmp_path: Path, detections: list[dict[str, Any]], hits: int, others: int) -> None:
    extra = [{"file": "val/broken.jpg", "error": "no image"}, {"file": "b.jpg", "error": "no image"}]
    results, truth = files(tmp_path, detections, extra)
    assert found.count_found(Path(results), Path(truth)) == found.Counts(2, 2, hits, others)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, truth = files(tmp_path, [detection(2, 0, 0, 10, 10)])
    assert found.main([results, truth]) == 0
    assert capsys.readouterr().out.startswith("found 1 of 2 objects (50 %) in 2 images")
    (tmp_path / "broken.json").write_text("[")
    (tmp_path / "others.json").write_text('[{"file": "c.jpg", "detections": []}]')
    (tmp_path / "bare.json").write_text('[{"detections": []}]')
    for name, sentence in (
        ("missing.json", "cannot be read as JSON"),
        ("broken.json", "cannot be read as JSON"),
        ("truth.json", "expected a JSON list, got a dict"),
        ("others.json", "none of its images is named in"),
        ("bare.json", "expected a results.json and COCO annotations"),
    ):
        assert found.main([str(tmp_path / name), truth]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and name in error and sentence in error
