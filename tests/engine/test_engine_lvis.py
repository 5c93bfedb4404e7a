"""LVIS' federated figures: those of the `lvis` package, and what federated means."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtdetr.engine.evaluation.evaluator import score

CLASSES, IMAGES = 12, 25
# Of LVIS, in its order; r, c and f are rare, common and frequent classes.
NAMES = ("AP", "AP50", "AP75", "APs", "APm", "APl", "APr", "APc", "APf", "AR300", "ARs", "ARm", "ARl")


def write_lvis(path: Path, seed: int = 0) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A made-up LVIS set, and detections around its boxes and elsewhere, more than 300 in some images."""
    rng = np.random.default_rng(seed)
    images, boxes, found = [], [], []
    for image_id in range(1, IMAGES + 1):
        present = rng.choice(np.arange(1, CLASSES + 1), rng.integers(0, 5), replace=False).tolist()
        absent = sorted(set(range(1, CLASSES + 1)) - set(present))
        image = {"id": image_id, "coco_url": f"http://x/val2017/{image_id}.jpg", "width": 640, "height": 480}
        image["neg_category_ids"] = rng.choice(absent, 3, replace=False).tolist()
        image["not_exhaustive_category_ids"] = present[:1]
        images.append(image)
        for category in present:
            for _ in range(rng.integers(1, 5)):
                side = rng.choice([20, 60, 150])
                x, y, w, h = (float(v) for v in (*rng.uniform(0, 300, 2), *rng.uniform(side / 2, side, 2)))
                box = {"id": len(boxes) + 1, "image_id": image_id, "category_id": category, "bbox": [x, y, w, h]}
                boxes.append(box | {"area": w * h * 0.8})
                for _ in range(3):
                    moved = [float(v) for v in np.array([x, y, w, h]) + rng.normal(0, side / 25, 4)]
                    found.append({"image_id": image_id, "category_id": category, "bbox": moved})
        for _ in range(400 if image_id % 10 == 0 else 20):
            x, y, w, h = (float(v) for v in (*rng.uniform(0, 300, 2), *rng.uniform(5, 100, 2)))
            found.append({"image_id": image_id, "category_id": int(rng.integers(1, CLASSES + 1)), "bbox": [x, y, w, h]})
    for each in found:
        each["score"] = float(np.float32(rng.random()))
    categories = [{"id": i, "name": f"thing {i}", "frequency": "rcf"[i % 3]} for i in range(1, CLASSES + 1)]
    document = {"images": images, "annotations": boxes, "categories": categories}
    path.write_text(json.dumps(document))
    return document, found


def test_the_figures_of_the_lvis_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lvis = pytest.importorskip("lvis", reason="the `lvis` package, whose figures these must be, is not installed")
    monkeypatch.setattr(np, "float", float, raising=False)  # the package dates from when NumPy had it
    for seed in range(3):
        path = tmp_path / f"{seed}.json"
        _, found = write_lvis(path, seed)
        reference = lvis.LVISEval(lvis.LVIS(str(path)), lvis.LVISResults(lvis.LVIS(str(path)), found), "bbox")
        reference.run()
        names = {"AR300": "AR@300", **{f"AR{size}": f"AR{size}@300" for size in "sml"}}
        expected = {name: float(reference.results[names.get(name, name)]) for name in NAMES}
        result = score(found, path, "faster-coco-eval")
        assert result.figures == pytest.approx(expected, rel=0, abs=1e-12)
        assert 0.05 < result.figures["AP"] < 0.95 and len({*result.figures.values()}) > 10


def test_what_nobody_looked_for_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    box = [10.0, 10.0, 50.0, 50.0]
    image = {"id": 1, "coco_url": "http://x/a.jpg", "width": 100, "height": 100}
    categories = [{"id": i, "name": f"{i}", "frequency": "f"} for i in range(1, 4)]
    good = {"image_id": 1, "category_id": 1, "bbox": box, "score": 0.5}
    truth = [{"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "area": 2500}]

    def ap(**lists: list[int]) -> float:
        images = [image | {"neg_category_ids": [], "not_exhaustive_category_ids": []} | lists]
        document = {"images": images, "annotations": truth, "categories": categories}
        path.write_text(json.dumps(document))
        wrong = {**good, "score": 0.9, "bbox": [60.0, 60.0, 10.0, 10.0]}
        result = score([good, wrong, {**wrong, "category_id": 2}], path, "pycocotools")
        assert tuple(result.figures) == NAMES and "AP  rare                   -" in result.table()
        return result.figures["AP"]

    assert ap() == pytest.approx(0.5)
    assert ap(not_exhaustive_category_ids=[1]) == pytest.approx(1.0)
    assert ap(neg_category_ids=[2]) == pytest.approx(0.5)  # class 2 has no box in the whole set, so no AP of its own


def test_categories_without_frequency(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    document, found = write_lvis(path)
    whole = score(found, path, "faster-coco-eval").figures
    document["categories"] = [{"id": each["id"], "name": each["name"]} for each in document["categories"]]
    path.write_text(json.dumps(document))
    figures = score(found, path, "faster-coco-eval").figures
    assert figures["AP"] == whole["AP"] and figures["APr"] == figures["APc"] == figures["APf"] == -1
