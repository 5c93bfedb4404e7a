"""What setup.py decides; the quick cases of tests/install_matrix.py and one that compiles. CI runs the whole matrix."""

from __future__ import annotations

import os
import runpy
import site
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
