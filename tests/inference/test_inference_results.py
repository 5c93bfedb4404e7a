"""Results are whole after every image, in every format."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from PIL import Image

from rtdetr.data.classes import Classes
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import FileResult
from rtdetr.inference.results import JsonList, ResultsFolder

CLASSES = Classes(("mug\nor cup", "pen, red"), (3, 7))
DETECTIONS = [
    Detection(7, "pen, red", 0.9, (10.0, 20.0, 50.0, 80.0)),
    Detection(3, "mug", 0.512345, (0.0, 0.0, 1.0, 2.0)),
]


def test_a_list_is_valid_after_every_step(tmp_path: Path) -> None:
    path, expected = tmp_path / "list.json", []
    growing = JsonList(path)
    assert json.loads(path.read_text()) == []
    for items in ([{"a": 1}], [], [{"b": "]\n"}, 3], [[]]):
        growing.extend(items)
        expected += items
        assert json.loads(path.read_text()) == expected
    growing.close()
    assert len(path.read_text().splitlines()) == 2 + len(expected)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    class Full:
        """A file that takes twelve bytes more and then no longer any, until something is given back."""

        def __init__(self, file: object) -> None:
            self.file, self.left = file, 12

        def write(self, content: bytes) -> int:
            if self.left == 0:
                raise OSError(28, "No space left on device")
            written = self.file.write(content[: self.left])  # type: ignore[attr-defined]
            self.left -= written
            return written

        def truncate(self, size: int) -> None:
            self.left = 12
            self.file.truncate(size)  # type: ignore[attr-defined]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    growing = JsonList(tmp_path / "list.json")
    growing.extend(["first"])
    growing.file = Full(growing.file)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        growing.extend(["second, which is longer than twelve bytes"])
    assert json.loads((tmp_path / "list.json").read_text()) == ["first"]
    growing.extend(["x"])
    assert json.loads((tmp_path / "list.json").read_text()) == ["first", "x"]


def test_formats(tmp_path: Path) -> None:
    image = Image.new("RGB", (100, 200))
    with ResultsFolder(tmp_path, ["coco", "yolo", "csv"], CLASSES) as results:
        damaged = FileResult(Path("broken.jpg"), None, [], error="broken.jpg: why")
        seen = FileResult(Path("in/a.png"), image, DETECTIONS, size=image.size)
        empty = FileResult(Path("b.png"), image, [], size=image.size)
        names = (Path("broken"), Path("sub/a"), Path("b"))
        for found, name in zip((damaged, seen, empty), names):
            results.begin_drawing(found, name).result()
        nothing, target, _ = map(results.list_found, (damaged, seen, empty), names)
    assert nothing is None
    assert target is not None and target == tmp_path / "sub" / "a.jpg" and Image.open(target).size == (300, 600)
    broken, one, none = json.loads((tmp_path / "results.json").read_text())
    assert broken == {"file": "broken.jpg", "error": "broken.jpg: why"} and none["detections"] == []
    assert (one["width"], one["height"], one["annotated"]) == (100, 200, str(target))
    assert one["detections"][0] == {"category_id": 7, "name": "pen, red", "score": 0.9, "box": [10, 20, 50, 80]}

    coco = json.loads((tmp_path / "coco.json").read_text())
    assert [(each["image_id"], each["file_name"], each["category_id"]) for each in coco] == [
        (2, "in/a.png", 7),
        (2, "in/a.png", 3),
    ]
    assert coco[0]["bbox"] == [10, 20, 40, 60] and coco[0]["score"] == 0.9

    assert (tmp_path / "classes.txt").read_text().splitlines() == [r"mug\nor cup", "pen, red"]
    lines = [line.split() for line in (tmp_path / "labels" / "sub" / "a.txt").read_text().splitlines()]
    assert [line[0] for line in lines] == ["1", "0"]
    assert [float(value) for value in lines[0][1:]] == [0.3, 0.25, 0.4, 0.3, 0.9]
    assert (tmp_path / "labels" / "b.txt").read_text() == "" and not (tmp_path / "labels" / "broken.txt").exists()

    with open(tmp_path / "detections.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    box = {"x1": "10.0", "y1": "20.0", "x2": "50.0", "y2": "80.0"}
    assert rows[0] == {"file": "in/a.png", "category_id": "7", "name": "pen, red", "score": "0.9", **box}
    assert len(rows) == 2


def test_what_can_no_longer_be_read_leaves_no_earlier_result(tmp_path: Path) -> None:
    seen = FileResult(Path("a.png"), Image.new("RGB", (100, 200)), DETECTIONS, size=(100, 200))
    for found in (seen, FileResult(Path("a.png"), None, [], error="a.png: why")):
        with ResultsFolder(tmp_path, ["yolo"], CLASSES, crops=True) as results:
            results.begin_drawing(found, Path("a")).result()
            results.list_found(found, Path("a"))
    assert {each.name for each in tmp_path.rglob("*") if each.is_file()} == {"classes.txt", "results.json"}


def test_a_link_is_replaced_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious.jpg").write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a.jpg").symlink_to(tmp_path / "precious.jpg")
    with ResultsFolder(tmp_path / "out", [], CLASSES) as results:
        results.begin_drawing(FileResult(Path("a.png"), Image.new("RGB", (9, 9)), []), Path("a")).result()
    assert (tmp_path / "precious.jpg").read_text() == "mine"
    assert sorted(each.name for each in (tmp_path / "out").iterdir()) == ["a.jpg", "results.json"]
