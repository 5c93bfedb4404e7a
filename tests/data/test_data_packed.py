"""Hugging Face datasets on disk, with the images inside of parquet or arrow files, become folders of images."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from messages import message
from named_cases import everything
from named_sets import CLASSES, boxes_of, write_coco
from sound_set import NUM_IMAGES

from rtdetr import cli
from rtdetr.data.classes import DataError
from rtdetr.data.formats.huggingface import packed_files
from rtdetr.data.formats.sources import open_set

Rows = list[dict[str, Any]]


def rows_of(images: Path) -> Rows:
    rows = []
    for i in range(NUM_IMAGES):
        boxes = boxes_of(i)
        objects = {"id": [1, 2], "bbox": [b for _, b in boxes], "category": [CLASSES.index(name) for name, _ in boxes]}
        content = (images / f"{i:02d}.png").read_bytes()
        rows.append({"image_id": i, "image": {"bytes": content, "path": f"{i:02d}.png"}, "objects": objects})
    return rows


def write_packed(root: Path, rows: Rows, form: str, names: Any = CLASSES) -> None:
    """As `save_to_disk` does (arrow), or as the Hub has it (parquet)."""
    pa = pytest.importorskip("pyarrow", reason="reads parquet and arrow")
    from pyarrow import parquet

    label = {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "Sequence"}
    features = {"image": {"_type": "Image"}, "objects": {"category": label}}
    table = pa.Table.from_pylist(rows)
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    if form == "parquet":
        (root / "data").mkdir(parents=True)
        for part, half in enumerate((table[: NUM_IMAGES // 2], table[NUM_IMAGES // 2 :])):
            parquet.write_table(half, root / "data" / f"train-0000{part}-of-00002.parquet")
        return
    (root / "train").mkdir(parents=True)
    (root / "dataset_dict.json").write_text('{"splits": ["train"]}')
    (root / "train" / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    file = str(root / "train" / "data-00000-of-00001.arrow")
    with pa.OSFile(file, "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("to", ["coco", "yolo", "imagefolder"])
def test_packed_sets_convert(form: str, to: str, tmp_path: Path, images: Path) -> None:
    write_packed(tmp_path / "set", rows_of(images), form)
    write_coco(tmp_path / "coco", images)
    with pytest.raises(DataError, match=message("images inside", "parquet", "rtdetr convert-data", "set")):
        open_set(tmp_path / "set")
    assert cli.main(["convert-data", str(tmp_path / "set"), str(tmp_path / "out"), "--to", to]) == 0
    data = open_set(tmp_path / "out")
    assert data.classes.names == CLASSES
    assert [each[1:] for each in everything(data)] == [each[1:] for each in everything(open_set(tmp_path / "coco"))]


HOSTILE: dict[str, tuple[Callable[[Rows], object], str]] = {
    "no image": (lambda rows: rows[2].update(image=None), "row 3 has no image in it, got None"),
    "an image elsewhere": (
        lambda rows: rows[2].update(image={"bytes": None, "path": "/etc/passwd"}),
        "row 3 has no image",
    ),
    "no picture": (
        lambda rows: rows[2].update(image={"bytes": b"x", "path": "../../x.png"}),
        "cannot be read as an image",
    ),
    "no images": (
        lambda rows: [row.pop("image") for row in rows],
        "expected columns `image` and `objects`, got image_id",
    ),
    "no objects": (lambda rows: [row.pop("objects") for row in rows], "expected columns `image` and `objects`"),
    "objects null": (
        lambda rows: rows[2].update(objects={"bbox": [[1.0, 2, 3, 4]], "category": None}),
        "as many classes",
    ),
    "a box of three": (
        lambda rows: rows[2]["objects"].update(bbox=[[1.0, 2, 3]] * 2),
        "expected x, y, width and height",
    ),
    "a box nan": (lambda rows: rows[2]["objects"].update(bbox=[[1.0, float("nan"), 3, 4]] * 2), "expected x, y, width"),
    "class -1": (lambda rows: rows[2]["objects"].update(category=[-1, 0]), "expected a class, as a name or a number"),
    "class 7": (lambda rows: rows[2]["objects"].update(category=[7, 0]), "the class '7' is not among those of its set"),
}


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_rows_are_one_sentence(
    name: str, form: str, tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, sentence = HOSTILE[name]
    rows = rows_of(images)
    change(rows)
    write_packed(tmp_path / "set", rows, form)
    assert cli.main(["convert-data", str(tmp_path / "set"), str(tmp_path / "out"), "--to", "coco"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and sentence in error, error
    assert sorted(each.name for each in tmp_path.iterdir()) == ["set"]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("way", ["empty", "cut", "words", "zeros", "swapped", "folder"])
def test_hostile_files_are_one_sentence(
    way: str, form: str, tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_packed(tmp_path / "set", rows_of(images), form)
    for path in packed_files(tmp_path / "set")["train"]:
        content = path.read_bytes()
        half = len(content) // 2
        instead = {"empty": b"", "cut": content[:half], "words": b"hello" * 99, "zeros": bytes(999)}
        path.write_bytes(instead.get(way, content[half:] + content[:half]))
        if way == "folder":
            path.unlink()
            path.mkdir()
    assert cli.main(["convert-data", str(tmp_path / "set"), str(tmp_path / "out"), "--to", "imagefolder"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and str(tmp_path / "set") in error, error
    assert sorted(each.name for each in tmp_path.iterdir()) == ["set"]


@pytest.mark.parametrize("names", [None, 7, [], [7], {"a": 1}, ["cup", "cup", "pen"]])
def test_hostile_names_of_classes(names: Any, tmp_path: Path, images: Path) -> None:
    """What is no list of names is not taken for one; a name twice is named."""
    write_packed(tmp_path / "set", rows_of(images), "parquet", names)
    twice = names == ["cup", "cup", "pen"]
    code = cli.main(["convert-data", str(tmp_path / "set"), str(tmp_path / "out"), "--to", "coco"])
    assert code == (2 if twice else 0)
    if not twice:
        assert open_set(tmp_path / "out").classes.names == ("class0", "class1", "class2")


def test_every_class_keeps_its_number(tmp_path: Path, images: Path) -> None:
    """A line of classes.txt that was left out, or two for one name, shifted the names of the others."""
    write_packed(tmp_path / "set", rows_of(images), "parquet", ["_background_", "two\nlines", ""])
    assert cli.main(["convert-data", str(tmp_path / "set"), str(tmp_path / "out"), "--to", "coco"]) == 0
    assert open_set(tmp_path / "out").classes.names == ("_background_", r"two\nlines", "class2")


def test_links_and_other_folders_are_refused(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_packed(tmp_path / "set", rows_of(images), "parquet")
    given = ["convert-data", str(tmp_path / "set"), str(tmp_path / "out")]
    assert cli.main([*given, "--to", "coco", "--link"]) == 2
    assert message("images inside", "linked").search(capsys.readouterr().err)
    write_coco(tmp_path / "coco", images)
    assert cli.main(["convert-data", str(tmp_path / "coco"), str(tmp_path / "out"), "--to", "imagefolder"]) == 2
    assert message("only", "parquet", "arrow", "imagefolder").search(capsys.readouterr().err)


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train-00000-of-00001.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(["convert-data", str(tmp_path), str(tmp_path.parent / "out"), "--to", "imagefolder"]) == 2
    assert message("missing package", "pyarrow", "rtdetr[datasets]").search(capsys.readouterr().err)
