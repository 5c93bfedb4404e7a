"""Installs the package in scratch environments that lack one thing each, and checks what it then says of itself.

    python tests/install_matrix.py [--list] [case ...]

The environments see the packages of this interpreter's environment (torch is not installed again). Exit status 1 and
one line per failure if a case does not behave.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "rtdetr")
SMOKE = """
import torch
from rtdetr.ops import ms_deform_attn
value = torch.rand(1, 20, 2, 8, requires_grad=True)
locations, weights = torch.rand(1, 3, 2, 2, 2, 2), torch.rand(1, 3, 2, 2, 2)
auto, plain = (ms_deform_attn(value, ((4, 4), (2, 2)), None, locations, weights, backend=b) for b in ("auto", "torch"))
auto.sum().backward()
assert torch.allclose(auto, plain, atol=1e-6) and value.grad is not None
"""


@dataclass
class Scratch:
    """A copy of the sources, a virtual environment, and a PATH with chosen tools only."""

    folder: Path
    environment: dict[str, str]

    @property
    def python(self) -> str:
        return str(self.folder / "venv/bin/python")

    def tools(self, *names: str) -> None:
        """Put links to these programs, and to nothing else of the PATH, into the environment's PATH."""
        for name in names:
            path = shutil.which(name)
            if path is None:
                raise LookupError(f"{name} is not on the PATH")
            wrapper = self.folder / "bin" / name
            wrapper.write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {path} "$@"\n')
            wrapper.chmod(0o755)

    def run(self, *command: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        environment = {**self.environment, **settings}
        done = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def install(self, *, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        command = [
            self.python,
            "-m",
            "pip",
            "install",
            "-v",
            "--no-build-isolation",
            "--no-deps",
            "--no-index",
            "./src",
        ]
        return self.run(*command, check=check, **settings)

    def says(self) -> dict[str, dict[str, dict[str, str]]]:
        facts: dict[str, dict[str, dict[str, str]]] = json.loads(
            self.run(self.python, "-m", "rtdetr.ops", "--json").stdout
        )
        return facts

    def works(self, cpu: str) -> None:
        """The op runs, and the processor uses the backend `cpu`."""
        assert self.says()["devices"]["cpu"]["backend"] == cpu, self.says()
        self.run(self.python, "-c", SMOKE)


def make_scratch(folder: Path) -> Scratch:
    source = folder / "src"
    for name in SOURCES:
        ignore = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, source / name, ignore=ignore)
        elif path.exists():
            source.mkdir(exist_ok=True)
            shutil.copy(path, source / name)
    if not (source / "README.md").exists():
        (source / "README.md").write_text("rtdetr")
    # Without a pip of its own, and so without the old setuptools that some Pythons bring along.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    site = next((folder / "venv/lib").glob("python*")) / "site-packages"
    (site / "shared.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "bin").mkdir()
    path = f"{folder}/venv/bin:{folder}/bin"
    return Scratch(folder, {"PATH": path, "HOME": str(folder), "TORCH_CUDA_ARCH_LIST": "9.0", "OMP_NUM_THREADS": "1"})


def no_compiler(scratch: Scratch) -> None:
    scratch.install()
    for library in scratch.says()["libraries"].values():
        assert "no C++ compiler was found" in library["why_not"] and "apt-get install g++" in library["why_not"]
    scratch.works("torch")


def cuda_off(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja", "nvcc")
    scratch.install(RTDETR_CUDA="0")
    assert "switched off by RTDETR_CUDA=0" in scratch.says()["libraries"]["cuda"]["why_not"]
    scratch.works("cpu")


def force_cpu(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja", "nvcc")
    scratch.install(FORCE_CPU="1", RTDETR_CUDA="1")
    assert "FORCE_CPU=1" in scratch.says()["libraries"]["cuda"]["why_not"]
    scratch.works("cpu")


def no_nvcc(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    hide_pypi_nvcc(scratch)
    scratch.install()
    assert "no nvcc was found" in scratch.says()["libraries"]["cuda"]["why_not"]
    assert "pip install '.[cuda]'" in scratch.says()["libraries"]["cuda"]["why_not"]
    scratch.works("cpu")


def no_nvcc_but_demanded(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    hide_pypi_nvcc(scratch)
    done = scratch.install(check=False, RTDETR_CUDA="1")
    assert done.returncode and "RTDETR_CUDA=1, but no nvcc was found" in done.stdout + done.stderr, done.stdout


def nvcc_without_gpu(scratch: Scratch) -> None:
    """Also the case of another minor version, when torch's CUDA is 13.2 and this nvcc 13.0."""
    scratch.tools("g++", "ninja", "nvcc")
    scratch.install(RTDETR_CUDA="1")
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and library["archs"] == ["90"], library
    scratch.works("cpu")


def nvcc_of_another_minor(scratch: Scratch) -> None:
    """An nvcc that calls itself 13.1: the number is compared by its major part alone."""
    scratch.tools("g++", "ninja", "nvcc")
    fake_version(scratch, "13.1")
    scratch.install()
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and library["cuda"] == "13.1", library
    scratch.works("cpu")


def nvcc_of_a_newer_major(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja", "nvcc")
    fake_version(scratch, "14.0")
    scratch.install()
    assert "nvcc 14.0 is newer than CUDA" in scratch.says()["libraries"]["cuda"]["why_not"]
    scratch.works("cpu")


def nvcc_from_pypi(scratch: Scratch) -> None:
    """Downloads nvidia-cuda-nvcc and its companions into the scratch environment; no CUDA on the PATH."""
    scratch.tools("g++", "ninja")
    packages = ["nvidia-cuda-nvcc==13.0.*", "nvidia-cuda-runtime==13.0.*", "nvidia-cuda-cccl==13.0.*"]
    scratch.run(scratch.python, "-m", "pip", "install", "-q", "--ignore-installed", *packages)
    scratch.install(RTDETR_CUDA="1")
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and str(scratch.folder) in library["compiler"], library
    scratch.works("cpu")


def cannot_load(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    scratch.install(RTDETR_CUDA="0")
    folder = Path(scratch.run(scratch.python, "-c", "import rtdetr; print(rtdetr.__path__[0])").stdout.strip())
    (folder / "ops/_cpu.so").write_bytes(b"not a library")
    assert "but do not load with torch" in scratch.says()["libraries"]["cpu"]["why_not"]
    scratch.works("torch")


def torch_alone(scratch: Scratch) -> None:
    """Nothing was ever compiled: the sources on PYTHONPATH."""
    scratch.environment["PYTHONPATH"] = str(scratch.folder / "src")
    assert "nothing has been compiled yet" in scratch.says()["libraries"]["cpu"]["why_not"]
    scratch.works("torch")


def just_in_time(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    settings = {"PYTHONPATH": str(scratch.folder / "src"), "RTDETR_JIT": "1", "RTDETR_CUDA": "0"}
    scratch.environment |= settings
    scratch.works("cpu")
    (library,) = scratch.folder.glob(".cache/rtdetr/*/rtdetr/ops/_cpu.so")
    stamp = library.stat().st_mtime_ns
    scratch.works("cpu")
    assert library.stat().st_mtime_ns == stamp, "the second start compiled again"


def isolated(scratch: Scratch) -> None:
    """Plain `pip install .`: pip fetches setuptools and ninja for the build, and torch is found beside them."""
    scratch.tools("g++")
    link = next((scratch.folder / "venv/lib").glob("python*")) / "site-packages/torch"
    link.symlink_to(Path(sysconfig.get_path("purelib")) / "torch")
    scratch.run(scratch.python, "-m", "pip", "install", "-v", "--no-deps", "./src", RTDETR_CUDA="0")
    scratch.works("cpu")


def editable(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    command = ["-m", "pip", "install", "--no-build-isolation", "--no-deps", "--no-index", "-e", "./src"]
    scratch.run(scratch.python, *command, RTDETR_CUDA="0")
    assert (scratch.folder / "src/rtdetr/ops/_cpu.so").exists()
    scratch.works("cpu")


def hide_pypi_nvcc(scratch: Scratch) -> None:
    if list(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc")):
        raise LookupError("this interpreter's environment itself has nvcc from PyPI")


def fake_version(scratch: Scratch, version: str) -> None:
    wrapper = scratch.folder / "bin/nvcc"
    real = wrapper.read_text().splitlines()[1]
    answer = f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V{version}.0"; exit; fi'
    wrapper.write_text(f"#!/bin/sh\n{answer}\n{real}\n")


CASES: list[Callable[[Scratch], None]] = [
    no_compiler, cuda_off, force_cpu, no_nvcc, no_nvcc_but_demanded, nvcc_without_gpu, nvcc_of_another_minor,
    nvcc_of_a_newer_major, nvcc_from_pypi, cannot_load, torch_alone, just_in_time, editable,
    isolated,
]  # fmt: skip


def run_case(case: Callable[[Scratch], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case(make_scratch(Path(folder)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help="names of cases; all without")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    arguments = parser.parse_args()
    known = {case.__name__: case for case in CASES}
    if arguments.list:
        print("\n".join(known))
        return 0
    if unknown := set(arguments.cases) - set(known):
        parser.error(f"unknown cases {', '.join(sorted(unknown))}; known: {', '.join(known)}")
    failed = 0
    for name in arguments.cases or known:
        try:
            run_case(known[name])
            print(f"{name}: ok", flush=True)
        except LookupError as missing:
            print(f"{name}: skipped, {missing}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: FAILED, {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
