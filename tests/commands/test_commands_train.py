"""Rows about `rtdetr train` for the table in test_commands_table.py, in a folder that holds a finished run.

run/ is that run (two steps), small.yml its config with relative paths, shapes/ its data, nobox.json its annotations
without a box.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from command_cases import Row, check, contents, run
from engine_helpers import tiny_config, tiny_data
from messages import message

from rtdetr.config import save_config
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import load_checkpoint, save_checkpoint

TRAIN = "train -c small.yml --device cpu"
MORE = "-u train.max_iterations=3"
USED = "already holds a run (last.pth, best.pth, metrics.csv, config.yml, tensorboard); continue with -r run/last.pth, "
TABLE = {
    # a run is never lost
    "into a used folder": Row(
        f"{TRAIN} --output-dir run", 2, (f"run: {USED}", "another --output-dir", "--overwrite (to run-old)")
    ),
    "going on into a used folder": Row(
        f"train -r copy/last.pth --output-dir run --device cpu {MORE}", 2, (f"run: {USED}",)
    ),
    "half a run": Row(f"{TRAIN} --output-dir half", 2, (message("already", "half", "best.pth"),)),
    "overwriting what goes on": Row(
        f"train -r run/last.pth --overwrite --device cpu {MORE}",
        2,
        (message("overwrite with resume", "run"), "--overwrite"),
    ),
    "no weights": Row(
        f"{TRAIN} --output-dir run --overwrite -t none.pth", 2, (message("no such weights", "none.pth"),)
    ),
    "best.pth to go on from": Row(
        "train -r run/best.pth --output-dir copy --overwrite --device cpu", 2, ("no training state",)
    ),
    "nothing to go on from": Row(
        f"{TRAIN} -r none.pth --output-dir copy --overwrite", 2, (message("no such weights", "none.pth"),)
    ),
    "no data": Row(
        f"{TRAIN} --output-dir run --overwrite -u data.val.annotations=none.json", 2, ("none.json: no such",)
    ),
    "graphs that cannot be": Row(
        f"{TRAIN} --output-dir run --overwrite -u kernels=plain train.graphs=on",
        2,
        (message("not possible", "train.graphs=on"),),
    ),
    "no box": Row(
        f"{TRAIN} --output-dir new -u data.train.annotations=nobox.json",
        2,
        (message("no box", "nobox.json", "12 images"),),
    ),
    "finished": Row("train -r run/last.pth --device cpu", 0, (message("finished", "2", "train.max_iterations"),)),
    "finished, elsewhere": Row("train -r run/last.pth --output-dir new --device cpu", 0, (message("finished", "2"),)),
    "finished, over another": Row(
        "train -r run/last.pth --output-dir copy --overwrite --device cpu", 0, (message("finished", "2"),)
    ),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the docstring lists, made once and copied for each row; copy/ is run/ again."""
    folder = tmp_path_factory.mktemp("made")
    data = tiny_data(folder / "shapes")
    content = json.loads((data / "annotations" / "instances_train.json").read_text())
    (folder / "nobox.json").write_text(json.dumps({**content, "annotations": []}))
    cfg = tiny_config(Path("shapes"), "train.max_iterations=2", "train.loggers=[tensorboard]")
    save_config(cfg, folder / "small.yml")
    (folder / "half").mkdir()
    (folder / "half" / "best.pth").write_text("of a run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert run(f"{TRAIN} --output-dir run") == 0
    (folder / "run" / "notes.txt").write_text("of the user")
    shutil.copytree(folder / "run", folder / "copy")
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(folder)
    monkeypatch.setattr("rtdetr.engine.trainer.draw_curves", lambda *_: None)  # takes longer than these runs
    return folder


@pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
def test_command(row: Row, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(row, folder, capsys)


def test_an_old_run_is_moved_aside_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = contents(folder / "run")
    notes = {"notes.txt": before.pop("notes.txt")}
    assert run(f"{TRAIN} --output-dir run --overwrite") == 0
    assert f"{folder}/run-old now" in capsys.readouterr().out
    assert contents(folder / "run-old") == before and "load_report.txt" not in before
    second = contents(folder / "run")
    assert notes.items() <= second.items() and len([name for name in second if "tfevents" in name]) == 1
    assert run(f"{TRAIN} --output-dir run --overwrite -t run-old/best.pth") == 0
    assert contents(folder / "run-old") == before
    assert contents(folder / "run-old-2") == {name: value for name, value in second.items() if name != "notes.txt"}
    assert (folder / "run" / "load_report.txt").is_file()


def test_the_folder_one_works_in_stays_when_its_run_is_moved(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = contents(folder / "run")
    monkeypatch.chdir("run")
    assert run("train -c config.yml --device cpu --output-dir . --overwrite") == 0
    assert before.items() >= contents(folder / "run-old").items() and (folder / "run-old" / "last.pth").is_file()
    assert (folder / "run" / "last.pth").is_file() and (folder / "run" / "notes.txt").is_file()


def test_the_default_folder_of_a_run_gets_a_number(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = tiny_config(folder).name
    for number in ("", "-2", "-3"):
        assert run(TRAIN) == 0
        assert f"into output/{name}{number}\n" in capsys.readouterr().out
        assert (folder / "output" / f"{name}{number}" / "last.pth").is_file()
    before = contents(folder / "output" / name)
    assert run(f"{TRAIN} --overwrite") == 0
    assert contents(folder / "output" / f"{name}-old") == before


def test_going_on_elsewhere_brings_the_history(folder: Path) -> None:
    best = load_checkpoint("run/last.pth")
    best["training"]["best_ap"] = 1.0  # no later AP is better
    save_checkpoint(Path("run/last.pth"), best)
    before = contents(folder / "run")
    with open("run/metrics.csv", "a") as file:  # a row that the checkpoint does not know
        file.write("train,3" + ",0" * 40 + "\n")
    assert run(f"train -r run/last.pth --output-dir new --device cpu {MORE}") == 0
    rows, old = (read_rows(Path(name) / "metrics.csv") for name in ("new", "run"))
    assert [(row["kind"], row["iteration"]) for row in rows] == [
        ("train", "1"), ("train", "2"), ("eval", "2"), ("train", "3"), ("eval", "3")
    ]  # fmt: skip
    assert rows[:3] == old[:3] and rows[2]["AP"] and rows[4]["AP"]
    after = contents(folder / "new")
    assert after["best.pth"] == before["best.pth"]
    events = {name: value for name, value in before.items() if "tfevents" in name}
    assert events.items() < after.items()
    before["metrics.csv"] = contents(folder / "run")["metrics.csv"]
    assert contents(folder / "run") == before


def test_a_run_killed_before_its_first_save_can_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_go_on", lambda self: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            run(f"train -r run/last.pth --output-dir new --device cpu {MORE}")
    assert run(f"train -r new/last.pth --device cpu {MORE}") == 0
    assert load_checkpoint("new/last.pth")["training"]["iteration"] == 3


def test_evaluating_and_going_on_from_another_directory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert run(f"eval -w {folder}/run/best.pth --device cpu") == 0, capsys.readouterr().err
    assert run(f"train -r {folder}/run/last.pth --device cpu {MORE}") == 0, capsys.readouterr().err
    assert run(f"train -c {folder}/run/config.yml --device cpu --output-dir here") == 0, capsys.readouterr().err
    assert not (tmp_path / "elsewhere" / "output").exists()


@pytest.mark.parametrize("hidden", [False, True])
def test_a_full_disk_is_one_line_and_leaves_the_last_state(
    hidden: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        error = OSError(28, "No space left on device")
        if not hidden:
            raise error
        other = RuntimeError("[enforce fail at inline_container.cc:671]")  # as torch.save does
        other.__context__ = error
        raise other

    before = contents(folder / "run")["last.pth"]
    monkeypatch.setattr("rtdetr.weights.checkpoint.torch.save", full)
    assert run(f"train -r run/last.pth --device cpu {MORE}") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: run/last.pth: cannot be written (No space left on device)")
    assert contents(folder / "run")["last.pth"] == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "half").chmod(0o555)
    check(Row(f"{TRAIN} --output-dir half/new", 2, (message("nothing written there", "half/new"),)), folder, capsys)


@pytest.mark.parametrize(("updates", "advice"), [("", True), ("train.checkpoint_activations=true", False)])
def test_a_full_gpu_is_one_line_that_says_what_to_change(
    updates: str, advice: bool, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    monkeypatch.setattr(Trainer, "train_step", full)
    assert run(f"train -r run/last.pth --device cpu {MORE} {updates}") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: iteration 2: CUDA out of memory; ") and line.endswith(
        "; continue with -r run/last.pth"
    )
    assert "lower data.train_batch_size (" in line and "model.supervision.num_noise_groups (" in line
    assert ("checkpoint_activations" in line) == advice


def test_an_evaluation_that_does_not_fit_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    monkeypatch.setattr("rtdetr.engine.trainer.evaluate", full)
    assert run(f"train -r run/last.pth --device cpu {MORE}") == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert message("out of memory", "evaluation", "data.train_batch_size").search(line) and "accumulate" not in line


def test_a_run_says_where_it_resumes_and_what_came_of_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"train -r run/last.pth --device cpu {MORE}") == 0
    out = capsys.readouterr().out.splitlines()
    assert "resuming at iteration 2 of 3" in out
    best = max((row for row in read_rows(Path("run/metrics.csv")) if row["AP"]), key=lambda row: float(row["AP"]))
    assert out[-3:] == [
        f"best AP {float(best['AP']):.4f} at iteration {best['iteration']} of 3",
        "weights: run/best.pth",
        "next: rtdetr predict run/best.pth IMAGES",
    ]
    no_box = "data.val.annotations=nobox.json data.val.images=shapes/train"
    assert run(f"{TRAIN} --output-dir new -u {no_box}") == 0
    out = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("resuming") for line in out)
    assert out[-3:] == [
        "no AP, as the validation images have no box",
        "weights: new/best.pth",
        "next: rtdetr predict new/best.pth IMAGES",
    ]
    assert run(f"train -r run/last.pth --device cpu -u train.max_iterations=4 train.epochs=99 {no_box}") == 0
    assert capsys.readouterr().out.splitlines()[-3] == "no AP, as the validation images have no box"


def test_missing_data_of_a_config_name_the_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not a path that nobody typed; one that somebody typed is named."""
    for command in (
        "train -c rtdetrv3_r18vd_6x_coco",
        "train -c rtdetrv3_r18vd_small",
        "train -c rtdetrv3_r18vd_small --overfit 4",
    ):
        assert run(f"{command} --device cpu") == 2
        assert capsys.readouterr().err.startswith("error: --data DATA is needed, a folder or file with images")
    sections = "data.train={'annotations':'here.json'} data.val={'annotations':'here.json'}"
    assert run(f"train -c rtdetrv3_nano_shapes --device cpu -u {sections}") == 2
    assert "here.json: no such annotation file" in capsys.readouterr().err
    content = load_checkpoint("run/best.pth")
    content["config"]["data"]["val"]["annotations"] = "/elsewhere/val.json"
    save_checkpoint(Path("from_elsewhere.pth"), content)
    assert run("eval from_elsewhere.pth --device cpu") == 2
    err = capsys.readouterr().err
    assert err.startswith("error: --data DATA is needed") and message("data elsewhere", "/elsewhere/val.json").search(
        err
    )
    assert run("eval from_elsewhere.pth --device cpu --data shapes") == 0
    assert run("eval from_elsewhere.pth --device cpu --data nowhere") == 2
    assert message("no annotations", "nowhere").search(capsys.readouterr().err)
