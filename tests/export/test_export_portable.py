"""Portable files: which operators and tensors they are made of, that they agree, what they refuse."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from export_cases import REFUSED, noise, write_checkpoint
from messages import message

from rtdetr.cli import main
from rtdetr.config import ConfigError
from rtdetr.data.preprocess import SCALE
from rtdetr.export.build import describe
from rtdetr.export.cases import Case, calibration_images, cases, example_images
from rtdetr.export.certificate import BOUNDS, compare, reference
from rtdetr.export.graph import make_graph, make_portable_graph
from rtdetr.export.onnx import operators, write_onnx
from rtdetr.export.quantize import quantize_onnx
from rtdetr.inference.export_metadata import Metadata
from rtdetr.inference.runtimes import open_exported
from rtdetr.models.portable import best_places, descending, running_sum, sample_by_gather, sample_by_products
from rtdetr.models.rtdetrv3 import Network
from rtdetr.ops.reference import ms_deform_attn_reference

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("portable")
    write_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def described(folder: Path) -> tuple[Network, Metadata]:
    model, metadata = describe(folder / "model.pth", "fp32", raw=False, input_type="uint8")
    return model, replace(metadata, fixed=True)


def check_file(path: Path, model: Network, metadata: Metadata) -> None:
    """Its operators, ranks and numbers; its detections on images and on noise."""
    inferred = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True).graph
    assert not REFUSED & set(operators(path))
    known = {each.name: len(each.type.tensor_type.shape.dim) for each in inferred.value_info}
    assert {name for node in inferred.node for name in node.output} <= known.keys() | {
        each.name for each in inferred.output
    }
    assert max(known.values()) <= 4
    for each in inferred.initializer:
        values = torch.from_numpy(onnx.numpy_helper.to_array(each).copy())
        assert values.dim() <= 4 and bool(torch.isfinite(values).all()), each.name
    file, bounds = open_exported(path), BOUNDS["fp32"]
    num_queries = model.decoder.selector.num_queries
    for case in cases(example_images(None, metadata.config), metadata.config.data.image_size, num_queries, True):
        found = compare(file, case, *reference(model, case, 300), bounds)
        assert found.passed and found.detections, found


@pytest.mark.parametrize(("sampling", "opset"), [("gather", 13), ("products", 17)])
def test_portable_files_hold_few_operators_and_agree(
    described: tuple[Network, Metadata], tmp_path: Path, sampling: str, opset: int
) -> None:
    model, metadata = described
    path = tmp_path / "portable.onnx"
    write_onnx(make_portable_graph(model, metadata, sampling), metadata, path, opset)  # type: ignore[arg-type]
    content = onnx.load(path)
    assert [each.version for each in content.opset_import] == [opset] and content.ir_version <= 8
    assert ("Gather" in operators(path)) is (sampling == "gather")
    assert ("LayerNormalization" in operators(path)) is (opset == 17)
    check_file(path, model, metadata)
    with pytest.raises(ConfigError, match="takes images of 64 x 96 alone, got 96 x 64"):
        open_exported(path)(noise(1, 96, 64) * SCALE, torch.tensor([[96, 64]]))


def test_raw_portable_module_is_the_plain_model(described: tuple[Network, Metadata]) -> None:
    """As torch module that others export; its queries come in another order."""
    model, metadata = described
    pixels = noise(1, 64, 96)
    with torch.no_grad():
        plain = make_graph(model, replace(metadata, raw=True, fixed=False), "torch").module(pixels)
        for sampling in ("gather", "products"):
            graph = make_portable_graph(model, replace(metadata, raw=True), sampling)  # type: ignore[arg-type]
            found = graph.module(pixels)
            order, expected = (each[0][0].amax(dim=1).argsort() for each in (found, plain))
            for ours, theirs in zip(found, plain):
                torch.testing.assert_close(ours[0][order], theirs[0][expected], atol=1e-4, rtol=0)


@pytest.mark.parametrize("sample", [sample_by_gather, sample_by_products])
def test_sampling_agrees_with_grid_sample(sample: object) -> None:
    """Outside of the maps, too, at their borders and far away."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((6, 9), (3, 4))
    value = torch.randn(2, 66, 3, 5, generator=generator)
    locations = torch.rand(2, 7, 3, 2, 4, 2, generator=generator) * 2 - 0.5
    locations[0, 0, 0, 0] = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1e6, 0.5], [-1e6, -1e6]])
    weights = torch.rand(2, 7, 3, 2, 4, generator=generator)
    expected = ms_deform_attn_reference(value, shapes, locations, weights)
    by_head = value.transpose(1, 2).flatten(0, 1)
    x, y, share = (each.transpose(1, 2).flatten(0, 1).flatten(2) for each in (*locations.unbind(-1), weights))
    found = sample(by_head, shapes, x, y, share).unflatten(0, (2, 3)).transpose(1, 2).flatten(2)  # type: ignore[operator]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("count", [6, 35, 97, 1280])
def test_best_places_are_those_of_a_sort(count: int) -> None:
    """Also among equal values, of which the first are taken, and of rows that are equal all over."""
    generator = torch.Generator().manual_seed(count)
    distinct = torch.randn(3, count, generator=generator) * torch.tensor([[1.0], [1e-3], [30.0]])
    values = torch.cat((distinct, distinct.round(), torch.zeros(1, count), torch.full((1, count), -7.5)))
    for k in {1, 5, count - 1, count}:
        expected = values.argsort(dim=1, descending=True, stable=True)[:, :k].sort(dim=1).values
        assert torch.equal(best_places(values, k), expected.float())
    sums = torch.randint(0, 2, (2, count), generator=generator).float()
    assert torch.equal(running_sum(sums), sums.cumsum(dim=1))
    few = values[:, :6]
    order = descending(few)
    expected = few.sort(dim=1, descending=True, stable=True)
    assert torch.equal((order @ few.unsqueeze(2)).squeeze(2), expected.values)
    assert torch.equal(order.argmax(dim=2), expected.indices)


def test_the_command_certifies_a_portable_file_and_lists_its_operators(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(folder / "model.pth", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["export", "model.pth", "--portable", "--operators", "--ap", str(folder / "shapes")]) == 0
    said = capsys.readouterr().out.splitlines()
    certificate = json.loads(Path("model-portable.onnx.certificate.json").read_bytes())
    assert certificate["ap"]["file"] == pytest.approx(certificate["ap"]["model"], abs=0.001)
    assert any(line.startswith("AP ") and " images" in line for line in said)
    assert any("opset 17" in line for line in said)
    listed = dict(each.rsplit(" ", 1) for each in said[-1].removeprefix("operators: ").split(", "))
    assert {name: int(count) for name, count in listed.items()} == operators(Path("model-portable.onnx"))
    image = str(min((folder / "shapes" / "val").glob("*.jpg")))
    assert main(["predict", "-w", "model-portable.onnx", image, "--output-dir", "out"]) == 0
    exported = Path("model-portable.onnx").read_bytes()
    content = bytearray(exported)
    largest = max(onnx.load("model-portable.onnx").graph.initializer, key=lambda each: len(each.raw_data)).raw_data
    content[content.index(largest) + len(largest) // 2] ^= 1
    Path("model-portable.onnx").write_bytes(content)
    assert main(["export", "model.pth", "--check", "model-portable.onnx"]) == 1
    output = capsys.readouterr()
    assert message("other weights").search(output.err) and "AP " not in output.out
    Path("model-portable.onnx").write_bytes(exported)
    assert main(["export", "model.pth", "--check", "model-portable.onnx"]) == 0
    assert json.loads(Path("model-portable.onnx.certificate.json").read_bytes())["ap"] == certificate["ap"]
    # a weight of NaN, from which numbers of rows come that do not exist
    Path("model-portable.onnx").write_bytes(exported.replace(largest, b"\xff" * len(largest)))
    assert main(["export", "model.pth", "--check", "model-portable.onnx"]) == 1
    assert main(["predict", "-w", "model-portable.onnx", image, "--output-dir", "out2"]) != 0
    assert message("cannot run").search(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("--portable --half", "half: portable files are float32 or int8"),
        ("--portable --format aot", "portable: expected the format onnx, torch-export or openvino, got "),
        ("--portable --format openvino --opset 17", "opset: can only be chosen for portable files of the format onnx"),
        ("--portable --opset 12", "opset: expected one of 13, 17, 18, got 12"),
        ("--portable --format openvino --int8 --calibrate .", "int8: expected a format of onnx, triton"),
        ("--portable --format torch-export --int8 --calibrate .", "int8: expected a format of onnx, triton"),
        ("--portable --format executorch", "portable: expected the format onnx, torch-export or openvino, got "),
        ("--format transformers --ap shapes", "ap: files of transformers are not run here"),
        ("--ap nowhere", "nowhere"),
        ("--sampling products", "--sampling needs --portable"),
        ("--opset 17", "opset: can only be chosen for portable files"),
        ("--operators --format torch-export", "--operators: expected an ONNX file, got model.pt2"),
    ],
)
def test_arguments_that_do_not_fit(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, why: str
) -> None:
    monkeypatch.chdir(folder)
    assert main(["export", "model.pth", *arguments.split()]) == 2
    assert why in capsys.readouterr().err


def test_a_file_for_one_size_needs_a_size_that_fits(described: tuple[Network, Metadata]) -> None:
    model, metadata = described
    config = replace(metadata.config, data=replace(metadata.config.data, image_size=(80, 96)))
    with pytest.raises(ConfigError, match=r"takes multiples of 32 from 64 .*, got 80 x 96"):
        make_portable_graph(model, replace(metadata, config=config))


def test_several_images_go_through_a_file_for_one_and_calibrate_it(
    folder: Path, described: tuple[Network, Metadata], tmp_path: Path
) -> None:
    model, metadata = described
    graph = make_portable_graph(model, metadata, "products")
    write_onnx(graph, metadata, tmp_path / "portable.onnx")
    case = Case("random", noise(3, 64, 96), torch.tensor([[64, 96]] * 3))
    assert compare(open_exported(tmp_path / "portable.onnx"), case, *reference(model, case, 300), BOUNDS["fp32"]).passed
    images = calibration_images(folder / "shapes" / "train", metadata.config)
    assert len(images) > 1
    int8 = tmp_path / "int8.onnx"
    quantize_onnx(tmp_path / "portable.onnx", replace(metadata, precision="int8"), images, int8)
    assert "QuantizeLinear" in operators(int8) and not REFUSED & set(operators(int8))
    shown = Case("images", *case[1:])
    assert compare(open_exported(int8), shown, *reference(model, shown, 300), BOUNDS["int8"]).passed


@pytest.mark.slow
def test_portable_program(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--portable", "--sampling", "products", "--format", "torch-export", "-o", "portable.pt2"]
    assert main(["export", str(folder / "model.pth"), *arguments]) == 0
    assert open_exported("portable.pt2").metadata.fixed
