"""What tests of several folders use, and one thread, so that tests run beside each other. Fixtures of one folder are in
its own conftest.py; what a fixture imports, a test without it does not need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from api_cases import Web

    from rtdetr import RTDETRv3


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(int(os.environ.get("RTDETR_TEST_THREADS", "1")))


@pytest.fixture(autouse=True)
def _float32_as_it_was() -> Iterator[None]:
    """A trainer on a GPU lets its whole process round to TF32, and so the tests that come after it."""
    precision = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(precision)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generated images, to train on."""
    from engine_helpers import tiny_data

    return tiny_data(tmp_path_factory.mktemp("data") / "shapes")


@pytest.fixture
def no_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than the runs of tests. A run that a module's fixture makes does draw."""
    monkeypatch.setattr("rtdetr.engine.trainer.draw_curves", lambda *_: None)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from api_cases import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(checkpoint: Path) -> RTDETRv3:
    from rtdetr import RTDETRv3

    return RTDETRv3.from_pretrained(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from api_cases import write_images

    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    from api_cases import Web

    server = Web()
    yield server
    server.server.shutdown()
    server.server.server_close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--parity-report",
        default=os.environ.get("RTDETR_PARITY_REPORT", ""),
        metavar="FILE",
        help="write the worst deviation of every quantity as a Markdown table (also: RTDETR_PARITY_REPORT)",
    )


def pytest_sessionfinish(session: pytest.Session) -> None:
    report = session.config.getoption("--parity-report")
    if report:
        from parity import RECORD

        Path(report).write_text(RECORD.markdown(), encoding="utf-8")
