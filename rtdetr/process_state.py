"""Saves and restores process-wide state, which belongs to the caller of the Python API."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch


@contextmanager
def process_restored() -> Iterator[None]:
    """Context manager: restores random generators, float32 precision, deterministic algorithms, cuDNN's settings, the
    current GPU, torch's thread counts, default type and environment variables at the end, also after an error. Inside,
    gradients are computed and new tensors are float32, whatever the caller has set."""
    environment, generators = dict(os.environ), _generators()
    settings = [(read, write, read()) for read, write in _settings()]
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    torch.set_default_dtype(torch.float32)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)
        for read, write, value in settings:
            if read() != value:
                write(value)
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


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """What reads each of torch's settings, and what writes it. The newer ones of float32 come last: the older ones
    write to them."""
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    flags = ("enabled", "benchmark", "deterministic", "allow_tf32")
    attributes = [*((torch.backends.cudnn, name) for name in flags), *((each, "fp32_precision") for each in products)]
    return [
        (torch.get_default_dtype, torch.set_default_dtype),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        (_deterministic, lambda both: torch.use_deterministic_algorithms(both[0], warn_only=both[1])),
        *((partial(getattr, *each), partial(setattr, *each)) for each in attributes),
    ]
