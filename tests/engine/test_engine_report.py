"""The report of an evaluation: what kinds of mistakes there are, and a page that needs nothing else."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_helpers import tiny_config, tiny_data
from format_sets import write_all
from PIL import Image

from rtdetr.cli import main
from rtdetr.data.classes import Classes
from rtdetr.data.formats.sources import open_set, read_document
from rtdetr.engine.evaluation import report
from rtdetr.engine.evaluation.error_analysis import find_mistakes
from rtdetr.engine.evaluation.evaluator import score
from rtdetr.engine.evaluation.report import write_report
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint


def truth_of(tmp_path: Path, **extra: Any) -> Path:
    images = [{"id": i, "file_name": f"{i}.png", "width": 200, "height": 100} for i in (7, 9)]
    boxes = [
        {"id": 1, "image_id": 7, "category_id": 3, "bbox": [10, 10, 20, 20]},
        {"id": 2, "image_id": 7, "category_id": 3, "bbox": [60, 10, 20, 20]},
        {"id": 3, "image_id": 7, "category_id": 5, "bbox": [110, 10, 20, 20]},
        {"id": 4, "image_id": 9, "category_id": 5, "bbox": [10, 10, 50, 50]},
        {"id": 5, "image_id": 9, "category_id": 3, "bbox": [100, 0, 80, 80], "iscrowd": 1},
        {"id": 6, "image_id": 9, "category_id": 3, "bbox": [70, 70, 20, 20]},
    ]
    categories = [{"id": 5, "name": "<dog>"}, {"id": 3, "name": "cat & co"}]
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"images": images, "annotations": boxes, "categories": categories} | extra))
    for image in images:
        Image.new("RGB", (200, 100), (9, 99, 199)).save(tmp_path / image["file_name"])
    return path


def found(image: int, category: int, box: list[float], confidence: float) -> dict[str, Any]:
    return {"image_id": image, "category_id": category, "bbox": box, "score": confidence}


DETECTIONS = [
    found(7, 3, [10, 10, 20, 20], 0.95),  # right
    found(7, 3, [11, 10, 20, 20], 0.9),  # double
    found(7, 3, [70, 10, 20, 20], 0.85),  # beside the second cat
    found(7, 3, [110, 10, 20, 20], 0.8),  # a dog
    found(7, 5, [160, 60, 20, 20], 0.75),  # nothing
    found(9, 3, [110, 10, 20, 20], 0.7),  # in the crowd: does not count
    found(7, 5, [60, 12, 20, 20], 0.04),  # too low to be looked at
]
LATE = [found(7, 3, [60, 10, 20, 20], 0.06), found(9, 3, [70, 70, 20, 20], 0.06)]  # right, and hardly sure


def test_each_kind_of_mistake(tmp_path: Path) -> None:
    mistakes = find_mistakes(read_document(truth_of(tmp_path)), [*DETECTIONS, *LATE])
    assert mistakes.threshold == 0.06 and mistakes.found == 3
    assert mistakes.counts == {"class": 1, "place": 1, "double": 1, "background": 1, "missed": 1}
    assert [each.kind for each in mistakes.wrong] == ["double", "place", "class", "background"]
    assert mistakes.wrong[2].other == (110, 10, 20, 20) and mistakes.missed[0].box == (10, 10, 50, 50)
    cat, dog, nothing = 0, 1, 2  # by id
    expected = np.zeros((3, 3), int)
    expected[cat, cat], expected[dog, cat], expected[dog, nothing] = 3, 1, 1
    expected[nothing, cat], expected[nothing, dog] = 2, 1
    assert mistakes.confusion.tolist() == expected.tolist()
    assert mistakes.confusion[:2].sum() == 5  # every object once
    assert mistakes.f1 == pytest.approx(2 * 3 / (7 + 5))


def test_only_detections_above_the_best_threshold_count(tmp_path: Path) -> None:
    mistakes = find_mistakes(read_document(truth_of(tmp_path)), DETECTIONS)
    assert mistakes.threshold == 0.95 and mistakes.counts["missed"] == 4 and not mistakes.wrong


def test_classes_that_the_set_does_not_list_do_not_count(tmp_path: Path) -> None:
    truth = read_document(truth_of(tmp_path))
    other = found(7, 8, [10, 10, 20, 20], 0.99)
    assert repr(find_mistakes(truth, [other, *DETECTIONS])) == repr(find_mistakes(truth, DETECTIONS))


def test_where_nobody_looked_nothing_is_wrong(tmp_path: Path) -> None:
    """LVIS: dogs were not looked for in image 9 beyond the boxed ones, cats of image 7 are not all boxed."""
    truth = read_document(truth_of(tmp_path))
    lists = {7: ([5], [3]), 9: ([], [])}
    images = [
        image | {"neg_category_ids": lists[image["id"]][0], "not_exhaustive_category_ids": lists[image["id"]][1]}
        for image in truth.images
    ]
    mistakes = find_mistakes(truth._replace(images=images), [*DETECTIONS, *LATE])
    assert mistakes.found == 3 and [each.kind for each in mistakes.wrong] == ["background"]


def test_calibration(tmp_path: Path) -> None:
    truth = read_document(truth_of(tmp_path))
    mistakes = find_mistakes(truth, DETECTIONS)
    assert mistakes.calibration == [
        (pytest.approx(0.75), 0.0, 1),
        (pytest.approx(0.825), 0.0, 2),
        (pytest.approx(0.925), 0.5, 2),
    ]
    assert mistakes.calibration_error == pytest.approx((0.75 + 2 * 0.825 + 2 * 0.425) / 5)


def test_nothing_found_and_nothing_to_find(tmp_path: Path) -> None:
    truth = read_document(truth_of(tmp_path))
    nothing = find_mistakes(truth, [])
    assert nothing.counts["missed"] == 5 and nothing.calibration == [] and nothing.calibration_error == 0
    empty = find_mistakes(truth._replace(annotations=[]), DETECTIONS)
    assert empty.found == 0 and empty.counts["missed"] == 0


class Reader(HTMLParser):
    """The words of a page, its images, and tags that were not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[str] = []
        self.images: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for key, value in attributes:
            if key in ("src", "href", "xlink:href") and value:
                (self.images if value.startswith("data:image/jpeg;base64,") else self.addresses).append(value)

    def handle_data(self, data: str) -> None:
        self.words += data.split()


def test_the_page(tmp_path: Path) -> None:
    path = truth_of(tmp_path)
    source = open_set(path, tmp_path)
    result = score([*DETECTIONS, *LATE], path, "faster-coco-eval")
    write_report(tmp_path / "out" / "report.html", "mine", result, source)
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    reader = Reader()
    reader.feed(page)
    assert "http" not in page and all(address.startswith("#") for address in reader.addresses)
    assert len(reader.images) == 5 and reader.tags.count("svg") == 2 and "script" not in reader.tags
    for each in reader.images:
        cut = Image.open(io.BytesIO(base64.b64decode(each.partition(",")[2])))
        assert max(cut.size) == 220 and np.asarray(cut).std() > 5  # boxes are drawn on it
    assert "&lt;dog&gt;" in page and "<dog>" not in page and "cat &amp; co" in page
    assert {"class", "place", "double", "background", "missed"} <= {*reader.words}


def test_names_of_all_kinds_stand_beside_the_curves(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = truth_of(tmp_path)
    result = score(DETECTIONS, path, "pycocotools")
    names = (r"5 $ \frac{ $", "_hidden 箱")
    classes = [each._replace(name=name) for each, name in zip(result.classes, (*names, "never seen"))]
    write_report(tmp_path / "report.html", "mine", result._replace(classes=classes), open_set(path, tmp_path))
    drawn = (tmp_path / "report.html").read_text(encoding="utf-8").partition("<svg")[2]
    assert all(name in drawn for name in names) and not recwarn.list


def test_long_names_break_where_they_must(tmp_path: Path) -> None:
    """test_a_browser_shows_it_without_network measures it."""
    wrapped = re.search(r"(.*) { overflow-wrap: anywhere }", report.STYLE)
    assert wrapped is not None and wrapped[1].split(", ") == ["h1", "p", "figure", "td:first-child"]


def test_a_class_with_no_box_and_a_set_with_no_box(tmp_path: Path) -> None:
    path = truth_of(tmp_path, annotations=[])
    result = score(DETECTIONS, path, "pycocotools")
    write_report(tmp_path / "report.html", "mine", result, open_set(path, tmp_path))
    assert "None." in (tmp_path / "report.html").read_text()


def test_the_command_and_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every figure of the terminal stands in the page, whatever the format."""
    folder = write_all(tmp_path)["yolo"]
    cfg = tiny_config(tiny_data(tmp_path / "shapes"), f"data.val.annotations={folder}")
    classes = Classes(("ähre", "a big cat", "zebra"), (0, 1, 2))
    model = build_model(cfg.model, 3)
    save_checkpoint(tmp_path / "model.pth", make_checkpoint(cfg, classes, model.state_dict()))
    arguments = ["eval", "-w", str(tmp_path / "model.pth"), "--report", str(tmp_path / "out"), "--device", "cpu"]
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    cells = re.findall(r"<tr><td>(.*?)</td></tr>", page)
    rows = [re.sub(r"</td><td>", " ", each).split() for each in cells]
    for line in lines[1:13]:
        assert line.split() in rows
    for line in lines[14:17]:
        assert any(row[: len(line.split())] == line.split() for row in rows), line
    assert lines[-1] == f"report: {tmp_path / 'out' / 'report.html'}"
    assert main(arguments) == 2 and "exists already" in capsys.readouterr().err


def test_a_browser_shows_it_without_network(tmp_path: Path) -> None:
    """Headless Chromium, where there is one, decodes every image and shows every figure."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    path = truth_of(tmp_path)
    result = score([*DETECTIONS, *LATE], path, "faster-coco-eval")
    write_report(tmp_path / "report.html", "mine", result, open_set(path, tmp_path))
    script = "<script>document.title = [...document.images].map(each => each.naturalWidth).join(' ')</script>"
    page = (tmp_path / "report.html").read_text(encoding="utf-8").replace("</html>", f"{script}</html>")
    (tmp_path / "seen.html").write_text(page, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=5000", "--dump-dom"]
    command = [browser, *options, *offline, (tmp_path / "seen.html").as_uri()]
    seen = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    widths = re.findall(r"<title>(.*?)</title>", seen)[0].split()
    assert len(widths) == 5 and all(0 < int(width) <= 220 for width in widths)
    assert all(f"<td>{value:.4f}</td>" in seen for value in result.figures.values() if value >= 0)
