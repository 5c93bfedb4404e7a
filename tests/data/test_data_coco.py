"""Reading COCO detection sets: classes, boxes, compactness, and a sentence for everything that can be wrong."""

from __future__ import annotations

import copy
import gc
import json
import pickle
from pathlib import Path
from re import Pattern
from typing import Any

import numpy as np
import pytest
from coco_set import SET, open_coco, write_set
from golden_files import shared_data
from image_cases import STORED, UPRIGHT, camera_file
from messages import message, says
from PIL import Image

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.formats.coco import read_coco


def test_classes_are_the_categories_by_id(tmp_path: Path) -> None:
    data = open_coco(*write_set(tmp_path))
    assert data.classes == Classes(("circle", "triangle", "cross"), (2, 5, 11))
    assert len(data.classes) == 3


def test_boxes_become_clipped_corners_with_contiguous_labels(tmp_path: Path) -> None:
    data = open_coco(*write_set(tmp_path))
    boxes, labels = data.targets(0)
    assert boxes.dtype == np.float32 and labels.dtype == np.int64
    assert boxes.tolist() == [[0, 30.5, 15, 40], [10, 10, 15.5, 16]] and labels.tolist() == [0, 2]
    boxes, labels = data.targets(1)
    assert boxes.tolist() == [[1, 2, 11, 22]] and labels.tolist() == [2]
    assert data.targets(2)[0].shape == (0, 4) and data.targets(2)[1].shape == (0,)
    assert (data.num_crowd, data.num_degenerate, data.num_empty) == (1, 2, 1)
    assert message("boxes left out", "3 images", "1 without boxes", "3 boxes of 3 classes", "1 crowd").search(
        data.summary()
    )


def test_targets_are_copies(tmp_path: Path) -> None:
    data = open_coco(*write_set(tmp_path))
    data.targets(0)[0][:] = 0
    assert data.targets(0)[0].sum() > 0


def test_infos_and_images(tmp_path: Path) -> None:
    data = open_coco(*write_set(tmp_path))
    assert [tuple(data.info(i)) for i in range(3)] == [
        (40, "b.png", 40, 60),
        (7, "sub/ä.png", 50, 30),
        (9, "empty.png", 10, 20),  # the JSON gives no size: taken from the file
    ]
    assert [data.image(i).size for i in range(3)] == [(60, 40), (30, 50), (20, 10)]


def test_images_without_boxes_can_be_dropped(tmp_path: Path) -> None:
    empty_first = SET | {"images": SET["images"][::-1]}
    data = open_coco(*write_set(tmp_path, empty_first), drop_empty=True)
    assert [tuple(data.info(i)) for i in range(len(data))] == [(7, "sub/ä.png", 50, 30), (40, "b.png", 40, 60)]
    assert [data.targets(i)[1].tolist() for i in range(2)] == [
        [2],
        [0, 2],
    ] and "left out: 1 image without boxes, " in data.summary()


def broken(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The set with one entry replaced."""
    document = copy.deepcopy(SET)
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        (("categories",), [], "`categories` is empty"),
        (("categories",), {}, message("expected", "categories", "object", "list")),
        (("images",), None, message("expected", "images", "null", "list")),
        (("annotations",), [3], message("expected", "annotations", "mapping")),
        (("images",), [], message("unknown reference", "annotation 1", "image", "7")),
        (("images", 0, "id"), "40", message("needs", "integer `id`", "file_name")),
        (("images", 0, "id"), 9, message("twice", "image id 9")),
        (("images", 0, "file_name"), "c.png", message("no such image", "c.png", "1", "3", "a.json")),
        (("categories", 0, "id"), 2, message("twice", "category id 2")),
        (("categories", 0, "id"), 12, message("unknown reference", "annotation 1", "category", "11")),
        (("annotations", 5, "image_id"), 8, message("unknown reference", "annotation 6", "image", "8")),
        (("annotations", 0, "bbox"), [1, 2, 3], message("expected", "annotation 1", "bbox", "four finite numbers")),
        (
            ("annotations", 0, "bbox"),
            [1, 2, 3, float("nan")],
            message("expected", "annotation 1", "bbox", "four finite numbers"),
        ),
        (("annotations", 0, "bbox"), None, message("expected", "annotation 1", "bbox", "four finite numbers")),
        (
            ("annotations", 0, "bbox"),
            [1, 2, 3, 10**400],
            message("expected", "annotation 1", "bbox", "four finite numbers"),
        ),
        (
            ("annotations", 0, "bbox"),
            [1, 2, 3, "4"],
            message("expected", "annotation 1", "bbox", "four finite numbers"),
        ),
        (
            ("annotations", 2, "bbox"),
            [1, 2, 3],
            message("expected", "annotation 3", "bbox", "four finite numbers"),
        ),  # a crowd
        (("annotations", 0, "iscrowd"), "no", message("expected", "annotation 1", "iscrowd", "0 or 1", "'no'")),
        (("annotations", 0, "iscrowd"), [], message("expected", "annotation 1", "iscrowd", "0 or 1", "[]")),
        (("annotations", 0, "iscrowd"), 2, message("expected", "annotation 1", "iscrowd", "0 or 1", "2")),
        (("annotations", 0, "area"), "wide", message("expected", "annotation 1", "area", "finite number", "'wide'")),
        (("annotations", 0, "area"), float("inf"), message("expected", "annotation 1", "area", "finite number", "inf")),
        (("annotations", 0, "image_id"), "7", message("unknown reference", "annotation 1", "image", "'7'")),
        (("annotations", 0, "image_id"), [7], message("unknown reference", "annotation 1", "image", "[7]")),
        (("annotations", 0, "category_id"), {}, message("unknown reference", "annotation 1", "category", "{}")),
        (("images", 0, "id"), 2**63, message("needs", "integer `id`", "file_name")),
        (("images", 0, "file_name"), None, message("needs", "integer `id`", "file_name")),
        (("images", 0, "width"), 60.5, message("expected", "image 40", "height", "width", "whole pixels")),
        (("images", 0, "width"), -60, message("expected", "image 40", "height", "width", "whole pixels")),
        (("images", 0, "height"), float("nan"), message("expected", "image 40", "height", "finite number", "nan")),
    ],
)
def test_contradictions_are_named(
    tmp_path: Path, path: tuple[str | int, ...], value: Any, sentence: str | Pattern[str]
) -> None:
    with pytest.raises(DataError, match=sentence) as caught:
        open_coco(*write_set(tmp_path, broken(path, value)))
    assert "\n" not in str(caught.value) and "a.json" in str(caught.value)


def test_ids_that_are_text_are_in_quotes(tmp_path: Path) -> None:
    document = broken(("annotations", 0), {"id": "12", "image_id": 7, "category_id": "11", "bbox": [1, 2, 3, 4]})
    with pytest.raises(DataError, match=message("unknown reference", "annotation '12'", "category", "'11'")):
        open_coco(*write_set(tmp_path, document))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("annotations", 0, "bbox"), [1] * 9999),
        (("annotations", 0, "image_id"), "7" * 9999),
        (("annotations", 0, "iscrowd"), "no" * 9999),
        (("annotations", 0, "area"), "wide" * 999),
        (("images", 0), {"id": "40", "file_name": "b.png", "regions": list(range(9999))}),
        (("categories", 0), {"id": "11", "name": "cross", "keypoints": list(range(9999))}),
        (("images",), [{"id": i // 2, "file_name": "b.png"} for i in range(9999)]),
        (("categories",), [{"id": i // 2, "name": f"name {i}"} for i in range(9999)]),
    ],
)
def test_long_values_are_cut(tmp_path: Path, path: tuple[str | int, ...], value: Any) -> None:
    with pytest.raises(DataError) as caught:
        open_coco(*write_set(tmp_path, broken(path, value)))
    assert len(str(caught.value)) < 600 + 2 * len(str(tmp_path))
    twice = ("and 4998 more are given twice", "image id 0 is given twice; 4999 of 9999 images")
    assert "characters)" in str(caught.value) or any(each in str(caught.value) for each in twice)


@pytest.mark.parametrize(
    ("crowd", "value"), [(0, each) for each in (None, 0, 0.0, False, "0")] + [(1, each) for each in (1, 1.0, True, "1")]
)
def test_crowds_in_every_spelling(tmp_path: Path, crowd: int, value: Any) -> None:
    data = open_coco(*write_set(tmp_path, broken(("annotations", 0, "iscrowd"), value)))
    assert (data.num_crowd, len(data.targets(1)[0])) == (1 + crowd, 1 - crowd)


def test_a_crowd_without_a_box_is_left_out(tmp_path: Path) -> None:
    for box in (None, []):
        document = broken(("annotations", 2, "bbox"), box)
        data = open_coco(*write_set(tmp_path, document))
        assert data.num_crowd == 1 and len(data.targets(0)[0]) == 2
        assert [each["bbox"] for each in read_coco(tmp_path / "a.json").annotations if each["iscrowd"]] == []


def test_the_default_area_and_numbers_as_text(tmp_path: Path) -> None:
    for area, expected in ((None, 200), ("150.5", 150.5), (150, 150)):
        write_set(tmp_path, broken(("annotations", 0, "area"), area))
        assert read_coco(tmp_path / "a.json").annotations[0]["area"] == expected
    data = open_coco(*write_set(tmp_path, broken(("images", 0, "width"), "60")))
    assert tuple(data.info(0)) == (40, "b.png", 40, 60)


def test_lvis_names_images_by_url(tmp_path: Path) -> None:
    """In COCO's folders, or in one folder without them."""
    document = copy.deepcopy(SET)
    document["images"][0] = {"id": 40, "coco_url": "http://images.cocodataset.org/b.png", "width": 60, "height": 40}
    document["images"][1] |= {"file_name": None, "coco_url": "http://images.cocodataset.org/coco/sub/ä.png?x=1"}
    document["images"][2]["coco_url"] = "http://images.cocodataset.org/nowhere.png"  # `file_name` wins
    data = open_coco(*write_set(tmp_path, document))
    assert [data.info(i).file_name for i in range(3)] == ["b.png", "sub/ä.png", "empty.png"]
    document["images"][0]["coco_url"] = "http://images.cocodataset.org/val2017/b.png"
    assert open_coco(*write_set(tmp_path, document)).info(0).file_name == "b.png"
    document["images"][0]["coco_url"] = "http://images.cocodataset.org/val2017/c.png"
    with pytest.raises(DataError, match=message("no such image", "val2017/c.png", "1", "3")):
        open_coco(*write_set(tmp_path, document))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    images, annotations = write_set(tmp_path)
    with pytest.raises(DataError, match=r"nowhere.json: no such annotation file"):
        open_coco(images, tmp_path / "nowhere.json")
    with pytest.raises(DataError, match=r"nowhere: no such image folder"):
        open_coco(tmp_path / "nowhere", annotations)
    annotations.write_text('{"images": [')
    with pytest.raises(DataError, match=r"a.json: not valid JSON"):
        open_coco(images, annotations)
    annotations.write_text("[" * 200_000)
    with pytest.raises(DataError, match=r"a.json: not valid JSON"):
        open_coco(images, annotations)


@pytest.mark.parametrize(
    ("content", "looks"),
    [
        (
            '[{"image_id": 1, "category_id": 2, "bbox": [0, 0, 1, 1], "score": 0.5}]',
            message("looks like", "COCO results"),
        ),
        ('[{"file": "a.jpg", "width": 5, "detections": []}]', message("looks like", "results.json")),
        ("[1, 2, 3]", "it is a list of length 3"),
        ("7", "it is a number"),
        ("null", "it is null"),
        ('{"shapes": [], "imagePath": "a.jpg", "version": "5"}', message("looks like", "LabelMe")),
        ('{"info": {}, "images": [], "categories": []}', "list of images without annotations, as of a test set"),
        (
            '{"image": [], "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}',
            "at its top are 'image', 'b', 'c', 'd', 'e' and 1 more",
        ),
        ("{}", "at its top are no keys"),
        ("", "the file is empty"),
        ("0 0.5 0.5 0.25 0.125\n1 0.1 .2 3e-1 0.4\n", message("looks like", "YOLO labels")),
        ("train: images/train\nval: images/val\n", message("looks like", "YOLO data.yaml")),
        ("<annotation>\n<folder>", message("looks like", "Pascal VOC")),
        ('<?xml version="1.0"?>\n<annotation>', message("looks like", "Pascal VOC")),
        ("<!doctype html><html>", message("looks like", "web page")),
        ("version https://git-lfs.github.com/spec/v1\noid", message("looks like", "Git LFS")),
    ],
)
def test_files_of_another_kind_are_recognised(tmp_path: Path, content: str, looks: str | Pattern[str]) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError) as caught:
        read_coco(tmp_path / "a.json")
    sentence = str(caught.value)
    assert sentence.startswith(f"{tmp_path / 'a.json'}: ") and sentence.count("\n") == 0
    assert says(sentence, looks)


def test_a_folder_instead_of_the_file_in_it(tmp_path: Path) -> None:
    images, annotations = write_set(tmp_path)
    with pytest.raises(DataError, match=message("folder", "images", "COCO")):
        read_coco(images)
    (tmp_path / "annotations").mkdir()
    right = annotations.rename(tmp_path / "annotations" / "instances_val.json")
    (tmp_path / "annotations" / "captions_val.json").touch()
    with pytest.raises(DataError) as caught:
        read_coco(tmp_path)
    other = right.with_name("captions_val.json")
    assert str(caught.value).endswith(f"is a folder, expected a COCO detection JSON; did you mean {right}, {other}?")


@pytest.mark.parametrize(
    ("name", "at", "advice"),
    [
        ("b.png", "images/deep/b.png", "one of that name is in {}/images/deep; is that the image folder?"),
        ("val/b.png", "val/b.png", "one of that name is in {}; is that the image folder?"),
        ("val/b.png", "images/b.png", "{}/images/b.png is there: remove the folder from `file_name`"),
        ("C:\\me\\b.png", "images/b.png", "{}/images/b.png is there: remove the folder from `file_name`"),
        ("deep\\b.png", "images/deep/b.png", "write names with / instead of \\"),
        ("b.png", "val/b.png", "one of that name is in {}/val; is that the image folder?"),
        ("b.png", "far/away/b.png", "check the image folder"),
    ],
)
def test_advice_on_missing_images(tmp_path: Path, name: str, at: str, advice: str) -> None:
    images, annotations = write_set(tmp_path, broken(("images", 0, "file_name"), name))
    (tmp_path / at).parent.mkdir(parents=True, exist_ok=True)
    (images / "b.png").rename(tmp_path / at)
    with pytest.raises(DataError) as caught:
        open_coco(images, annotations)
    assert str(caught.value).startswith(f"{images / name}: no such image; 1 of the 3 in {annotations} are missing")
    assert advice.format(tmp_path) in str(caught.value)


def test_an_image_may_have_a_whole_path_in_its_folder(tmp_path: Path) -> None:
    whole = str(tmp_path / "images" / "b.png")
    images, annotations = write_set(tmp_path, broken(("images", 0, "file_name"), whole))
    assert open_coco(images, annotations).image(0).size == (60, 40)
    images.rename(tmp_path / "moved")
    (tmp_path / "images").mkdir()
    (tmp_path / "moved" / "b.png").rename(whole)
    with pytest.raises(DataError, match=message("leaves the folder", "image 40", "file_name", "b.png")):
        open_coco(tmp_path / "moved", annotations)


@pytest.mark.parametrize("name", ["../b.png", "sub/../../b.png", "sub/../b.png", "/etc/passwd", "linked/../b.png"])
def test_names_that_leave_the_folder_are_not_opened(tmp_path: Path, name: str) -> None:
    images, annotations = write_set(tmp_path, broken(("images", 0, "file_name"), name))
    (images / "linked").symlink_to("/usr/lib")
    Image.new("RGB", (60, 40)).save(tmp_path / "b.png")
    with pytest.raises(DataError, match="leaves the image folder"):
        open_coco(images, annotations)


def test_links_in_the_folder_are_followed(tmp_path: Path) -> None:
    images, annotations = write_set(tmp_path)
    (images / "b.png").rename(tmp_path / "elsewhere.png")
    (images / "b.png").symlink_to("../elsewhere.png")
    assert open_coco(images, annotations).image(0).size == (60, 40)


def test_images_that_cannot_be_trusted(tmp_path: Path) -> None:
    images, annotations = write_set(tmp_path)
    data = open_coco(images, annotations)
    Image.new("RGB", (40, 60)).save(images / "b.png")
    with pytest.raises(DataError, match=message("other size", "b.png", "40 x 60", "a.json", "60 x 40")):
        data.image(0)
    whole = (images / "sub" / "ä.png").read_bytes()
    (images / "sub" / "ä.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=message("not an image", "ä.png")):
        data.image(1)


@pytest.mark.parametrize("orientation", STORED)
def test_images_turn_as_the_annotated_size_asks(tmp_path: Path, orientation: int) -> None:
    """Boxes are never changed: they are in the pixels of the image that comes out."""
    images, annotations = write_set(tmp_path)
    camera_file(images / "b.png", orientation)
    height, width = STORED[orientation].shape[:2]
    stored = STORED[orientation] if orientation >= 5 else UPRIGHT
    for size, expected in (((80, 48), UPRIGHT), ((height, width), stored), ((None, None), UPRIGHT)):
        document = broken(("images", 0), {"id": 40, "file_name": "b.png", "height": size[0], "width": size[1]})
        annotations.write_text(json.dumps(document))
        data = open_coco(images, annotations)
        assert (data.info(0).height, data.info(0).width) == expected.shape[:2]
        assert np.array_equal(np.asarray(data.image(0)), expected)
        assert data.targets(0)[0][1].tolist() == [10, 10, 15.5, 16]
    annotations.write_text(json.dumps(broken(("images", 0, "height"), 81)))
    with pytest.raises(DataError, match=message("other size", "b.png", "48 x 80", "a.json", "60 x 81")):
        open_coco(images, annotations).image(0)


def test_no_image_is_opened_where_sizes_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = write_set(tmp_path)
    opened = []
    original = Image.open
    monkeypatch.setattr(Image, "open", lambda path, formats: opened.append(Path(path).name) or original(path))
    open_coco(*arguments)
    assert opened == ["empty.png"]


def test_too_large_images_are_named(tmp_path: Path) -> None:
    data = open_coco(*write_set(tmp_path), max_megapixels=0.0023)
    assert data.image(1).size == (30, 50)
    with pytest.raises(DataError, match=r"b.png: .* larger than data.max_megapixels=0.0023"):
        data.image(0)
    with pytest.raises(DataError, match=message("too large", "empty.png", "data.max_megapixels=0.0001")):
        open_coco(*write_set(tmp_path), max_megapixels=0.0001)


def reachable_objects(root: object) -> int:
    """Python objects that hang on `root`, classes and modules not counted."""
    seen: dict[int, object] = {}
    queue = [root]
    while queue:
        each = queue.pop()
        if id(each) in seen or isinstance(each, type):
            continue
        seen[id(each)] = each
        queue.extend(gc.get_referents(each))
    return len(seen)


def test_annotations_are_held_in_flat_arrays(tmp_path: Path) -> None:
    """Ten times the images and boxes: the same number of Python objects, and few bytes for each box."""
    (tmp_path / "p").mkdir()
    Image.new("RGB", (50, 50)).save(tmp_path / "p" / "0.png")
    sets = []
    for count in (100, 1000):
        for i in range(1, count):
            (tmp_path / "p" / f"{i}.png").write_bytes(b"")  # only the names are looked at here
        document = {
            "images": [{"id": i, "file_name": f"{i}.png", "width": 50, "height": 50} for i in range(count)],
            "annotations": [
                {"id": 10 * i + k, "image_id": i, "category_id": 1, "bbox": [k, k, 9, 9], "iscrowd": 0}
                for i in range(count)
                for k in range(10)
            ],
            "categories": [{"id": 1, "name": "thing"}],
        }
        (tmp_path / "a.json").write_text(json.dumps(document))
        sets.append(open_coco(tmp_path / "p", tmp_path / "a.json"))
    small, large = sets
    assert reachable_objects(large) == reachable_objects(small)
    # 16 bytes of box and 4 of label per box; id 8, size 8, offset 8, name end 8 and some ten of name per image
    assert len(pickle.dumps(large)) < 10_000 * 20 + 1000 * 50 + 2000
    assert pickle.loads(pickle.dumps(large)).info(999).file_name == "999.png"


def test_real_sets_are_read() -> None:
    cells = shared_data("bccd")
    train = open_coco(cells / "train", cells / "annotations" / "instances_train.json")
    assert train.classes == Classes(("RBC", "WBC", "Platelets"), (1, 2, 3))
    counts = np.bincount(np.concatenate([train.targets(i)[1] for i in range(len(train))])).tolist()
    assert (len(train), counts, train.num_degenerate) == (205, [2381, 214, 209], 0)
    val = open_coco(cells / "val", cells / "annotations" / "instances_val.json", classes=train.classes)
    assert (len(val), len(val._boxes)) == (87, 1137) and val.image(0).size == (640, 480)


def test_real_coco_ids_are_mapped() -> None:
    coco = shared_data("coco_mini")
    data = open_coco(coco / "val2017", coco / "annotations" / "instances_val2017.json")
    assert (len(data), len(data.classes), data.num_crowd, data.num_empty) == (41, 80, 2, 2)
    assert data.classes.category_ids[-1] == 90 and data.classes.names[-1] == "toothbrush"
    document = json.loads((coco / "annotations" / "instances_val2017.json").read_text())
    for i in range(len(data)):
        boxes, labels = data.targets(i)
        own = [a for a in document["annotations"] if a["image_id"] == data.info(i).image_id and not a["iscrowd"]]
        assert [data.classes.category_ids[k] for k in labels] == [a["category_id"] for a in own]
        corners = np.array([[a["bbox"][0], a["bbox"][1]] for a in own]).reshape(-1, 2)
        np.testing.assert_allclose(boxes[:, :2], corners, atol=1e-4)
