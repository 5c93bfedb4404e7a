"""A GPU that starts while torch is imported; the driver is a fake, but for the last test."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading

import pytest
import torch

from rtdetr.gpu_startup import _GpuStart, _make_context, wake_gpu


class Driver:
    """Of a machine with two GPUs."""

    def __init__(self, init: int = 0) -> None:
        self.init, self.asked = init, []

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGet(self, device: object, index: int) -> int:
        device._obj.value = index
        return 0 if index < 2 else 101

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:
        self.asked.append(device.value)
        return 0


@pytest.mark.parametrize("index,init,asked", [(0, 0, [0]), (1, 0, [1]), (2, 0, []), (0, 100, [])])
def test_the_context_of_a_gpu(monkeypatch: pytest.MonkeyPatch, index: int, init: int, asked: list[int]) -> None:
    driver = Driver(init)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver)
    assert _make_context(index) == bool(asked)
    assert driver.asked == asked


def test_a_machine_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert not _make_context(0)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The GPUs whose libraries were loaded, on a machine that has them all."""
    gpus: list[int] = []
    monkeypatch.setattr("rtdetr.gpu_startup._make_context", lambda index: index < 8)
    monkeypatch.setattr("rtdetr.gpu_startup.load_libraries", gpus.append)
    return gpus


def test_libraries_follow_torch(loaded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    start = _GpuStart(3)
    start.start()
    assert start.is_alive() and not loaded
    torch.__spec__._initializing = True  # its import has begun
    monkeypatch.setitem(sys.modules, "torch", torch)
    start.join(0.05)
    assert start.is_alive() and not loaded
    torch.__spec__._initializing = False
    start.join(60)
    assert loaded == [3]


def test_a_program_may_end_without_torch(loaded: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    start = _GpuStart(0)
    start.start()
    start.end()
    assert not start.is_alive() and not loaded


@pytest.mark.parametrize("error", [AssertionError("Torch not compiled with CUDA enabled"), RuntimeError("no memory")])
def test_errors_are_left_to_torch(loaded: list[int], monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(index: int) -> None:
        loaded.append(index)
        raise error

    monkeypatch.setattr("rtdetr.gpu_startup.load_libraries", fail)
    _GpuStart(4).run()
    assert loaded == [4]


def test_without_a_context_nothing_is_loaded(loaded: list[int]) -> None:
    start = _GpuStart(9)
    start.run()
    assert not loaded


@pytest.mark.parametrize(
    "device,rank,index",
    [
        ("auto", None, 0),
        ("cuda", None, 0),
        ("cuda:3", None, 3),
        ("cuda", "2", 2),
        ("cpu", None, None),
        ("x", None, None),
    ],
)
def test_which_gpu(monkeypatch: pytest.MonkeyPatch, device: str, rank: str | None, index: int | None) -> None:
    started: list[int] = []
    monkeypatch.setattr("rtdetr.gpu_startup._make_context", started.append)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    wake_gpu(device)
    for thread in threading.enumerate():
        if thread.name == "rtdetr-wake":
            thread.join()
    assert started == ([] if index is None else [index])


def test_torch_is_not_needed() -> None:
    code = "import sys; from rtdetr import wake_gpu; wake_gpu('cpu'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


AWAKE = """
import ctypes, time
from rtdetr import wake_gpu
wake_gpu("cuda")
flags, active, start = ctypes.c_uint(), ctypes.c_int(), time.monotonic()
while not active.value:
    assert time.monotonic() - start < 60, "nobody made a context"
    time.sleep(0.01)
    ctypes.CDLL("libcuda.so.1").cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active))
import torch
assert torch.ones(3, device="cuda").sum().item() == 3
"""


@pytest.mark.gpu
def test_torch_finds_it_awake() -> None:
    subprocess.run([sys.executable, "-c", AWAKE], check=True, timeout=120)
