"""`rtdetr train --overfit N`: its images, its verdict, its exit code, and that no run is touched."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from engine_helpers import NANO, NUM_TRAIN, tiny_config, tiny_updates
from messages import message

from rtdetr import cli
from rtdetr.data.loader import open_train_set
from rtdetr.data.subset import spread, with_boxes, write_subset
from rtdetr.engine.evaluation.overfit import overfit_config


def command(data: Path, number: int, folder: Path, *updates: str) -> int:
    arguments = ["train", "-c", str(NANO), "--overfit", str(number), "--device", "cpu", "--output-dir", str(folder)]
    return cli.main([*arguments, "-u", *tiny_updates(data), "train.log_every=50", *updates])


def test_overfitted_images_pass(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rtdetr.engine.evaluation.overfit.GOAL", 0.5)  # .9 takes half as long again
    assert command(data, 2, tmp_path / "test") == 0
    said = capsys.readouterr().out.splitlines()
    assert said[-1].startswith("overfit: passed, AP50 ") and message("overfit", "2 images").search(said[-1])
    assert not any("warning" in line for line in said)  # of images in both sets, which is the point here
    chosen = json.loads((tmp_path / "test" / "images.json").read_text())
    assert len(chosen["images"]) == 2 and len(chosen["categories"]) == 5


def test_too_short_a_try_fails_and_touches_no_run(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    used = tmp_path / "run"
    used.mkdir()
    (used / "last.pth").write_text("of a run")
    assert command(data, 3, used) == 2
    assert "run: already holds a run (last.pth)" in capsys.readouterr().err
    assert [each.name for each in used.iterdir()] == ["last.pth"] and (used / "last.pth").read_text() == "of a run"
    assert command(data, 3, tmp_path / "test", "train.max_iterations=1") == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("overfit: failed, AP50 0.0") and "at iteration 1 (expected 0.90): " in said


@pytest.mark.parametrize("number", ["0", "-1", "many", "2.5"])
def test_the_number_is_a_whole_one(number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        cli.main(["train", "-c", "x.yml", f"--overfit={number}"])
    assert error.value.code == 2 and f"expected a whole number from 1, got {number}" in capsys.readouterr().err


def test_the_self_test_goes_on_with_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["train", "-r", "last.pth", "--overfit", "3"])
    assert "leave out -r" in capsys.readouterr().err


def test_nothing_is_written_before_the_data_are_there(data: Path, tmp_path: Path) -> None:
    assert command(data, 3, tmp_path / "test", "data.train.annotations=none.json") == 2
    assert not (tmp_path / "test").exists()


def test_its_config_is_plain(data: Path) -> None:
    cfg = tiny_config(data, "data.image_size=[64, 96]", "train.patience=3", "train.epochs=auto")
    plain = overfit_config(cfg, cfg.data.train, 20, from_random=True)
    assert plain.data.train == plain.data.val and plain.data.image_size == (96, 96)
    assert (plain.data.augment.crop_prob, plain.data.augment.flip_prob, plain.data.augment.batch_sizes) == (0, 0, (96,))
    assert (plain.data.train_batch_size, plain.train.max_iterations, plain.train.patience) == (8, 700, 0)
    assert plain.train.epochs == 350 and plain.optimizer.flat_ratio == 1 and plain.optimizer.lr == cfg.optimizer.lr


def test_a_subset_has_the_boxes_of_its_images(data: Path, tmp_path: Path) -> None:
    cfg = tiny_config(data)
    source = open_train_set(cfg)
    chosen = spread(with_boxes(source), 5)
    assert len(set(chosen)) == 5 and spread(range(NUM_TRAIN), 99) == list(range(NUM_TRAIN))
    split = write_subset(source, chosen, tmp_path / "part.json")
    part = open_train_set(
        tiny_config(data, f"data.train.images={split.images}", f"data.train.annotations={split.annotations}")
    )
    assert part.classes == source.classes and len(part) == 5
    for place, index in enumerate(chosen):
        assert part.info(place) == source.info(index)
        for ours, theirs in zip(part.targets(place), source.targets(index)):
            assert ours.shape == theirs.shape and abs(ours - theirs).max() < 1e-3
