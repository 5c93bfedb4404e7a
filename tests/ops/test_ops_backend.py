"""Which backend runs, and what is said when one cannot: resolve_backend, why_not_compiled, `python -m rtdetr.ops`."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from messages import message
from ops_cases import require
from torch._subclasses.fake_tensor import FakeTensorMode

from rtdetr.ops import __main__ as command
from rtdetr.ops import (
    backend,
    compiled,
    ms_deform_attn,
    ms_deform_attn_fused,
    resolve_backend,
    why_not_compiled,
)


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (["90"], (9, 0), True),
        (["80"], (8, 6), True),  # machine code runs on later minors of its major
        (["86"], (8, 0), False),
        (["90"], (10, 0), False),
        (["90+PTX"], (10, 0), True),
        (["120+PTX"], (10, 0), False),
        (["75", "120+PTX"], (12, 1), True),
        (["90a"], (9, 0), True),
        (["90a"], (10, 0), False),
        (["100f"], (10, 3), False),
        ([], (9, 0), False),
    ],
)
def test_architectures_that_cover_a_gpu(archs: list[str], capability: tuple[int, int], expected: bool) -> None:
    assert backend.covers(archs, *capability) is expected


def test_unknown_backend_is_an_error() -> None:
    with pytest.raises(ValueError, match=message("expected", "auto, cuda, cpu, torch", "'gpu'")):
        resolve_backend("gpu", torch.empty(0))  # type: ignore[arg-type]


def test_named_backend_on_the_wrong_device_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=message("expected device", "cuda", "value.device=cpu")):
        resolve_backend("cuda", torch.empty(0))


def test_named_backend_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", "the cpu kernels are not built (no compiler)")
    with pytest.raises(RuntimeError, match=message("backend cannot run", "backend='cpu'", "not built", "no compiler")):
        resolve_backend("cpu", torch.empty(0))


def test_auto_falls_back_and_says_so_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", "said once")
    with caplog.at_level(logging.WARNING, logger="rtdetr"):
        assert [resolve_backend("auto", torch.empty(0)) for _ in range(3)] == ["torch"] * 3
    assert [record.getMessage() for record in caplog.records].count(
        "ms_deform_attn takes the torch backend: said once"
    ) == 1


def test_auto_takes_the_kernel_of_the_device() -> None:
    require("cpu", "cpu")
    assert resolve_backend("auto", torch.empty(0)) == "cpu"
    assert resolve_backend("torch", torch.empty(0)) == "torch"


def test_types_and_devices_without_a_kernel() -> None:
    assert "got torch.int32" in (why_not_compiled(torch.empty(0, dtype=torch.int32)) or "")
    assert "device type 'meta'" in (why_not_compiled(torch.empty(0, device="meta")) or "")


def test_more_levels_than_the_cuda_kernels_take(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a GPU: tensors that only pretend to lie on one."""
    monkeypatch.setitem(compiled.WHY_NOT, "cuda", None)
    monkeypatch.setattr(backend, "_why_not_this_gpu", lambda index: None)
    shapes = ((1, 2),) * 33
    with FakeTensorMode():
        value, reference = torch.empty(2, 66, 3, 8, device="cuda"), torch.empty(2, 5, 1, 4, device="cuda")
        offsets, logits = torch.empty(2, 5, 3, 33, 4, 2, device="cuda"), torch.empty(2, 5, 3, 33, 4, device="cuda")
        assert resolve_backend("auto", value, 32) == resolve_backend("auto", value, 0) == "cuda"
        with caplog.at_level(logging.WARNING, logger="rtdetr"):
            assert ms_deform_attn(value, shapes, None, offsets, logits).shape == (2, 5, 24)
            assert ms_deform_attn_fused(value, shapes, reference, offsets, logits).shape == (2, 5, 24)
        assert message("too many levels", "32", "33").search(caplog.text)
        with pytest.raises(RuntimeError, match=message("too many levels", "backend='cuda'", "32", "33")):
            ms_deform_attn(value, shapes, None, offsets, logits, backend="cuda")
        with pytest.raises(RuntimeError, match=message("too many levels", "backend='cuda'", "32", "33")):
            ms_deform_attn_fused(value, shapes, reference, offsets, logits, backend="cuda")
    assert why_not_compiled(torch.empty(0), 33) == why_not_compiled(torch.empty(0))


def test_library_that_was_never_built(tmp_path: Path) -> None:
    assert compiled.load("cpu", tmp_path, {}) == (
        f"the cpu kernels are not built (nothing has been compiled yet); to build them: {compiled.BUILD}"
    )
    facts = {"cuda": {"built": False, "reason": "no nvcc was found", "fix": "pip install it"}}
    assert compiled.load("cuda", tmp_path, facts) == (
        "the cuda kernels are not built (no nvcc was found); to build them: pip install it"
    )


SETUP = """
import json, os, pathlib, sys
with open("runs", "a") as runs:
    runs.write("x")
if os.environ["BUILDS"] == "fails":
    sys.exit(1)
folder = pathlib.Path(sys.argv[sys.argv.index("--build-lib") + 1]) / "rtdetr/ops"
folder.mkdir(parents=True)
cpu = {"built": True} if os.environ["BUILDS"] == "yes" else {"built": False, "reason": "no compiler", "fix": "get one"}
(folder / "_build.json").write_text(json.dumps({"cpu": cpu}))
"""


def test_a_cache_is_used_only_if_the_kernels_were_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RTDETR_JIT=1 with a setup.py that compiles nothing, then fails, and then builds for two versions of torch."""
    here, runs, cache = tmp_path / "rtdetr/ops", tmp_path / "runs", tmp_path / "cache/rtdetr"
    here.mkdir(parents=True)
    (tmp_path / "setup.py").write_text(SETUP)
    monkeypatch.setattr(compiled, "HERE", here)
    monkeypatch.setenv("RTDETR_JIT", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    for builds, says in (("no", "no compiler"), ("fails", f"{tmp_path / 'setup.py'} failed")):
        monkeypatch.setenv("BUILDS", builds)
        for _ in range(2):
            folder, info = compiled.find_libraries()
            assert folder == here and not [*cache.iterdir()]
            assert message("not built", says).search(compiled.load("cpu", folder, info) or "")
    assert runs.read_text() == "xxxx"
    monkeypatch.setenv("BUILDS", "yes")
    folders = [compiled.find_libraries()[0] for _ in range(2)]
    monkeypatch.setattr(torch, "__version__", "99.0")
    folders.append(compiled.find_libraries()[0])
    assert folders[0] == folders[1] != folders[2] and runs.read_text() == "xxxxxx"
    assert {*folders} == {each / "rtdetr/ops" for each in cache.iterdir()}


def test_a_cache_that_cannot_be_written_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rtdetr/ops").mkdir(parents=True)
    (tmp_path / "setup.py").write_text(SETUP)
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(compiled, "HERE", tmp_path / "rtdetr/ops")
    monkeypatch.setenv("RTDETR_JIT", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, info = compiled.find_libraries()
    monkeypatch.setattr(compiled, "INFO", info)
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", compiled.load("cpu", folder, info))
    said = " ".join(command.lines(command.report())[1:3])
    assert message("not built", "cache", "Not a directory", "set XDG_CACHE_HOME").search(said)


def test_library_that_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "_cpu.so").write_bytes(b"not a library")
    why = compiled.load("cpu", tmp_path, {"cpu": {"built": True, "torch": "9.9"}})
    assert why is not None and why.startswith(
        f"the cpu kernels are built (torch 9.9) but do not load with torch {torch.__version__}"
    )
    assert why.endswith(f"to build them again: {compiled.BUILD}")


def test_library_of_an_older_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pulled source tree with the libraries that were compiled before."""
    if compiled.WHY_NOT["cpu"] is not None:
        pytest.skip(compiled.WHY_NOT["cpu"])
    monkeypatch.setattr(torch.ops, "rtdetr", object())
    assert compiled.load("cpu", compiled.FOLDER, compiled.INFO) == (
        "the cpu kernels are of an older version of this package; to build them again: pip install ."
    )


def test_cuda_library_beside_a_torch_without_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "_cuda.so").write_bytes(b"never read")
    monkeypatch.setattr(torch.version, "cuda", None)
    reason = compiled.load("cuda", tmp_path, {})
    assert reason is not None and message("without CUDA", "install").search(reason)


def test_report_is_text_and_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rtdetr.ops", "--json"])
    command.main()
    facts = json.loads(capsys.readouterr().out)
    assert facts["torch"] == torch.__version__ and facts["devices"]["cpu"]["backend"] in ("cpu", "torch")
    assert set(facts["libraries"]) == {"cpu", "cuda"}
    monkeypatch.setattr("sys.argv", ["rtdetr.ops"])
    command.main()
    text = capsys.readouterr().out
    assert f"cpu (CPU) uses the backend {facts['devices']['cpu']['backend']}" in text


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_report_of_what_is_missing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setitem(compiled.WHY_NOT, kind, "the reason")
    monkeypatch.setitem(compiled.INFO, kind, {"built": False})
    text = command.lines(command.report())
    assert (
        text[text.index(f"{kind} kernels: not built{', debug' if compiled.INFO.get('debug') else ''}") + 1]
        == "  the reason"
    )


def test_the_compiler_takes_the_answer_about_a_gpu_as_it_is() -> None:
    def marked() -> None: ...

    assert vars(torch.compiler.assume_constant_result(marked)) == vars(backend._why_not_this_gpu)
