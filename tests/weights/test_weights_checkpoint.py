"""Checkpoints: whole or absent, read back exactly, refused in one sentence, reported when they fit in part."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from full_disk import small_files
from messages import message
from PIL import Image
from torch import nn
from weight_cases import CLASSES, nano_config

from rtdetr.cli import main
from rtdetr.engine.run_files.run_state import rng_state, set_rng_state
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, make_checkpoint, save_checkpoint
from rtdetr.weights.compare import compare, describe
from rtdetr.weights.load import load_exactly, model_from_checkpoint, warm_start
from rtdetr.weights.official import convert


def nano_model(num_classes: int = 3, depth: int = 18, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build_model(nano_config(depth).model, num_classes)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "nano.pth"
    average = nano_model(seed=1).state_dict()
    save_checkpoint(path, make_checkpoint(nano_config(), CLASSES, nano_model().state_dict(), average))
    return path


def one_line(error: pytest.ExceptionInfo[CheckpointError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def test_a_checkpoint_knows_its_model_classes_and_config(saved: Path) -> None:
    before = torch.get_rng_state()
    model, cfg, classes = model_from_checkpoint(saved, ["eval.max_detections=5"])
    assert torch.equal(torch.get_rng_state(), before)  # no time is spent on numbers that the weights replace
    assert classes == CLASSES and cfg.model == nano_config().model and cfg.eval.max_detections == 5
    assert not model.training
    for name, tensor in nano_model(seed=1).state_dict().items():  # the average, not the raw weights
        assert torch.equal(model.state_dict()[name], tensor), name


def test_saving_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "last.pth"
    save_checkpoint(path, {"content": 1})
    with pytest.raises(AttributeError):
        save_checkpoint(path, {"content": lambda: None})  # cannot be pickled
    assert torch.load(path, weights_only=True) == {"content": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["last.pth"]


def test_a_description_counts_in_words() -> None:
    assert describe(nano_model(num_classes=1).state_dict()).endswith("on 3 levels, 1 extra query group, 1 class")


def test_missing_foreign_and_damaged_files(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such weight file") as error:
        load_checkpoint(tmp_path / "none.pth")
    assert "none.pth" in one_line(error)
    cases = {
        "text.pth": (b"hello", "not a checkpoint nor other torch weights, it begins with b'hello'"),
        "empty.pth": (b"", "the file is empty"),
        "cut.pth": (saved.read_bytes()[:5000], "cut off"),
    }
    damaged = bytearray(saved.read_bytes())
    damaged[100:600] = bytes(500)
    cases["damaged.pth"] = (bytes(damaged), "damaged")
    for name, (content, expected) in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=expected) as error:
            load_checkpoint(tmp_path / name)
        assert name in one_line(error)
    torch.save({"weight": torch.zeros(2)}, tmp_path / "plain.pth")
    with pytest.raises(CheckpointError, match="not a checkpoint of this project"):
        load_checkpoint(tmp_path / "plain.pth")


def locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may read every folder; what the system would say about others is said for it."""
    stat = Path.stat

    def refuse(self: Path, **kwargs: Any) -> os.stat_result:
        if "locked" in self.parts[:-1]:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(self))
        return stat(self, **kwargs)

    monkeypatch.setattr(Path, "stat", refuse)


@pytest.mark.parametrize(
    ("name", "reason"), [("locked/x.pth", "Permission denied"), ("x" * 300 + ".pth", "File name too long")]
)
@pytest.mark.parametrize(
    "command", ["export {}", "predict a.png -w {}", "convert {} -o y.pth", "eval {}", "compare {}"]
)
def test_a_path_that_cannot_be_accessed_is_one_sentence(
    name: str,
    reason: str,
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 48)).save("a.png")
    locked(monkeypatch)
    assert main(command.format(name).split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message("not looked at", name, reason).search(line)
    assert [each.name for each in tmp_path.iterdir()] == ["a.png"]


@pytest.mark.parametrize("command", ["export .", "convert . -o ../y.pth", "eval ."])
def test_the_current_folder_is_no_weight_file(
    command: str, saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(saved.parent)
    assert main(command.split()) == 2
    assert message("folder", "did you mean", "nano.pth").search(capsys.readouterr().err)


def test_a_full_disk_is_told_by_the_system(tmp_path: Path) -> None:
    """torch hides its message."""
    with pytest.raises(OSError, match="File too large"), small_files():
        save_checkpoint(tmp_path / "w.pth", {"model": {"w": torch.zeros(100_000)}})
    assert not list(tmp_path.iterdir())


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"

    class Hostile:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (marker,))

    torch.save({"format": "rtdetr", "model": Hostile()}, tmp_path / "hostile.pth")
    with pytest.raises(CheckpointError, match="nothing of it was run") as error:
        load_checkpoint(tmp_path / "hostile.pth")
    assert "weights_only" not in one_line(error)  # torch's sentence advises to switch it off
    assert not marker.exists()


def test_weights_of_another_model_are_named(saved: Path) -> None:
    weights = load_checkpoint(saved)["model"]
    with pytest.raises(CheckpointError, match=r"R18.*3 classes.*expected.*R18.*8 classes") as error:
        load_exactly(nano_model(num_classes=8), weights, saved)
    assert "decoder" in one_line(error) and "(3," in one_line(error)
    with pytest.raises(CheckpointError, match="expected RT-DETRv3 R34"):
        load_exactly(nano_model(depth=34), weights, saved)
    with pytest.raises(CheckpointError, match="something else than RT-DETRv3"):
        load_exactly(nano_model(), {"fc.weight": torch.zeros(1)}, saved)


def test_loading_exactly_wants_every_entry(saved: Path) -> None:
    weights = load_checkpoint(saved)["model"]
    name = "decoder.layers.0.norm1.weight"
    with pytest.raises(CheckpointError, match=rf"differ in 1 entry \(.*\): {name} missing"):
        load_exactly(nano_model(), {k: v for k, v in weights.items() if k != name}, saved)
    with pytest.raises(CheckpointError, match="extra left over"):
        load_exactly(nano_model(), {**weights, "extra": torch.zeros(1)}, saved)


def test_warm_start_takes_what_fits_and_reports_the_rest(saved: Path) -> None:
    model = nano_model(num_classes=8, seed=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    average = nano_model(seed=1).state_dict()
    report = warm_start(model, saved)
    after = model.state_dict()
    differing = {entry.split(" ")[0] for entry in report.mismatched}
    assert differing and all("score" in n or "label_embedding" in n or "class" in n for n in differing)
    assert not report.missing and not report.unexpected
    for name, tensor in after.items():
        if name in differing:
            assert torch.equal(tensor, before[name]), name
        elif not name.endswith("num_batches_tracked"):
            assert torch.equal(tensor, average[name]), name
    text = report.text()
    assert f"loaded {len(report.matched)} of" in text and "%" in text and "of another shape" in text


def test_warm_start_from_something_else_is_refused(saved: Path, tmp_path: Path) -> None:
    content = {**load_checkpoint(saved), "model": {"fc.weight": torch.zeros(1)}, "ema": None}
    save_checkpoint(tmp_path / "other.pth", content)
    with pytest.raises(CheckpointError, match=message("nothing fits", "1", "fc.weight")):
        warm_start(nano_model(), tmp_path / "other.pth")


@pytest.mark.parametrize("keys", [(), ("model",), ("ema", "module")])
def test_warm_start_takes_a_state_dict_of_this_project(keys: tuple[str, ...], saved: Path, tmp_path: Path) -> None:
    content: dict[str, Any] = dict(nano_model(seed=1).state_dict())
    for key in reversed(keys):
        content = {key: content}
    torch.save(content, tmp_path / "w.pth")
    model = nano_model(seed=2)
    report = warm_start(model, tmp_path / "w.pth")
    assert report.matched and not (report.missing or report.unexpected or report.mismatched)
    expected = nano_model(seed=1).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    with pytest.raises(CheckpointError, match=message("own state dict", "config", "classes", "rtdetr train -t")):
        model_from_checkpoint(tmp_path / "w.pth")
    with pytest.raises(CheckpointError, match=message("already", "checkpoint", "no conversion")):
        convert(saved)


def test_report_names_missing_and_left_over_entries() -> None:
    model = nn.Linear(2, 3)
    report = compare(model.state_dict(), {"weight": torch.zeros(3, 2), "other": torch.zeros(1)})
    assert report == (["weight"], ["bias"], ["other"], [], (), "")
    assert "50.0%" in report.text() and "bias" in report.text() and "other" in report.text()


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "rng.pth", {"rng": rng_state()})
    expected = (random.random(), np.random.rand(), torch.rand(3).tolist())
    set_rng_state(torch.load(tmp_path / "rng.pth", weights_only=True)["rng"])
    assert (random.random(), np.random.rand(), torch.rand(3).tolist()) == expected


def test_keeping_the_file_before_after_a_kill_between_the_two_renamings(tmp_path: Path) -> None:
    """Both names are the same file then."""
    last, before = tmp_path / "last.pth", tmp_path / "last-1.pth"
    save_checkpoint(last, {"number": 1})
    before.hardlink_to(last)
    save_checkpoint(last, {"number": 2}, before)
    assert [torch.load(each)["number"] for each in (last, before)] == [2, 1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["last-1.pth", "last.pth"]
