"""What a method of the Python API leaves in the process of its caller: nothing."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_cases import PIXELS, write_checkpoint

from rtdetr import RTDETRv3
from rtdetr.config import ConfigError
from rtdetr.data.classes import DataError
from rtdetr.engine import distributed
from rtdetr.engine.run_files.run_state import be_deterministic, seed_everything
from rtdetr.engine.trainer import Trainer
from rtdetr.outputs import OutputError
from rtdetr.process_state import process_restored

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of one step, whose classes are those of its data."""
    folder = tmp_path_factory.mktemp("model")
    model = RTDETRv3.from_pretrained(write_checkpoint(folder), device="cpu")
    return model.train(folder, max_iterations=1, output_dir=folder / "first").best


def state() -> dict[str, Any]:
    numpy: Any = np.random.get_state()
    name, keys, *rest = numpy
    products: Any = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return {
        "random": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
        "torch": torch.get_rng_state().tolist(),
        "seed": torch.initial_seed(),
        "cuda": [each.tolist() for each in torch.cuda.get_rng_state_all()] if torch.cuda.is_initialized() else [],
        "matmul": torch.get_float32_matmul_precision(),
        "products": [each.fp32_precision for each in products],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": [getattr(torch.backends.cudnn, n) for n in ("enabled", "benchmark", "deterministic", "allow_tf32")],
        "sdp": torch.backends.cuda.cudnn_sdp_enabled(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
        "signals": [signal.getsignal(each) for each in SIGNALS],
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, []),
        "collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "logging": (logging.root.level, logging.root.handlers[:], logging.root.manager.disable),
        "logger": (logging.getLogger("rtdetr").level, logging.getLogger("rtdetr").handlers[:]),
        "running": sorted(each.name for each in threading.enumerate()),
        "folder": os.getcwd(),
    }


def differences(before: dict[str, Any]) -> list[str]:
    return [name for name, value in state().items() if value != before[name]]


def train(model: RTDETRv3, folder: Path) -> None:
    model.train(epochs=1, output_dir=folder / "run", eval_every=1, num_workers=1)


METHODS: dict[str, Callable[[RTDETRv3, Path], Any]] = {
    "train": train,
    "evaluate": lambda model, _: model.evaluate(),
    "predict": lambda model, _: model.predict(PIXELS, 0.0),
}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_leaves_no_traces(checkpoint: Path, tmp_path: Path, method: str) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    seed_everything(123)  # not that of a run
    before = state()
    METHODS[method](model, tmp_path)
    assert differences(before) == []


@pytest.mark.parametrize("call", ["evaluate()", "train(max_iterations=1, output_dir='run', num_workers=0)"])
def test_what_is_imported_for_a_method_leaves_no_traces(
    checkpoint: Path, tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)  # importing torchvision sets it
    code = f"""import os; from rtdetr import RTDETRv3
model = RTDETRv3.from_pretrained({str(checkpoint)!r}, device="cpu"); before = dict(os.environ); model.{call}
assert dict(os.environ) == before, os.environ.keys() - before.keys()"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


@pytest.mark.parametrize("setting", [torch.no_grad, torch.inference_mode])
def test_what_the_caller_has_set_does_not_stop_a_training(
    checkpoint: Path, tmp_path: Path, setting: Callable[[], Any]
) -> None:
    torch.set_default_dtype(torch.bfloat16)
    try:
        with setting():
            model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
            before = state()
            train(model, tmp_path)
            assert differences(before) == []
            assert {each.dtype for each in model.model.parameters()} == {torch.float32}
            found = model.predict(PIXELS, 0.0)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("meta"):
        again = model.predict(PIXELS, 0.0)
    assert np.array_equal(found.scores, again.scores)


def test_the_autocast_of_the_caller_changes_no_result(checkpoint: Path, tmp_path: Path) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    found, figures = model.predict(PIXELS, 0.0), model.evaluate()
    with torch.autocast("cpu", torch.bfloat16):
        again, figures_again = model.predict(PIXELS, 0.0), model.evaluate()
        with pytest.raises(ConfigError, match=r"train\(\): leave torch.autocast first"):
            train(model, tmp_path)
    assert np.array_equal(found.scores, again.scores) and np.array_equal(found.boxes, again.boxes)
    assert figures is not None and figures_again is not None
    assert figures.detections == figures_again.detections
    assert not list(tmp_path.iterdir())


def test_a_run_that_failed_before_its_first_step_is_not_in_the_way(checkpoint: Path, tmp_path: Path) -> None:
    calls = itertools.count()

    def broken(*sample: Any) -> Any:
        if next(calls):  # the first one is a trial before there is a folder
            raise ValueError("not finished")
        return sample

    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    given: dict[str, Any] = {"epochs": 1, "output_dir": tmp_path / "run", "num_workers": 0}
    with pytest.raises(DataError, match="not finished"):
        model.train(augment=broken, **given)
    assert (tmp_path / "run" / "config.yml").is_file()
    assert model.train(**given).best.is_file()
    with pytest.raises(OutputError, match="already holds a run"):
        model.train(**given)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def leave_all_traces() -> None:
    """What a run does on a GPU, and more of its kind."""
    seed_everything(0)
    be_deterministic()
    distributed.let_memory_grow()
    os.environ["HOME"] = "elsewhere"
    torch.set_float32_matmul_precision("high")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
    if torch.cuda.is_available():
        torch.cuda.set_device(torch.cuda.device_count() - 1)


@pytest.mark.parametrize("matmul", ["highest", "high"])
def test_a_run_that_fails_leaves_no_traces(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, matmul: str
) -> None:
    def fail(*_: Any) -> None:
        leave_all_traces()
        raise RuntimeError("no more")

    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setattr(Trainer, "run", fail)
    with process_restored():
        seed_everything(123)
        if matmul != torch.get_float32_matmul_precision():  # to set it at all writes to newer settings
            torch.set_float32_matmul_precision(matmul)
        before = state()
        with pytest.raises(RuntimeError, match="no more"):
            train(model, tmp_path)
        assert differences(before) == []


@pytest.mark.gpu
def test_gpus_keep_their_random_numbers() -> None:
    torch.cuda.manual_seed_all(5)
    torch.rand(3, device="cuda")
    before = state()
    with process_restored():
        leave_all_traces()
        torch.rand(3, device="cuda")
        assert {"cuda", "deterministic", "environment", "matmul"} < {*differences(before)}
    assert differences(before) == []


def test_generators_of_gpus_that_nobody_has_used_begin_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    torch.manual_seed(7)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with process_restored():
        torch.manual_seed(0)
    assert seeds == [0, 7]
