"""Starts a GPU before torch is there: its context takes half a second, in which Python can import torch."""

from __future__ import annotations

import ctypes
import os
import threading


def wake_gpu(device: str = "auto") -> None:
    """Makes the context of a GPU in a thread, to be found there by torch; call it before torch is imported.

    device: auto, cpu, cuda or cuda:N, as everywhere. Without a GPU, or for cpu, nothing happens.
    """
    kind, _, number = device.partition(":")
    if kind not in ("auto", "cuda") or not (number or "0").isdecimal():
        return
    index = int(os.environ.get("LOCAL_RANK", number or 0))  # as torchrun numbers its processes
    threading.Thread(target=_make_context, args=(index,), name="rtdetr-wake", daemon=True).start()


def _make_context(index: int) -> None:
    """Errors are left to torch, which will meet them again and has words for them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver, no GPU
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
