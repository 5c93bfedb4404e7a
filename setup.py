"""Decides once which libraries of the op are compiled and with what, and prints why; csrc/rules.ninja says how.

Settings: RTDETR_CUDA=auto|1|0, FORCE_CPU=1, RTDETR_DEBUG=1, TORCH_CUDA_ARCH_LIST, all explained in docs/op.md, "Build".
Whether a GPU is present is never a condition. torch is not imported: its headers and its CUDA version are enough.
"""

import json
import os
import platform
import re
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

OPS = Path(__file__).parent.resolve() / "rtdetr/ops"
# Where packages lie in the environment to install into, in pip's isolated build too.
SITES = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), site.getusersitepackages()]
DEBUG = os.environ.get("RTDETR_DEBUG") == "1"
CUDA_MODE = "0" if os.environ.get("FORCE_CPU") == "1" else os.environ.get("RTDETR_CUDA", "auto")
ABI = {"bdist_wheel": {"py_limited_api": "cp310"}}  # the libraries use nothing of Python: one wheel for all
DEMAND_CUDA = "RTDETR_CUDA=1 pip install ."
LIBRARIES = {"cpu": f"{platform.machine()}/_cpu.so", "cuda": "_cuda.so"}  # targets of rules.ninja


class Skip(Exception):
    """Why a library is not compiled, and the line that mends it."""


def find_torch():
    """Folder, version and CUDA version (None without CUDA) of the torch to compile for."""
    places = [Path(path, "torch") for path in (*sys.path, *SITES)]
    folder = next((place for place in places if (place / "include/torch/csrc/stable/c/shim.h").exists()), None)
    if folder is None:
        fix = "pip install 'torch>=2.11' 'setuptools>=77' ninja && pip install --no-build-isolation ."
        raise Skip("no torch with the stable headers (2.10 or newer) was found", fix)
    facts = dict(re.findall(r"^(\w+)\b.*= '(.*)'", (folder / "version.py").read_text(), re.M))
    return folder, facts["__version__"], facts.get("cuda")


def find_tool(what, names, fix):
    found = [path for name in names if (path := shutil.which(name))]
    if not found:
        raise Skip(f"no {what} was found (tried {', '.join(names)})", f"{fix} && pip install .")
    return found[0]


def find_cxx():
    """The C++ compiler with its arguments, from CXX (`ccache g++`), and the program among them that compiles."""
    words = shlex.split(os.environ.get("CXX", "")) or ["g++"]
    first = find_tool("C++ compiler", [words[0], "clang++"], "sudo apt-get install g++")
    words = [first, *words[1:]] if shutil.which(words[0]) else [first]
    return shlex.join(words), next(path for word in reversed(words) if (path := shutil.which(word)))


def find_nvcc(torch_cuda):
    """nvcc and its version; from CUDA_HOME, the PATH, or the package nvidia-cuda-nvcc of PyPI (13 and later)."""
    if CUDA_MODE == "0":
        raise Skip("CUDA is switched off by RTDETR_CUDA=0 or FORCE_CPU=1", DEMAND_CUDA)
    if CUDA_MODE == "auto" and torch_cuda is None:
        raise Skip("the installed torch has no CUDA", DEMAND_CUDA)
    home, major = os.environ.get("CUDA_HOME"), int((torch_cuda or "13").split(".")[0])
    places = [f"{home}/bin/nvcc" if home else "nvcc", *(f"{path}/nvidia/cu{major}/bin/nvcc" for path in SITES)]
    fix = "pip install '.[cuda]'" if major >= 13 else f"conda install -c nvidia cuda-toolkit={torch_cuda}"
    nvcc = find_tool("nvcc", places, fix)
    version = re.search(r"release ([\d.]+)", subprocess.check_output([nvcc, "--version"], text=True))[1]
    if CUDA_MODE == "auto" and int(version.split(".")[0]) > major:
        raise Skip(f"nvcc {version} is newer than CUDA {torch_cuda} of torch, and may need a newer driver", DEMAND_CUDA)
    return nvcc, version


def choose_archs(nvcc):
    """Names like 90, 90a, 90+PTX: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else all common ones that nvcc knows."""
    asked = re.findall(r"[^;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if wrong := [arch for arch in asked if not re.fullmatch(r"\d+\.?\d[af]?(\+PTX)?", arch)]:
        raise SystemExit(f"TORCH_CUDA_ARCH_LIST: expected a list like '8.0;9.0a;12.0+PTX', not {' '.join(wrong)!r}")
    listed = "" if asked else subprocess.getoutput("nvidia-smi --query-gpu=compute_cap --format=csv,noheader")
    if archs := asked or sorted(re.findall(r"^\d+\.\d+$", listed, re.M)):
        return list(dict.fromkeys(arch.replace(".", "") for arch in archs))
    known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
    archs = [str(arch) for arch in (75, 80, 86, 89, 90, 100, 120) if f"compute_{arch}" in known]
    return [*archs[:-1], f"{archs[-1]}+PTX"]


def compile_library(kind, objects):
    """Make the library of `kind` (cpu or cuda) in the folder `objects`; return its path and what it was built with."""
    torch, version, torch_cuda = find_torch()
    cxx, host = find_cxx()
    ninja = find_tool("ninja", ["ninja"], "pip install ninja")
    settings = {"csrc": OPS / "csrc", "torch": torch, "cxx": cxx, "flags": "-O1 -g -DRTDETR_DEBUG" if DEBUG else "-O3"}
    info = {"built": True, "torch": version, "compiler": cxx}
    if kind == "cuda":
        nvcc, cuda = find_nvcc(torch_cuda)
        archs = choose_archs(nvcc)
        codes = [("sm", arch) for arch in archs] + [("compute", arch) for arch in archs if arch.endswith("+PTX")]
        gencode = " ".join(f"-gencode arch=compute_{arch},code={code}_{arch}" for code, arch in codes)
        settings |= {"ccbin": host, "nvcc": f"{nvcc}{' -lineinfo' * DEBUG}", "archs": gencode.replace("+PTX", "")}
        info |= {"compiler": nvcc, "cuda": cuda, "archs": archs}
    objects.mkdir(parents=True, exist_ok=True)
    (objects / "settings.ninja").write_text("".join(f"{name} = {value}\n" for name, value in settings.items()))
    subprocess.run([ninja, "-C", objects, "-f", OPS / "csrc/rules.ninja", LIBRARIES[kind]], check=True)
    return objects / LIBRARIES[kind], info


class Compile(build_ext):
    def run(self):
        folder = OPS if self.inplace or self.editable_mode else Path(self.build_lib) / "rtdetr/ops"
        folder.mkdir(parents=True, exist_ok=True)
        info = {"debug": DEBUG}
        for kind in LIBRARIES:
            library = folder / f"_{kind}.so"
            try:
                made, info[kind] = compile_library(kind, Path(self.build_temp).resolve())
                os.replace(shutil.copy(made, f"{library}.new"), library)
            except (Skip, subprocess.CalledProcessError) as error:
                again = DEMAND_CUDA if kind == "cuda" else "pip install ."
                reason, fix = error.args if isinstance(error, Skip) else ("compiling failed", f"{again} -v")
                info[kind] = {"built": False, "reason": reason, "fix": fix}
                library.unlink(missing_ok=True)
        (folder / "_build.json").write_text(json.dumps(info, indent=1))
        print("rtdetr compiles:", *(f"  {kind}: {info[kind]}" for kind in LIBRARIES), sep="\n", flush=True)
        if CUDA_MODE == "1" and not info["cuda"]["built"]:
            raise SystemExit(f"RTDETR_CUDA=1, but {info['cuda']['reason']}. What mends it: {info['cuda']['fix']}")


class CarryConfigs(build_py):
    """Puts configs/ into a wheel as rtdetr/configs; an editable install reads those of the clone."""

    def run(self):
        super().run()
        if not self.editable_mode:
            shutil.copytree("configs", Path(self.build_lib) / "rtdetr/configs", dirs_exist_ok=True)


if CUDA_MODE not in ("auto", "1", "0"):
    raise SystemExit(f"RTDETR_CUDA: expected auto, 1 or 0, got {CUDA_MODE!r}")
COMMANDS = {"build_ext": Compile, "build_py": CarryConfigs}
setup(ext_modules=[Extension("rtdetr.ops._cpu", [])], cmdclass=COMMANDS, options=ABI)
