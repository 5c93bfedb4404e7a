"""Label Studio, CVAT, LabelMe and Hugging Face: read into the same arrays as COCO, or one sentence."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_cases import recognise
from hostile_named import HOSTILE, Case
from messages import message
from named_cases import everything
from named_sets import CLASSES, WRITERS, link, tasks, write_coco, write_huggingface
from sound_set import HEIGHT, NUM_IMAGES, WIDTH

from rtdetr import cli
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.doctor.examine import examine
from rtdetr.data.formats.records import DataSource
from rtdetr.data.formats.sources import find_sources, open_set, read_document

FORMATS = tuple(WRITERS)


@pytest.mark.parametrize("name", FORMATS)
def test_the_same_arrays_as_coco(name: str, tmp_path: Path, images: Path) -> None:
    """Whole pixels come back from percent, too; a folder is all that is given."""
    write_coco(tmp_path / "coco", images)
    WRITERS[name](tmp_path / name, images)
    expected, data = open_set(tmp_path / "coco"), open_set(tmp_path / name)
    assert recognise(tmp_path / name) == name
    assert everything(data) == everything(expected) and len(data) == NUM_IMAGES
    first = 0 if name == "huggingface" else 1
    assert data.classes == Classes(CLASSES, (first, first + 1, first + 2))
    assert everything(read_again(data)) == everything(expected)
    model = Classes(("fork", *reversed(CLASSES)), (4, 3, 2, 1))
    places = [model.names.index(CLASSES[label]) for label in expected.targets(0)[1]]
    assert open_set(tmp_path / name, classes=model).targets(0)[1].tolist() == places
    report = examine(tmp_path / name)
    assert report.code() == 0 and not report.not_read and report.verdict() == "sound: no defects; exit code 0"


def read_again(data: DetectionSet) -> DetectionSet:
    """As an evaluation reads it, from where it came."""
    assert isinstance(data.origin, DataSource)
    return DetectionSet(read_document(data.origin), data.origin)


@pytest.mark.parametrize("to", ["coco", "yolo", "voc"])
@pytest.mark.parametrize("name", FORMATS)
def test_converted_without_loss(name: str, to: str, tmp_path: Path, images: Path) -> None:
    write_coco(tmp_path / "coco", images)
    WRITERS[name](tmp_path / name, images)
    assert cli.main(["convert-data", str(tmp_path / name), str(tmp_path / "out"), "--to", to]) == 0
    data = open_set(tmp_path / "out")
    assert recognise(tmp_path / "out") == to and data.classes.names == CLASSES
    assert everything(data) == everything(open_set(tmp_path / "coco"))


def test_each_format_has_25_hostile_sets() -> None:
    assert all(len({case.name for case in cases}) == len(cases) >= 25 for cases in HOSTILE.values())


@pytest.mark.parametrize(
    ("name", "case"),
    [(n, c) for n in HOSTILE for c in HOSTILE[n]],
    ids=[f"{n}, {c.name}" for n in HOSTILE for c in HOSTILE[n]],
)
def test_hostile_sets_are_one_sentence(name: str, case: Case, tmp_path: Path, images: Path) -> None:
    WRITERS[name](tmp_path / "set", images)
    case.change(tmp_path / "set")
    report = examine(tmp_path / "set")
    lines = list(report.lines())
    kinds = {each.kind for each in report.defects()}
    assert kinds & set(case.kind.split("|")), (kinds, lines)
    assert report.code() == case.code, lines
    assert all("\n" not in line and len(line) < 1500 for line in lines)
    json.dumps([each.plain() for each in report.defects()])
    try:
        data = open_set(tmp_path / "set")
        assert case.code < 2 and len(data) >= NUM_IMAGES - 1 and data.num_boxes >= 2 * NUM_IMAGES - 2
    except DataError as error:
        assert case.code == 2 and "\n" not in str(error) and str(tmp_path) in str(error) and len(str(error)) < 1500


@pytest.mark.parametrize("name", FORMATS)
def test_a_clean_copy_is_sound(name: str, tmp_path: Path, images: Path) -> None:
    """In the same folder of images, which `rtdetr doctor --fix` prints."""
    for number, case in enumerate([case for case in HOSTILE[name] if case.code == 1][::5]):
        root = tmp_path / str(number)
        WRITERS[name](root / "set", images)
        case.change(root / "set")
        assert cli.main(["doctor", str(root / "set"), "--fix", str(root / "clean.json")]) == 1, case.name
        report = examine(root / "clean.json", str(open_set(root / "set").folder))
        assert report.code() == 0, (case.name, list(report.lines()))
        assert len(json.loads((root / "clean.json").read_text())["annotations"]) >= 2 * NUM_IMAGES - 2


def label_studio(root: Path, images: Path, change: Callable[[list[dict[str, Any]]], object]) -> DetectionSet:
    WRITERS["labelstudio"](root, images)
    document = tasks()
    change(document)
    (root / "export.json").write_text(json.dumps(document))
    return open_set(root / "export.json")


def region(kind: str, **value: Any) -> dict[str, Any]:
    size = {"original_width": WIDTH, "original_height": HEIGHT}
    return {"type": kind, "value": value | {kind: ["cup"]}, **size}


def test_label_studio_shapes_become_boxes(tmp_path: Path, images: Path) -> None:
    def change(document: list[dict[str, Any]]) -> None:
        document[0]["annotations"][0]["result"] = [
            region("rectanglelabels", x=50, y=25, width=25, height=25, rotation=90),  # about the corner (20, 8)
            region("polygonlabels", points=[[10, 25], [30, 25], [20, 75]]),
            region("ellipselabels", x=50, y=50, radiusX=10, radiusY=25),
            {"type": "choices", "value": {"choices": ["blurred"]}},
        ]

    data = label_studio(tmp_path / "set", images, change)
    assert data.targets(0)[0].tolist() == [[12, 8, 20, 18], [4, 8, 12, 24], [16, 8, 24, 24]]
    said = data.summary()
    assert (
        message("taken as", "polygon", "boxes around them: 1").search(said)
        and "regions of other types left out: 1" in said
    )
    assert message("taken as", "rotated rectangle", "boxes around them: 1").search(said)


def test_label_studio_annotators(tmp_path: Path, images: Path) -> None:
    """Ground truth, else the last that was not cancelled; unlabelled tasks are no images without boxes."""

    def change(document: list[dict[str, Any]]) -> None:
        one, other = document[1]["annotations"][0], document[2]["annotations"][0]
        document[0]["annotations"] += [other | {"ground_truth": True}, one | {"was_cancelled": True}, one]
        document[3]["annotations"] = [one, other | {"was_cancelled": True}]
        document[4]["annotations"] = []
        document[5]["annotations"][0]["result"] = []

    data = label_studio(tmp_path / "set", images, change)
    assert len(data) == NUM_IMAGES - 1 and data.num_empty == 1
    assert data.targets(0)[0].tolist() == data.targets(2)[0].tolist()
    assert data.targets(3)[0].tolist() == data.targets(1)[0].tolist()
    assert "tasks without an annotation left out: 1" in data.summary()
    assert data.defects == []  # Label Studio stores the size of an image at its boxes alone
    assert message("several annotations", "task", "taken: 1").search(data.summary())


@pytest.mark.parametrize(
    "given",
    ["/data/local-files/?d=photos/00.png", "s3://bucket/x/00.png", "https://a.b/x/00.png?v=3", "00.png", "/x/00.png"],
)
def test_label_studio_finds_images_by_any_address(given: str, tmp_path: Path, images: Path) -> None:
    data = label_studio(tmp_path / "set", images, lambda document: document[0]["data"].update(image=given, note="x"))
    assert data.info(0).file_name == "00.png"
    shutil.copy(tmp_path / "set" / "images" / "00.png", tmp_path / "set")  # the folder with most of them counts
    assert len(open_set(tmp_path / "set" / "export.json")) == NUM_IMAGES
    (tmp_path / "set" / "00.png").unlink()
    shutil.move(tmp_path / "set" / "images", tmp_path / "elsewhere")
    assert len(open_set(tmp_path / "set" / "export.json", tmp_path / "elsewhere")) == NUM_IMAGES


def test_cvat_shapes_and_subsets(tmp_path: Path, images: Path) -> None:
    WRITERS["cvat"](tmp_path / "set", images)
    path = tmp_path / "set" / "annotations.xml"
    text = path.read_text()
    shapes = (
        '<box label="cup" xtl="10" ytl="8" xbr="14" ybr="20" rotation="90"/>'
        '<polygon label="key" points="4.00,8.00;12,8;8,24"/><ellipse label="pen" cx="20" cy="16" rx="4" ry="8"/>'
        '<mask label="cup" rle="1, 2" left="3" top="4" width="5" height="6"/><tag label="cup"/>'
        '<points label="cup" points="1,2"/>\n'
    )
    start = text.index("<box")
    text = text[:start] + shapes + text[text.index("</image>") :]
    path.write_text(text)
    data = open_set(path)
    assert data.targets(0)[0].tolist() == [[6, 12, 18, 16], [4, 8, 12, 24], [16, 8, 24, 24], [3, 4, 8, 10]]
    assert (
        data.targets(0)[1].tolist() == [0, 1, 2, 0]
        and "shapes without a box (points, lines, tags) left out: 2" in data.summary()
    )
    for i in range(NUM_IMAGES):
        text = text.replace(f'<image id="{i}"', f'<image id="{i}" subset="{"Validation" if i % 4 == 0 else "Train"}"')
    path.write_text(text)
    assert sorted(find_sources(path)) == ["train", "val"]
    assert [len(open_set(tmp_path / "set", split=split)) for split in ("train", "val")] == [18, 6]
    assert open_set(path, split="val").classes.names == CLASSES
    path.write_bytes(text.replace("utf-8", "utf-16").encode("utf-16"))
    assert sorted(find_sources(path)) == ["train", "val"] and len(open_set(path, split="val")) == 6
    path.write_text(text.replace(' subset="Train"', "", 1))
    with pytest.raises(DataError, match=r"its subsets are '', 'Train', 'Validation'; call each of them train, val or"):
        find_sources(path)


def test_labelme_shapes_and_folders(tmp_path: Path, images: Path) -> None:
    WRITERS["labelme"](tmp_path / "all", images)
    document = json.loads((tmp_path / "all" / "00.json").read_text())
    shapes = {
        "polygon": [[4, 8], [12, 8], [8, 24]],
        "circle": [[20, 16], [23, 20]],
        "mask": [[3, 4], [8, 10]],
        "rotation": [[6, 12], [12, 6], [18, 12], [12, 18]],
        "point": [[1, 2]],
        "linestrip": [[1, 2], [3, 4]],
    }
    document["shapes"] = [{"label": "cup", "shape_type": kind, "points": points} for kind, points in shapes.items()]
    (tmp_path / "all" / "00.json").write_text(json.dumps(document))
    data = open_set(tmp_path / "all")
    assert data.targets(0)[0].tolist() == [[4, 8, 12, 24], [15, 11, 25, 21], [3, 4, 8, 10], [6, 6, 18, 18]]
    assert (
        "shapes without a box (points, lines) left out: 2" in data.summary()
        and "boxes around them: 1" in data.summary()
    )
    for split, last in (("train", "0123456"), ("valid", "789")):
        (tmp_path / "set" / split).mkdir(parents=True)
        for each in (tmp_path / "all").iterdir():
            if each.stem[-1] in last:
                shutil.copy(each, tmp_path / "set" / split)
    (tmp_path / "set" / "labels.txt").write_text("__ignore__\n_background_\npen\ncup\nkey\n")
    assert sorted(find_sources(tmp_path / "set")) == ["train", "val"]
    assert open_set(tmp_path / "set", split="val").classes.names == ("pen", "cup", "key")
    with pytest.raises(DataError, match=message("looks like", "LabelMe", "folder")):
        open_set(tmp_path / "all" / "00.json")


def test_labelme_files_alone(tmp_path: Path, images: Path) -> None:
    """The images are elsewhere, under the names that the files say."""
    WRITERS["labelme"](tmp_path / "set", images)
    (tmp_path / "elsewhere").mkdir()
    for each in (tmp_path / "set").glob("*.png"):
        shutil.move(each, tmp_path / "elsewhere")
    for each in (tmp_path / "set").glob("*.json"):
        each.rename(each.with_name(f"x{each.name}"))
    assert len(open_set(tmp_path / "set", tmp_path / "elsewhere")) == NUM_IMAGES


@pytest.mark.parametrize("form", ["names", "digits", "rows", "numbers alone"])
def test_every_way_to_write_objects(form: str, tmp_path: Path, images: Path) -> None:
    write_huggingface(tmp_path / "set", images)
    write_coco(tmp_path / "coco", images)
    path = tmp_path / "set" / "train" / "metadata.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        boxes, labels = row["objects"]["bbox"], row["objects"].pop("categories")
        if form == "rows":
            row["objects"] = [{"id": 7, "bbox": box, "category": label} for box, label in zip(boxes, labels)]
        else:
            names = {"names": CLASSES, "digits": ("10", "9", "a")}.get(form, (0, 1, 2))
            row["objects"]["label"] = [names[i] for i in labels]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if form != "rows":
        (tmp_path / "set" / "classes.txt").unlink()
    data = open_set(tmp_path / "set")
    expected = {
        "names": Classes(CLASSES, (1, 2, 3)),
        "digits": Classes(("10", "9", "a"), (1, 2, 3)),  # names that look like numbers
        "rows": Classes(CLASSES, (0, 1, 2)),
        "numbers alone": Classes(("class0", "class1", "class2"), (0, 1, 2)),
    }
    assert data.classes == expected[form] and everything(data) == everything(open_set(tmp_path / "coco"))
    shutil.move(tmp_path / "set" / "train", tmp_path / "alone")
    assert everything(open_set(tmp_path / "alone")) == everything(data)


def test_what_fiftyone_exports(tmp_path: Path, images: Path) -> None:
    """The layouts of its COCODetectionDataset and YOLOv5Dataset, as docs/data.md has them."""
    write_coco(tmp_path / "coco", images)
    expected = everything(open_set(tmp_path / "coco"))
    link(images, tmp_path / "one" / "data")
    document = json.loads((tmp_path / "coco" / "annotations" / "instances_train.json").read_text())
    for each in document["categories"]:
        each["supercategory"] = None
    document |= {"info": {"year": "", "contributor": ""}, "licenses": []}
    (tmp_path / "one" / "labels.json").write_text(json.dumps(document))
    assert everything(open_set(tmp_path / "one")) == expected
    arguments = ["convert-data", str(tmp_path / "coco"), str(tmp_path / "yolo"), "--to", "yolo"]
    assert cli.main(arguments) == 0
    (tmp_path / "yolo" / "rtdetr.json").unlink()
    (tmp_path / "yolo" / "data.yaml").unlink()
    names = "".join(f"  {i}: {name}\n" for i, name in enumerate(CLASSES))
    yaml = f"path: {tmp_path / 'yolo'}\ntrain: ./images/train/\nnames:\n{names}"
    (tmp_path / "yolo" / "dataset.yaml").write_text(yaml)
    assert everything(open_set(tmp_path / "yolo")) == expected


FIFTYONE = """
import sys
import fiftyone as fo
from fiftyone.utils.coco import COCODetectionDatasetExporter
from fiftyone.utils.yolo import YOLOv5DatasetExporter
from named_sets import CLASSES, boxes_of
from sound_set import HEIGHT, NUM_IMAGES, WIDTH
out, images = sys.argv[1:]
def export(exporter):  # as Dataset.export does, which needs a MongoDB to have a Dataset
    with exporter:
        for i in range(NUM_IMAGES):
            found = [
                fo.Detection(label=name, bounding_box=[x / WIDTH, y / HEIGHT, w / WIDTH, h / HEIGHT])
                for name, (x, y, w, h) in boxes_of(i)
            ]
            path = f"{images}/{i:02d}.png"
            exporter.export_sample(path, fo.Detections(detections=found), metadata=fo.ImageMetadata.build_for(path))
export(COCODetectionDatasetExporter(export_dir=f"{out}/coco", classes=list(CLASSES)))
export(YOLOv5DatasetExporter(export_dir=f"{out}/yolo", split="train", classes=list(CLASSES)))
"""


def test_what_fiftyone_itself_exports(tmp_path: Path, images: Path) -> None:
    if importlib.util.find_spec("fiftyone") is None:
        pytest.skip("fiftyone is not installed")
    environment = {**os.environ, "HOME": str(tmp_path), "FIFTYONE_DO_NOT_TRACK": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", FIFTYONE, str(tmp_path / "out"), str(images)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    write_coco(tmp_path / "coco", images)
    expected = open_set(tmp_path / "coco")
    for path in ("coco", "yolo"):
        data = open_set(tmp_path / "out" / path)
        assert data.classes.names == CLASSES and len(data) == NUM_IMAGES
        assert examine(tmp_path / "out" / path).code() == 0
        for i in range(NUM_IMAGES):
            assert Path(data.info(i).file_name).name == Path(expected.info(i).file_name).name
            (boxes, labels, *_), (other_boxes, other_labels, *_) = data.targets(i), expected.targets(i)
            assert labels.tolist() == other_labels.tolist()
            np.testing.assert_allclose(boxes, other_boxes, rtol=0, atol=1e-4)  # YOLO's six digits, of 60 pixels
