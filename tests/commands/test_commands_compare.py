"""`rtdetr compare`: one table over a checkpoint and its exports."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from export_cases import write_checkpoint
from messages import message
from plain_kernels import OurOperators

from rtdetr.cli import main
from rtdetr.commands.compare import HEADS, exports_beside
from rtdetr.ops.compiled import WHY_NOT
from rtdetr.weights.catalogue import checkpoint_of
from rtdetr.weights.checkpoint import load_checkpoint, save_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model.pth and model.pt2, certified."""
    folder = tmp_path_factory.mktemp("compare")
    write_checkpoint(folder)
    assert main(["export", str(folder / "model.pth"), "--format", "torch-export"]) == 0
    return folder


def test_the_table_has_a_row_for_each_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = tmp_path / "table.md", tmp_path / "table.json"
    arguments = [word for output in outputs for word in ("-o", str(output))]
    assert main(["compare", str(folder / "model.pth"), "--device", "cpu", *arguments]) == 0
    text = outputs[0].read_text()
    assert text.strip() in capsys.readouterr().out
    assert [line.count("|") for line in text.splitlines()] == [len(HEADS) + 1] * 4
    ours, theirs = json.loads(outputs[1].read_text())["rows"]
    assert (ours["file"], theirs["file"]) == ("model.pth", "model.pt2")
    assert (ours["runtime"], theirs["runtime"]) == ("PyTorch", "torch")
    assert abs(ours["AP"] - theirs["AP"]) < 1e-3
    certificate = json.loads((folder / "model.pt2.certificate.json").read_text())
    assert ours["score"] is None and theirs["box"] == max(each["box"] for each in certificate["comparisons"])
    assert all(row[key] > 0 for row in (ours, theirs) for key in ("latency_ms", "images_per_second"))
    assert theirs["megabytes"] == (folder / "model.pt2").stat().st_size / 1e6


@pytest.mark.parametrize("kernels", [["--kernels", "plain"], []])
def test_a_checkpoint_runs_with_the_kernels_that_are_asked_for(folder: Path, kernels: list[str]) -> None:
    with OurOperators() as called:
        assert main(["compare", str(folder / "model.pth"), str(folder / "model.pth"), "--device", "cpu", *kernels]) == 0
    assert bool(called.names) == (not kernels and WHY_NOT["cpu"] is None)


def test_files_with_a_certificate_are_taken(tmp_path: Path) -> None:
    for name in ("best.onnx", "best-fp16.onnx", "best2.onnx", "last.onnx", "best.onnx.failed", "best.pt2"):
        (tmp_path / name).touch()
        if name != "best.pt2":
            (tmp_path / f"{name}.certificate.json").touch()
    others = ["best2.onnx", "last.onnx"]  # left out later if their certificate is about other weights
    assert [each.name for each in exports_beside(tmp_path / "best.pth")] == ["best-fp16.onnx", "best.onnx", *others]
    assert [each.name for each in exports_beside(tmp_path / "best.onnx")] == ["best-fp16.onnx", *others]


def test_a_model_is_compared_by_its_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "rtdetrv2_r18vd_coco"
    monkeypatch.setenv("RTDETR_WEIGHTS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    shutil.copy(folder / "model.pth", checkpoint_of(name))
    assert main(["compare", name, "--device", "cpu"]) == 0
    assert f"| {name} | PyTorch |" in capsys.readouterr().out


def test_files_of_other_weights_or_classes_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("model.pth", "model.pt2", "model.pt2.certificate.json"):
        shutil.copy(folder / name, tmp_path / name)
    content = load_checkpoint(tmp_path / "model.pth")
    content["classes"]["names"] = content["classes"]["names"][::-1]
    save_checkpoint(tmp_path / "other.pth", content)
    for files in (["model.pth", "other.pth"], ["other.pth", "model.pt2"]):
        assert main(["compare", *(str(tmp_path / file) for file in files), "--device", "cpu"]) == 2
        assert message("detects other classes", files[1], files[0]).search(capsys.readouterr().err)
    assert main(["export", str(tmp_path / "other.pth"), "--check", str(tmp_path / "model.pt2")]) == 1
    assert "it was exported with other classes" in capsys.readouterr().err
    content = load_checkpoint(tmp_path / "model.pth")
    next(iter(content["model"].values())).add_(1)
    save_checkpoint(tmp_path / "model.pth", content)
    assert main(["compare", str(tmp_path / "model.pth"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert message("other weights", "model.pt2", "left out", "certificate").search(out) and "| model.pt2 |" not in out
    assert main(["compare", str(tmp_path / "model.pth"), str(tmp_path / "model.pt2"), "--device", "cpu"]) == 2
    assert message("other weights", "model.pt2", "certificate").search(capsys.readouterr().err)


def test_a_file_whose_package_is_missing_is_left_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "model.pth", tmp_path / "model.pth")
    (tmp_path / "model.onnx").touch()
    shutil.copy(folder / "model.pt2.certificate.json", tmp_path / "model.onnx.certificate.json")
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert main(["compare", str(tmp_path / "model.pth"), "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert message("missing package", "model.onnx", "left out", "onnxruntime", 'pip install "rtdetr[onnx]"').search(out)
    assert "| model.pth |" in out and "| model.onnx |" not in out
    assert main(["compare", str(tmp_path / "model.pth"), str(tmp_path / "model.onnx"), "--device", "cpu"]) == 2
    assert message("missing package", "model.onnx", "onnxruntime").search(capsys.readouterr().err)


def test_files_of_one_name_are_told_apart(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(folder / "model.pth", tmp_path / "model.pth")
    files = [str(each / "model.pth") for each in (folder, tmp_path)]
    assert main(["compare", *files, "--device", "cpu"]) == 0
    table = capsys.readouterr().out
    assert all(f"| {file} |" in table for file in files)


def test_a_missing_file_is_named_before_the_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("rtdetr.export.measure.load_model", None)
    for weights in (["-w", str(folder / "model.pth")], [str(folder / "model.pth")]):
        assert main(["compare", *weights, "nowhere.onnx"]) == 2
        assert capsys.readouterr().err == "error: nowhere.onnx: no such file\n"


def test_a_changed_file_is_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = folder / "model.pt2.certificate.json"
    content = certificate.read_text()
    certificate.write_text(json.dumps({**json.loads(content), "certified_sha256": "0"}))
    try:
        assert main(["compare", str(folder / "model.pth"), "--device", "cpu"]) == 2
    finally:
        certificate.write_text(content)
    assert message("other file", "model.pt2").search(capsys.readouterr().err)
    output = str(tmp_path / "table.txt")
    assert main(["compare", str(folder / "model.pth"), "-o", output]) == 2
    assert message("expected", "--output", ".json", ".md").search(capsys.readouterr().err)


@pytest.mark.parametrize("damaged", ["{", "[]", '{"certified_sha256": "0"}', '{"comparisons": 1}'])
def test_a_damaged_certificate_is_one_sentence(damaged: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = folder / "model.pt2.certificate.json"
    content = certificate.read_text()
    certificate.write_text(damaged)
    try:
        assert main(["compare", str(folder / "model.pth"), "--device", "cpu"]) == 2
    finally:
        certificate.write_text(content)
    assert message("damaged", "model.pt2.certificate.json").search(capsys.readouterr().err)
