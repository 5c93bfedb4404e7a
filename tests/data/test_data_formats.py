"""VOC and YOLO folders, LVIS, and what tells them apart: read into the same arrays as COCO, or one sentence."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest
from format_cases import everything, lvis_set, recognise, yolo_set
from format_sets import IDS, SIZE, voc_object, voc_xml, write_all
from image_cases import STORED, UPRIGHT, camera_file
from messages import message
from PIL import Image

from rtdetr.data.classes import Classes, DataError
from rtdetr.data.formats.lvis import is_federated
from rtdetr.data.formats.records import IMAGE_SUFFIXES
from rtdetr.data.formats.sources import find_sources, open_set, read_document, source_of
from rtdetr.data.images import FORMATS

NAMES = tuple(IDS[category] for category in sorted(IDS))


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_all(tmp_path_factory.mktemp("sets"))


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_same_arrays_from_every_format(sets: dict[str, Path], split: str) -> None:
    """A folder is all that is given. Whole pixels come back from six digits."""
    coco, voc, yolo = (open_set(sets[name], split=split) for name in ("coco", "voc", "yolo"))
    assert everything(coco) == everything(voc) == everything(yolo) and len(coco) == 6
    assert coco.num_empty == voc.num_empty == yolo.num_empty == 1
    assert coco.classes == Classes(NAMES, (0, 1203, 4000))
    assert voc.classes == Classes(NAMES, (1, 2, 3)) and yolo.classes == Classes(NAMES, (0, 1, 2))
    assert np.array_equal(np.asarray(coco.image(3)), np.asarray(yolo.image(3)))
    assert [voc.info(i).image_id for i in range(6)] == [yolo.info(i).image_id for i in range(6)] == [1, 2, 3, 4, 5, 6]


def test_recognised(sets: dict[str, Path]) -> None:
    for path, format in (
        (sets["coco"], "coco"),
        (sets["coco"] / "annotations", "coco"),
        (sets["coco"] / "annotations" / "instances_val.json", "coco"),
        (sets["voc"], "voc"),
        (sets["voc"] / "Annotations", "voc"),
        (sets["voc"] / "ImageSets" / "Main" / "val.txt", "voc"),
        (sets["yolo"], "yolo"),
        (sets["yolo"] / "data.yaml", "yolo"),
    ):
        assert recognise(path) == format, path
        val = open_set(path, split="val")
        assert len(val) == 6 and val.info(0).file_name.endswith("val 0ß.png")


def test_nothing_recognised(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=message("no annotations", "COCO", "LVIS", "data.yaml")):
        recognise(tmp_path)
    with pytest.raises(DataError, match=message("no annotations", "nowhere")):
        recognise(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"notes.txt: not valid JSON"):
        read_document(tmp_path / "notes.txt")


def test_sets_by_name(sets: dict[str, Path], tmp_path: Path) -> None:
    assert list(find_sources(sets["voc"])) == ["train", "val"]
    with pytest.raises(DataError, match=message("no such set", "voc", "test", "train, val")):
        source_of(sets["voc"], "test")
    lists = tmp_path / "ImageSets" / "Main"
    lists.mkdir(parents=True)
    (tmp_path / "Annotations").mkdir()
    (tmp_path / "Annotations" / "a.xml").write_text(voc_xml("a.png", [voc_object("cat", [1, 1, 2, 2])]))
    for name in ("trainval", "test"):
        (lists / f"{name}.txt").write_text("a\n")
    assert [source_of(tmp_path, each).split for each in ("train", "val", "test")] == ["trainval", "test", "test"]


def test_roboflow_folders(sets: dict[str, Path], tmp_path: Path) -> None:
    """train/_annotations.coco.json, XML beside images, and ../train/images that is one folder too far."""
    for split, name in (("train", "train"), ("val", "valid")):
        for kind in ("coco", "voc"):
            (tmp_path / kind / name).mkdir(parents=True)
            for each in (sets["coco"] / split).iterdir():
                (tmp_path / kind / name / each.name).symlink_to(each)
        source = sets["coco"] / "annotations" / f"instances_{split}.json"
        (tmp_path / "coco" / name / "_annotations.coco.json").write_bytes(source.read_bytes())
        for each in (sets["voc"] / "Annotations").glob(f"{split}*"):
            (tmp_path / "voc" / name / each.name).write_bytes(each.read_bytes())
        (tmp_path / "yolo" / name).mkdir(parents=True)
        (tmp_path / "yolo" / name / "images").symlink_to(sets["yolo"] / "images" / split)
        (tmp_path / "yolo" / name / "labels").symlink_to(sets["yolo"] / "labels" / split)
    text = f"train: ../train/images\nval: ../valid/images\nnames: {list(NAMES)}\npath: /content/gone\n"
    (tmp_path / "yolo" / "data.yaml").write_text(text)
    expected = everything(open_set(sets["coco"], split="val"))
    by_name = sorted(range(3), key=lambda i: NAMES[i])  # VOC without classes.txt
    for kind in ("coco", "voc", "yolo"):
        assert recognise(tmp_path / kind) == kind
        found = open_set(tmp_path / kind, split="val", classes=Classes(NAMES, (1, 2, 3)) if kind == "voc" else None)
        assert everything(found) == expected
    assert open_set(tmp_path / "voc").classes == Classes(tuple(NAMES[i] for i in by_name), (1, 2, 3))


@pytest.mark.parametrize(
    "yaml",
    [
        "train: images\nnames: [cat, dog]\nnc: 2",
        "train: ./images/\nnames: {0: cat, 1: dog}",
        "train: {root}/images\nnames: {{'0': cat, '1': dog}}",
        "path: {root}\ntrain: [images]\nnames: [cat, dog]",
        "path: .\ntrain: list.txt\nnames: [cat, dog]",
        "train: other/whole.txt\nnames:\n- cat\n- dog",
        "names: [cat, dog]",
    ],
)
def test_every_way_to_write_a_data_yaml(tmp_path: Path, yaml: str) -> None:
    root = yolo_set(tmp_path / "set", yaml=yaml.format(root=tmp_path / "set") if "{root}" in yaml else yaml)
    (root / "list.txt").write_text("./images/a.png\n\nimages/b.png\n")
    (root / "other").mkdir()
    (root / "other" / "whole.txt").write_text(f"{root}/images/b.png\nimages/a.png\n")
    data = open_set(root / "data.yaml")
    assert [Path(data.info(i).file_name).name for i in range(len(data))] == ["a.png", "b.png"]
    assert data.targets(0)[0].tolist() == [[36, 16, 60, 48]] and len(data.targets(1)[0]) == 0
    assert data.classes == Classes(("cat", "dog"), (0, 1))


def test_folders_without_a_data_yaml(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, "1 0.5 0.5 0.25 0.5\n")
    (root / "data.yaml").unlink()
    assert open_set(root).classes == Classes(("class0", "class1"), (0, 1))
    (root / "labels" / "classes.txt").write_text("a cat\nÄ dog\n")
    assert open_set(root).classes == Classes(("a cat", "Ä dog"), (0, 1))


def test_an_empty_test_folder_is_no_set(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "labels" / name).mkdir(parents=True)
    yolo_set(tmp_path / "made", "1 0.5 0.5 0.25 0.5\n")
    (tmp_path / "made" / "images" / "a.png").rename(tmp_path / "images" / "train" / "a.png")
    (tmp_path / "made" / "labels" / "a.txt").rename(tmp_path / "labels" / "train" / "a.txt")
    assert [*find_sources(tmp_path)] == ["train"] and open_set(tmp_path).num_boxes == 1


def test_a_config_of_training_is_no_data_yaml(tmp_path: Path) -> None:
    root = yolo_set(tmp_path)
    (root / "config.yml").write_text("train: {epochs: 3}\nname: mine\n")
    assert find_sources(root)["train"].path == root / "data.yaml"
    (root / "data.yaml").unlink()
    assert recognise(root) == "yolo"


def test_a_first_image_without_labels_or_class_names(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, "1 0.5 0.5 0.25 0.5\n")
    (root / "data.yaml").unlink()
    (root / "labels" / "a.txt").rename(root / "labels" / "b.txt")
    assert open_set(root).classes == Classes(("class0", "class1"), (0, 1))


def test_one_set_of_a_folder_with_several(sets: dict[str, Path], tmp_path: Path) -> None:
    """Its classes are those of the data.yaml above."""
    (tmp_path / "valid").mkdir()
    for name in ("images", "labels"):
        (tmp_path / "valid" / name).symlink_to(sets["yolo"] / name / "val")
    (tmp_path / "data.yaml").write_bytes((sets["yolo"] / "data.yaml").read_bytes())
    expected = open_set(sets["yolo"], split="val")
    for path in (sets["yolo"] / "images" / "val", tmp_path / "valid"):
        data = open_set(path)
        assert everything(data) == everything(expected) and data.classes == expected.classes


def test_names_of_one_set_are_those_of_the_only_yaml_above(tmp_path: Path) -> None:
    root = yolo_set(tmp_path / "train", "1 0.5 0.5 0.25 0.5\n")
    (root / "data.yaml").unlink()
    (tmp_path / "mugs.yaml").write_text("train: train\nval: valid\nnames: [cat, dog]\n")
    (tmp_path / "compose.yaml").write_text("test: {image: x}\n")
    for path in (root, root / "images"):
        assert open_set(path).classes.names == ("cat", "dog")
    (tmp_path / "mugs2.yaml").write_text("names: [bird, cow]\n")
    assert open_set(root).classes.names == ("class0", "class1")


def test_keypoints_and_names_of_one_set_are_those_declared_above(tmp_path: Path) -> None:
    root = yolo_set(tmp_path / "train", "1 0.5 0.5 0.25 0.5 0.1 0.1 0.9 0.9\n")
    (root / "data.yaml").unlink()
    (tmp_path / "data.yaml").write_text("train: train\nval: valid\nnames: [cat, dog]\nkpt_shape: [2, 2]\n")
    for path in (root, root / "images"):
        assert open_set(path).targets(0)[0].tolist() == [[36, 16, 60, 48]]
    (tmp_path / "data.yaml").unlink()
    for name in ("classes.txt", "labels/classes.txt"):
        (root / name).write_text("cat\ndog\n")
        assert open_set(root / "images").classes.names == ("cat", "dog")
        (root / name).unlink()


def test_polygons_become_boxes_and_are_counted(tmp_path: Path) -> None:
    data = open_set(yolo_set(tmp_path, "1 0.25 0.25 0.75 0.25 0.5 0.75\n0 0.5 0.5 0.25 0.5\n"))
    assert data.targets(0)[0].tolist() == [[24, 16, 72, 48], [36, 16, 60, 48]]
    assert data.targets(0)[1].tolist() == [1, 0] and message("taken as", "polygon", "boxes around them: 1").search(
        data.summary()
    )


def test_keypoints_behind_a_box_are_not_read(tmp_path: Path) -> None:
    """As many numbers as a polygon has, where `kpt_shape` is [n, 2]."""
    root = yolo_set(tmp_path, "1 0.5 0.5 0.25 0.5 0.1 0.1 0.9 0.9\n0 0.5 0.5 0.25 0.5\n")
    (root / "data.yaml").write_text("train: images\nnames: [cat, dog]\nkpt_shape: [2, 2]\n")
    assert open_set(root).targets(0)[0].tolist() == [[36, 16, 60, 48]] * 2
    (root / "data.yaml").write_text("train: images\nnames: [cat, dog]\nkpt_shape: [2, 3]\n")
    (root / "labels" / "a.txt").write_text("1 0.5 0.5 0.25 0.5 0.1 0.1 2 0.9 0.9 0\n")
    assert open_set(root).targets(0)[0].tolist() == [[36, 16, 60, 48]]


def test_a_test_set_that_was_never_made(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, yaml="train: images\nval: images\ntest: ../test/images\nnames: [cat, dog]")
    assert [*find_sources(root)] == ["train", "val"]
    assert message("no such path", "test", "'../test/images'").search(open_set(root).summary())
    with pytest.raises(DataError, match=message("no such set", "test", "train, val")):
        open_set(root, split="test")


def test_advice_where_there_is_nothing_to_validate_on(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, yaml="train: images\nnames: [cat, dog]")
    with pytest.raises(DataError, match=message("no such set", "val", "train", "data.val.split")):
        open_set(root, split="val")


def test_sizes_come_from_the_upright_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = yolo_set(tmp_path)
    (root / "images" / "a.png").unlink()
    camera_file(root / "images" / "a.jpg", 6)
    monkeypatch.setattr(Image.Image, "load", lambda *_: pytest.fail("an image was decoded"))
    data = open_set(root)
    monkeypatch.undo()
    assert (data.info(0).height, data.info(0).width) == UPRIGHT.shape[:2] != STORED[6].shape[:2]
    assert data.image(0).size == (data.info(0).width, data.info(0).height)


YOLO_DEFECTS = {
    "0 0.5 0.5 0.25": message("expected", "a.txt", "line 1", "class", "4", "a class and 3"),
    "0 0.5 0.5 0.25 0.5 0.9": message("expected", "a.txt", "line 1", "class", "4", "a class and 5"),
    "\n0 0.5 0.5 0.2 0.2\n0 0.5 nan 0.25 0.5": message("expected", "a.txt", "line 3", "finite", "'0 0.5 nan"),
    "0 0.5 inf 0.25 0.5": message("expected", "a.txt", "line 1", "finite"),
    "nan 0.5 0.5 0.25 0.5": message("expected", "a.txt", "line 1", "finite"),
    "2 0.5 0.5 0.25 0.5": message("unknown reference", "a.txt", "line 1", "class 2", "2", "0 to 1"),
    "-1 0.5 0.5 0.25 0.5": message("unknown reference", "a.txt", "line 1", "class -1", "2"),
    "0.5 0.5 0.5 0.25 0.5": message("unknown reference", "a.txt", "line 1", "class 0.5", "2"),
    "0 0.5 0.5 -0.25 0.5": message("expected", "a.txt", "line 1", "0 to 1"),
    "0 48 32 20 10": message("expected", "a.txt", "line 1", "0 to 1"),
    "0 1e308 0.5 0.5 0.5": message("expected", "a.txt", "line 1", "0 to 1"),
    "cat 0.5 0.5 0.25 0.5": message("expected", "a.txt", "line 1", "class cx cy w h", "'cat"),
    "0,0.5,0.5,0.25,0.5": message("expected", "a.txt", "line 1", "class cx cy w h"),
    "{}": message("expected", "a.txt", "line 1", "class cx cy w h"),
}


@pytest.mark.parametrize("lines", YOLO_DEFECTS)
def test_bad_label_lines_are_named(tmp_path: Path, lines: str) -> None:
    with pytest.raises(DataError, match=YOLO_DEFECTS[lines]) as caught:
        open_set(yolo_set(tmp_path, lines))
    assert "\n" not in str(caught.value)


def test_all_problems_at_once(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, "0 0.5 0.5 0.25\n0 0.5 0.5 0.25 0.5\n7 0.5 0.5 0.25 0.5\n")
    (root / "images" / "c.png").write_bytes(b"no image")
    document = read_document(source_of(root, "train"), limit=None)
    assert [(Path(each.file).name, each.record, each.kind) for each in document.defects] == [
        ("a.txt", "line 1", "box_numbers"),
        ("a.txt", "line 3", "box_class"),
        ("c.png", None, "image_picture"),
    ]
    assert len(document.images) == 2 and [each["bbox"] for each in document.annotations] == [[36, 16, 24, 32]]


def test_labels_whose_image_is_gone_are_named(tmp_path: Path) -> None:
    """Nothing else in a YOLO folder tells that there was one."""
    root = yolo_set(tmp_path)
    (root / "labels" / "sub").mkdir()
    (root / "labels" / "sub" / "lost.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    (root / "labels" / "classes.txt").write_text("cat\ndog\n")
    document = read_document(source_of(root, "train"), limit=None)
    assert [(Path(each.file).name, each.kind, each.action) for each in document.defects] == [
        ("lost.txt", "picture_missing", "dropped")
    ]
    with pytest.raises(DataError, match=message("no such image", "lost.txt", "images/sub/lost.*", "1 of 3")):
        open_set(root)


def test_advice_on_names_from_windows(tmp_path: Path) -> None:
    root = yolo_set(tmp_path, yaml="train: .\\images\nnames: [cat, dog]\n")
    with pytest.raises(DataError, match=message("backslashes", "train")):
        open_set(root)
    (root / "data.yaml").write_text("train: list.txt\nnames: [cat, dog]\n")
    (root / "list.txt").write_bytes(b"images\\a.png\r\nimages\\b.png\r\n")
    with pytest.raises(DataError, match=message("backslashes", "line 1", "no such image")):
        open_set(root)


def test_images_of_every_format_are_found() -> None:
    endings = {each for each, format in Image.registered_extensions().items() if format in FORMATS}
    assert endings - set(IMAGE_SUFFIXES) <= {".icb", ".vda", ".vst", ".pfm"}  # old names of TGA, and floats


@pytest.mark.parametrize("ending", [each for each in IMAGE_SUFFIXES if each not in (".avif", ".avifs", ".jp2", ".mpo")])
def test_images_of_every_ending(tmp_path: Path, ending: str) -> None:
    root = yolo_set(tmp_path)
    kind = Image.registered_extensions()[ending]
    if kind not in FORMATS:
        pytest.skip(f"PIL reads no {ending} here")
    Image.new("L" if ending in (".pgm", ".pbm") else "RGB", SIZE).save(root / "images" / f"a{ending.upper()}", kind)
    (root / "images" / "a.png").unlink()
    data = open_set(root, limit=None)
    assert [Path(data.info(i).file_name).name for i in range(len(data))] == [f"a{ending.upper()}", "b.png"]
    assert data.image(0).size == SIZE and len(data.targets(0)[0]) == 1


YAML_DEFECTS = {
    "train: images\nnames: [cat, dog]\nnc: 3": r"`nc` is 3, but `names` has 2",
    "train: images\nnc: -1": message("expected", "nc", "number", "classes", "-1"),
    "train: images\nnames: [yes, no]": message("expected", "class 0", "text", "True"),
    "train: images\nnames: []": message("expected", "names", "list"),
    "train: images\nnames: cat": message("expected", "names", "list"),
    "train: images\nnames: {a: cat}": message("expected", "number", "0", "'a'"),
    "train: images\nnames: {0: cat, '0': dog}": message("twice", "0", "line 2"),
    "train: images\ntrain: images\nnames: [a]": message("twice", "train", "line 1", "line 2"),
    "train: nowhere\nnames: [cat]": message("no such path", "train", "'nowhere'", "deep"),
    "train: 5\nnames: [cat]": message("expected", "train", "folder", "list file", "5"),
    "path: [1]\ntrain: images\nnames: [cat]": message("expected", "path", "folder"),
    "train: [images\nnames": r"not valid YAML at line 2",
    "- train\n- val": r"expected `key: value` lines",
    "train: images\nnames: " + "[" * 5000: message("nested", "20", "data.yaml"),
    "train: list.txt\nnames: [cat, dog]": message("outside", "list.txt", "line 2", "'../../secret.png'"),
    "val: list.txt\ntrain: gone.txt\nnames: [cat, dog]": r"`train` is 'gone.txt'",
}


@pytest.mark.parametrize("yaml", YAML_DEFECTS)
def test_bad_data_yamls_are_named(tmp_path: Path, yaml: str) -> None:
    root = yolo_set(tmp_path / "set" / "deep", yaml=yaml)
    Image.new("RGB", SIZE).save(tmp_path / "secret.png")
    (root / "list.txt").write_text("images/a.png\n../../secret.png\n")
    with pytest.raises(DataError, match=YAML_DEFECTS[yaml]) as caught:
        open_set(root / "data.yaml")
    assert "\n" not in str(caught.value)


def test_wrong_encodings_are_named(tmp_path: Path) -> None:
    root = yolo_set(tmp_path)
    (root / "labels" / "a.txt").write_bytes(b"0 0.5 0.5 0.25 0.5\n0 0.5 0.5 0.25 0.5 \xff\n")
    with pytest.raises(DataError, match=message("not UTF-8", "a.txt", "line 2", "0xff")):
        open_set(root)
    (root / "data.yaml").write_bytes("train: images\nnames: [Bär]".encode("latin-1"))
    with pytest.raises(DataError, match=message("not UTF-8", "data.yaml", "line 2")):
        open_set(root)


def test_no_labels_at_all(tmp_path: Path) -> None:
    root = yolo_set(tmp_path)
    (root / "labels" / "a.txt").unlink()
    with pytest.raises(DataError, match=message("no labels", "2 images", "labels/a.txt")):
        open_set(root)


def voc_set(root: Path, xml: str | bytes) -> Path:
    for folder in ("Annotations", "JPEGImages", "ImageSets/Main"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    Image.new("RGB", SIZE).save(root / "JPEGImages" / "a.png")
    (root / "Annotations" / "a.xml").write_bytes(xml.encode() if isinstance(xml, str) else xml)
    return root


CAT = voc_object("cat", [9, 19, 21, 21])


def test_voc_pixels_are_counted_from_1_unless_some_begin_at_0(tmp_path: Path) -> None:
    data = open_set(voc_set(tmp_path, voc_xml("a.png", [CAT])))
    assert data.targets(0)[0].tolist() == [[9, 19, 30, 40]]
    data = open_set(voc_set(tmp_path, voc_xml("a.png", [CAT, voc_object("cat", [-1, 4, 8, 8])])))
    assert data.targets(0)[0].tolist() == [[10, 20, 30, 40], [0, 5, 7, 12]]
    assert "boxes counted from pixel 0" in data.summary()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "iso-8859-1"])
def test_voc_encodings(tmp_path: Path, encoding: str) -> None:
    declared = encoding.removesuffix("-sig")
    xml = f'<?xml version="1.0" encoding="{declared}"?>\n' + voc_xml("a.png", [voc_object("Bär", [1, 1, 5, 5])])
    assert open_set(voc_set(tmp_path, xml.encode(encoding))).classes.names == ("Bär",)


def test_voc_images_by_the_name_of_the_xml_or_in_it(tmp_path: Path) -> None:
    root = voc_set(tmp_path, voc_xml("C:\\me\\wrong.jpg", [CAT]))
    assert open_set(root).info(0).file_name == "a.png"
    (root / "JPEGImages" / "a.png").rename(root / "JPEGImages" / "b.PNG")
    (root / "Annotations" / "a.xml").write_text(voc_xml("b.PNG", [CAT]))
    assert open_set(root).info(0).file_name == "b.PNG"
    (root / "Annotations" / "a.xml").write_text(voc_xml("b.\nPNG", [CAT]))
    with pytest.raises(DataError, match=message("expected", "a.xml", "<filename>", r"'b.\nPNG'", "image")):
        open_set(root)
    (root / "Annotations" / "a.xml").write_text(voc_xml("../../b.png", [CAT]))
    with pytest.raises(DataError, match=message("leaves the folder", "a.xml", "'../../b.png'")):
        open_set(root)


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaa">' + "".join(
    f'<!ENTITY {b} "{f"&{a};" * 20}">' for a, b in zip("abcdefgh", "bcdefghi")
)
VOC_DEFECTS = {
    "": message("not valid", "a.xml", "line 1", "XML", "empty"),
    "<annotation>\n<object>": message("not valid", "a.xml", "line 2", "XML"),
    "<annotation>\n</object>": message("not valid", "a.xml", "line 2", "XML"),
    "<html></html>": message("expected", "a.xml", "line 1", "<annotation>", "<html>"),
    '{"images": []}': message("not valid", "a.xml", "line 1", "XML"),
    f"{BOMB}]><annotation><filename>&i;</filename></annotation>": r"^[^(]*line 1: declares the entity 'a', .*; refused",
    '<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]><annotation>&x;</annotation>': r"declares the entity 'x'",
    "<annotation>\n" + "<a>" * 3000: message("nested", "a.xml", "line 2", "20"),
    voc_xml("a.png", [CAT.replace("30", "nan")]): message(
        "needs", "a.xml", "line 6", "<bndbox>", "finite number", "<xmax>", "'nan'"
    ),
    voc_xml("a.png", [CAT.replace("30", "1e999")]): message(
        "needs", "a.xml", "line 6", "<bndbox>", "finite number", "<xmax>"
    ),
    voc_xml("a.png", [CAT.replace("30", "wide")]): message(
        "needs", "a.xml", "line 6", "<bndbox>", "finite number", "<xmax>", "'wide'"
    ),
    voc_xml("a.png", [CAT.replace("<xmin>10</xmin>", "")]): message(
        "needs", "line 6", "<bndbox>", "finite number", "<xmin>", "None"
    ),
    voc_xml("a.png", [CAT.replace("<xmin>", "<xmin>3</xmin><xmin>")]): message("twice", "line 6", "<xmin>", "<bndbox>"),
    voc_xml("a.png", [CAT.replace("bndbox", "box")]): message(
        "needs", "a.xml", "line 4", "<bndbox>", "<name>", "<box>"
    ),
    voc_xml("a.png", [CAT.replace("cat", " ")]): message("needs", "a.xml", "line 4", "<name>"),
    voc_xml("a.png", [CAT]).replace("96", "-96"): message(
        "expected", "line 3", "height", "width", "whole pixels", "64.0", "-96.0"
    ),
    voc_xml("a.png", []): r"no XML in it names an object, so there is nothing to detect",
    voc_xml("a.png", [CAT]).replace("<annotation>", '<?xml version="1.0" encoding="klingon"?><annotation>'): (
        message("not valid", "a.xml", "line 1", "XML")
    ),
}


@pytest.mark.parametrize("xml", VOC_DEFECTS)
def test_bad_xml_is_named(tmp_path: Path, xml: str) -> None:
    started = time.perf_counter()
    with pytest.raises(DataError, match=VOC_DEFECTS[xml]) as caught:
        open_set(voc_set(tmp_path, xml))
    assert "\n" not in str(caught.value) and time.perf_counter() - started < 5


def test_xml_files_alone(tmp_path: Path) -> None:
    """As some download them: the images are elsewhere."""
    root = voc_set(tmp_path / "set", voc_xml("a.png", [CAT]))
    (root / "JPEGImages").rename(tmp_path / "pictures")
    data = open_set(root / "Annotations", tmp_path / "pictures")
    assert data.info(0).file_name == "a.png" and len(read_document(data.origin).images) == 1


def test_bad_voc_lists_are_named(tmp_path: Path) -> None:
    root = voc_set(tmp_path, voc_xml("a.png", [CAT]))
    path = root / "ImageSets" / "Main" / "train.txt"
    for lines, sentence in (
        ("a\nb\n", r"train.txt: line 2: .*Annotations/b.xml: no such annotation"),
        ("a\n\na\n", r"train.txt: line 3: 'a' is listed twice"),
        ("../../../etc/passwd\n", r"train.txt: line 1: '../../../etc/passwd' leaves .*Annotations"),
        ("", r"no image is left to work on"),
    ):
        path.write_text(lines)
        with pytest.raises(DataError, match=sentence):
            open_set(root)
    for line in ("a  1\n", "a.png\n", "a.xml\n"):
        path.write_text(line)
        assert len(open_set(root)) == 1


def test_a_class_that_is_not_listed(tmp_path: Path) -> None:
    root = voc_set(tmp_path, voc_xml("a.png", [CAT]))
    (root / "classes.txt").write_text("dog\nbird\n")
    with pytest.raises(DataError, match=message("unknown class names", "a.xml", "line 4", "'cat'", "'dog'", "'bird'")):
        open_set(root)


def test_voc_classes_are_matched_by_name(sets: dict[str, Path]) -> None:
    """VOC has no ids: the model's order of classes counts, whatever it is."""
    model = Classes(("zebra", "ähre", "a big cat", "more"), (9, 8, 7, 6))
    data = open_set(sets["voc"], split="val", classes=model)
    own = open_set(sets["voc"], split="val")
    index = [model.names.index(name) for name in own.classes.names]
    assert all([index[i] for i in own.targets(k)[1]] == data.targets(k)[1].tolist() for k in range(6))
    with pytest.raises(DataError, match=message("unknown class names", "categories")):
        open_set(sets["voc"], split="val", classes=Classes(("dog",), (1,)))


def test_lvis_is_recognised_and_keeps_its_lists(tmp_path: Path) -> None:
    path, raw = lvis_set(tmp_path)
    document = read_document(path)
    assert recognise(path) == "coco" and is_federated(document.images)
    assert document.images[0]["neg_category_ids"] == [2] and document.images[0]["not_exhaustive_category_ids"] == []
    assert [each["frequency"] for each in document.categories] == ["r", "f"]
    assert open_set(path, split="val").info(0).file_name == "val2017/a.png"
    raw["images"][0]["neg_category_ids"] = "2"
    path.write_text(json.dumps(raw))
    with pytest.raises(DataError, match=message("expected", "image 1", "neg_category_ids", "list", "'2'")):
        read_document(path)


def test_images_that_are_not_near_their_json(tmp_path: Path, sets: dict[str, Path]) -> None:
    path = tmp_path / "a.json"
    path.write_bytes((sets["coco"] / "annotations" / "instances_val.json").read_bytes())
    with pytest.raises(DataError, match=message("images not found", "a.json", "data.train")):
        open_set(path)
    assert len(open_set(path, sets["coco"] / "val")) == 6
    os.symlink(sets["coco"] / "val", tmp_path / "images")
    assert len(open_set(path)) == 6
    document = json.loads(path.read_text())
    for each in document["images"]:
        each["file_name"] = f"val\\{each['file_name']}"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=message("images not found", "a.json", "/ instead of")):
        open_set(path)
    path.write_text(json.dumps(document | {"images": [], "annotations": []}))
    with pytest.raises(DataError, match=message("no image there", "a.json")):
        open_set(path)


def test_links_that_go_round_in_a_circle(tmp_path: Path) -> None:
    root = yolo_set(tmp_path)
    (root / "images" / "again").symlink_to(root / "images")
    assert len(open_set(root)) == 2


TOKENS = [
    *(
        b"nan",
        b"-1",
        b"1e309",
        b"../",
        b"<",
        b"]]>",
        b"&a;",
        b"\xff",
        b"\0",
        b"{",
        b"[",
        b"- ",
        b": ",
        b"\n",
        b"*a",
        b"/",
    ),
    *(b"!!python/object:os.system ", b"9" * 400, b"0x1F", b"\xe2\x80\xae", b"'", b"&", b"@", b"<!ENTITY a 'b'>", b"\r"),
]


def mutated(content: bytes, rng: np.random.Generator) -> bytes:
    for _ in range(rng.integers(1, 4)):
        start = int(rng.integers(0, len(content) + 1))
        end = start + int(rng.choice([0, 1, 3, 20, len(content)]))
        content = content[:start] + bytes(rng.choice(np.array(TOKENS, object))) + content[end:]
    return content


@pytest.mark.parametrize("name", ["voc", "yolo"])
def test_whatever_is_in_the_files_is_one_sentence_or_a_set(tmp_path: Path, name: str) -> None:
    """Random damage: a set that can be used, or DataError with one line."""
    rng = np.random.default_rng(int(os.environ.get("RTDETR_FUZZ_SEED", "0")))
    root = write_all(tmp_path)[name]
    files = [path for path in sorted(root.rglob("*")) if path.suffix in (".xml", ".txt", ".yaml")]
    outcomes = {True: 0, False: 0}
    for _ in range(int(os.environ.get("RTDETR_FUZZ", "150"))):
        path = files[rng.integers(len(files))]
        whole = path.read_bytes()
        path.write_bytes(mutated(whole, rng))
        try:
            data = open_set(root, split=str(rng.choice(["train", "val"])))
            assert all(np.isfinite(data.targets(i)[0]).all() for i in range(len(data)))
            outcomes[True] += 1
        except DataError as error:
            assert "\n" not in str(error) and str(tmp_path) in str(error) and len(str(error)) < 1200
            outcomes[False] += 1
        path.write_bytes(whole)
    assert min(outcomes.values()) > 0
