"""Files of phones and small boards, tested where the extra of a format is installed."""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_cases import write_checkpoint
from messages import message
from PIL import Image

from rtdetr.cli import main
from rtdetr.export.build import NEEDS, describe
from rtdetr.export.cases import calibration_images
from rtdetr.export.edge import WithoutComparisons, of_one_image
from rtdetr.export.graph import make_graph
from rtdetr.export.quantize import quantize_program
from rtdetr.inference.export_metadata import METADATA_FILE
from rtdetr.inference.runtimes import (
    COREML_WEIGHTS,
    NCNN_FILES,
    append_metadata,
    appended_metadata,
    load,
    note_ncnn,
    open_exported,
    runtime_of,
)
from rtdetr.models.layers import SelfAttention
from rtdetr.weights.checkpoint import CheckpointError

ENDINGS = {"executorch": ".pte", "litert": ".tflite", "coreml": ".mlpackage", "ncnn": "_ncnn"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edge")
    write_checkpoint(folder)
    return folder


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def exported(folder: Path, format: str, *arguments: str) -> Path:
    if not all(importlib.util.find_spec(each.split(".")[0]) for each in NEEDS[format]):
        pytest.skip(f'needs pip install "rtdetr[{format}]"')
    images = str(folder / "shapes" / "val")
    command = ["export", str(folder / "model.pth"), "--format", format, "--images", images, "--overwrite"]
    assert main([*command, *arguments]) == 0
    return folder / f"model{ENDINGS[format]}"


@pytest.mark.slow  # the first two converters take a minute
@pytest.mark.parametrize("format", ["executorch", "litert", "ncnn"])
def test_file_detects_as_the_checkpoint_does(folder: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(folder, format)
    certificate = json.loads((folder / f"{file.name}.certificate.json").read_bytes())
    assert certificate["passed"] and certificate["format"] == format
    assert {each["runtime"] for each in certificate["comparisons"]} == {format}
    assert sum(each["detections"] for each in certificate["comparisons"]) > 100
    images = [Image.open(each).convert("RGB") for each in sorted((folder / "shapes").glob("*/*.jpg"))]
    ours: Any = load(folder / "model.pth", threshold=0.05).predict(images)
    theirs: Any = load(file, threshold=0.049).predict(images)
    assert len(images) == 16 and sum(map(len, ours)) > 100
    for found, others in zip(ours, theirs, strict=True):
        for each in found:
            boxes = [np.array(other.box) for other in others if other.name == each.name]
            assert min(np.abs(box - each.box).max() for box in boxes) < 1
    if format == "ncnn":
        assert all(line.endswith(" 31=7") for line in (file / NCNN_FILES[0]).read_text().splitlines()[2:])
    for damaged in [file / name for name in NCNN_FILES] if file.is_dir() else [file]:
        before = damaged.read_bytes()
        flip_a_bit(damaged)
        capsys.readouterr()
        assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
        assert "other bytes than were written" in capsys.readouterr().err
        damaged.write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["executorch", "litert"])
def test_8_bits(folder: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    train = str(folder / "shapes" / "train")
    output = folder / f"int8{ENDINGS[format]}"
    exported(folder, format, "--int8", "--calibrate", train, "-o", str(output))
    assert output.exists() and "in float32: backbone.stem.0 and all else" in capsys.readouterr().out
    certificate = json.loads((folder / f"int8{ENDINGS[format]}.certificate.json").read_bytes())
    assert certificate["passed"] and certificate["precision"] == "int8"
    model, metadata = describe(folder / "model.pth", "int8", raw=False, input_type="uint8")
    graph = of_one_image(make_graph(model, metadata, "torch"), (64, 96))
    with torch.no_grad():
        program = quantize_program(
            graph, replace(metadata, fixed=True), calibration_images(train, metadata.config), format
        )
    convolutions = {"float": 0, "int8": 0}
    for node in program.module.graph.nodes:  # type: ignore[union-attr, operator]
        if node.target is torch.ops.aten.conv2d.default:
            convolutions["int8" if "dequantize" in str(node.args[0].target) else "float"] += 1
    assert convolutions["float"] == 4 and convolutions["int8"] > 30  # the first one; three of the decoder


@pytest.mark.slow  # a minute, too
@pytest.mark.skipif(platform.system() == "Darwin", reason="there Core ML runs")
def test_core_ml_package_is_written_and_not_called_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = exported(folder, "coreml")
    assert "not run here, so not compared" in capsys.readouterr().out
    certificate = json.loads((folder / f"{file.name}.certificate.json").read_bytes())
    assert not certificate["passed"] and certificate["not_run"] == "Core ML runs on macOS alone"
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 0
    assert main(["predict", "-w", str(file), str(folder / "shapes" / "val"), "--output-dir", str(folder / "out")]) == 2
    assert "Core ML runs on macOS alone" in capsys.readouterr().err
    manifest = file / "Manifest.json"
    content = manifest.read_text()
    manifest.write_text(content.replace('"rootModelIdentifier": "', '"rootModelIdentifier": "x'))
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
    assert "damaged, or no Core ML package" in capsys.readouterr().err
    manifest.write_text(content)
    flip_a_bit(file / COREML_WEIGHTS)
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
    assert message("other weights").search(capsys.readouterr().err)


@pytest.mark.parametrize("format", ENDINGS)
def test_missing_package_is_named(
    folder: Path, format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = NEEDS[format][0].split(".")[0]
    for name in [package, *(each for each in sys.modules if each.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    assert (
        main(["export", str(folder / "model.pth"), "--format", format, "-o", str(folder / f"x{ENDINGS[format]}")]) == 2
    )
    error = capsys.readouterr().err
    assert message("missing package", f"rtdetr[{format}]").search(error) and len(error.splitlines()) == 1


@pytest.mark.parametrize("format", ENDINGS)
def test_what_a_format_cannot_do_is_said(folder: Path, format: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["export", str(folder / "model.pth"), "--format", format]
    assert main([*command, "--half"]) == 2
    assert f"files of {format} are float32" in capsys.readouterr().err
    assert main([*command, "-o", str(folder / "x.onnx")]) == 2
    if format != "ncnn":
        assert runtime_of(Path(f"x{ENDINGS[format]}")) == format
    if format in ("coreml", "ncnn"):
        assert main([*command, "--int8", "--calibrate", "."]) == 2
        assert "int8: expected a format of onnx, triton, executorch, litert" in capsys.readouterr().err


def test_docs_name_the_versions_of_the_extras() -> None:
    root = Path(__file__).resolve().parents[2]
    extras, text = (root / "pyproject.toml").read_text(), (root / "docs/export.md").read_text()
    for extra in ENDINGS:
        (line,) = re.findall(rf"^{extra} = .*", extras, re.MULTILINE)
        pinned = re.findall(r'"([\w-]+)==([\d.]+)"', line)
        assert pinned and all(f"{name} {version}" in text for name, version in pinned), extra


def test_metadata_at_the_end_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "x.pte"
    file.write_bytes(bytes(range(256)) * 9)
    assert appended_metadata(file) == {}
    append_metadata(file, {"names": "[]"})
    assert file.read_bytes().startswith(bytes(range(256)) * 9) and appended_metadata(file)["names"] == "[]"
    content = file.read_bytes()
    for place in (0, 9 * 256 - 1, 9 * 256 + 80):  # the program's ends, the metadata
        damaged = bytearray(content)
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            appended_metadata(file)


def test_ncnn_folder_with_other_bytes(folder: Path, tmp_path: Path) -> None:
    _, metadata = describe(folder / "model.pth", "fp32", raw=True, input_type="float")
    for name in NCNN_FILES:
        (tmp_path / name).write_bytes(bytes(range(256)) * 3)
    note_ncnn(tmp_path, metadata.entries())
    assert runtime_of(tmp_path) == "ncnn"
    flip_a_bit(tmp_path / NCNN_FILES[1])
    with pytest.raises(CheckpointError, match="has other bytes than were written"):
        open_exported(tmp_path)
    (tmp_path / METADATA_FILE).write_text("{")
    with pytest.raises(CheckpointError, match="damaged, or no ncnn folder"):
        open_exported(tmp_path)


def test_comparisons_by_arithmetic() -> None:
    """Of neighbouring floats, and of whole numbers."""
    a = torch.tensor([[0.5], [-3.0], [1e-3], [1e-6]])
    steps = torch.tensor([-torch.inf, 0.0, torch.inf])
    b = torch.where(steps == 0, a, torch.nextafter(a, steps)).clamp(min=-4)
    whole, others = torch.tensor([[7.0], [0.0], [8400.0]]), torch.tensor([0.0, 6.0, 7.0, 8.0, 8399.0, 8400.0])
    expected = [a > b, a[1] > b, *(op(whole, others) for op in (torch.ge, torch.le, torch.eq))]
    with WithoutComparisons():
        found = [a > b, a[1] > b, whole >= others, whole <= others, whole == others]
    assert all(each.is_floating_point() for each in found)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs.float())


def test_attention_of_all_tokens_has_no_split() -> None:
    """LiteRT's converter fails at one of a single part."""
    tokens = torch.zeros(1, 6, 8)
    program = torch.export.export(SelfAttention(8, 2).eval(), (tokens, tokens))
    assert not [node for node in program.graph.nodes if "split" in str(node.target)]
