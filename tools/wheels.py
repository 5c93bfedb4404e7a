"""`make wheels`: a wheel with the op for CPUs, and one for NVIDIA GPUs as well, each tried away from the clone.

    python tools/wheels.py [-o dist] [--kind cpu|cuda]      build and check
    python tools/wheels.py --check dist/*.whl               check with the torch of this interpreter

The libraries use torch's stable ABI and nothing of Python: one wheel serves CPython 3.10 and later and torch 2.11 and
later. The platform tag is that of the oldest glibc that the libraries run on; a build in an older system makes it
older. The wheel for GPUs is for the architectures of ARCHS, or of TORCH_CUDA_ARCH_LIST.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE", "NOTICE", "configs", "rtdetr")
ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
DETECT = """
import os, numpy, torch, rtdetr
from rtdetr import RTDETRv3
assert rtdetr.__file__.startswith(os.environ["PYTHONPATH"]), rtdetr.__file__
model = RTDETRv3.from_pretrained("rtdetrv3_nano_shapes", classes=["a", "b"])
assert len(model.predict(numpy.zeros((90, 120, 3), numpy.uint8), threshold=0)), "nothing was detected"
print("torch", torch.__version__, "on", model.device)
"""
COMPARE = (  # of a checkpoint and its export, with what they need
    "rtdetr.data.shapes shapes --num-train 8 --num-val 8",
    "rtdetr train shapes -c rtdetrv3_nano_shapes --output-dir run --device cpu -u max_iterations=1 num_workers=0",
    "rtdetr export run/best.pth --format torch-export",
    "rtdetr compare run/best.pth --device cpu -o table.json",
)


def build(kind: str, output: Path) -> Path:
    """The wheel of a kind, cpu or cuda, in the folder `output`."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "source", Path(folder) / "made"
        source.mkdir()
        subprocess.run(["cp", "-r", *(ROOT / name for name in SOURCES), source], check=True)
        for left in (*source.glob("rtdetr/ops/*.so"), source / "rtdetr/ops/_build.json"):
            left.unlink(missing_ok=True)
        environment = {**os.environ, "RTDETR_CUDA": "0"}
        if kind == "cuda":
            archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or ARCHS
            environment |= {"RTDETR_CUDA": "1", "TORCH_CUDA_ARCH_LIST": archs}
            file = source / "rtdetr/__init__.py"
            file.write_text(re.sub(r'(?m)^(__version__ = ".*)"', rf'\1+cu{_cuda_version()}"', file.read_text("utf-8")))
        pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(made), str(source)]
        subprocess.run(pip, env=environment, check=True)
        (wheel,) = made.glob("*.whl")
        tag = f"manylinux_2_{_oldest_glibc(wheel)}_{platform.machine()}"
        subprocess.run([sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, wheel], check=True)
        (wheel,) = made.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def check(wheel: Path) -> str:
    """Installs a wheel into a folder ahead of the packages of this interpreter, and detects with it; a line on what was
    found. Raises CalledProcessError or AssertionError."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": f"{folder}/site"}
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", f"{folder}/site"]
        subprocess.run([*pip, str(wheel.resolve())], check=True)

        def run(*arguments: str) -> str:
            return subprocess.check_output([sys.executable, *arguments], cwd=folder, env=environment, text=True)

        facts = json.loads(run("-m", "rtdetr.ops", "--json"))
        assert facts["devices"]["cpu"]["backend"] == "cpu", facts
        assert facts["libraries"]["cuda"]["built"] == ("+cu" in wheel.name), facts
        run("-m", "rtdetr", "--help")
        with_torch = run("-c", DETECT).strip()
        for command in COMPARE:
            run("-m", *command.split())
        rows = json.loads((Path(folder) / "table.json").read_text())["rows"]
        assert [row["file"] for row in rows] == ["best.pth", "best.pt2"] and rows[1]["box"] < 0.1, rows
    size = wheel.stat().st_size / 1e6
    return f"{wheel.name}: {size:.1f} MB, detects with {with_torch}, Python {platform.python_version()}"


def _oldest_glibc(wheel: Path) -> int:
    """n of the glibc 2.n that the libraries in a wheel need."""
    with zipfile.ZipFile(wheel) as content:
        libraries = [content.read(name) for name in content.namelist() if name.endswith(".so")]
    assert libraries, f"{wheel.name}: nothing was compiled; pip says above why"
    return max(int(minor) for library in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", library))


def _cuda_version() -> str:
    nvcc = f"{os.environ['CUDA_HOME']}/bin/nvcc" if os.environ.get("CUDA_HOME") else "nvcc"
    (found,) = re.findall(r"release (\d+)\.(\d+)", subprocess.check_output([nvcc, "--version"], text=True))
    return "".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "dist", help="folder (default: dist)")
    parser.add_argument("--kind", choices=("cpu", "cuda"), action="append", help="default: both")
    parser.add_argument("--check", type=Path, nargs="+", metavar="WHEEL", help="check these and build nothing")
    arguments = parser.parse_args()
    for wheel in arguments.check or (build(kind, arguments.output) for kind in arguments.kind or ("cpu", "cuda")):
        print(check(wheel), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
