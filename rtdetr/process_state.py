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

State = tuple[Callable[[], Any], Callable[[Any], object]]  # what reads it, and what writes it
GENERATORS: tuple[State, ...] = (
    (random.getstate, random.setstate),
    (np.random.get_state, np.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
)


@contextmanager
def process_restored() -> Iterator[None]:
    """Context manager: restores random generators, float32 precision, deterministic algorithms, cuDNN's settings, the
    current GPU, torch's thread counts, default type and environment variables at the end, also after an error. Inside,
    gradients are computed and new tensors are float32, whatever the caller has set."""
    environment, generators = dict(os.environ), [(write, read()) for read, write in GENERATORS]
    settings = [(read, write, read()) for read, write in _settings()]
    gpus = (torch.cuda.current_device(), torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else None
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
        for write, value in generators:
            write(value)
        if gpus is None:  # theirs begin with the seed of torch's generator, at their first use if that is still to come
            torch.cuda.manual_seed_all(torch.initial_seed())
        else:
            torch.cuda.set_device(gpus[0])
            torch.cuda.set_rng_state_all(gpus[1])


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _settings() -> list[State]:
    """Torch's settings. The newer ones of float32 come last: the older ones write to them."""
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
