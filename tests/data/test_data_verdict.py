"""The doctor's last line says why it ends with its exit code, and what is passed over in a folder is named."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from format_sets import write_all
from hostile_sets import CASES, SOUND, Case, write_case
from named_sets import WRITERS
from PIL import Image
from sound_set import HEIGHT, WIDTH, sound_document

from rtdetr import cli
from rtdetr.data.classes import DataError
from rtdetr.data.doctor.examine import examine
from rtdetr.data.formats.coco import read_coco
from rtdetr.data.formats.sources import find_sources, not_read, open_set

# What is told of a set without being a defect.
NOTES = {
    *("picture_exif", "picture_cmyk", "picture_gray", "picture_16bit", "picture_palette", "picture_alpha"),
    *("picture_1bit", "picture_animated", "box_copy"),
}


def check_verdict(lines: list[str], code: int) -> None:
    """Of the lines of a report: defects, then notes, then the sets, then why it ends with that exit code."""
    begins = {0: "sound: no defects", 1: "training would survive: ", 2: "unusable: "}
    assert lines[-1].startswith(begins[code]) and lines[-1].endswith(f"; exit code {code}"), lines[-1]
    words = [line.split()[0] for line in lines if re.match(r"(note|kept|clipped|dropped|refused) ", line)]
    order = ("refused", "dropped", "clipped", "kept", "note")
    assert words == sorted(words, key=order.index)
    assert all((line.split()[1] in NOTES) == line.startswith("note ") for line in lines if line.split()[0] in order)


@pytest.mark.parametrize("case", [SOUND, *CASES[::3]], ids=lambda case: case.name)
def test_the_last_line_fits_the_exit_code(case: Case, tmp_path: Path, images: Path) -> None:
    annotations, folder = write_case(case, tmp_path, images)
    report = examine(annotations, str(folder))
    lines = list(report.lines())
    check_verdict(lines, report.code())
    assert any(": sound" in line for line in lines) == (report.code() == 0)


def greys(document: dict[str, Any], folder: Path) -> None:
    """17 grey images, of which two are the same."""
    for i in range(17):
        pixels = np.random.default_rng(max(i, 1)).integers(0, 255, (HEIGHT, WIDTH), np.uint8)
        (folder / f"{i:02d}.png").unlink()
        Image.fromarray(pixels).save(folder / f"{i:02d}.png")


def test_a_defect_among_many_notes(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It was called "sound, 17 notes" and ended with 1."""
    annotations, folder = write_case(Case("greys", "", 1, greys), tmp_path, images)
    assert cli.main(["doctor", str(annotations), "--images", str(folder)]) == 1
    lines = capsys.readouterr().out.splitlines()
    check_verdict(lines, 1)
    assert lines[0].startswith("kept    picture_copy") and lines[1].startswith("note    picture_gray")
    assert f"{annotations}: 1 defect (1 kept), 17 notes; training would survive them" in lines
    assert lines[-1] == "training would survive: 1 defect (1 picture_copy), 17 notes; exit code 1"
    assert "sound" not in "".join(lines).replace(str(tmp_path), "")


def test_the_verdict_of_two_sets(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    lines = [f"  {name}: {{annotations: {annotations}, images: {folder}}}" for name in ("train", "val")]
    (tmp_path / "my.yml").write_text("data:\n" + "\n".join(lines))
    assert cli.main(["doctor", str(tmp_path / "my.yml")]) == 1
    out = capsys.readouterr().out.splitlines()
    check_verdict(out, 1)
    assert f"train {annotations}: sound" in out and f"val {annotations}: 24 defects (24 kept)" in "\n".join(out)
    (tmp_path / "my.yml").write_text(("data:\n" + "\n".join(lines)).replace("a.json", "b.json"))
    assert cli.main(["doctor", str(tmp_path / "my.yml")]) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"unusable: {tmp_path / 'b.json'}: no such annotation file") and "and 1 more" in last


def test_the_verdict_stands_behind_the_clean_copy(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    assert cli.main(["doctor", str(annotations), "--images", str(folder), "--fix", str(tmp_path / "out.json")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "sound: no defects; exit code 0"


LISTS = {
    "categories null": ({"categories": None}, "`categories` is null"),
    "images null": ({"images": None}, "`images` is null"),
    "no categories": ({"categories": ...}, "`categories` is missing"),
    "no images": ({"images": ...}, "`images` is missing"),
    "no annotations": ({"annotations": ...}, "`annotations` is missing"),
    "annotations an object": ({"annotations": {"1": {"bbox": [1, 2, 3, 4]}}}, "`annotations` is an object"),
    "images text": ({"images": "a.png"}, "`images` is text"),
    "categories a number": ({"categories": 3}, "`categories` is a number"),
    "annotations true": ({"annotations": True}, "`annotations` is true or false"),
    "two at once": ({"images": None, "categories": ...}, "`images` is null and `categories` is missing"),
}


@pytest.mark.parametrize("name", LISTS)
def test_what_stands_in_place_of_a_list(name: str, tmp_path: Path) -> None:
    changes, sentence = LISTS[name]
    document = sound_document() | {"info": {}} | changes
    path = tmp_path / "a.json"
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}))
    with pytest.raises(DataError) as caught:
        read_coco(path)
    assert str(caught.value).startswith(f"{path}: {sentence} at the top, expected ")
    assert ("without annotations" in str(caught.value)) == (name == "no annotations")
    lines = list(examine(path).lines())
    assert sentence in lines[0] and sentence in lines[-1]


def coco_folder(root: Path, images: Path) -> Path:
    """A folder with a set of each name, two that nothing asks for, and files that are no sets."""
    annotations, folder = write_case(SOUND, root, images)
    (root / "annotations").mkdir()
    for name in ("instances_train", "instances_val", "instances_many", "instances_train_sparse_ids", "captions_train"):
        shutil.copy(annotations, root / "annotations" / f"{name}.json")
    annotations.unlink()
    (root / "rtdetr.json").write_text("{}")
    return folder.rename(root / "train").parent


PASSED_OVER = ("instances_many.json", "instances_train_sparse_ids.json")


def test_sets_that_are_passed_over_are_named(tmp_path: Path, images: Path) -> None:
    root = coco_folder(tmp_path, images)
    assert not_read(root) == [root / "annotations" / name for name in PASSED_OVER]
    assert not_read(root / "annotations" / "instances_val.json") == []
    (summary,) = [line for line in open_set(root, split="train").summary().split("; ") if line.startswith("not read")]
    assert summary == f"not read: {root}/annotations/{PASSED_OVER[0]}, {root}/annotations/{PASSED_OVER[1]}"
    assert "not read" not in open_set(root / "annotations" / "instances_train.json", root / "train").summary()


def test_the_commands_name_them(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = coco_folder(tmp_path, images)
    (tmp_path / "my.yml").write_text(f"data: {{train: {{annotations: {root}}}, val: {{annotations: {root}}}}}")
    assert cli.main(["convert-data", str(root), str(tmp_path / "out"), "--to", "yolo"]) == 0
    commands = [["doctor", str(root), "--fast"], ["doctor", str(tmp_path / "my.yml"), "--fast"]]
    outputs = [capsys.readouterr().out]
    for command in commands:
        cli.main(command)
        outputs.append(capsys.readouterr().out)
    for out in outputs:
        (line,) = [line for line in out.splitlines() if line.startswith("not read: ")]
        assert all(name in line for name in PASSED_OVER) and "captions" not in line and "rtdetr.json" not in line


@pytest.mark.parametrize("name", ["yolo", "voc"])
def test_other_formats_beside_the_one_that_is_read(name: str, tmp_path: Path) -> None:
    root = write_all(tmp_path)[name]
    assert not_read(root) == []
    (root / "annotations").mkdir(exist_ok=True)
    (root / "annotations" / "instances_train.json").write_text("{}")
    expected = [root / "annotations" / "instances_train.json"]
    if name == "yolo":
        shutil.copytree(tmp_path / "voc" / "Annotations", root / "Annotations")
        (root / "data.yaml").write_text((root / "data.yaml").read_text().replace("val: images/val\n", ""))
        expected = [root / "Annotations", *expected, root / "images" / "val"]
    assert not_read(root) == expected


@pytest.mark.parametrize("name", ["labelme", "huggingface"])
def test_folders_below_the_one_that_is_read(name: str, tmp_path: Path, images: Path) -> None:
    WRITERS[name](tmp_path / "made", images)
    made, root = tmp_path / "made" / ("train" if name == "huggingface" else ""), tmp_path / "set"
    shutil.copytree(made, root)
    assert not_read(root) == []
    for split in ("sub", "train"):
        shutil.copytree(made, root / split)
    assert not_read(root) == [root / "sub", root / "train"]
    for each in root.glob("*.json*"):
        each.unlink()
    assert [*find_sources(root)] == ["train"] and not_read(root) == [root / "sub"]


@pytest.mark.parametrize("name", ["labelme", "huggingface"])
def test_the_first_of_two_folders_of_a_split_is_read(name: str, tmp_path: Path, images: Path) -> None:
    WRITERS[name](tmp_path / "made", images)
    made, root = tmp_path / "made" / ("train" if name == "huggingface" else ""), tmp_path / "set"
    for folder in ("val", "valid"):
        shutil.copytree(made, root / folder)
    for each in sorted((root / "valid").glob("*.json"))[1:]:
        each.unlink()
    for each in (root / "valid").glob("*.jsonl"):
        each.write_text(each.read_text().splitlines(keepends=True)[0])
    assert len(open_set(root, split="val")) == len(open_set(root / "val")) > len(open_set(root / "valid")) == 1
    assert not_read(root) == [root / "valid"]


def test_an_xml_of_something_else_beside_voc_splits(tmp_path: Path) -> None:
    root = write_all(tmp_path)["voc"]
    for split in ("train", "val"):
        (tmp_path / "set" / split).mkdir(parents=True)
        for name in (root / "ImageSets" / "Main" / f"{split}.txt").read_text().split("\n")[:-1]:
            shutil.copy(root / "Annotations" / f"{name}.xml", tmp_path / "set" / split)
    (tmp_path / "set" / "a.xml").write_text("<?xml version='1.0'?>\n<!-- mine --><settings/>")
    assert [*find_sources(tmp_path / "set")] == ["train", "val"]
    (tmp_path / "set" / "a.xml").write_text("<annotations><version>1.1</version></annotations>")
    assert [*find_sources(tmp_path / "set")] == ["train", "val"]


def test_trainval_without_val_is_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It holds more than train; it was left out, as if val were there."""
    root = write_all(tmp_path)["voc"]
    lists = root / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text((lists / "train.txt").read_text() + (lists / "val.txt").read_text())
    (lists / "val.txt").unlink()
    assert cli.main(["convert-data", str(root), str(tmp_path / "out"), "--to", "coco"]) == 0
    assert "train: 12 images" in capsys.readouterr().out
    (lists / "val.txt").write_text((lists / "train.txt").read_text())
    assert cli.main(["convert-data", str(root), str(tmp_path / "out2"), "--to", "coco"]) == 0
    out = capsys.readouterr().out
    assert "train: 6 images" in out and "val: 6 images" in out
