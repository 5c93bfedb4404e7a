"""What setup.py decides; the quick cases of tests/install_matrix.py and one that compiles. CI runs the whole matrix."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import site
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from install_matrix import (
    ROOT,
    Scratch,
    cannot_load,
    just_in_time,
    licences,
    no_compiler,
    no_nvcc_but_demanded,
    run_case,
    torch_alone,
)
from messages import message


@pytest.fixture
def run_setup(monkeypatch: pytest.MonkeyPatch) -> Callable[[], dict[str, Any]]:
    """Everything that setup.py defines, without a build."""
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    return lambda: runpy.run_path(str(ROOT / "setup.py"))


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A machine with two kinds of GPU, one of them twice, and an nvcc that knows only new ones; returns the nvcc."""
    for name, answer in (
        ("nvidia-smi", "echo 12.0; echo 8.6; echo 12.0"),
        ("nvcc", "echo compute_90; echo compute_120"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return str(tmp_path / "nvcc")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("8.0;9.0+PTX", ["80", "90+PTX"]),
        (" 9.0a , 10.0  8.0;8.0;", ["90a", "100", "80"]),
        ("100f+PTX", ["100f+PTX"]),
        ("", ["120", "86"]),
        (" ; ", ["120", "86"]),
    ],
)
def test_architectures_that_the_user_sets_win(
    run_setup: Callable[[], dict[str, Any]],
    tools: str,
    monkeypatch: pytest.MonkeyPatch,
    asked: str,
    expected: list[str],
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", asked)
    assert run_setup()["choose_archs"](tools) == expected


def test_architectures_without_a_gpu(
    run_setup: Callable[[], dict[str, Any]], tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    Path(tools).with_name("nvidia-smi").write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    assert run_setup()["choose_archs"](tools) == ["90", "120+PTX"]


def test_architectures_that_are_none(
    run_setup: Callable[[], dict[str, Any]], tools: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;Hopper;sm_90")
    with pytest.raises(SystemExit, match=message("expected", "TORCH_CUDA_ARCH_LIST", "'Hopper sm_90'")):
        run_setup()["choose_archs"](tools)


@pytest.mark.parametrize(
    ("asked", "cxx", "ccbin"),
    [
        ("", "{}/g++", "g++"),
        ("g++ -m64", "{}/g++ -m64", "g++"),
        ("ccache g++", "{}/ccache g++", "g++"),
        ("none -m64", "{}/clang++", "clang++"),
    ],
)
def test_the_compiler_may_be_several_words(
    run_setup: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str, cxx: str,
    ccbin: str,
) -> None:  # fmt: skip
    for name in ("ccache", "g++", "clang++", "ninja", "nvcc", "nvidia-smi"):
        (tmp_path / name).write_text("#!/bin/sh\necho release 13.0; echo compute_90\n")
        (tmp_path / name).chmod(0o755)
    for name, value in {"PATH": str(tmp_path), "CXX": asked, "RTDETR_CUDA": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("CUDA_HOME", "FORCE_CPU"):
        monkeypatch.delenv(name, raising=False)
    setup = run_setup()
    setup["compile_library"]("cuda", tmp_path)
    settings = (tmp_path / "settings.ninja").read_text().splitlines()
    assert f"cxx = {cxx.format(tmp_path)}" in settings and f"ccbin = {tmp_path / ccbin}" in settings


def test_what_failed_to_compile_is_tried_again_alone(
    run_setup: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise subprocess.CalledProcessError(1, "ninja")

    compile_ = run_setup()["Compile"]
    monkeypatch.setitem(compile_.run.__globals__, "compile_library", fails)
    monkeypatch.setitem(compile_.run.__globals__, "CUDA_MODE", "auto")
    command = compile_(pytest.importorskip("setuptools").Distribution())
    command.build_lib = command.build_temp = str(tmp_path)
    command.run()
    info = json.loads((tmp_path / "rtdetr/ops/_build.json").read_text())
    assert info["cpu"]["fix"] == "pip install . -v" and info["cuda"]["fix"] == "RTDETR_CUDA=1 pip install . -v"


@pytest.mark.parametrize("place", ["purelib", "platlib", "user"])
def test_torch_is_found_wherever_packages_lie(
    run_setup: Callable[[], dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    torch = tmp_path / place / "torch"
    (torch / "include/torch/csrc/stable/c").mkdir(parents=True)
    (torch / "include/torch/csrc/stable/c/shim.h").touch()
    (torch / "version.py").write_text("__version__ = '2.12.0'\ncuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / name))
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path / "user"))
    setup = run_setup()
    monkeypatch.setattr(sys, "path", [])
    assert setup["find_torch"]() == (torch, "2.12.0", "13.0")


@pytest.mark.slow
@pytest.mark.parametrize("case", [no_compiler, licences, torch_alone, no_nvcc_but_demanded, cannot_load, just_in_time])
def test_install(case: Callable[[Scratch], None]) -> None:
    try:
        run_case(case)
    except LookupError as missing:
        pytest.skip(str(missing))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., str]:
    """What `make` would do in an active environment, with torch or without."""
    if shutil.which("make") is None:
        pytest.skip("no make on this machine")
    environment = {key: value for key, value in os.environ.items() if key not in ("CONDA_PREFIX", "MAKEFLAGS")}

    def run(*arguments: str, torch: bool = True) -> str:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin/python").write_text(f"#!/bin/sh\nexit {int(not torch)}\n")
        (tmp_path / "bin/python").chmod(0o755)
        command = ["make", "-n", *arguments]
        active = environment | {"VIRTUAL_ENV": str(tmp_path)}
        return subprocess.run(command, cwd=ROOT, env=active, capture_output=True, text=True, check=True).stdout

    return run


def test_make_installs_into_an_active_environment_that_has_torch(made: Callable[..., str], tmp_path: Path) -> None:
    assert f"{tmp_path}/bin/python -m pip install" in made("-W", "setup.py", "setup")
    without = made("-W", "setup.py", "setup", torch=False)
    assert ".venv/bin/python -m pip install" in without and str(tmp_path) not in without


def test_make_compiles_again_what_changed_or_was_cleaned(made: Callable[..., str], tmp_path: Path) -> None:
    made("setup")
    for name in (".rtdetr-ready", ".rtdetr-ready-dev"):
        (tmp_path / "bin" / name).touch()
        assert f"{tmp_path}/bin/{name}" in made("clean")
    assert "pip install" not in made("setup") and "rtdetr/ops/_build.json" in made("clean")
    for source in ("rows.h", "cpu", "cuda/common.cuh"):
        assert "pip install" in made("-W", f"rtdetr/ops/csrc/{source}", "setup")
