"""Weight files in which bytes have changed: refused in one sentence, or the bytes are of no tensor and no field.

RTDETR_DAMAGES sets how many damages each file gets.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from messages import message
from torch import Tensor

from rtdetr import RTDETRv3
from rtdetr.cli import main
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from rtdetr.weights.digest import json_sha256
from rtdetr.weights.load import read_checkpoint, read_weights

DAMAGES = int(os.environ.get("RTDETR_DAMAGES", "15"))
FILES = ("best.pth", "last.pth", "model.safetensors", "config.json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one step, and its best weights as save_pretrained() writes them."""
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    folder = tmp_path_factory.mktemp("run")
    trainer = Trainer(tiny_config(tiny_data(folder / "data"), "train.max_iterations=1"), folder, torch.device("cpu"))
    trainer.run()
    RTDETRv3.from_pretrained(folder / "best.pth").save_pretrained(folder)
    return folder


def damaged(content: bytes, rng: random.Random) -> bytes:
    """1 KiB of other bytes, a flipped one, or the end cut off."""
    how, at = rng.randrange(5), rng.randrange(len(content))
    if how == 0:
        return content[:at]
    length = min(1024 if how < 3 else 1, len(content) - at)
    given = int.from_bytes(content[at : at + length], "big")
    changed = given ^ (rng.getrandbits(8 * length) | 1)  # never the same
    return content[:at] + changed.to_bytes(length, "big") + content[at + length :]


def same(ours: Any, theirs: Any) -> bool:
    """Whether two contents are equal to the last bit of their tensors."""
    if isinstance(ours, Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def copied(folder: Path, target: Path, name: str, content: bytes) -> Path:
    """What is read where a file of the folder has another content."""
    if name.endswith(".pth"):
        (target / name).write_bytes(content)
        return target / name
    for each in ("model.safetensors", "config.json"):
        shutil.copyfile(folder / each, target / each)
    (target / name).write_bytes(content)
    return target / "model.safetensors"


@pytest.mark.parametrize("name", FILES)
def test_damage_is_refused_or_is_of_no_number(name: str, folder: Path, tmp_path: Path) -> None:
    rng, content = random.Random(name), (folder / name).read_bytes()
    expected, refused = read_checkpoint(copied(folder, tmp_path, name, content)), 0
    for number in range(DAMAGES):
        path = copied(folder, tmp_path, name, damaged(content, rng))
        try:
            found = read_checkpoint(path)
        except CheckpointError as error:
            assert str(error).startswith(str(tmp_path)) and "\n" not in str(error)
            refused += 1
        else:
            assert same(found, expected), number
    print(f"{name}: {refused} of {DAMAGES} refused, the others equal to the last bit")
    assert refused > DAMAGES * 0.8


def middle(content: bytes) -> bytes:
    """One bit of the largest tensors changed, which no sentence of a parser tells."""
    at = len(content) // 2
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("name", FILES[:3])
def test_one_changed_bit_is_refused(name: str, folder: Path, tmp_path: Path) -> None:
    path = copied(folder, tmp_path, name, middle((folder / name).read_bytes()))
    for read in (read_checkpoint, read_weights, RTDETRv3.from_pretrained):
        with pytest.raises(CheckpointError, match="damaged"):
            read(path)  # type: ignore[operator]


@pytest.mark.parametrize(
    "command",
    [
        "train -r last.pth",
        "train -c rtdetrv3_nano_shapes -r last.pth -u data.train_batch_size=auto",
        "train -c rtdetrv3_nano_shapes -t last.pth -u model.backbone.freeze_stages=auto",
        "train -c rtdetrv3_nano_shapes -t last.pth",
        "eval -w last.pth",
        "export last.pth -o new.onnx",
        "export last.pth --check last.onnx",
        "convert last.pth -o new.pth",
        "predict -w last.pth data/val --output-dir out",
        "serve -w last.pth --port 0",
        "train --replay last.pth",
    ],
)
def test_commands_refuse_a_damaged_state_and_name_the_other(
    command: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pth").write_bytes(middle((folder / "last.pth").read_bytes()))
    shutil.copyfile(folder / "last.pth", tmp_path / "last-1.pth")
    (tmp_path / "last.onnx").touch()
    data = [f"data.{s}.{k}" for s in ("train", "val") for k in ("images", "annotations")]
    places = ["train", "annotations/instances_train.json", "val", "annotations/instances_val.json"]
    updates = [f"{key}={folder / 'data' / place}" for key, place in zip(data, places)]
    arguments = command.replace("data/val", str(folder / "data/val")).split()
    if "-c" in arguments:
        arguments += [*(() if "-u" in arguments else ("-u",)), *updates]
    device = [] if arguments[0] in ("export", "convert") else ["--device", "cpu"]
    assert main([*arguments, *device]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith("error: last.pth: damaged, its part ")
    assert line.endswith("; or resume from last-1.pth, the run's state before it")


def test_parts_that_are_marked_as_folders_are_refused(tmp_path: Path) -> None:
    """torch reads nothing for them, and the numbers would be whatever was in memory."""
    save_checkpoint(tmp_path / "w.pth", {"w": torch.arange(1000)})
    content = (tmp_path / "w.pth").read_bytes()
    for found in re.finditer(b"PK\x01\x02", content):
        changed = bytearray(content)
        changed[found.start() + 38] |= 0x10
        (tmp_path / "w.pth").write_bytes(changed)
        with pytest.raises(CheckpointError, match="damaged"):
            load_checkpoint(tmp_path / "w.pth")


def test_python_names_the_other_state_too(folder: Path, tmp_path: Path) -> None:
    model = RTDETRv3.from_pretrained(folder / "best.pth")
    (tmp_path / "last.pth").write_bytes(middle((folder / "last.pth").read_bytes()))
    shutil.copyfile(folder / "last.pth", tmp_path / "last-1.pth")
    with pytest.raises(CheckpointError, match=message("state before", "last-1.pth")):
        model.train(resume=tmp_path / "last.pth")


def test_our_files_have_checksums_whatever_torch_is_told(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        save_checkpoint(tmp_path / "w.pth", {"w": torch.arange(1000)})
        assert torch.serialization.get_crc32_options() is False
    finally:
        torch.serialization.set_crc32_options(True)
    (tmp_path / "w.pth").write_bytes(middle((tmp_path / "w.pth").read_bytes()))
    with pytest.raises(CheckpointError, match="has other bytes than were written"):
        load_checkpoint(tmp_path / "w.pth")


def test_files_without_checksums_are_read_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    weights = load_checkpoint(folder / "best.pth")
    path = tmp_path / "old.pth"
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    assert same(load_checkpoint(path), weights) and same(load_checkpoint(path), weights)
    assert caplog.messages == [
        f"{path}: torch's old format has no checksums, so damage stays unnoticed; save the weights again to add them"
    ]
    caplog.clear()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "bare.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    assert same(load_checkpoint(tmp_path / "bare.pth"), weights)
    assert message("no checksums", "bare.pth").search(caplog.text)


def pretrained(folder: Path, target: Path, change: Callable[[dict[str, Any]], Any], metadata: bool = True) -> Path:
    """A copy of the shared model whose config.json is changed, and whose weights carry no digest unless `metadata`."""
    import safetensors.torch

    path = copied(folder, target, "config.json", b"")
    about = json.loads((folder / "config.json").read_text())
    change(about)
    (target / "config.json").write_text(json.dumps(about))
    if not metadata:
        safetensors.torch.save_file(safetensors.torch.load_file(path), path)
    return path


def test_safetensors_of_others_are_read_with_a_warning(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def forget(about: dict[str, Any]) -> None:
        del about["weights_sha256"], about["config_sha256"]

    path = pretrained(folder, tmp_path, forget, metadata=False)
    assert same(read_checkpoint(path)["model"], read_checkpoint(folder / "model.safetensors")["model"])
    assert message("no checksums", path, "config.json").search(caplog.text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("classes", {"names": ["a"] * 5, "category_ids": [1, 2, 3, 4, 5]}), ("config_sha256", None), ("sha256", "x")],
)
def test_a_config_that_somebody_changed_says_so(key: str, value: Any, folder: Path, tmp_path: Path) -> None:
    path = pretrained(folder, tmp_path, lambda about: about.update({key: value}))
    with pytest.raises(CheckpointError, match=message("damaged", "config.json", '"config_sha256": "edited"')):
        read_checkpoint(path)
    path = pretrained(folder, tmp_path, lambda about: about.update({key: value, "config_sha256": "edited"}))
    assert read_checkpoint(path)["classes"]


def test_config_and_weights_of_two_models_are_refused(folder: Path, tmp_path: Path) -> None:
    def other(about: dict[str, Any]) -> None:
        about["weights_sha256"] = 64 * "0"
        about["config_sha256"] = json_sha256(about, without="config_sha256")

    for metadata in (True, False):
        path = pretrained(folder, tmp_path, other, metadata)
        with pytest.raises(CheckpointError, match=message("other weights", "config.json")):
            read_checkpoint(path)


def test_half_precision_and_scalars_have_a_digest(folder: Path, tmp_path: Path) -> None:
    """bfloat16 is unknown to NumPy."""
    from rtdetr.weights.digest import weights_sha256

    weights = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.tensor(3), "c": torch.ones(0)}
    assert weights_sha256(weights) == weights_sha256(dict(reversed(weights.items())))
    assert weights_sha256(weights) != weights_sha256({**weights, "a": torch.ones(2, dtype=torch.half)})
