"""`rtdetr convert-data`: COCO -> YOLO -> VOC -> COCO loses nothing, and nothing is left half-written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coco_set import SET, write_set
from format_cases import everything, lvis_set, recognise, yolo_set
from format_sets import write_all
from image_cases import STORED, UPRIGHT, camera_file
from messages import message, says
from PIL import Image

from rtdetr.cli import main
from rtdetr.data.formats.coco import read_coco
from rtdetr.data.formats.document import CocoDocument
from rtdetr.data.formats.lvis import is_federated
from rtdetr.data.formats.sources import open_set, read_document, source_of

HARD: dict[str, Any] = {
    "images": [
        {"id": 4000, "file_name": "b.png", "width": 60, "height": 40},
        {"id": 0, "file_name": "sub/ä.png", "width": 30, "height": 50},
        {"id": 1203, "file_name": "empty.png", "width": 20, "height": 10},
        {"id": 8, "file_name": "sub/b 1.png"},
    ],
    "annotations": [
        {"id": 1, "image_id": 4000, "category_id": 4000, "bbox": [1.25, 2, 10.3, 20], "area": 77.5},
        {"id": 2, "image_id": 4000, "category_id": 0, "bbox": [-0.5, 30.5, 20, 100], "iscrowd": 0},
        {"id": 3, "image_id": 4000, "category_id": 1203, "bbox": [0, 0, 10, 10.123456], "iscrowd": 1, "area": 31},
        {"id": 4, "image_id": 0, "category_id": 7, "bbox": [3, 3, 0, 9]},
        {"id": 5, "image_id": 0, "category_id": 8, "bbox": [0.3333333333, 3, 8, 9]},
        {"id": 6, "image_id": 8, "category_id": 8, "bbox": [1, 1, 5.5, 6]},
    ],
    "categories": [
        {"id": 4000, "name": "a <cat> & 'dog'"},
        {"id": 1203, "name": "ähre 麦"},
        {"id": 0, "name": "no"},
        {"id": 8, "name": "twin"},
        {"id": 7, "name": "twin"},
        {"id": 9, "name": " spaces\taround "},
    ],
}


def hard_set(root: Path) -> tuple[Path, Path]:
    images, path = write_set(root, HARD)
    Image.new("RGB", (33, 22), (1, 2, 3)).save(images / "sub" / "b 1.png")
    return images, path


def plain(document: CocoDocument) -> tuple[Any, ...]:
    """All that a conversion must keep, in an order that does not depend on it; boxes apart."""
    boxes = sorted(document.annotations, key=lambda each: (each["image_id"], each["iscrowd"], each["category_id"]))
    images = sorted((each["id"], each["file_name"]) for each in document.images)
    kept = [(each["image_id"], each["category_id"], each["iscrowd"]) for each in boxes]
    return images, document.categories, kept, [[*each["bbox"], each["area"]] for each in boxes]


@pytest.mark.parametrize("way", [("yolo", "voc", "coco"), ("voc", "yolo", "coco"), ("coco",), ("yolo", "coco")])
def test_nothing_is_lost(tmp_path: Path, way: tuple[str, ...]) -> None:
    images, source = hard_set(tmp_path / "in")
    now = str(source)
    for i, format in enumerate(way):
        out = str(tmp_path / f"{i}-{format}")
        assert main(["convert-data", now, out, "--to", format, *(["--images", str(images)] if i == 0 else [])]) == 0
        assert recognise(out) == format
        now = out
    before, after = plain(read_coco(source)), plain(read_document(source_of(now, "train")))
    assert after[:3] == before[:3]
    assert np.allclose(before[3], after[3], rtol=0, atol=2e-5)
    sizes = {each["id"]: (each["height"], each["width"]) for each in read_document(source_of(now, "train")).images}
    assert sizes == {4000: (40, 60), 0: (50, 30), 1203: (10, 20), 8: (22, 33)}
    for image in HARD["images"]:
        copied, original = Path(now) / "train" / image["file_name"], images / image["file_name"]
        assert copied.read_bytes() == original.read_bytes()


def test_every_format_on_the_way_trains_on_the_same(tmp_path: Path) -> None:
    """Each folder is a whole set of its own, under its own ids, with the classes in one order."""
    images, source = hard_set(tmp_path / "in")
    expected = sorted(everything(open_set(source, images)))
    for format, ids in (("yolo", range(6)), ("voc", range(1, 7)), ("coco", (0, 7, 8, 9, 1203, 4000))):
        out = tmp_path / format
        arguments = ["convert-data", str(source), str(out), "--to", format, "--images", str(images), "--link"]
        assert main(arguments) == 0
        data = open_set(out)
        assert data.classes.category_ids == tuple(ids)
        found = sorted(everything(data))
        assert [each[:3] + each[4:] for each in found] == [each[:3] + each[4:] for each in expected]
        for one, other in zip(found, expected):
            assert np.allclose(one[3], other[3], rtol=0, atol=2e-5)
        assert data.num_crowd == 1 and data.num_degenerate == 1
        assert everything(open_set(out, classes=data.classes)) == everything(data)  # with two classes of one name
        assert all((data.folder / data.info(i).file_name).is_symlink() for i in range(len(data)))


def test_sets_by_hand_come_back_exactly(tmp_path: Path) -> None:
    sets = write_all(tmp_path)
    for name in ("voc", "yolo"):
        assert main(["convert-data", str(sets[name]), str(tmp_path / f"from {name}"), "--to", "coco"]) == 0
        for split in ("train", "val"):
            assert everything(open_set(tmp_path / f"from {name}", split=split)) == everything(
                open_set(sets["coco"], split=split)
            )
    arguments = ["convert-data", str(sets["coco"]), str(tmp_path / "val"), "--to", "voc", "--split", "val"]
    assert main(arguments) == 0
    assert everything(open_set(tmp_path / "val", split="val")) == everything(open_set(sets["coco"], split="val"))


def test_lvis_lists_come_back(tmp_path: Path) -> None:
    path, _ = lvis_set(tmp_path / "in")
    for given, out, format in (
        (path, "yolo", "yolo"),
        (tmp_path / "yolo", "voc", "voc"),
        (tmp_path / "voc", "c", "coco"),
    ):
        assert main(["convert-data", str(given), str(tmp_path / out), "--to", format]) == 0
    back, there = read_document(tmp_path / "c"), read_coco(path)
    assert is_federated(back.images) and back.categories == there.categories
    keys = ("id", "coco_url", "neg_category_ids", "not_exhaustive_category_ids")
    assert [[each[key] for key in keys] for each in back.images] == [
        [each[key] for key in keys] for each in there.images
    ]


@pytest.mark.parametrize("ending", ["jpg", "tif"])
@pytest.mark.parametrize("orientation", [5, 6, 7, 8])
def test_boxes_of_images_on_their_side_turn_with_them(tmp_path: Path, orientation: int, ending: str) -> None:
    """YOLO has no sizes, so a reader takes the image upright; the same pixels must lie in the box."""
    (tmp_path / "images").mkdir()
    camera_file(tmp_path / "images" / f"a.{ending}", orientation)
    height, width = STORED[orientation].shape[:2]
    document = {
        "images": [{"id": 1, "file_name": f"a.{ending}", "height": height, "width": width}],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [10, 4, 20, 12]}],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    assert main(["convert-data", str(tmp_path / "a.json"), str(tmp_path / "yolo"), "--to", "yolo"]) == 0
    patches = []
    for path in (tmp_path / "a.json", tmp_path / "yolo"):
        data = open_set(path)
        (x1, y1, x2, y2) = data.targets(0)[0][0].astype(int)
        patches.append(np.asarray(data.image(0))[y1:y2, x1:x2].reshape(-1, 3))
    assert data.image(0).size == UPRIGHT.shape[1::-1]
    assert sorted(map(tuple, patches[0])) == sorted(map(tuple, patches[1]))


@pytest.mark.parametrize("names", [("a.png", "a.bmp"), ("A.png", "a.png"), ("A.png", "a.bmp"), ("B/a.png", "b/A.bmp")])
def test_names_that_only_differ_in_their_ending_or_in_case(tmp_path: Path, names: tuple[str, str]) -> None:
    """macOS and Windows hold no two names that differ only in case."""
    for name in names:
        (tmp_path / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "images" / name)
    images = [{"id": i, "file_name": name} for i, name in enumerate(names)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [i, i, 3, 3]} for i in (0, 1)]
    document = {"images": images, "annotations": boxes, "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "a.json").write_text(json.dumps(document))
    for given, out in (("a.json", "coco"), ("a.json", "yolo"), ("yolo", "voc"), ("voc", "back")):
        to = "coco" if out == "back" else out
        assert main(["convert-data", str(tmp_path / given), str(tmp_path / out), "--to", to]) == 0
    for out in ("coco", "back", "yolo", "voc"):
        files = [str(each.relative_to(tmp_path / out)) for each in (tmp_path / out).rglob("*.*") if each.is_file()]
        assert len({each.lower() for each in files}) == len(files)
    for out in ("coco", "back"):
        assert plain(read_document(tmp_path / out))[2:] == plain(read_coco(tmp_path / "a.json"))[2:]
        kept = {str(each.relative_to(tmp_path / out / "train")) for each in (tmp_path / out).rglob("*.*[pg]")}
        assert names[0] in kept and len(kept) == 2
        assert names[1] in kept or names[0].lower() == names[1].lower()


def test_sets_whose_names_only_differ_in_case_get_folders_in_voc(tmp_path: Path) -> None:
    for split, name in (("train", "A.png"), ("val", "a.png")):
        for folder in (tmp_path / "in" / "images" / split, tmp_path / "in" / "labels" / split):
            folder.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / "in" / "images" / split / name)
        (tmp_path / "in" / "labels" / split / name).with_suffix(".txt").write_text("0 0.5 0.5 0.5 0.5\n")
    assert main(["convert-data", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "voc"]) == 0
    images = tmp_path / "out" / "JPEGImages"
    assert {str(each.relative_to(images)) for each in images.rglob("*.png")} == {"train/A.png", "val/a.png"}


@pytest.mark.parametrize("to", ["yolo", "voc"])
def test_names_that_readers_of_folders_would_pass_over(tmp_path: Path, to: str) -> None:
    names = ["images/a.png", "images/images/b.png", "sub/.c.png", "sub/d .png", "sub/e", "f.weird", "images_/a.png"]
    for number, name in enumerate(names):
        file = tmp_path / "elsewhere" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20 + number, 10)).save(file, "PNG")
    document = {
        "images": [{"id": i, "file_name": name} for i, name in enumerate(names)],
        "annotations": [{"id": i, "image_id": i, "category_id": 1, "bbox": [i, i, 3, 3]} for i in range(len(names))],
        "categories": [{"id": 1, "name": "cat"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    given = ["convert-data", str(tmp_path / "a.json"), str(tmp_path / "out"), "--images", str(tmp_path / "elsewhere")]
    assert main([*given, "--to", to]) == 0
    assert main(["doctor", str(tmp_path / "out")]) == 0
    data = open_set(tmp_path / "out", split="train", limit=0)
    assert len(data) == data.num_boxes == len(names)
    assert sorted(data.image(i).width for i in range(len(data))) == [20 + i for i in range(len(names))]
    assert main(["convert-data", str(tmp_path / "out"), str(tmp_path / "back"), "--to", "coco"]) == 0
    back, there = plain(read_document(tmp_path / "back")), plain(read_coco(tmp_path / "a.json"))
    assert back[2:] == there[2:] and [number for number, _ in back[0]] == [number for number, _ in there[0]]


def test_boxes_of_another_size_are_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "images" / "a.png")
    for height, width in ((400, 600), (60, 40)):
        document = {
            "images": [{"id": 1, "file_name": "a.png", "height": height, "width": width}],
            "annotations": [{"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 1, 3, 3]}],
            "categories": [{"id": 1, "name": "cat"}],
        }
        (tmp_path / "a.json").write_text(json.dumps(document))
        assert main(["convert-data", str(tmp_path / "a.json"), str(tmp_path / "out"), "--to", "yolo"]) == 2
        said = capsys.readouterr().err
        assert f"the image is 60 x 40 but its annotations say {width} x {height}" in said
        assert not (tmp_path / "out").exists()


def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = yolo_set(tmp_path / "in", "0 0.5 0.5 0.25\n"), tmp_path / "new" / "out"
    cases = {
        (str(root), str(out)): message("expected", "a.txt", "line 1", "class", "4 numbers"),
        (str(tmp_path / "nowhere"), str(out)): message("no annotations", "nowhere"),
        (str(tmp_path / "nowhere.json"), str(out)): message("no annotations", "nowhere.json"),
        (str(root), str(root)): "in: holds what would be converted",
        (str(root / "data.yaml"), str(root)): "in: holds what would be converted",
        (str(root), str(root / "data.yaml")): message("expected", "data.yaml", "folder"),
        (str(root), str(root / "data.yaml" / "x")): message("nothing written there", "it is a file"),
    }
    for (given, target), sentence in cases.items():
        before = sorted(tmp_path.rglob("*"))
        assert main(["convert-data", given, target, "--to", "voc"]) == 2
        error = capsys.readouterr().err
        assert says(error, sentence) and error.startswith("error: ") and error.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before
    (root / "labels" / "a.txt").write_text("0 0.5 0.5 0.25 0.5\n")
    assert main(["convert-data", str(root), str(out), "--to", "voc", "--images", str(tmp_path / "gone")]) == 2
    assert "gone: no such image folder" in capsys.readouterr().err
    assert main(["convert-data", str(root), str(out), "--to", "voc", "--split", "val"]) == 2
    assert message("no such set", "in", "val", "train").search(capsys.readouterr().err)


def test_images_outside_their_folder_are_not_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "secret.png")
    document = {
        "images": [{"id": 1, "file_name": "../secret.png"}],
        "annotations": [],
        "categories": [{"id": 1, "name": "a"}],
    }
    (tmp_path / "a.json").write_text(json.dumps(document))
    given = [str(tmp_path / "a.json"), str(tmp_path / "out"), "--images", str(tmp_path / "images")]
    assert main(["convert-data", *given, "--to", "yolo"]) == 2
    assert "secret.png: leaves the image folder" in capsys.readouterr().err


def test_what_is_in_the_way_moves_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root, out = yolo_set(tmp_path / "in"), tmp_path / "out"
    out.mkdir()
    assert main(["convert-data", str(root), str(out), "--to", "coco"]) == 0
    (out / "mine").touch()
    assert main(["convert-data", str(root), str(out), "--to", "voc"]) == 2
    assert message("not empty", "out", "--overwrite").search(capsys.readouterr().err)
    assert main(["convert-data", str(root), str(out), "--to", "voc", "--overwrite"]) == 0
    assert (tmp_path / "out-old" / "mine").exists() and recognise(out) == "voc"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["in", "out", "out-old"]


def test_labels_that_changed_after_the_conversion(tmp_path: Path) -> None:
    """rtdetr.json speaks of lines; it is not believed where lines were added."""
    images, source = hard_set(tmp_path / "in")
    out = tmp_path / "yolo"
    assert main(["convert-data", str(source), str(out), "--to", "yolo", "--images", str(images)]) == 0
    label_file = out / "labels" / "train" / "b.txt"
    label_file.write_text("0 0.5 0.5 0.5 0.5\n" + label_file.read_text())
    areas = [each["area"] for each in read_document(source_of(out, "train")).annotations if each["image_id"] == 1]
    assert areas[0] == 600 and 77.5 not in areas


def test_a_foreign_sidecar_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = yolo_set(tmp_path / "in")
    for content in ("{", '{"made_by": "rtdetr convert-data"}', '{"made_by": "rtdetr convert-data", "categories": [1]}'):
        (root / "rtdetr.json").write_text(content)
        assert main(["convert-data", str(root), str(tmp_path / "out"), "--to", "voc"]) == 2
        assert message("changed by hand", "rtdetr.json", "convert-data").search(capsys.readouterr().err)


def test_the_set_of_the_coco_tests_converts(tmp_path: Path) -> None:
    images, source = write_set(tmp_path / "in", SET)
    for format in ("yolo", "voc"):
        out = tmp_path / format
        assert main(["convert-data", str(source), str(out), "--to", format, "--images", str(images)]) == 0
        assert len(open_set(out)) == 3
