"""Folders as they lie on real disks: hidden copies, other tools' files, several folders of images, edited labels."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_cases import everything
from format_sets import write_all
from messages import message
from named_sets import write_labelme
from PIL import Image
from sound_set import write_images

from rtdetr.cli import main
from rtdetr.data.classes import DataError
from rtdetr.data.data_arguments import data_updates
from rtdetr.data.defects import MOST_KEPT, Defect, condensed
from rtdetr.data.formats.records import split_named
from rtdetr.data.formats.sources import find_sources, open_set, read_document, source_of
from rtdetr.engine.evaluation.evaluator import counted_truth

Sets = dict[str, Path]


@pytest.fixture
def sets(tmp_path: Path) -> Sets:
    return write_all(tmp_path)


def converted(source: Path, out: Path, to: str, *more: str) -> Path:
    assert main(["convert-data", str(source), str(out), "--to", to, *more]) == 0
    return out


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_hidden_copies_are_not_read(sets: Sets) -> None:
    before = {name: everything(open_set(path)) for name, path in sets.items()}
    for pattern in ("*/images/train/*.png", "voc/*/*.xml", "coco/annotations/*.json"):
        for file in sorted(sets["coco"].parent.glob(pattern))[:3]:
            (file.parent / ".ipynb_checkpoints").mkdir(exist_ok=True)
            shutil.copy(file, file.parent / ".ipynb_checkpoints" / f"{file.stem}-checkpoint{file.suffix}")
            (file.parent / f"._{file.name}").write_bytes(b"\0\5\26\7")
    assert {name: everything(open_set(path)) for name, path in sets.items()} == before


def test_hidden_and_upper_case_files_of_labelme(tmp_path: Path) -> None:
    write_images(tmp_path / "images")
    write_labelme(tmp_path / "set", tmp_path / "images")
    before = everything(open_set(tmp_path / "set"))
    first = min((tmp_path / "set").glob("*.json"))
    (first.parent / f"._{first.name}").write_bytes(b"\0\5\26\7")
    first.rename(first.with_suffix(".JSON"))
    assert everything(open_set(tmp_path / "set")) == before


def test_upper_case_xml_is_read(sets: Sets) -> None:
    before = everything(open_set(sets["voc"]))
    for file in sorted((sets["voc"] / "Annotations").iterdir())[:4]:
        file.rename(file.with_suffix(".XML"))
    assert everything(open_set(sets["voc"])) == before
    shutil.rmtree(sets["voc"] / "ImageSets")
    assert len(open_set(sets["voc"])) == 12


@pytest.mark.parametrize(
    "content", ["x: !!python/name:os.system\n", "a: 1\n---\nb: 2\n", "train: 0.8\nseed: 1\n", "{{ template }}\n"]
)
def test_yaml_of_other_tools_beside_annotations(sets: Sets, content: str) -> None:
    (sets["coco"] / "params.yaml").write_text(content)
    assert {each.format for each in find_sources(sets["coco"]).values()} == {"coco"}


@pytest.mark.parametrize("content", ["\ufefftrain: images/train\nnc: 3\n", '"train": images/train\n"nc": 3\n'])
def test_a_data_yaml_under_another_name(sets: Sets, content: str) -> None:
    (sets["yolo"] / "data.yaml").unlink()
    (sets["yolo"] / "my.yaml").write_text(content, encoding="utf-8")
    assert {each.path for each in find_sources(sets["yolo"]).values()} == {sets["yolo"] / "my.yaml"}


def test_a_folder_that_cannot_be_read_is_not_passed_over(sets: Sets, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = sets["yolo"] / "images" / "train" / "locked"
    locked.mkdir()
    scandir = os.scandir

    def refuse(path: Any = ".") -> Any:
        if os.fspath(path) == str(locked):
            raise PermissionError(13, "Permission denied", str(locked))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match="locked: cannot be read"):
        open_set(sets["yolo"])


def test_images_are_those_of_the_folder_that_has_most(tmp_path: Path, sets: Sets) -> None:
    coco = sets["coco"]
    (coco / "annotations" / "instances_val.json").rename(coco / "annotations" / "holdout.json")
    (coco / "val").rename(coco / "b_right")
    (coco / "a_old").mkdir()
    shutil.copy(coco / "b_right" / "val 0ß.png", coco / "a_old")
    assert open_set(coco / "annotations" / "holdout.json").folder == coco / "b_right"
    shutil.copytree(coco / "b_right", coco / "c_other")
    with pytest.raises(DataError, match=message("several image folders", "b_right", "c_other")):
        open_set(coco / "annotations" / "holdout.json")
    assert len(open_set(coco / "annotations" / "holdout.json", coco / "c_other")) == 6


def test_images_of_another_set_replace_no_missing_one(sets: Sets) -> None:
    coco = sets["coco"]
    for file in sorted((coco / "train").iterdir()):
        shutil.copy(file, coco / "val")  # a set whose images are called alike
    file.unlink()
    for layout in (coco / "annotations" / "instances_train.json", coco / "train.json"):
        (coco / "annotations" / "instances_train.json").replace(layout)
        data = open_set(layout, limit=1)
        assert (data.folder, len(data)) == (coco / "train", len(list((coco / "train").iterdir())))
        assert [each.kind for each in data.defects] == ["picture_missing"]


@pytest.mark.parametrize("everywhere", [True, False])
def test_names_in_another_case_are_pointed_out(sets: Sets, everywhere: bool) -> None:
    files = sorted((sets["coco"] / "train").iterdir())
    for file in files if everywhere else files[:2]:
        file.rename(file.with_suffix(".PNG"))
    with pytest.raises(DataError, match=message("other case", f"{files[0].stem}.PNG")):
        open_set(sets["coco"])


def test_an_image_folder_that_is_not_used_is_named(sets: Sets, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with pytest.raises(DataError, match=message("images not used", "other", "yolo")):
        data_updates((tmp_path / "other", sets["yolo"]), ("val",))
    assert main(["doctor", str(sets["yolo"]), "--images", str(tmp_path / "other")]) == 2
    for own in (sets["yolo"], sets["yolo"] / "images" / "val"):
        assert data_updates((own, sets["yolo"] / "data.yaml"), ("val",))
    data = open_set(sets["yolo"], tmp_path / "other")
    assert f"not used: the image folder {tmp_path / 'other'}" in data.summary()
    assert "not used" not in open_set(sets["coco"]).summary()


def test_edited_labels_of_a_converted_set_are_read(sets: Sets, tmp_path: Path) -> None:
    file = sets["coco"] / "annotations" / "instances_train.json"
    edit(file, lambda document: [each.update(area=each["area"] / 2) for each in document["annotations"]])
    out = converted(sets["coco"], tmp_path / "out", "yolo")
    areas = [each["area"] for each in read_document(file).annotations]
    assert sorted(each["area"] for each in read_document(source_of(out, "train")).annotations) == sorted(areas)
    first, *others = sorted((out / "labels" / "train").iterdir())
    first.write_text("0 0.5 0.25 0.5 0.5\n")
    two = next(each for each in others if each.read_text().count("\n") == 2)
    before = {name: [(label, box) for *_, label, box in boxes] for name, *boxes in _by_file(out)}
    two.write_text("".join(reversed(two.read_text().splitlines(keepends=True))))
    after = {name: [(label, box) for *_, label, box in boxes] for name, *boxes in _by_file(out)}
    assert [box for _, box in after[f"images/train/{first.stem}.png"]] == [[24.0, 0.0, 72.0, 32.0]]
    name = f"images/train/{two.stem}.png"
    assert sorted(after[name]) == sorted(before[name])


def _by_file(folder: Path) -> list[Any]:
    data = open_set(folder)
    return [
        (data.info(i).file_name, *zip(labels.tolist(), boxes.round(3).tolist()))
        for i in range(len(data))
        for boxes, labels in [data.targets(i)]
    ]


def test_converting_back_leaves_no_keys_of_ours(sets: Sets, tmp_path: Path) -> None:
    file = sets["coco"] / "annotations" / "instances_train.json"
    edit(file, lambda document: document["annotations"][0].update(iscrowd=1, area=5))
    back = converted(converted(sets["coco"], tmp_path / "yolo2", "yolo"), tmp_path / "back", "coco")
    image = json.loads((back / "annotations" / "instances_train.json").read_text())["images"][0]
    assert image.keys() == {"id", "file_name", "width", "height"}


def test_a_chosen_split_is_never_another_one(sets: Sets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("annotations/instances_val.json", "val"):
        (sets["coco"] / name).rename(sets["coco"] / name.replace("val", "test"))
    arguments = ["convert-data", str(sets["coco"]), str(tmp_path / "out"), "--to", "coco", "--split"]
    assert main([*arguments, "val"]) == 2
    assert message("no such set", "coco", "val").search(capsys.readouterr().err)
    assert main([*arguments, "test"]) == 0


def test_trainval_becomes_train(sets: Sets, tmp_path: Path) -> None:
    lists = sets["voc"] / "ImageSets" / "Main"
    (lists / "trainval.txt").write_text((lists / "train.txt").read_text() + (lists / "val.txt").read_text())
    out = converted(sets["voc"], tmp_path / "out", "yolo", "--split", "trainval")
    assert {*find_sources(out)} == {"train"} and len(open_set(out)) == 12


def test_options_that_would_be_ignored(sets: Sets, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit):
        main(["convert-data", str(sets["coco"]), out, "--to", "imagefolder", "--split", "train"])
    assert "leave out --split, --images, --link" in capsys.readouterr().err
    given = ["convert-data", str(sets["yolo"]), out, "--to", "coco", "--images", str(sets["coco"])]
    assert main(given) == 2
    assert message("images not used", "coco", "yolo").search(capsys.readouterr().err)


def test_links_into_the_replaced_folder_are_refused(
    sets: Sets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(sets["coco"] / "annotations", tmp_path / "annotations")
    given = [str(tmp_path / "annotations" / "instances_train.json"), str(sets["coco"]), "--to", "yolo", "--link"]
    assert main(["convert-data", *given, "--images", str(sets["coco"] / "train"), "--overwrite"]) == 2
    assert message("cannot be linked", "train 0ß.png").search(capsys.readouterr().err)


def test_the_output_may_be_a_link_to_an_empty_folder(sets: Sets, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk", target_is_directory=True)
    assert len(open_set(converted(sets["coco"], tmp_path / "out", "yolo"))) == 6
    assert (tmp_path / "disk" / "data.yaml").is_file()


@pytest.mark.parametrize("to", ["coco", "voc", "yolo"])
def test_names_that_are_no_text_are_changed(tmp_path: Path, sets: Sets, to: str) -> None:
    images = sets["yolo"] / "images" / "train"
    for old, new in (("train 0ß", b"caf\xe9"), ("train 1ß", b"a\x01")):
        for file in (images / f"{old}.png", sets["yolo"] / "labels" / "train" / f"{old}.txt"):
            file.rename(file.parent / os.fsdecode(new + file.suffix.encode()))
    out = converted(sets["yolo"], tmp_path / "out", to)
    files = {data.info(i).file_name.rpartition("/")[2] for data in [open_set(out)] for i in range(len(data))}
    assert {"caf_.png", "a_.png"} <= files and len(files) == 6
    assert open_set(out).num_boxes == open_set(sets["yolo"]).num_boxes


def test_classes_txt_with_an_empty_line_is_refused(sets: Sets) -> None:
    (sets["yolo"] / "data.yaml").unlink()
    for text, line in (("a\n\nb\nc\n", 2), ("\na\nb\nc\n", 1)):
        (sets["yolo"] / "classes.txt").write_text(text)
        with pytest.raises(DataError, match=rf"classes.txt: line {line} is empty"):
            open_set(sets["yolo"])
    (sets["yolo"] / "classes.txt").write_text("a\nb\nc\n\n\n")
    assert open_set(sets["yolo"]).classes.names == ("a", "b", "c")


def test_sizes_beyond_any_image_in_xml(sets: Sets) -> None:
    file = min((sets["voc"] / "Annotations").glob("train*"))
    file.write_text(file.read_text().replace("<width>96<", "<width>4294967296<"))
    with pytest.raises(DataError, match=message("xml size", "4294967296.0")):
        open_set(sets["voc"], limit=0)


def test_many_defects_of_a_kind_become_one_for_each_action() -> None:
    kept, clipped, dropped = (
        [Defect("a.json", i, "image_size", "wrong", action) for i in range(count)]  # type: ignore[arg-type]
        for action, count in (("kept", MOST_KEPT + 1), ("clipped", MOST_KEPT + 1), ("dropped", MOST_KEPT + 1))
    )
    found = condensed([*dropped, *kept, *clipped])
    assert found[: len(dropped)] == dropped and [each.action for each in found[len(dropped) :]] == ["kept", "clipped"]


def test_a_set_that_was_accepted_is_evaluated(sets: Sets) -> None:
    file = sets["coco"] / "annotations" / "instances_val.json"
    edit(file, lambda document: [each.update(bbox=[1, 2, 3]) for each in document["annotations"][:2]])
    with pytest.raises(DataError, match="dropped"):
        counted_truth(file, {})
    accepted = open_set(sets["coco"], split="val", limit=0.5)
    assert len(counted_truth(accepted.origin, {}).annotations) == accepted.num_boxes


def test_a_fixed_roboflow_set_has_all_its_splits(sets: Sets, tmp_path: Path) -> None:
    for split, folder in (("train", "train"), ("val", "valid")):
        if folder != split:
            (sets["coco"] / split).rename(sets["coco"] / folder)
        file = sets["coco"] / "annotations" / f"instances_{split}.json"
        file.rename(sets["coco"] / folder / "_annotations.coco.json")
    assert main(["doctor", str(sets["coco"]), "--fast", "--fix", str(tmp_path / "fixed")]) == 0
    written = [each.path for each in find_sources(tmp_path / "fixed").values()]
    assert sorted(map(split_named, written)) == ["train", "val"]


def test_large_images_where_no_config_sets_their_limit(
    sets: Sets, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (sets["yolo"] / "images" / "train").iterdir():
        Image.new("1", (180_000, 1000)).save(file)
    assert main(["doctor", str(sets["yolo"])]) == 2
    said = capsys.readouterr().out
    assert "larger than data.max_megapixels=179" in said and "label file" not in said
    assert main(["doctor", str(sets["yolo"]), "--max-megapixels", "200", "--fast"]) == 0
    assert len(open_set(converted(sets["yolo"], tmp_path / "out", "coco"))) == 6
