"""Damaged and hostile weight files: one sentence that names the file, no memory that the file does not fill."""

from __future__ import annotations

import dataclasses
import io
import pickle
import random
import re
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import message
from torch import Tensor
from weight_cases import CLASSES, nano_config

from rtdetr.config import Config
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights import pdparams
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, make_checkpoint
from rtdetr.weights.compare import describe
from rtdetr.weights.load import load_exactly, read_weights
from rtdetr.weights.official import TWINS, convert
from rtdetr.weights.official_names import official_names
from rtdetr.weights.pdparams import ConvertError, read_pdparams

MUTATIONS = 150  # of each file; runs of 5000 found no more
OPCODES = b"jr\x8dB\x8e\x96\x95X\x8bLIK.()}]tR\x85\x86\x87\x81bQPUT\x94cVSoid0123e\x88\x91\x90\x92\x97\x98\x82"
WEIGHTS = {"decoder.dec_score_head.0.bias": torch.arange(6.0).reshape(2, 3).t(), "half": torch.ones(3).half()}


def saved(content: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **options)
    return buffer.getvalue()


def without_addresses(content: bytes) -> bytes:
    """A torch file of the old kind names storages by their addresses; the same mutations want the same bytes."""
    names: dict[bytes, bytes] = {}
    return re.sub(rb"\d{10,}", lambda m: names.setdefault(m[0], b"%0*d" % (15, len(names)))[-len(m[0]) :], content)


def own_checkpoint(**changes: Any) -> dict[str, Any]:
    return {**make_checkpoint(nano_config(), CLASSES, WEIGHTS), **changes}


def rezipped(content: bytes, change: Callable[[bytes], bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
    """A torch file with another data.pkl, whose checksum is right."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(buffer, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(old.read(name)) if name.endswith("data.pkl") else old.read(name))
    return buffer.getvalue()


def mutated(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, removed or doubled."""
    data = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at, how, length = rng.randrange(len(data)), rng.randrange(5), rng.randrange(1, 20)
        if how == 0:
            data[at] = rng.randrange(256)
        elif how == 1:
            data[at] = rng.choice(OPCODES)
        elif how == 2:
            data[at : at + 4] = rng.choice((b"\0\0\0\0", b"\xff\xff\xff\xff"))
        elif how == 3 and len(data) > 50:
            del data[at : at + length]
        else:
            start = rng.randrange(len(data))
            data[at:at] = data[start : start + length]
    return bytes(data)


def refusal(read: Callable[[Path], Any], path: Path) -> str:
    """The sentence, empty where the file is read. Any error but CheckpointError ends the test."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, on odd pickle protocols
            read(path)
    except CheckpointError as error:
        return str(error)
    return ""


class TestMutations:
    def check(self, path: Path, contents: list[bytes], *reads: Callable[[Path], Any]) -> None:
        refused = 0
        for content in contents:
            path.write_bytes(content)
            for read in reads:
                text = refusal(read, path)
                refused += bool(text)
                assert not text or text.startswith(f"{path}: "), text
                assert "\n" not in text and "weights_only" not in text and len(text) < 500 + len(str(path)), text
        assert refused > len(contents) / 2

    @pytest.mark.parametrize("zipped", [True, False])
    def test_torch_files(self, zipped: bool, tmp_path: Path) -> None:
        rng = random.Random(0)
        content = without_addresses(saved(own_checkpoint(), _use_new_zipfile_serialization=zipped))
        contents = [mutated(content, rng) for _ in range(MUTATIONS)]
        self.check(tmp_path / "w.pth", contents, load_checkpoint, read_weights)

    def test_pickles_inside_torch_files(self, tmp_path: Path) -> None:
        rng = random.Random(1)
        content = saved(own_checkpoint())
        contents = [rezipped(content, lambda data: mutated(data, rng)) for _ in range(MUTATIONS)]
        self.check(tmp_path / "w.pth", contents, load_checkpoint, read_weights)

    @pytest.mark.parametrize("protocol", [2, 4])
    def test_paddle_files(self, protocol: int, tmp_path: Path) -> None:
        rng = random.Random(protocol)
        content = pickle.dumps({name: tensor.numpy() for name, tensor in WEIGHTS.items()}, protocol=protocol)
        contents = [mutated(content, rng) for _ in range(4 * MUTATIONS)]
        tracemalloc.start()
        try:
            self.check(tmp_path / "w.pdparams", contents, read_pdparams)
            assert tracemalloc.get_traced_memory()[1] < 20e6
        finally:
            tracemalloc.stop()


def foreign_state(**changes: Tensor) -> dict[str, Tensor]:
    """A nano model under official names; `changes` are named with _ for the dots."""
    state = build_model(nano_config().model, 3).state_dict()
    official = {name: state[ours] for ours, name in official_names(state).items()}
    return {name: changes.get(name.replace(".", "_"), tensor) for name, tensor in official.items()}


def seen_through_stride_0(*shape: int) -> Tensor:
    return torch.ones(1).expand(*shape)


class TestTorchFiles:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"", "the file is empty"),
            (
                b"<!DOCTYPE html>\n<html>",
                "not a checkpoint nor other torch weights, it begins with b'<!DOCTYPE html",
            ),
            (
                b"version https://git-lfs",
                "not a checkpoint nor other torch weights, it begins with b'version https:",
            ),
            (b"PK\x03\x04 and no more", "cut off or damaged"),
            (saved(WEIGHTS)[:-100], "cut off or damaged"),
            (saved(WEIGHTS, _use_new_zipfile_serialization=False)[:-4], "damaged"),
            (saved(WEIGHTS, _use_new_zipfile_serialization=False)[:40], "damaged"),
            (rezipped(saved(WEIGHTS), lambda data: b""), "damaged"),
            (rezipped(saved(WEIGHTS), lambda data: data[:20]), "damaged"),
            (rezipped(saved(WEIGHTS), lambda data: data.replace(b"half", b"\xff\xff\xff\xff")), "damaged"),
            (rezipped(saved(WEIGHTS), lambda data: data.replace(b"q\x01", b"h\x77", 1)), "damaged"),
        ],
        ids=["empty", "page", "pointer", "head", "cut", "old cut", "old head", "nothing", "short", "text", "memo"],
    )
    def test_damaged(self, content: bytes, words: str, tmp_path: Path) -> None:
        path = tmp_path / "w.pth"
        path.write_bytes(content)
        for read in (load_checkpoint, read_weights, convert):
            text = refusal(read, path)
            assert text.startswith(f"{path}: ") and words in text, text

    def test_a_small_file_does_not_unpack_into_a_large_one(self, tmp_path: Path) -> None:
        path = tmp_path / "w.pth"
        zeros = saved({"model": torch.zeros(1_000_000)})
        path.write_bytes(rezipped(zeros, lambda data: data, zipfile.ZIP_DEFLATED))
        assert "packed or overlapping parts" in refusal(read_weights, path)

    def test_tensors_beyond_the_file(self, tmp_path: Path) -> None:
        """Four bytes that claim 17 terabytes, in our checkpoint and in a foreign file."""
        huge = seen_through_stride_0(2**21, 2**21)
        path = tmp_path / "w.pth"
        path.write_bytes(saved(own_checkpoint(model={"encoder.lateral.0.conv.weight": huge})))
        expected = r"\(2097152, 2097152\), which is more than the file holds"
        for read in (load_checkpoint, read_weights):
            with pytest.raises(CheckpointError, match=expected):
                read(path)
        path.write_bytes(saved(foreign_state(transformer_enc_output_0_0_weight=huge)))
        for read in (read_weights, convert):
            with pytest.raises(CheckpointError, match=expected):
                read(path)

    @pytest.mark.filterwarnings("ignore:Validating sparse")
    @pytest.mark.parametrize(
        "value", [torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), torch.ones(2, dtype=torch.cfloat), 1.0]
    )
    def test_what_is_no_plain_tensor(self, value: Any, tmp_path: Path) -> None:
        path = tmp_path / "w.pth"
        path.write_bytes(saved(own_checkpoint(model={"w": value})))
        with pytest.raises(CheckpointError, match="entry 'w' is not a"):
            load_checkpoint(path)

    @pytest.mark.parametrize("part", ["config", "classes", "model", "ema", "training"])
    def test_a_checkpoint_without_a_part(self, part: str, tmp_path: Path) -> None:
        path = tmp_path / "w.pth"
        path.write_bytes(saved({name: value for name, value in own_checkpoint().items() if name != part}))
        with pytest.raises(CheckpointError, match=f"its part '{part}' is not there"):
            load_checkpoint(path)

    @pytest.mark.parametrize("classes", [{}, {"names": ["a"], "category_ids": []}, {"names": 1, "category_ids": [1]}])
    def test_a_checkpoint_with_broken_classes(self, classes: dict[str, Any], tmp_path: Path) -> None:
        path = tmp_path / "w.pth"
        path.write_bytes(saved(own_checkpoint(classes=classes)))
        with pytest.raises(CheckpointError, match="classes do not fit their ids"):
            read_weights(path)

    @pytest.mark.parametrize("shape", [(), (0, 0), (64,), (7, 5)])
    def test_sizes_that_no_model_has(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        names = ("neck_input_proj_0_0", "transformer_dec_score_head_0", "transformer_decoder_layers_0_linear1")
        changes = {f"{name}_weight": torch.ones(shape) for name in names}
        path = tmp_path / "w.pth"
        path.write_bytes(saved(foreign_state(**changes)))
        with pytest.raises(ConvertError, match=r"sizes that no model has|damaged"):
            read_weights(path)

    @pytest.mark.parametrize(("name", "axis", "twin"), TWINS)
    def test_a_damaged_entry_that_tells_a_size_is_named(self, name: str, axis: int, twin: str, tmp_path: Path) -> None:
        state = foreign_state()
        shape = [*state[name].shape]
        shape[axis] = 117
        (tmp_path / "w.pth").write_bytes(saved(state | {name: torch.ones(shape)}))
        with pytest.raises(ConvertError, match=re.escape(f"{name} of shape {tuple(shape)}")) as raised:
            convert(tmp_path / "w.pth")
        assert twin in str(raised.value)

    def test_a_folder_is_called_a_folder(self, tmp_path: Path) -> None:
        for read in (load_checkpoint, read_weights, read_pdparams):
            assert refusal(read, tmp_path) == f"{tmp_path}: is a folder without weight files"
        for name, named in (("a.pdparams", "a.pdparams"), ("last.pth", "last.pth"), ("best.pth", "last.pth")):
            (tmp_path / name).touch()
            assert refusal(load_checkpoint, tmp_path) == f"{tmp_path}: is a folder; did you mean {tmp_path / named}?"
        assert refusal(read_weights, tmp_path).endswith(f"{tmp_path / 'best.pth'} or {tmp_path / 'last.pth'}?")


class SameBytes:
    """Arrays that all have the one bytes object that pickle remembers."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def __reduce__(self) -> tuple[Any, ...]:
        made, arguments, state = np.frombuffer(self.data, np.uint8).__reduce__()[:3]  # type: ignore[misc]
        return made, arguments, (*state[:4], self.data)


class TestPaddleFiles:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (b"\x80\x02Nr\xff\xff\xff\x00.", "expected a dict of weights, got NoneType"),  # the memo at 16,777,215
            (b"\x80\x04\x8e" + (10**8).to_bytes(8, "little") + b"x.", "cut short"),  # bytes
            (b"\x80\x04\x8d" + (10**8).to_bytes(8, "little") + b"x.", "cut short"),  # text
            (b"\x80\x04\x95" + (10**8).to_bytes(8, "little") + b"N.", "expected a dict"),  # a frame
            (b"\x80\x02\x8b" + (10**8).to_bytes(4, "little") + b"x.", "cut short"),  # an integer
            (b"\x80\x05\x96" + (10**8).to_bytes(8, "little") + b".", "cut short"),
            (b"\x80\x05\x96" + (1).to_bytes(8, "little") + b"x.", "instruction BYTEARRAY8"),
            (pickle.dumps({"a": 2**9999}, 4), "instruction LONG4"),
            (b"\x80\x02}(" + b")" + b"\x85" * 10**5 + b"Nu.", "something else than named entries"),  # no hash() of it
            (b"\x80\x02" + b"(" * 10**5 + b".", "cut short"),
            (pickle.dumps({i: i for i in range(3)}, 4), "something else than named entries"),
        ],
        ids=["memo", "bytes", "text", "frame", "integer", "array", "kind", "long", "nested", "marks", "keys"],
    )
    def test_no_memory_beyond_the_file(self, content: bytes, words: str, tmp_path: Path) -> None:
        path = tmp_path / "w.pdparams"
        path.write_bytes(content)
        tracemalloc.start()
        try:
            text = refusal(read_pdparams, path)
            assert tracemalloc.get_traced_memory()[1] < 30e6
        finally:
            tracemalloc.stop()
        assert words in text and "\n" not in text

    def test_the_same_bytes_again_and_again(self, tmp_path: Path) -> None:
        data = b"x" * 10**6
        path = tmp_path / "w.pdparams"
        path.write_bytes(pickle.dumps({f"w{i}": SameBytes(data) for i in range(50)}, 4))
        assert path.stat().st_size < 1_100_000
        assert "describes more numbers than it holds" in refusal(read_pdparams, path)

    def test_too_many_instructions(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pdparams, "MAX_INSTRUCTIONS", 1000)
        path = tmp_path / "w.pdparams"
        path.write_bytes(b"\x80\x02" + b"N" * 1001 + b".")
        assert message("more than weights need", "instructions").search(refusal(read_pdparams, path))

    def test_odd_names_stay_on_one_line(self, tmp_path: Path) -> None:
        path = tmp_path / "w.pdparams"
        path.write_bytes(pickle.dumps({"a\nb\udc80" + 200 * "c": 1}, 4))
        text = refusal(read_pdparams, path)
        assert r"entry 'a\nb\udc80ccc" in text and len(text) < 300 + len(str(path))


def changed(part: str, **values: Any) -> Config:
    config = nano_config()
    inner = dataclasses.replace(getattr(config.model, part), **values)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **{part: inner}))


def meta_state(config: Config) -> dict[str, Tensor]:
    with torch.device("meta"):
        return build_model(config.model, 3).state_dict()


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("backbone", {"width": 0.75}),
        ("backbone", {"depth": 34}),
        ("encoder", {"hidden_dim": 32}),
        ("encoder", {"feedforward_dim": 64}),
        ("decoder", {"hidden_dim": 32}),
        ("decoder", {"feedforward_dim": 64}),
        ("decoder", {"num_layers": 2}),
        ("supervision", {"num_noise_groups": 3}),
    ],
)
def test_models_of_other_sizes_have_other_words(part: str, values: dict[str, Any]) -> None:
    given, expected = describe(meta_state(changed(part, **values))), describe(meta_state(nano_config()))
    assert given != expected
    with pytest.raises(CheckpointError) as error:
        load_exactly(build_model(nano_config().model, 3), meta_state(changed(part, **values)), "w.pth")
    assert f"they look like {given}, expected {expected}, and differ in" in str(error.value)


@pytest.mark.parametrize(
    ("part", "values", "entry"),
    [
        ("decoder", {"num_points": 2}, "sampling_offsets.weight (48, 64), (96, 64)"),
        ("encoder", {"expansion": 1.0}, r"encoder.top_down.0.conv1.conv.weight (64, 128, 1, 1), (32, 128, 1, 1)"),
    ],
)
def test_where_words_do_not_differ_the_entry_is_named(part: str, values: dict[str, Any], entry: str) -> None:
    with pytest.raises(CheckpointError) as error:
        load_exactly(build_model(nano_config().model, 3), meta_state(changed(part, **values)), "w.pth")
    text = str(error.value)
    assert message("other weights", "RT-DETRv3 R18").search(text) and entry.split(" ")[0] in text
    assert f"({entry.split(' ', 1)[1]})" in text
