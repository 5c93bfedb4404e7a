"""Decides once what of rtdetr/ops/csrc to compile, prints why, and lets ninja make plain shared libraries of it.

RTDETR_CUDA=auto|1|0  auto: compile what the tools found here can compile; 1: a missing piece is an error; 0: no CUDA
FORCE_CPU=1           the same as RTDETR_CUDA=0
RTDETR_DEBUG=1        line information and bounds checks
TORCH_CUDA_ARCH_LIST  as in torch, "8.0;9.0+PTX"; without it the visible GPUs, without those the common list
Whether a GPU is present is never a condition. torch is not imported: its headers and its CUDA version are enough.
"""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT, SITE = Path(__file__).parent.resolve(), Path(sysconfig.get_path("purelib"))
CSRC, AGAIN = ROOT / "rtdetr/ops/csrc", "pip install ."
CUDA_MODE = "0" if os.environ.get("FORCE_CPU") == "1" else os.environ.get("RTDETR_CUDA", "auto")
NO_TORCH = "pip install 'torch>=2.11' 'setuptools>=77' ninja && pip install --no-build-isolation ."
DEBUG = os.environ.get("RTDETR_DEBUG") == "1"
COMMON_ARCHS = ["75", "80", "86", "89", "90", "100", "120"]
X86_KERNELS = {"avx2": "-mavx2 -mfma -mf16c", "avx512": "-mavx512f -mfma -mf16c"}


class Skip(Exception):
    """Why a library is not compiled, and the line that mends it."""


def output_of(*command):
    return subprocess.check_output(command, text=True)


def find_torch():
    """Folder, version and CUDA version of the torch to compile for, seen from inside pip's isolated build too."""
    spec = importlib.util.find_spec("torch")
    for folder in ([Path(spec.origin).parent] if spec and spec.origin else []) + [SITE / "torch"]:
        if (folder / "include/torch/csrc/stable/library.h").exists():
            text = (folder / "version.py").read_text()
            version, cuda = (re.search(rf"^{name}\b.*= '(.*)'", text, re.M) for name in ("__version__", "cuda"))
            return folder, version[1], cuda[1] if cuda else None
    raise Skip("no torch with the stable headers (2.10 or newer) is installed", NO_TORCH)


def find_tool(what, names, fix):
    for path in map(shutil.which, filter(None, names)):
        if path:
            return path
    raise Skip(f"no {what} was found on the PATH", f"{fix} && {AGAIN}")


def find_nvcc(torch_cuda):
    """nvcc, its version, and the options it needs: from CUDA_HOME, the PATH, or the package nvidia-cuda-nvcc[-cu12]."""
    if CUDA_MODE == "0":
        raise Skip("CUDA is switched off by RTDETR_CUDA=0 or FORCE_CPU=1", f"RTDETR_CUDA=1 {AGAIN}")
    if torch_cuda is None and CUDA_MODE != "1":
        raise Skip("the installed torch has no CUDA", f"RTDETR_CUDA=1 {AGAIN}")
    home, major = os.environ.get("CUDA_HOME"), (torch_cuda or "13").split(".")[0]
    found = Path(f"{home}/bin/nvcc" if home else shutil.which("nvcc") or "")
    for nvcc in (found, SITE / f"nvidia/cu{major}/bin/nvcc", SITE / "nvidia/cuda_nvcc/bin/nvcc"):
        if nvcc.is_file():
            version = re.search(r"release ([\d.]+)", output_of(nvcc, "--version"))[1]
            if CUDA_MODE != "1" and int(version.split(".")[0]) > int(major):
                reason = (
                    f"nvcc {version} is newer than CUDA {torch_cuda} of torch, whose driver may not run its kernels"
                )
                raise Skip(reason, f"RTDETR_CUDA=1 {AGAIN}")
            roots = [nvcc.parents[1], *nvcc.parents[2].glob("cuda_[rc]*")] if SITE in nvcc.parents else []
            return nvcc, version, roots
    raise Skip("no nvcc was found (CUDA_HOME, PATH, PyPI)", f"pip install '.[cuda{'12' * (major == '12')}]' && {AGAIN}")


def choose_archs(nvcc):
    """Names like 90 or 90+PTX: TORCH_CUDA_ARCH_LIST, else the visible GPUs, else all common ones that nvcc knows."""
    if asked := re.findall(r"[^;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").replace(".", "")):
        return asked
    query = [shutil.which("nvidia-smi") or "false", "--query-gpu=compute_cap", "--format=csv,noheader"]
    seen = subprocess.run(query, capture_output=True, text=True)
    if seen.returncode == 0 and seen.stdout.strip():
        return sorted(set(seen.stdout.replace(".", "").split()))
    archs = [arch for arch in COMMON_ARCHS if f"compute_{arch}\n" in output_of(nvcc, "--list-gpu-arch")]
    return [*archs[:-1], archs[-1] + "+PTX"]


def compile_library(kind, objects):
    """Compile csrc into objects/_cpu.so or objects/_cuda.so and return what it was built with."""
    torch, version, torch_cuda = find_torch()
    cxx = find_tool("C++ compiler", [os.environ.get("CXX"), "g++", "clang++"], "sudo apt-get install g++")
    settings = {"torch": torch, "cxx": cxx, "flags": "-O1 -g -DRTDETR_DEBUG" if DEBUG else "-O3"}
    info = {"built": True, "torch": version, "compiler": cxx}
    if kind == "cpu":
        isas = {"baseline": "", **(X86_KERNELS if os.uname().machine == "x86_64" else {})}
        jobs = [
            (f"{isa}.o", "cpp", "cpu/ms_deform_attn.cpp", f"-DRTDETR_ISA={isa} {flag}") for isa, flag in isas.items()
        ]
        jobs += [("dispatch.o", "cpp", "cpu/dispatch.cpp", ""), ("ops.o", "cpp", "ms_deform_attn.cpp", "")]
    else:
        settings["nvcc"], info["cuda"], roots = find_nvcc(torch_cuda)
        info |= {"compiler": str(settings["nvcc"]), "archs": choose_archs(settings["nvcc"])}
        codes = [
            (a.removesuffix("+PTX"), k) for a in info["archs"] for k in ("sm", "compute")[: 1 + a.endswith("+PTX")]
        ]
        settings["archs"] = " ".join(f"-gencode arch=compute_{a},code={k}_{a}" for a, k in codes)
        settings["includes"] = " ".join(f"-I{root}/include -I{root}/include/cccl" for root in roots)
        settings["libs"] = " ".join(f"-L{root}/lib" for root in roots)
        jobs = [("ops.o", "cpp", "ms_deform_attn.cpp", "-DUSE_CUDA -DRTDETR_LIBRARY_CUDA")]
        jobs += [(f"{path.stem}.o", "cuda", f"cuda/{path.name}", "") for path in sorted((CSRC / "cuda").glob("*.cu"))]
    lines = [f"{name} = {value}" for name, value in settings.items()] + [f"include {CSRC}/rules.ninja"]
    lines += [f"build {out}: {rule} {CSRC / source}\n  options = {options}" for out, rule, source, options in jobs]
    lines += [f"build _{kind}.so: link_{kind} {' '.join(job[0] for job in jobs)}", ""]
    objects.mkdir(parents=True, exist_ok=True)
    (objects / "build.ninja").write_text("\n".join(lines))
    subprocess.run([find_tool("ninja", ["ninja"], "pip install ninja"), "-C", objects], check=True)
    return info


class Compile(build_ext):
    def run(self):
        folder = ROOT / "rtdetr/ops" if self.inplace or self.editable_mode else Path(self.build_lib) / "rtdetr/ops"
        folder.mkdir(parents=True, exist_ok=True)
        info = {"debug": DEBUG}
        for kind in ("cpu", "cuda"):
            objects, library = Path(self.build_temp).resolve() / kind, f"_{kind}.so"
            try:
                info[kind] = compile_library(kind, objects)
                os.replace(shutil.copy(objects / library, folder / f"{library}.new"), folder / library)
            except (Skip, subprocess.CalledProcessError) as error:
                reason, fix = (
                    error.args if isinstance(error, Skip) else ("compiling failed", f"RTDETR_CUDA=1 {AGAIN} -v")
                )
                info[kind] = {"built": False, "reason": reason, "fix": fix}
                (folder / library).unlink(missing_ok=True)
        (folder / "_build.json").write_text(json.dumps(info, indent=1))
        print("rtdetr compiles:", *(f"  {kind}: {info[kind]}" for kind in ("cpu", "cuda")), sep="\n", flush=True)
        if CUDA_MODE == "1" and not info["cuda"]["built"]:
            raise SystemExit(f"RTDETR_CUDA=1, but {info['cuda']['reason']}. What mends it: {info['cuda']['fix']}")


class AnyPython(bdist_wheel):
    def get_tag(self):  # the libraries use the stable interface of torch and nothing of Python's
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[Extension("rtdetr.ops._cpu", [])], cmdclass={"build_ext": Compile, "bdist_wheel": AnyPython})
