"""Official weight files: read exactly, without Paddle and without running them; bad ones refused with a sentence."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from messages import message
from parity import (
    CONFIGS,
    config_of,
    deviation,
    eval_images,
    golden_file,
    golden_json,
    golden_names,
    official_state,
    write_pdparams,
)
from torch import nn

from rtdetr.cli import main
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint
from rtdetr.weights.compare import compare
from rtdetr.weights.load import model_from_checkpoint
from rtdetr.weights.official import convert, load_foreign_weights, recognise, under_our_names
from rtdetr.weights.official_names import official_layout
from rtdetr.weights.pdparams import ConvertError, read_pdparams

TOOL = CONFIGS.parent / "tools" / "convert.py"
MODELS = ("r18", "r34", "r50", "r101")


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in this process: a new one would spend its time on importing torch."""
    command = [str(argument) for argument in arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["convert", *command])
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def r18_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pdparams(
        tmp_path_factory.mktemp("official") / "rtdetrv3_r18vd_6x_coco.pdparams", official_state("r18")
    )


class TestPaddleFiles:
    @pytest.mark.parametrize("name", ["tiny.pdparams", "tiny_protocol2.pdparams"])
    def test_values_are_exact(self, name: str) -> None:
        arrays = read_pdparams(golden_file(name))
        expected = golden_json("tiny.json")["tensors"]
        assert sorted(arrays) == sorted(expected)
        for key, entry in expected.items():
            assert arrays[key].dtype == np.float32 and list(arrays[key].shape) == entry["shape"]
            assert np.array_equal(arrays[key].ravel(), np.array(entry["values"], np.float32)), key

    @pytest.mark.parametrize("name", ["tiny.pdparams", "tiny_protocol2.pdparams"])
    def test_transposes_give_paddles_results(self, name: str) -> None:
        """Linear and self-attention of Paddle on given inputs, with our layout of the weights."""
        check = golden_json("tiny.json")["check"]
        weights = {n: official_layout(n, torch.from_numpy(a)) for n, a in read_pdparams(golden_file(name)).items()}
        linear = nn.functional.linear(torch.tensor(check["x"]), weights["fc.weight"], weights["fc.bias"])
        assert deviation(linear, check["linear_of_x"]) < 1e-6
        attention = nn.MultiheadAttention(4, num_heads=2, batch_first=True)
        attention.load_state_dict({n.removeprefix("attn."): w for n, w in weights.items() if n.startswith("attn.")})
        x = torch.tensor(check["attn_in"])
        with torch.no_grad():
            found = attention(x, x, x, need_weights=False)[0]
        assert deviation(found, check["self_attention_of_attn_in"]) < 1e-6

    def test_tuple_big_endian_and_fortran_order(self, tmp_path: Path) -> None:
        array = np.arange(6, dtype=np.float32).reshape(2, 3)
        content = {"a": ("a", array), "b": array.astype(">f4"), "c": np.asfortranarray(array), "d": ("d", array)}
        path = tmp_path / "w.pdparams"
        path.write_bytes(pickle.dumps(content, protocol=4))
        for found in read_pdparams(path).values():
            assert np.array_equal(found, array) and found.dtype == np.float32 and found.flags.writeable

    def test_tensor_stored_by_calling_tuple(self, tmp_path: Path) -> None:
        class AsTuple:
            def __reduce__(self) -> tuple[Any, ...]:
                return tuple, (("internal.w_0", np.ones(3, np.float32)),)

        for protocol in (2, 4):
            path = tmp_path / f"{protocol}.pdparams"
            path.write_bytes(pickle.dumps({"w": AsTuple()}, protocol=protocol))
            assert np.array_equal(read_pdparams(path)["w"], np.ones(3, np.float32))


class Calls:
    """Pickles into a call of any function."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def by_name(module: str, name: str, argument: str) -> bytes:
    """A protocol 2 pickle of {"w": module.name(argument)}, also for names that do not exist here."""
    call = f"c{module}\n{name}\n".encode() + b"X" + len(argument).to_bytes(4, "little") + argument.encode() + b"\x85R"
    return b"\x80\x02}X\x01\x00\x00\x00w" + call + b"s."


def hostile(marker: Path) -> dict[str, tuple[bytes, str]]:
    """Files that would run something, and what the refusal must name."""
    touch = f"touch {marker}"
    write = f"open({str(marker)!r}, 'w')"
    ones = np.ones(2, np.float32)
    reconstruct, arguments, state = ones.__reduce__()[:3]
    build_on_global = b"\x80\x02cnumpy\nndarray\n}X\x01\x00\x00\x00aK\x01sb."
    return {
        "system": (pickle.dumps({"w": Calls(os.system, touch)}, 4), "posix.system"),
        "os.system": (by_name("os", "system", touch), "os.system"),
        "eval": (pickle.dumps({"w": Calls(eval, write)}, 4), "builtins.eval"),
        "eval_protocol_2": (by_name("__builtin__", "eval", write), "__builtin__.eval"),
        "exec": (by_name("builtins", "exec", write), "builtins.exec"),
        "getattr": (pickle.dumps({"w": Calls(getattr, ones, "dump")}, 4), "builtins.getattr"),
        "subprocess": (pickle.dumps({"w": Calls(subprocess.call, ["touch", str(marker)])}, 4), "subprocess.call"),
        "dotted": (pickle.dumps({"w": Calls(np.ndarray.dump, ones, str(marker))}, 4), "getattr"),
        "numpy_load": (by_name("numpy", "load", str(marker)), "numpy.load"),
        "torch": (pickle.dumps({"w": torch.ones(2)}, 4), "torch._utils._rebuild_tensor_v2"),
        "object_array": (pickle.dumps({"w": np.array([Calls(os.system, touch)], object)}, 4), "object"),
        "text_array": (pickle.dumps({"w": np.array(["text"])}, 4), "U4"),
        "record_array": (pickle.dumps({"w": np.zeros(2, [("a", "f4")])}, 4), "dtype"),
        "utf8": (pickle.dumps({"w": Calls(__import__("_codecs").encode, "x", "rot13")}, 4), "_codecs.encode"),
        "subclass": (pickle.dumps({"w": np.ma.masked_array([1.0])}, 4), "numpy.ma"),
        "build_on_global": (build_on_global, "numpy.ndarray"),
        "called_type": (by_name("numpy", "ndarray", "x"), "numpy.ndarray"),
        "persistent": (b"\x80\x02X\x01\x00\x00\x00xQ.", "outside of the file"),
        "wrong_size": (pickle.dumps({"w": Calls(_resized, reconstruct, arguments, state)}, 4), "_resized"),
    }


def _resized(*_arguments: Any) -> None:
    raise AssertionError("the reader called a function of the file")


HOSTILE = sorted(hostile(Path("marker")))


class TestRefusals:
    @pytest.mark.parametrize("kind", HOSTILE)
    def test_foreign_globals_are_named_and_not_run(self, kind: str, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        content, named = hostile(marker)[kind]
        path = tmp_path / f"{kind}.pdparams"
        path.write_bytes(content)
        with pytest.raises(ConvertError, match="refused") as error:
            read_pdparams(path)
        assert named in str(error.value) and str(path) in str(error.value)
        assert "\n" not in str(error.value)
        assert not marker.exists()

    def test_the_same_file_would_have_run_in_pickle(self, tmp_path: Path) -> None:
        """The hostile files are real: Python's own reader falls for one."""
        marker = tmp_path / "marker"
        pickle.loads(hostile(marker)["os.system"][0])
        assert marker.exists()

    def test_lying_array_sizes(self, tmp_path: Path) -> None:
        content = pickle.dumps({"w": np.ones((2, 3), np.float32)}, 4)
        path = tmp_path / "w.pdparams"
        path.write_bytes(content.replace(b"K\x02K\x03\x86", b"K\x02K\x7f\x86"))
        with pytest.raises(ConvertError, match=r"shape \(2, 127\).*24 bytes"):
            read_pdparams(path)

    @pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.9999])
    def test_truncated(self, share: float, r18_file: Path, tmp_path: Path) -> None:
        content = golden_file("tiny.pdparams").read_bytes() if share != 0.3 else r18_file.read_bytes()
        path = tmp_path / "cut.pdparams"
        path.write_bytes(content[: int(len(content) * share)])
        words = "cut short or not a Paddle weight file" if share else "the file is empty"
        with pytest.raises(ConvertError, match=words):
            read_pdparams(path)

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ([1, 2], "expected a dict of weights, got list"),
            ({"w": 1.0}, "entry 'w' is float"),
            ({"w": {"a": np.ones(1)}}, "entry 'w' is dict"),
            ({"LR_Scheduler": {"last_epoch": 3}}, "optimiser file"),
            ({}, "holds no weights"),
        ],
    )
    def test_not_weights(self, content: Any, words: str, tmp_path: Path) -> None:
        path = tmp_path / "w.pdparams"
        path.write_bytes(pickle.dumps(content, protocol=4))
        with pytest.raises(ConvertError, match=words):
            convert(path)

    def test_missing_file_and_other_network(self, tmp_path: Path) -> None:
        with pytest.raises(ConvertError, match="no such weight file"):
            convert(tmp_path / "none.pdparams")
        path = write_pdparams(tmp_path / "w.pdparams", {"conv0.weight": np.ones((2, 2), np.float32)})
        with pytest.raises(ConvertError, match=message("unknown layout", "RT-DETR", "conv0.weight")):
            convert(path)

    def test_torch_file_with_code(self, tmp_path: Path) -> None:
        marker = tmp_path / "marker"
        path = tmp_path / "w.pth"
        torch.save({"model": {"backbone.res_layers.0": Calls(os.system, f"touch {marker}")}}, path)
        with pytest.raises(CheckpointError, match="nothing of it was run"):
            load_foreign_weights(path)
        assert not marker.exists()


class TestOfficialModels:
    @pytest.mark.parametrize("model", MODELS)
    def test_every_name_and_shape_is_ours(self, model: str) -> None:
        """The model is recognised from names and shapes alone, and equals the one of the config file."""
        entries = golden_json(f"params_{model}.json")["entries"]
        official = {e["name"]: official_layout(e["name"], torch.empty(e["shape"], device="meta")) for e in entries}
        config = recognise(official, "memory")
        assert config.model == config_of(model).model
        assert config.name == config_of(model).name
        with torch.device("meta"):
            own = build_model(config.model, 80)
        report = compare(own.state_dict(), under_our_names(official, own))
        assert not report.missing and not report.unexpected and not report.mismatched
        assert len(report.matched) == len(entries)

    def test_tool_converts_a_full_file_that_reproduces_the_goldens(self, r18_file: Path, tmp_path: Path) -> None:
        output = tmp_path / "r18.pth"
        command = [sys.executable, str(TOOL), str(r18_file), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, done.stderr
        digest = hashlib.sha256(r18_file.read_bytes()).hexdigest()
        assert digest in done.stdout and "recognised" in done.stdout and "(100.0%)" in done.stdout
        content = load_checkpoint(output)
        assert content["source"] == {"file": r18_file.name, "sha256": digest, "licence": "Apache-2.0"}
        assert content["preprocess"]["interpolation"] == "cubic" and content["ema"] is None
        model, config, classes = model_from_checkpoint(output)
        assert (config.name, classes.names[0], classes.category_ids[-1]) == ("rtdetrv3_r18vd_6x_coco", "person", 90)
        with np.load(golden_file("eval_r18_f64.npz")) as golden, torch.no_grad():
            predictions = model.double()(eval_images("b1").double())
            assert deviation(predictions.boxes, golden["b1/dec_boxes"]) < 1e-8
            assert deviation(predictions.logits, golden["b1/dec_logits"]) < 1e-6

    def test_raw_weights_file_converts_too(self, tmp_path: Path) -> None:
        path = write_pdparams(tmp_path / "model.pdema", official_state("r18"), protocol=2)
        assert len(convert(path).report.matched) == len(official_state("r18"))

    def test_other_number_of_classes(self, tmp_path: Path) -> None:
        state = {name: a[..., :7] if is_class_row(name) else a for name, a in official_state("r18").items()}
        state["transformer.denoising_class_embed.weight"] = state["transformer.denoising_class_embed.weight"][:7]
        for i in range(3):
            state[f"aux_o2m_head.pred_cls.{i}.weight"] = official_state("r18")[f"aux_o2m_head.pred_cls.{i}.weight"][:7]
        path = write_pdparams(tmp_path / "seven.pdparams", state)
        names = tmp_path / "names.json"
        categories = [{"id": 3 * i, "name": f"thing {i}"} for i in range(7)]
        names.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
        done = run_tool(path, "-o", tmp_path / "seven.pth", "--annotations", names, "--licence", "MIT")
        assert done.returncode == 0, done.stderr
        content = load_checkpoint(tmp_path / "seven.pth")
        assert content["classes"]["category_ids"] == [0, 3, 6, 9, 12, 15, 18] and content["source"]["licence"] == "MIT"
        categories.pop()
        names.write_text(json.dumps({"images": [], "annotations": [], "categories": categories}))
        done = run_tool(path, "-o", tmp_path / "six.pth", "--annotations", names)
        assert done.returncode == 2 and "7 classes" in done.stderr and not (tmp_path / "six.pth").exists()

    def test_a_full_disk(
        self, r18_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def full(path: Path, content: dict[str, Any]) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr("rtdetr.weights.official.save_checkpoint", full)
        output = tmp_path / "out.pth"
        assert main(["convert", str(r18_file), "-o", str(output)]) == 1
        assert message("not written", output, "No space left on device").search(capsys.readouterr().err)

    def test_wrong_model(self, r18_file: Path, tmp_path: Path) -> None:
        done = run_tool(r18_file, "-o", tmp_path / "out.pth", "-c", CONFIGS / "rtdetrv3_r34vd_6x_coco.yml")
        assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        assert "does not fit rtdetrv3_r34vd_6x_coco" in done.stderr and not (tmp_path / "out.pth").exists()
        assert "missing in the file" in done.stdout

    @pytest.mark.parametrize("fault", ["missing", "left over", "shape"])
    def test_incomplete_file(self, fault: str, tmp_path: Path) -> None:
        state = dict(official_state("r18"))
        if fault == "missing":
            del state["neck.lateral_convs.0.bn.bias"]
        elif fault == "left over":
            state["neck.lateral_convs.0.bn.extra"] = np.ones(3, np.float32)
        else:
            state["neck.lateral_convs.0.bn.bias"] = np.ones(3, np.float32)
        path = write_pdparams(tmp_path / "w.pdparams", state)
        report = convert(path).report
        listed = {"missing": report.missing, "left over": report.unexpected, "shape": report.mismatched}[fault]
        assert len(listed) == 1
        done = run_tool(path, "-o", tmp_path / "out.pth")
        said = {"missing": "1 entry missing", "left over": "1 left over", "shape": "1 of another shape"}[fault]
        assert done.returncode == 2 and said in done.stderr and not (tmp_path / "out.pth").exists()


def is_class_row(name: str) -> bool:
    """Entries whose last axis counts classes in Paddle's layout."""
    return "score_head" in name or ("pred_cls" in name and name.endswith("bias"))


def test_golden_folder_names_known_models() -> None:
    """Files of a model without a config would be skipped silently otherwise."""
    for name in golden_names("params_*.json"):
        assert (CONFIGS / f"rtdetrv3_{name[7:-5]}vd_6x_coco.yml").is_file()
