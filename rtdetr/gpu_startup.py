"""Starts a GPU before torch is imported. Its context takes half a second, during which Python can import torch; the
convolution and matrix libraries take another quarter, during which it can import and read the rest."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading

LOOK_EVERY = 0.01  # seconds between checks whether torch is imported

_lock = threading.Lock()
_loaded: set[int] = set()  # GPUs whose libraries are loaded


def wake_gpu(device: str = "auto") -> None:
    """Creates a GPU's context in a thread, where torch finds it, and loads GPU libraries once torch is imported. Call
    it before importing torch.

    device: auto, cpu, cuda or cuda:N, as everywhere. Does nothing without a GPU, or for cpu.
    """
    kind, _, number = (f"cuda:{device}" if device.isdecimal() else device).partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdecimal():
        return
    start = _GpuStart(int(os.environ.get("LOCAL_RANK", number or 0)))  # as torchrun numbers its processes
    start.start()
    atexit.register(start.end)


class _GpuStart(threading.Thread):
    def __init__(self, index: int) -> None:
        super().__init__(name="rtdetr-wake", daemon=True)
        self.index, self.ending = index, threading.Event()

    def run(self) -> None:
        """Leaves errors to torch, which meets them again and reports them."""
        if not _make_context(self.index):
            return
        while not _imported("torch"):  # not imported here, as it may not be needed
            if self.ending.wait(LOOK_EVERY):
                return
        try:
            load_libraries(self.index)
        except (AssertionError, ImportError, RuntimeError):  # the first one: a torch without CUDA
            return

    def end(self) -> None:
        """Stops the thread: a process that exits while a library is loading would crash."""
        self.ending.set()
        self.join()


def _imported(name: str) -> bool:
    """Whether a module has been imported completely."""
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _make_context(index: int) -> bool:
    """Creates the CUDA context and returns whether it exists."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no GPU
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGet(ctypes.byref(device), index) == 0
        and driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device) == 0
    )


def load_libraries(index: int | None) -> None:
    """Loads the convolution and matrix libraries, which torch loads at their first use, unless they are loaded; waits
    for a thread that is loading them. index: of the GPU; None: torch's current one. Raises torch's RuntimeError."""
    import torch
    import torch.nn.functional as F

    with _lock:
        index = torch.cuda.current_device() if index is None else index
        if index in _loaded:
            return
        device = torch.device("cuda", index)
        x = torch.zeros(1, 16, 16, 16, dtype=torch.float16, device=device).contiguous(memory_format=torch.channels_last)
        for dtype in (torch.float16, torch.float32):
            F.linear(F.conv2d(x, x).to(dtype).flatten(1), torch.zeros(16, 1, dtype=dtype, device=device))
        _loaded.add(index)
