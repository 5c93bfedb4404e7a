"""A repository for Triton: its configuration, by the fields of Triton's ModelConfig, and the file that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from export_cases import write_checkpoint
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from messages import message

from rtdetr.cli import main
from rtdetr.commands.export import run
from rtdetr.config import ConfigError
from rtdetr.export import FORMATS
from rtdetr.export.triton import CONFIG_FILE
from rtdetr.inference.export_metadata import TRITON_MODEL

TYPES = {"TYPE_UINT8": 2, "TYPE_INT64": 9, "TYPE_FP32": 11}  # numbers of model_config.proto
Field = descriptor_pb2.FieldDescriptorProto


def model_config() -> Any:
    """An empty ModelConfig with the fields that we write; the parser knows no others."""
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="inference", syntax="proto3")
    kinds = file.enum_type.add(name="DataType")
    kinds.value.add(name="TYPE_INVALID", number=0)
    for name, number in TYPES.items():
        kinds.value.add(name=name, number=number)

    def message(name: str, *fields: tuple[str, int, int, bool, str]) -> None:
        made = file.message_type.add(name=name)
        for field, number, kind, repeated, of in fields:
            label = Field.LABEL_REPEATED if repeated else Field.LABEL_OPTIONAL
            made.field.add(name=field, number=number, type=kind, label=label, type_name=of or None)  # type: ignore[arg-type]

    tensor = [
        ("name", 1, Field.TYPE_STRING, False, ""),
        ("data_type", 2, Field.TYPE_ENUM, False, ".inference.DataType"),
    ]
    message("ModelInput", *tensor, ("dims", 4, Field.TYPE_INT64, True, ""))
    message("ModelOutput", *tensor, ("dims", 3, Field.TYPE_INT64, True, ""))
    message("ModelDynamicBatching", ("max_queue_delay_microseconds", 2, Field.TYPE_UINT64, False, ""))
    message(
        "ModelConfig",
        ("name", 1, Field.TYPE_STRING, False, ""),
        ("max_batch_size", 4, Field.TYPE_INT32, False, ""),
        ("input", 5, Field.TYPE_MESSAGE, True, ".inference.ModelInput"),
        ("output", 6, Field.TYPE_MESSAGE, True, ".inference.ModelOutput"),
        ("dynamic_batching", 11, Field.TYPE_MESSAGE, False, ".inference.ModelDynamicBatching"),
        ("backend", 17, Field.TYPE_STRING, False, ""),
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("inference.ModelConfig"))()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder)
    return folder / "model.pth"


def repository(checkpoint: Path, name: str, *options: str) -> Path:
    pytest.importorskip("onnxruntime", reason="rtdetr[onnx] is not installed")
    folder = checkpoint.parent / name
    assert run([str(checkpoint), "--format", "triton", "-o", str(folder), *options]) == 0
    return folder


@pytest.fixture(scope="module")
def usual(checkpoint: Path) -> Path:
    return repository(checkpoint, "usual")


@pytest.fixture(scope="module")
def raw(checkpoint: Path) -> Path:
    return repository(checkpoint, "raw", "--raw", "--input", "float")


@pytest.mark.parametrize("kind", ["usual", "raw"])
def test_the_configuration_fits_the_file(kind: str, request: pytest.FixtureRequest) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="rtdetr[onnx] is not installed")
    folder: Path = request.getfixturevalue(kind)
    assert folder.with_name(f"{kind}.certificate.json").is_file()
    config = text_format.Parse((folder / CONFIG_FILE).read_text(), model_config())
    assert (config.backend, config.max_batch_size) == ("onnxruntime", 8) and config.name == CONFIG_FILE.parent.name
    assert 0 < config.dynamic_batching.max_queue_delay_microseconds < 10_000
    session = runtime.InferenceSession(str(folder / TRITON_MODEL), providers=["CPUExecutionProvider"])
    names = {TYPES["TYPE_UINT8"]: "tensor(uint8)", TYPES["TYPE_INT64"]: "tensor(int64)"}
    names |= {TYPES["TYPE_FP32"]: "tensor(float)"}
    for written, given in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        own = {each.name: (each.type, each.shape[1:]) for each in given}
        assert {each.name for each in written} == set(own)
        for each in written:
            kind, shape = own[each.name]
            assert kind == names[each.data_type]
            assert len(shape) == len(each.dims)
            assert all(said in (-1, real) for said, real in zip(each.dims, shape))
    assert isinstance(session.get_inputs()[0].shape[0], str)  # the batch is open


def test_a_file_of_the_folder_is_checked_as_the_folder(
    checkpoint: Path, usual: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = sorted(usual.rglob("*"))
    assert main(["export", str(checkpoint), "--check", str(usual / TRITON_MODEL)]) == 0
    monkeypatch.chdir(usual)
    assert main(["export", str(checkpoint), "--check", "."]) == 0
    assert sorted(usual.rglob("*")) == before  # no certificate inside: it would change the folder


def test_a_flipped_bit_fails_the_check(checkpoint: Path, usual: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check = ["export", str(checkpoint), "--check", str(usual)]
    for name in (CONFIG_FILE, TRITON_MODEL):
        whole = (usual / name).read_bytes()
        content = bytearray(whole)
        content[len(content) // 2] ^= 1
        (usual / name).write_bytes(content)
        assert main(check) == 1
        assert capsys.readouterr().err.startswith(f"error: {usual}: ")
        (usual / name).write_bytes(whole)
    assert main(check) == 0


def test_what_triton_does_not_take_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    assert "triton" in FORMATS
    with pytest.raises(ConfigError, match=message("expected", "portable", "onnx", "torch-export", "openvino")):
        run([str(checkpoint), "--format", "triton", "--portable", "-o", str(tmp_path / "models")])
    assert not list(tmp_path.iterdir())
