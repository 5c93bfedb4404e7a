"""Exported files: what they say and compute, the certificate that they agree, their use in place of a checkpoint."""

from __future__ import annotations

import json
import logging
import math
import runpy
import shutil
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import NANO
from export_cases import CLASSES, REFUSED, FakeTensorRT, noise, write_checkpoint
from export_programs import RUN_PROGRAM, run_alone
from messages import message
from PIL import Image

from rtdetr import RTDETRv3 as Api
from rtdetr.cli import main
from rtdetr.config import ConfigError, load_config
from rtdetr.data.preprocess import SCALE
from rtdetr.export import build, export_model
from rtdetr.export.build import describe
from rtdetr.export.cases import Case, calibration_images, example_images
from rtdetr.export.certificate import BOUNDS, Arrays, certify, compare, difference, reference, runtimes_for
from rtdetr.export.graph import make_graph
from rtdetr.export.onnx import changed_weights, initializers_sha256, write_openvino
from rtdetr.export.quantize import quantize_onnx, with_more_queries
from rtdetr.export.tensorrt import check_script, write_script
from rtdetr.inference.runtimes import ExportedModel, _load_op, load, open_exported
from rtdetr.models.postprocess import postprocess
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.weights.checkpoint import CheckpointError, make_checkpoint, save_checkpoint
from rtdetr.weights.load import model_from_checkpoint

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "export"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `write_checkpoint` writes; model.onnx with its certificate."""
    folder = tmp_path_factory.mktemp("export")
    write_checkpoint(folder)
    images = str(folder / "shapes" / "val")
    assert main(["export", str(folder / "model.pth"), "--format", "onnx", "--pictures", images]) == 0
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> Network:
    return model_from_checkpoint(folder / "model.pth")[0]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


def changed(source: Path, target: Path, factor: float, honest: bool) -> Path:
    """A copy with one weight multiplied (all of a tensor: factor < 0); honest: with its hash put right."""
    model = onnx.load(source)
    tensor = max(model.graph.initializer, key=lambda each: len(each.raw_data))
    values = onnx.numpy_helper.to_array(tensor).copy()
    values.flat[5] *= factor
    if factor < 0:
        values *= factor
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))
    if honest:
        entries = {each.key: each.value for each in model.metadata_props}
        onnx.helper.set_model_props(model, {**entries, "initializers_sha256": initializers_sha256(model)})
    onnx.save(model, target)
    return target


def test_onnx_file_says_what_it_is(folder: Path) -> None:
    content = onnx.load(folder / "model.onnx")
    assert all(node.domain in ("", "ai.onnx") and not node.doc_string for node in content.graph.node)
    assert REFUSED & {node.op_type for node in content.graph.node} >= {"GridSample", "TopK"}
    assert str(ROOT).encode() not in content.SerializeToString()  # the exporter notes where our code lies
    dims = {
        each.name: [d.dim_param or d.dim_value for d in each.type.tensor_type.shape.dim] for each in content.graph.input
    }
    assert [*dims] == ["images", "sizes"] and [each.name for each in content.graph.output] == [
        "labels",
        "boxes",
        "scores",
    ]
    assert all(isinstance(dims["images"][i], str) for i in (0, 2, 3)) and dims["images"][1] == 3
    about = {each.key: each.value for each in content.metadata_props}
    assert json.loads(about["names"]) == list(CLASSES.names)
    assert json.loads(about["category_ids"]) == list(CLASSES.category_ids)
    assert json.loads(about["preprocess"])["size"] == [64, 96] and json.loads(about["preprocess"])["input"] == "uint8"
    assert len(about["weights_sha256"]) == len(about["checkpoint_sha256"]) == 64 and about["rtdetr.version"]


def test_names_are_stored_as_they_are(folder: Path, tmp_path: Path) -> None:
    classes = replace(CLASSES, names=("Löffel", "杯子", "\N{CUP WITH STRAW}", "\udcff", 'a "lid"'))
    entries = replace(open_exported(folder / "model.onnx").metadata, classes=classes).entries()
    assert entries["names"] == '["Löffel", "杯子", "\N{CUP WITH STRAW}", "\\udcff", "a \\"lid\\""]'
    content = onnx.load(folder / "model.onnx")
    onnx.helper.set_model_props(content, entries)
    onnx.save(content, tmp_path / "model.onnx")
    for runtime in runtimes_for(tmp_path / "model.onnx"):
        assert open_exported(tmp_path / "model.onnx", runtime=runtime).metadata.classes == classes


def test_certificate_of_a_good_file(folder: Path) -> None:
    content = json.loads((folder / "model.onnx.certificate.json").read_text())
    assert content["passed"] and content["reason"] == "" and content["bounds"]["score"] == 1e-4
    compared = [each for each in content["comparisons"] if each["runtime"] == "onnxruntime"]
    assert {each["kind"] for each in compared} == {"images", "random"}
    assert {each["batch"] for each in compared} == {1, 3, 8}
    assert len({(each["height"], each["width"]) for each in compared}) >= 3
    assert sum(each["detections"] for each in compared) > 50
    assert {"torch", "onnx", "onnxruntime"} <= set(content["versions"]) and "4 images of" in content["images"]


@pytest.mark.parametrize(("batch", "height", "width"), [(1, 128, 128), (3, 96, 160), (8, 64, 224)])
def test_one_onnx_file_for_all_sizes(folder: Path, model: Network, batch: int, height: int, width: int) -> None:
    session = ort.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    pixels, sizes = noise(batch, height, width), torch.tensor([[480 + i, 640 - i] for i in range(batch)])
    labels, boxes, scores = session.run(None, {"images": pixels.numpy(), "sizes": sizes.numpy()})
    with torch.no_grad():
        expected = postprocess(model(pixels * SCALE), sizes)
    assert labels.dtype == np.int64 and boxes.shape == (batch, labels.shape[1], 4)
    np.testing.assert_allclose(scores, expected.scores, atol=1e-4)
    for i in range(batch):
        given = [Arrays(*(np.asarray(each[i]) for each in side)) for side in (expected, (scores, labels, boxes))]
        found = difference(given[0], given[1], BOUNDS["fp32"])
        assert found.missing == 0 and found.detections > 5


def test_predict_and_eval_take_the_file_for_the_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, results = [], []
    for name in ("model.pth", "model.onnx"):
        weights, out = str(folder / name), folder / f"out-{name}"
        sources = sorted(map(str, (folder / "shapes" / "val").glob("*.jpg")))
        assert main(["predict", "-w", weights, *sources, "--output-dir", str(out), "--threshold", "0.2"]) == 0
        results.append(json.loads((out / "results.json").read_text()))
        capsys.readouterr()
        assert main(["eval", "-w", weights, "--device", "cpu"]) == 0
        tables.append(capsys.readouterr().out.splitlines()[1:])
    assert tables[0] == tables[1] and "circle" in "".join(tables[0])
    for expected, found in zip(*results, strict=True):
        assert len(expected["detections"]) == len(found["detections"]) > 0
        for one, other in zip(expected["detections"], found["detections"], strict=True):
            assert (one["category_id"], one["name"]) == (other["category_id"], other["name"])
            assert one["score"] == pytest.approx(other["score"], abs=1e-4)
            assert one["box"] == pytest.approx(other["box"], abs=0.06)


def test_python_makes_no_mistyped_folder(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"mistyped is no folder"):
        Api.from_pretrained(folder / "model.pth").export(output=folder / "mistyped" / "new.onnx")
    with pytest.raises(ValueError, match="output: expected a path, got 5"):
        Api.from_pretrained(folder / "model.pth").export(output=5)  # type: ignore[arg-type]
    assert not (folder / "mistyped").exists()


def test_python_api_takes_the_file(folder: Path) -> None:
    image = min((folder / "shapes" / "val").glob("*.jpg"))
    own, exported = (Api.from_pretrained(folder / name, device="cpu") for name in ("model.pth", "model.onnx"))
    for size in (None, (96, 160)):
        expected, found = (each.predict(image, threshold=0.2, size=size) for each in (own, exported))
        assert type(expected) is type(found) and len(found.scores) > 0 and found.names == expected.names
        assert found.scores == pytest.approx(expected.scores, abs=1e-4)
        assert found.boxes == pytest.approx(expected.boxes, abs=0.05)
    expected_figures, found_figures = (each.evaluate() for each in (own, exported))
    assert expected_figures is not None and found_figures is not None
    assert found_figures.figures == pytest.approx(expected_figures.figures, abs=1e-6)
    with pytest.raises(ValueError, match="exported file"):
        exported.train()


def test_a_size_that_no_file_takes_is_one_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "-w", str(folder / "model.onnx"), "--device", "cpu", "-u", "data.image_size=[64, 32]"]) == 2
    assert "multiples of 32 from 64, got 64 x 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("factor", "honest", "why"), [(1.001, False, "its weights are not"), (-1.0, True, "no counterpart")]
)
def test_a_flipped_weight_fails(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], factor: float, honest: bool, why: str
) -> None:
    """Also one so small that no image shows it; and if the hash in the file were right, the images tell."""
    file = changed(folder / "model.onnx", tmp_path / "model.onnx", factor, honest)
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
    assert why in one_line(capsys)
    content = json.loads((tmp_path / "model.onnx.certificate.json").read_text())
    assert content["passed"] is False and why in content["reason"] and file.exists()


def test_check_of_a_good_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "copy.onnx"
    file.write_bytes((folder / "model.onnx").read_bytes())
    assert main(["export", "-w", str(folder / "model.pth"), "--check", str(file)]) == 0
    assert json.loads((tmp_path / "copy.onnx.certificate.json").read_text())["passed"]
    file.write_bytes(file.read_bytes() + b"\x22\x00")  # the same numbers, other bytes than were certified
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
    assert message("other bytes").search(one_line(capsys))
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1  # and it stays so
    capsys.readouterr()
    file.write_bytes(b"no model")
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 1
    assert one_line(capsys).startswith(f"error: {file}: damaged, or no ONNX file")  # named once


def test_check_keeps_format_and_notes(folder: Path, tmp_path: Path) -> None:
    for name in ("model.onnx", "model.onnx.certificate.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    assert main(["export", str(folder / "model.pth"), "--check", str(tmp_path / "model.onnx")]) == 0
    before, after = (json.loads((each / "model.onnx.certificate.json").read_text()) for each in (folder, tmp_path))
    assert (after["format"], after["notes"]) == ("onnx", before["notes"]) and after["notes"]


def test_a_program_with_a_damaged_end_is_one_sentence(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A field of the zip that zipfile does not look at."""
    file = tmp_path / "model.pt2"
    torch.save({}, file)
    content = bytearray(file.read_bytes())
    content[-66] ^= 1  # the number of entries on this disk
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged, or not a file of torch"):
        open_exported(file)
    assert not caplog.records


def test_damage_that_a_runtime_opens_is_one_sentence(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Metadata that are no text; outputs without an image, as OpenVINO gives for a damaged constant."""
    file = tmp_path / "model.onnx"
    command = ["export", str(folder / "model.pth"), "--check", str(file)]
    content = (folder / "model.onnx").read_bytes()
    at = content.rindex(b"weights_sha256") + 20  # in its value
    file.write_bytes(content[:at] + bytes([content[at] ^ 0x80]) + content[at + 1 :])
    assert main(command) == 1
    assert "damaged" in one_line(capsys)
    file.write_bytes(content)
    monkeypatch.setattr(ort.InferenceSession, "run", lambda *_: [np.zeros((0, 300))] * 3)
    assert main(command) == 1
    assert "damaged" in one_line(capsys)


def test_other_weights_fail(folder: Path, tmp_path: Path, model: Network, capsys: pytest.CaptureFixture[str]) -> None:
    """And what is there of the certificate that they do not concern stays as it is."""
    cfg = model_from_checkpoint(folder / "model.pth")[1]
    torch.manual_seed(1)
    save_checkpoint(tmp_path / "other.pth", make_checkpoint(cfg, CLASSES, build_model(cfg.model, 5).state_dict()))
    file, certificate = tmp_path / "model.onnx", tmp_path / "model.onnx.certificate.json"
    file.write_bytes((folder / "model.onnx").read_bytes())
    check = ["export", str(tmp_path / "other.pth"), "--check", str(file)]
    assert main(check) == 1
    assert message("other weights", tmp_path / "other.pth", "certificate").search(one_line(capsys))
    assert not certificate.exists()
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 0
    good = certificate.read_bytes()
    assert main(check) == 1
    assert message("other weights", certificate, tmp_path / "other.pth").search(one_line(capsys))
    assert certificate.read_bytes() == good
    assert main(["export", str(folder / "model.pth"), "--check", str(file)]) == 0


def test_a_failed_comparison_leaves_another_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        build, "write_onnx", lambda graph, metadata, path, *_: changed(folder / "model.onnx", path, -1, True)
    )
    assert main(["export", str(folder / "model.pth"), "-o", str(tmp_path / "bad.onnx")]) == 1
    assert message("no agreement", "bad.onnx.failed").search(one_line(capsys))
    assert {each.name for each in tmp_path.iterdir()} == {"bad.onnx.failed", "bad.onnx.failed.certificate.json"}


@pytest.mark.parametrize("content", [b"", b"\x08\x07garbage", "half", "foreign"])
def test_files_that_are_no_exports(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | str
) -> None:
    file = tmp_path / "file.onnx"
    if content == "foreign":
        foreign = onnx.load(folder / "model.onnx")
        del foreign.metadata_props[:]
        onnx.save(foreign, file)
    else:
        whole = (folder / "model.onnx").read_bytes()
        file.write_bytes(whole[: len(whole) // 2] if content == "half" else content)
    assert (
        main(["predict", "-w", str(file), str(folder / "shapes" / "val"), "--output-dir", str(tmp_path / "out")]) == 2
    )
    assert str(file) in next(line for line in capsys.readouterr().err.splitlines() if line.startswith("error: "))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--format tflite", "did you mean litert?"),
        ("--half --int8 --calibrate .", "a file has one precision"),
        ("--int8", "go together"),
        ("--int8 --calibrate . --format aot", "int8: expected a format of onnx, triton, executorch, litert, got aot"),
        ("-o new.onnx --images nowhere", "nowhere: no image found"),
        ("--check nowhere.onnx", "nowhere.onnx: no such file"),
        ("--check model.pth", "model.pth: expected an exported file by its name"),
        ("--check model.onnx --half --raw --opset 17", "as it is, so leave out --half, --raw, --opset"),
        ("--check model.onnx --portable --sampling gather", "as it is, so leave out --portable, --sampling"),
        ("--check model.onnx -o x.onnx --ap .", "as it is, so leave out --output, --ap"),
        ("--check model.onnx --int8 --calibrate .", "as it is, so leave out --int8, --calibrate"),
        ("--check model.onnx --format onnx --input uint8", "as it is, so leave out --format, --input"),
        ("-w model.onnx", "model.onnx: is an exported file; expected the checkpoint that it came from"),
        ("-w model.onnx --check model.onnx", "model.onnx: is an exported file; expected the checkpoint"),
        ("-o model.onnx", "exists already"),
        ("-o model.engine --format tensorrt", "writes a file .onnx"),
        ("-o mistyped/new.onnx", "mistyped is no folder, so new.onnx cannot be written there"),
        ("-o mistyped/new --format openvino", "mistyped is no folder"),
        ("-o model.onnx --format openvino", "writes a folder"),
        ("-o . --format openvino", "writes a folder with a name of its own, got ."),
    ],
)
def test_arguments_that_do_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, why: str
) -> None:
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    try:
        code = main(["export", *([] if "-w" in arguments else ["model.pth"]), *arguments.split()])
    except SystemExit as end:  # of argparse
        code = int(end.code or 0)
    assert code == 2 and why in one_line(capsys)
    assert sorted(folder.iterdir()) == before


def test_chance_among_queries_is_not_held_against_a_file(folder: Path, model: Network) -> None:
    file = open_exported(folder / "model.onnx")
    case = Case("random", noise(2, 64, 96), torch.tensor([[64, 96]] * 2))
    expected, gaps = reference(model, case, 300)
    moved = expected._replace(boxes=expected.boxes + 1)
    assert compare(file, case, expected, gaps, BOUNDS["fp32"]).passed
    clear = compare(file, case, moved, torch.ones(2), BOUNDS["fp32"])
    assert not clear.passed and clear.missing == clear.detections >= 10
    tied = compare(file, case, moved, torch.tensor([1.0, 0.0]), BOUNDS["fp32"])
    assert tied.undecided == 1 and not tied.passed
    only = compare(file, case, moved, torch.zeros(2), BOUNDS["fp32"])
    assert only.undecided == 2 and only.detections == 0


def test_an_unknown_input_is_one_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match=message("expected", "input_type", "uint8", "float", "'float32'")):
        export_model(folder / "model.pth", input_type="float32")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message("expected", "half", "True", "False", "'auto'")):
        export_model(folder / "model.pth", half="auto")  # type: ignore[arg-type]


def test_a_query_more_or_less_is_not_held_against_float16(folder: Path, model: Network) -> None:
    """The rounding of the features decides about the last of them; one detection in ten may be another for that."""
    file = open_exported(folder / "model.onnx")
    case = Case("images", noise(1, 64, 96), torch.tensor([[64, 96]]))
    expected, gaps = reference(model, case, 300)
    for share, passes in ((0.1, True), (0.5, False)):
        boxes = expected.boxes.clone()
        boxes[:, : int(share * int((expected.scores > 0.05).sum()))] += 100
        found = compare(file, case, expected._replace(boxes=boxes), gaps, BOUNDS["fp16"])
        assert found.missing and found.passed == passes


def test_noise_does_not_decide_about_8_bits(folder: Path, model: Network) -> None:
    """It lies outside of the ranges that they were calibrated for; what is not finite is broken all the same."""
    file = open_exported(folder / "model.onnx")
    case = Case("random", noise(1, 64, 96), torch.tensor([[64, 96]]))
    expected, gaps = reference(model, case, 300)
    far = expected._replace(boxes=expected.boxes + 500)
    assert not compare(file, case, far, gaps, BOUNDS["fp16"]).passed
    assert compare(file, case, far, gaps, BOUNDS["int8"]).passed
    assert not compare(file, case._replace(kind="images"), far, gaps, BOUNDS["int8"]).passed
    broken = ExportedModel(file.path, file.metadata, "x", lambda feed: [each * torch.nan for each in file.run(feed)])
    assert not compare(broken, case, expected, gaps, BOUNDS["int8"]).passed


def test_half_keeps_what_scores_and_places(folder: Path, model: Network) -> None:
    """Run by torch itself here; the writers take the same module."""
    metadata = replace(open_exported(folder / "model.onnx").metadata, precision="fp16")
    graph = make_graph(model, metadata, "torch")
    types = {name: each.dtype for name, each in graph.module.named_parameters()}
    assert not any("dense_head" in name or "query_groups" in name for name in types)
    ends = [name for name in types if any(part in name for part in ("stem.0.", "selector", "score_heads", "box_heads"))]
    assert len(ends) > 20 and {types.pop(name) for name in ends} == {torch.float32}
    assert set(types.values()) == {torch.float16}
    pixels, sizes = noise(2, 64, 96), torch.tensor([[64, 96]] * 2)
    with torch.no_grad():
        _, boxes, scores = graph.module(pixels, sizes)
        expected = postprocess(model(pixels * SCALE), sizes)
    assert scores.dtype == boxes.dtype == torch.float32
    assert (scores.sort().values - expected.scores.sort().values).abs().max() < 0.02
    assert next(model.parameters()).dtype == torch.float32  # a copy was changed


def test_int8(folder: Path, model: Network, tmp_path: Path) -> None:
    metadata = replace(open_exported(folder / "model.onnx").metadata, precision="int8")
    images = calibration_images(folder / "shapes" / "train", metadata.config)
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    quantize_onnx(folder / "model.onnx", metadata, images, tmp_path / "model.onnx")
    assert logging.root.manager.disable == logging.CRITICAL  # what the caller had
    logging.disable(before)
    assert [each.name for each in tmp_path.iterdir()] == ["model.onnx"]
    assert changed_weights(tmp_path / "model.onnx") == ""
    quantised = onnx.load(tmp_path / "model.onnx")
    assert [each.domain for each in quantised.opset_import] == [""] and quantised.producer_name == "rtdetr"
    nodes = quantised.graph.node
    in_8_bits = {
        node.name.split("/")[0]: "DequantizeLinear" in node.input[1] for node in nodes if node.op_type == "Conv"
    }
    assert sum(in_8_bits.values()) > 30
    assert [name for name, rounded in in_8_bits.items() if "stem" in name and not rounded] == ["backbone.stem.0.conv"]
    rounded = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
    cut = [node.name for node in nodes if node.op_type == "Relu" and node.input[0] in rounded]
    assert not cut  # its input would have given levels to numbers that it takes away
    assert (tmp_path / "model.onnx").stat().st_size < (folder / "model.onnx").stat().st_size
    case = Case("random", noise(1, 64, 96), torch.tensor([[64, 96]]))
    found = open_exported(tmp_path / "model.onnx")(case.pixels * SCALE, case.sizes)
    assert (found.scores - reference(model, case, 300)[0].scores).abs().max() < 0.2


def test_tensorrt_script(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its types from the file, and stops where TensorRT has something in float16 that is float32 there."""
    file = tmp_path / "model.onnx"
    file.write_bytes((folder / "model.onnx").read_bytes())
    script = write_script(file, replace(open_exported(file).metadata, precision="fp16"))
    assert check_script(script, file) == ""
    tensorrt = FakeTensorRT({})
    monkeypatch.setitem(sys.modules, "tensorrt", tensorrt)
    monkeypatch.setattr(sys, "argv", [str(script)])
    keep = runpy.run_path(str(script), run_name="__main__")["KEEP_FLOAT32"]
    assert (tmp_path / "model.engine").read_bytes() == b"engine" and tensorrt.flags == 1 << 1
    assert tensorrt.shapes["images"][:2] == ((1, 3, 64, 64), (1, 3, 64, 96)) and len(tensorrt.shapes["sizes"]) == 3
    assert any("grid_sampler" in name for name in keep) and any("sigmoid" in name for name in keep)
    monkeypatch.setitem(sys.modules, "tensorrt", FakeTensorRT({keep[0]: "half"}))
    with pytest.raises(SystemExit, match="TensorRT takes it in float16"):
        runpy.run_path(str(script), run_name="__main__")
    text = script.read_text()
    script.write_text(text.replace(repr(keep[0]), "'no such layer'"))
    assert "no such layer" in check_script(script, file)
    script.write_text(text.replace("def main():", "def main(:"))
    assert "does not parse" in check_script(script, file)


@pytest.mark.parametrize(("size", "smallest"), [((640, 640), (128, 128)), ((96, 320), (96, 320))])
def test_the_smallest_shape_of_tensorrt_has_a_cell_for_every_query(
    folder: Path, tmp_path: Path, size: tuple[int, int], smallest: tuple[int, int]
) -> None:
    cfg = load_config(NANO, [f"data.image_size={list(size)}", "model.decoder.num_queries=300"])
    shutil.copy(folder / "model.onnx", tmp_path)
    metadata = replace(open_exported(folder / "model.onnx").metadata, config=cfg)
    profile = write_script(tmp_path / "model.onnx", metadata).read_text().split("'images': ")[1]
    assert profile.startswith(f"((1, 3, {smallest[0]}, {smallest[1]}), (1, 3, {size[0]}, {size[1]})")


def test_openvino(folder: Path, model: Network, tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed")
    metadata = open_exported(folder / "model.onnx").metadata
    write_openvino(folder / "model.onnx", metadata, tmp_path / "vino")
    images = example_images(folder / "shapes" / "val", metadata.config)
    assert certify(tmp_path / "vino", "openvino", model, metadata, images).passed
    assert load(tmp_path / "vino").classes == CLASSES
    content = bytearray((tmp_path / "vino" / "model.bin").read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    (tmp_path / "vino" / "model.bin").write_bytes(content)
    assert not certify(tmp_path / "vino", "openvino", model, metadata, images).passed
    (tmp_path / "vino" / "model.bin").unlink()
    with pytest.raises(CheckpointError, match="bin file cannot be found"):  # the line that says it, not the first
        load(tmp_path / "vino")


def check_program(file: Path, model: Network, tmp_path: Path, packaged: bool, *library: Path) -> None:
    """Two sizes and batches in a process without our code."""
    inputs = [(noise(b, h, w), torch.tensor([[h, w]] * b)) for b, h, w in ((1, 96, 64), (3, 64, 160))]
    torch.save(inputs, tmp_path / "tensors.pt")
    code = RUN_PROGRAM.format(packaged=packaged)
    run_alone(code, {"rtdetr"}, ["", str(tmp_path / "tensors.pt"), str(file), *map(str, library)])
    for (pixels, sizes), (labels, boxes, scores) in zip(inputs, torch.load(tmp_path / "tensors.pt")):
        with torch.no_grad():
            expected = postprocess(model(pixels * SCALE), sizes)
        torch.testing.assert_close(scores, expected.scores, atol=1e-4, rtol=0)
        assert boxes.shape == expected.boxes.shape and labels.dtype == torch.int64


def test_torch_export_in_a_process_without_our_code(folder: Path, model: Network, tmp_path: Path) -> None:
    exported = export_model(folder / "model.pth", "torch-export", tmp_path / "model.pt2")
    assert exported.certificate.passed and exported.path == tmp_path / "model.pt2"
    check_program(exported.path, model, tmp_path, packaged=False)
    content = bytearray(exported.path.read_bytes())
    with zipfile.ZipFile(exported.path) as parts:
        largest = max(parts.infolist(), key=lambda part: part.file_size)
    content[largest.header_offset + 200 + largest.file_size // 2] ^= 0x80
    exported.path.write_bytes(content)
    assert main(["export", str(folder / "model.pth"), "--check", str(exported.path)]) == 1


@pytest.mark.heavy  # inductor's C++ compiler takes half a minute, and the C++ headers of torch ten seconds
def test_aot_package_in_python_and_cpp(folder: Path, model: Network, tmp_path: Path) -> None:
    exported = export_model(folder / "model.pth", "aot", tmp_path / "model.aot.pt2")
    library = [each for each in (tmp_path / "model.aot.ops.so",) if each.exists()]
    check_program(exported.path, model, tmp_path, True, *library)
    torch_folder = Path(torch.__path__[0])
    if not (torch_folder / "include/ATen/ATen.h").exists():
        pytest.skip("this torch has no C++ headers")
    lib = torch_folder / "lib"
    libraries = [f"-I{torch_folder / 'include'}", f"-L{lib}", f"-Wl,-rpath,{lib}", "-Wl,--no-as-needed"]
    libraries += ["-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    program = str(tmp_path / "aot")
    subprocess.run(["g++", "-std=c++20", str(EXAMPLES / "aot.cpp"), *libraries, "-o", program], check=True)
    done = subprocess.run([program, str(exported.path), *map(str, library)], capture_output=True, text=True, check=True)
    grey = torch.full((1, 3, 96, 128), 127, dtype=torch.uint8)
    found = load(exported.path).model(grey * SCALE, torch.tensor([[96, 128]]))
    assert done.stdout.startswith(f"label {int(found.labels[0, 0])} score {float(found.scores[0, 0]):.3g}"[:-1])


@pytest.mark.slow  # two exports
@pytest.mark.parametrize("arguments", ["--raw --input float --half", "--int8 --calibrate shapes/train"])
def test_other_onnx_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str
) -> None:
    monkeypatch.chdir(folder)
    _, described = describe("model.pth", "fp32", raw=False, input_type="uint8")
    assert main(["export", "model.pth", "-o", "other.onnx", *arguments.split(), "--overwrite"]) == 0
    assert ("`rtdetr eval other.onnx` measures it" in capsys.readouterr().out) is ("--int8" in arguments)
    found: Any = load("other.onnx").predict([Image.open(min(Path("shapes/val").glob("*.jpg"))).convert("RGB")])
    assert len(found[0]) > 0
    own, of_file = (each.config.model.decoder.num_queries for each in (described, open_exported("other.onnx").metadata))
    assert of_file == (math.ceil(own * 4 / 3) if "--int8" in arguments else own)
    graph = onnx.load("other.onnx").graph
    best = {node.input[1] for node in graph.node if node.op_type == "TopK"}
    numbers = [onnx.numpy_helper.to_array(each).item() for each in graph.initializer if each.name in best]
    assert of_file in numbers  # cells that become queries


def test_queries_of_8_bits_are_no_more_than_the_cells(folder: Path) -> None:
    model, metadata = describe(folder / "model.pth", "int8", raw=False, input_type="uint8")
    cells, own = 12 * 8 + 6 * 4 + 3 * 2, metadata.config.model.decoder.num_queries  # cells of 96 x 64 pixels
    for number, expected in ((own, math.ceil(own * 4 / 3)), (cells - 1, cells), (cells + 1, cells + 1)):
        decoder = replace(metadata.config.model.decoder, num_queries=number)
        cfg = replace(metadata.config, model=replace(metadata.config.model, decoder=decoder))
        written, of_file = with_more_queries(model, replace(metadata, config=cfg))
        assert written.decoder.selector.num_queries == of_file.config.model.decoder.num_queries == expected
        assert of_file.config.eval.max_detections == 400 and model.decoder.selector.num_queries == own


def test_the_op_is_declared_once(tmp_path: Path) -> None:
    """A second library would end the process, also where the first one is of an older version and not used."""
    if not hasattr(torch.ops.rtdetr, "ms_deform_attn"):
        pytest.skip("the op is not built")
    _load_op(tmp_path / "model.pt2", "missing.so")


def test_runtimes_that_are_not_installed_are_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    images = str(folder / "shapes" / "val")
    assert main(["predict", "-w", str(folder / "model.onnx"), images, "--output-dir", str(tmp_path / "out")]) == 2
    assert message("missing package", "onnxruntime", "rtdetr[onnx]").search(one_line(capsys))
    assert main(["export", str(folder / "model.pth"), "-o", str(tmp_path / "new.onnx")]) == 2
    assert message("missing package", "onnx", "onnxruntime").search(one_line(capsys)) and not any(tmp_path.iterdir())
