"""Numbers of images in coco.json: those of the annotations, so that an evaluator takes it as it is."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from api_cases import IDS, write_checkpoint
from messages import message
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from rtdetr.cli import main
from rtdetr.data.classes import DataError
from rtdetr.engine.evaluation.evaluator import score
from rtdetr.inference.predictor import File
from rtdetr.inference.results import image_ids


def test_numbers_of_files() -> None:
    assert image_ids(["a/000000000139.jpg", "7.png"]) == {"a/000000000139.jpg": 139, "7.png": 7}
    assert image_ids(["9.jpg", "cat.jpg"]) == {"9.jpg": 1, "cat.jpg": 2}
    assert image_ids(["9.jpg", "b/09.jpg"]) == {"9.jpg": 1, "b/09.jpg": 2}


def test_numbers_of_annotations(tmp_path: Path) -> None:
    images = [{"id": 10 + i, "file_name": name} for i, name in enumerate(("a/x.jpg", "b/x.jpg", "c/y.jpg", "z.jpg"))]
    images = [each | {"width": 9, "height": 9} for each in images]
    truth = tmp_path / "truth.json"
    truth.write_text(json.dumps({"images": images, "annotations": [], "categories": [{"id": 1, "name": "cat"}]}))
    files = ["here/b/x.jpg", "y.jpg", Path("a/x.jpg"), "there/z.jpg"]
    assert list(image_ids(files, truth).values()) == [11, 12, 10, 13]
    for name in ("x.jpg", "w.jpg"):
        with pytest.raises(DataError, match=message("not one image", "truth.json", name)):
            image_ids([*files, name], truth)


def test_the_folders_of_a_file_decide_and_each_image_is_one_file(tmp_path: Path) -> None:
    truth = tmp_path / "truth.json"
    document = {"images": [{"id": 7, "file_name": "n.png"}, {"id": 8, "file_name": "sub/n.png"}]}
    document |= {"annotations": [], "categories": [{"id": 1, "name": "cat"}]}
    for image in document["images"]:
        image |= {"width": 9, "height": 9}
    truth.write_text(json.dumps(document))
    files: list[File] = ["x/sub/n.png", "x/n.png"]
    assert image_ids(files, truth) == {"x/sub/n.png": 8, "x/n.png": 7}
    truth.write_text(json.dumps(document | {"images": document["images"][:1]}))
    with pytest.raises(DataError, match=r"truth.json: names one image for x/sub/n.png and x/n.png"):
        image_ids(files, truth)


def test_pycocotools_scores_the_file_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Images are called by words, and their ids are far from their places; every third detection is true."""
    write_checkpoint(tmp_path)
    monkeypatch.chdir(tmp_path)
    for number, file in enumerate(sorted(Path("val").iterdir())):
        shutil.copyfile(file, f"word{number}{file.suffix}")
    command = ["predict", "model.pth", *map(str, sorted(Path().glob("word*"))), "--threshold", "0", "--device", "cpu"]
    assert main([*command, "--output-dir", "first"]) == 0
    images, objects = [], []
    for number, each in enumerate(json.loads(Path("first/results.json").read_text())):
        images.append({"id": 700 - number, "file_name": each["file"], "width": 96, "height": 96})
        for found in each["detections"][::3]:
            x1, y1, x2, y2 = found["box"]
            box = {"bbox": [x1, y1, x2 - x1, y2 - y1], "area": (x2 - x1) * (y2 - y1), "iscrowd": 0}
            objects.append(
                {"id": len(objects) + 1, "image_id": 700 - number, "category_id": found["category_id"], **box}
            )
    truth = {
        "info": {},
        "images": images,
        "annotations": objects,
        "categories": [{"id": i, "name": str(i)} for i in IDS],
    }
    Path("truth.json").write_text(json.dumps(truth))
    assert main([*command, "--output-dir", "new", "--format", "coco", "--annotations", "truth.json"]) == 0
    known = COCO("truth.json")
    run = COCOeval(known, known.loadRes("new/coco.json"), "bbox")
    run.evaluate()
    run.accumulate()
    run.summarize()
    assert run.stats[0] > 0.1
    found = json.loads(Path("new/coco.json").read_text())
    assert score(found, "truth.json", "pycocotools").figures["AP"] == run.stats[0]
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*command, "--annotations", "truth.json"])
    assert message("numbers images", "--annotations", "--format coco").search(capsys.readouterr().err)
