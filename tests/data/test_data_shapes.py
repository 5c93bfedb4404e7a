"""The generated set: the same bytes each time, boxes on the shapes, and never half of it."""

from __future__ import annotations

import hashlib
import inspect
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from coco_set import open_coco

from rtdetr.config import load_config
from rtdetr.data import shapes as S
from rtdetr.data.classes import DataError


def digest(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_same_bytes_for_the_same_arguments(tmp_path: Path) -> None:
    first = digest(S.make_shapes(tmp_path / "a", 5, 3, 96))
    assert len(first) == 5 + 3 + 2 + 1
    assert digest(S.make_shapes(tmp_path / "b", 5, 3, 96)) == first
    other = digest(S.make_shapes(tmp_path / "c", 5, 3, 96, seed=1))
    assert all(other[name] != first[name] for name in first)
    assert len(set(first.values())) == len(first)  # train and val share no image
    # more images do not change the first ones
    assert digest(S.make_shapes(tmp_path / "d", 6, 3, 96))["train/000004.jpg"] == first["train/000004.jpg"]


def test_a_finished_set_is_left_alone_and_another_one_replaced(tmp_path: Path) -> None:
    folder = S.make_shapes(tmp_path / "deep" / "a", 2, 1, 96)
    marker = folder / "train" / "marker"
    marker.touch()
    S.make_shapes(folder, 2, 1, 96)
    assert marker.exists()
    S.make_shapes(folder, 3, 1, 96)
    assert not marker.exists() and len(list((folder / "train").iterdir())) == 3
    assert [path.name for path in folder.parent.iterdir()] == ["a"]  # no remains


def test_nothing_is_left_of_an_interrupted_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(size: int, rng: np.random.Generator) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(S, "draw_image", fail)
    with pytest.raises(KeyboardInterrupt):
        S.make_shapes(tmp_path / "a", 2, 1, 96)
    assert list(tmp_path.iterdir()) == []


def test_a_set_that_another_process_finished_first_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = S._write_split

    def overtaken(root: Path, split: str, count: int, size: int, seed: int) -> None:
        if split == "val":
            monkeypatch.setattr(S, "_write_split", original)
            (S.make_shapes(tmp_path / "a", 2, 1, 96) / "marker").touch()
        original(root, split, count, size, seed)

    monkeypatch.setattr(S, "_write_split", overtaken)
    assert (S.make_shapes(tmp_path / "a", 2, 1, 96) / "marker").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("same", [True, False])
def test_two_processes_that_finish_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        shutil.copytree(self, target)
        if not same:
            (target / S.STAMP).write_text("{}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    if same:
        assert len(digest(S.make_shapes(tmp_path / "a", 2, 1, 96))) == 6
    else:
        with pytest.raises(OSError, match="not empty"):
            S.make_shapes(tmp_path / "a", 2, 1, 96)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_foreign_folders_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(DataError, match="holds something else than generated shapes"):
        S.make_shapes(tmp_path, 2, 1, 96)
    assert (tmp_path / "thesis.txt").exists()
    with pytest.raises(DataError, match="size >= 96"):
        S.make_shapes(tmp_path / "a", 2, 1, 64)


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert S.main([str(tmp_path / "a"), "--num-train", "2", "--num-val", "1", "--size", "96"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a")
    assert S.main([str(tmp_path / "a"), "--size", "1"]) == 2
    assert capsys.readouterr().err.startswith("error: shapes need size >= 96")


def test_the_set_is_varied(tmp_path: Path) -> None:
    folder = S.make_shapes(tmp_path / "a", 80, 1, 128)
    data = open_coco(folder / "train", folder / "annotations" / "instances_train.json")
    assert data.classes.category_ids == (2, 3, 5, 7, 11) and data.num_degenerate == 0
    counts = [len(data.targets(i)[0]) for i in range(len(data))]
    assert min(counts) == 0 and max(counts) == S.MAX_SHAPES and 1 <= data.num_empty <= 12
    labels = np.concatenate([data.targets(i)[1] for i in range(len(data))])
    assert (np.bincount(labels, minlength=5) > 20).all()
    sides = np.concatenate([data.targets(i)[0][:, 2:] - data.targets(i)[0][:, :2] for i in range(len(data))])
    assert sides.min() >= 128 * 0.1 and sides.max() <= 128 * 0.5
    document = json.loads((folder / "annotations" / "instances_train.json").read_text())
    assert all(a["area"] == a["bbox"][2] * a["bbox"][3] and a["iscrowd"] == 0 for a in document["annotations"])


def test_boxes_lie_tight_around_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Black background, white shapes, one per image: the box must be where the light is."""
    monkeypatch.setattr(S, "_background", lambda size, rng: np.zeros((size, size, 3), np.float32))
    monkeypatch.setattr(S, "_texture", lambda h, w, behind, rng: np.full((h, w, 3), 255, np.float32))
    monkeypatch.setattr(S, "MAX_SHAPES", 1)
    checked = set()
    for seed in range(40):
        pixels, found = S.draw_image(128, np.random.default_rng(seed))
        light = pixels.mean(axis=-1) > 100
        if not found:
            assert not light.any()
            continue
        rows, columns = np.flatnonzero(light.any(axis=1)), np.flatnonzero(light.any(axis=0))
        expected = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        assert np.abs(expected - found[0][1]).max() <= 1
        checked.add(found[0][0])
    assert checked == {2, 3, 5, 7, 11}


def test_the_demo_draws_a_curve_over_whole_epochs() -> None:
    """The shipped config and the set of the default size: every image in each epoch, and more than two AP points."""
    root = Path(__file__).resolve().parents[2]
    config = load_config(root / "configs" / "rtdetrv3_nano_shapes.yml")
    num_train = inspect.signature(S.make_shapes).parameters["num_train"].default
    assert num_train % config.data.train_batch_size == 0
    assert config.train.epochs // config.train.eval_every >= 4
    assert config.data.augment.batch_sizes == config.data.image_size[:1]  # trained as it is used


def test_the_command_answers_what_it_cannot_write_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / S.STAMP).write_text("{")
    for folder, reason in (("file/new", "file: cannot be written"), ("damaged", "holds something else")):
        assert S.main([str(tmp_path / folder), "--num-train", "1", "--num-val", "1"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and reason in error and error.count("\n") == 1
