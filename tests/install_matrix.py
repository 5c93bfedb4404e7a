"""Installs the package in scratch environments that lack one thing each, and checks what it then says of itself.

    python tests/install_matrix.py [--list] [case ...]

The environments see the packages of this interpreter's environment (torch is not installed again). In each the package
is installed, `python -m rtdetr.ops` has to say what is missing, and the op's tests that can run there have to pass.
Exit status 1 if a case does not behave.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "NOTICE", "configs", "rtdetr", "tests")
TESTS = ("src/tests/ops/test_ops.py", "src/tests/ops/test_ops_torch.py", "-m", "not gpu and not slow", "-k", "not onnx")
LIMIT = 600  # seconds for one command
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
        try:
            done = subprocess.run(
                command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=LIMIT
            )
        except subprocess.TimeoutExpired as late:
            raise AssertionError(f"{' '.join(command)}: not done after {LIMIT} s") from late
        if check and done.returncode:
            end = (done.stdout + done.stderr)[-3000:]
            raise AssertionError(f"{' '.join(command)}: exit status {done.returncode}, and at the end\n{end}")
        return done

    def pip(self, *options: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        return self.run(self.python, "-m", "pip", "install", "-v", *options, check=check, **settings)

    def install(self, *options: str, check: bool = True, **settings: str) -> subprocess.CompletedProcess[str]:
        """`pip install` of the sources, without asking any server."""
        offline = ("--no-build-isolation", "--no-deps", "--no-index")
        return self.pip(*offline, *options or ["./src"], check=check, **settings)

    def says(self) -> dict[str, Any]:
        """What `python -m rtdetr.ops` says of the installed package."""
        facts: dict[str, Any] = json.loads(self.run(self.python, "-m", "rtdetr.ops", "--json").stdout)
        assert facts["folder"].startswith(str(self.folder)), f"another rtdetr was imported: {facts['folder']}"
        return facts

    def works(self, cpu: str, tests: bool = True) -> None:
        """The processor uses the backend `cpu`, and the tests that can run pass; tests=False where they have passed
        with the same code before: in this environment, or in `no_compiler`, which has no library either."""
        facts = self.says()
        assert facts["devices"]["cpu"]["backend"] == cpu, facts
        self.run(self.python, "-c", SMOKE)
        if tests:
            self.run(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS)


def make_scratch(folder: Path) -> Scratch:
    ignore = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    (folder / "src").mkdir()
    for path in (ROOT / name for name in SOURCES):
        if path.is_dir():
            shutil.copytree(path, folder / "src" / path.name, ignore=ignore)
        else:
            shutil.copy(path, folder / "src")
    # Without a pip of its own, and so without the old setuptools that some Pythons bring along.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    (site_packages(folder) / "shared.pth").write_text(sysconfig.get_path("purelib"))
    (folder / "bin").mkdir()
    # Two cases download with pip, which needs its own settings: mirrors, certificates, proxies.
    kept = {name: value for name, value in os.environ.items() if re.match("HOME$|PIP_|.*_proxy$", name, re.I)}
    own = {"PATH": f"{folder}/venv/bin:{folder}/bin", "XDG_CACHE_HOME": f"{folder}/cache"}
    return Scratch(folder, {**kept, **own, "TORCH_CUDA_ARCH_LIST": "9.0", "OMP_NUM_THREADS": "1"})


def site_packages(folder: Path) -> Path:
    return next((folder / "venv/lib").glob("python*")) / "site-packages"


def needs_torch_with_cuda() -> None:
    if torch.version.cuda is None:
        raise LookupError("this interpreter's torch has no CUDA")


def no_compiler(scratch: Scratch) -> None:
    scratch.install()
    for library in scratch.says()["libraries"].values():
        assert "no C++ compiler was found" in library["why_not"] and "apt-get install g++" in library["why_not"]
    scratch.works("torch")


def licences(scratch: Scratch) -> None:
    """LICENSE and NOTICE travel in the wheel and in the source archive."""
    build = "from setuptools import build_meta; build_meta.build_sdist('..'); build_meta.build_wheel('..')"
    scratch.run(scratch.python, "-c", f"import os; os.chdir('src'); {build}", RTDETR_CUDA="0")
    with tarfile.open(next(scratch.folder.glob("*.tar.gz"))) as archive:
        names = archive.getnames()
    names += zipfile.ZipFile(next(scratch.folder.glob("*.whl"))).namelist()
    for name in ("LICENSE", "NOTICE"):
        folders = [path.partition("/")[2] for path in names if path.endswith(f"/{name}")]
        assert folders == [name, f"licenses/{name}"], names


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
    scratch.tools("g++", "ninja", "nvcc")
    scratch.install(RTDETR_CUDA="1")
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and library["archs"] == ["90"], library
    scratch.works("cpu")


def visible_gpu(scratch: Scratch) -> None:
    """Without TORCH_CUDA_ARCH_LIST the GPUs that nvidia-smi lists are built for, here two old ones."""
    scratch.tools("g++", "ninja", "nvcc")
    fake_gpus(scratch, "8.0", "7.5", "8.0")
    scratch.install(RTDETR_CUDA="1", TORCH_CUDA_ARCH_LIST="")
    assert sorted(scratch.says()["libraries"]["cuda"]["archs"]) == ["75", "80"], scratch.says()
    scratch.works("cpu")


def asked_architectures(scratch: Scratch) -> None:
    """TORCH_CUDA_ARCH_LIST wins over the visible GPUs."""
    scratch.tools("g++", "ninja", "nvcc")
    fake_gpus(scratch, "8.0")
    scratch.install(RTDETR_CUDA="1", TORCH_CUDA_ARCH_LIST="8.6; 9.0+PTX")
    assert scratch.says()["libraries"]["cuda"]["archs"] == ["86", "90+PTX"], scratch.says()


def nvcc_of_another_minor(scratch: Scratch) -> None:
    """An nvcc that calls itself 13.1: the number is compared by its major part alone."""
    needs_torch_with_cuda()
    scratch.tools("g++", "ninja", "nvcc")
    fake_version(scratch, f"{str(torch.version.cuda).split('.')[0]}.1")
    scratch.install()
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and library["cuda"].endswith(".1"), library
    scratch.works("cpu")


def nvcc_of_a_newer_major(scratch: Scratch) -> None:
    needs_torch_with_cuda()
    scratch.tools("g++", "ninja", "nvcc")
    fake_version(scratch, "99.0")
    scratch.install()
    assert "nvcc 99.0 is newer than CUDA" in scratch.says()["libraries"]["cuda"]["why_not"]
    scratch.works("cpu")


def nvcc_from_pypi(scratch: Scratch) -> None:
    """Downloads what the extra `cuda` names into the scratch environment; no CUDA on the PATH."""
    scratch.tools("g++", "ninja")
    scratch.pip("--ignore-installed", "cuda-toolkit[nvcc,cccl]>=13")
    scratch.install(RTDETR_CUDA="1")
    library = scratch.says()["libraries"]["cuda"]
    assert library["built"] and str(scratch.folder) in library["compiler"], library
    scratch.works("cpu")


def cannot_load(scratch: Scratch) -> None:
    scratch.install()
    (site_packages(scratch.folder) / "rtdetr/ops/_cpu.so").write_bytes(b"not a library")
    assert "but do not load with torch" in scratch.says()["libraries"]["cpu"]["why_not"]
    scratch.works("torch", tests=False)


def torch_alone(scratch: Scratch) -> None:
    """Nothing was ever compiled: the sources on PYTHONPATH."""
    scratch.environment["PYTHONPATH"] = str(scratch.folder / "src")
    assert "nothing has been compiled yet" in scratch.says()["libraries"]["cpu"]["why_not"]
    scratch.works("torch", tests=False)


def just_in_time(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    settings = {"PYTHONPATH": str(scratch.folder / "src"), "RTDETR_JIT": "1", "RTDETR_CUDA": "0"}
    scratch.environment |= settings
    scratch.works("cpu")
    (library,) = scratch.folder.glob("cache/rtdetr/*/rtdetr/ops/_cpu.so")
    stamp = library.stat().st_mtime_ns
    scratch.works("cpu", tests=False)
    assert library.stat().st_mtime_ns == stamp, "the second start compiled again"


def isolated(scratch: Scratch) -> None:
    """Plain `pip install .`: pip fetches setuptools and ninja for the build, and torch is found beside them."""
    scratch.tools("g++")
    torch_folder = Path(sysconfig.get_path("purelib")) / "torch"
    (site_packages(scratch.folder) / "torch").symlink_to(torch_folder)
    scratch.pip("--no-deps", "./src", RTDETR_CUDA="0")
    scratch.works("cpu")


def editable(scratch: Scratch) -> None:
    scratch.tools("g++", "ninja")
    scratch.install("-e", "./src", RTDETR_CUDA="0")
    assert (scratch.folder / "src/rtdetr/ops/_cpu.so").exists()
    scratch.works("cpu")


def wheel(scratch: Scratch) -> None:
    """The wheel of `make wheels` for processors, built, renamed and tried away from the clone."""
    tool = [sys.executable, str(ROOT / "tools/wheels.py"), "--kind", "cpu", "-o", "dist"]
    done = subprocess.run(tool, cwd=scratch.folder, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0 and "MB, detects with torch" in done.stdout, done.stdout + done.stderr
    (made,) = scratch.folder.glob("dist/*.whl")
    assert re.fullmatch(r"rtdetr-[\d.]+-cp310-abi3-manylinux_2_\d+_\w+\.whl", made.name), made.name


def hide_pypi_nvcc(scratch: Scratch) -> None:
    if list(Path(sysconfig.get_path("purelib")).glob("nvidia/cu*/bin/nvcc")):
        raise LookupError("this interpreter's environment itself has nvcc from PyPI")


def fake_gpus(scratch: Scratch, *capabilities: str) -> None:
    program = scratch.folder / "bin/nvidia-smi"
    program.write_text("#!/bin/sh\n" + "".join(f"echo {capability}\n" for capability in capabilities))
    program.chmod(0o755)


def fake_version(scratch: Scratch, version: str) -> None:
    wrapper = scratch.folder / "bin/nvcc"
    real = wrapper.read_text().splitlines()[1]
    answer = f'if [ "$1" = --version ]; then echo "Cuda compilation tools, release {version}, V{version}.0"; exit; fi'
    wrapper.write_text(f"#!/bin/sh\n{answer}\n{real}\n")


CASES: list[Callable[[Scratch], None]] = [
    no_compiler, licences, cuda_off, force_cpu, no_nvcc, no_nvcc_but_demanded, nvcc_without_gpu, visible_gpu,
    asked_architectures, nvcc_of_another_minor, nvcc_of_a_newer_major, nvcc_from_pypi, cannot_load, torch_alone,
    just_in_time, editable, isolated, wheel,
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
        start = time.monotonic()
        try:
            run_case(known[name])
            print(f"{name}: ok, {time.monotonic() - start:.0f} s", flush=True)
        except LookupError as missing:
            print(f"{name}: skipped, {missing}", flush=True)
        except AssertionError as error:
            failed += 1
            print(f"{name}: FAILED, {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
