"""Saves and restores process-wide state, which belongs to the caller of the Python API."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def process_restored() -> Iterator[None]:
    """Context manager: restores random generators, float32 precision, deterministic algorithms, cuDNN's settings, the
    current GPU, torch's thread counts, default type and environment variables at the end, also after an error. Inside,
    gradients are computed and new tensors are float32, whatever the caller has set."""
    environment, threads, generators = dict(os.environ), torch.get_num_threads(), _generators()
    precision, deterministic = _precision(), _deterministic()
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    cudnn = {name: getattr(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
    default_type = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(default_type)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        _restore_precision(precision)
        if _deterministic() != deterministic:
            enabled, warn_only = deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        for name, value in cudnn.items():
            setattr(torch.backends.cudnn, name, value)
        if gpu is not None:
            torch.cuda.set_device(gpu)
        _restore_generators(generators)


def _generators() -> tuple[Any, ...]:
    """Random generator states of Python, NumPy, torch and all GPUs; None for GPUs before their first use."""
    of_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), of_gpus


def _restore_generators(states: tuple[Any, ...]) -> None:
    of_python, of_numpy, of_torch, of_gpus = states
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_gpus is not None:
        torch.cuda.set_rng_state_all(of_gpus)
    else:  # they begin with the seed of torch's generator, at their first use if that is still to come
        torch.cuda.manual_seed_all(torch.initial_seed())


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _precision() -> tuple[str, bool, list[str]]:
    """Precision of float32 matrix products and convolutions, in torch's older and newer settings."""
    return (
        torch.get_float32_matmul_precision(),
        torch.backends.cudnn.allow_tf32,
        [each.fp32_precision for each in _products()],
    )


def _restore_precision(before: tuple[str, bool, list[str]]) -> None:
    matmul, convolution, newer = before
    if torch.get_float32_matmul_precision() != matmul:
        torch.set_float32_matmul_precision(matmul)
    if torch.backends.cudnn.allow_tf32 != convolution:
        torch.backends.cudnn.allow_tf32 = convolution
    for each, value in zip(_products(), newer):  # the older setting has written another value there
        if each.fp32_precision != value:
            each.fp32_precision = value


def _products() -> tuple[Any, Any]:
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
