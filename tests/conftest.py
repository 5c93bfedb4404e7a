"""What every test may use: where the golden data lies, and one thread, so that tests run beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from rtdetr import RTDETRv3

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"


def golden_dir() -> Path:
    """The folder of golden data: RTDETR_GOLDEN, else tests/golden."""
    return Path(os.environ.get("RTDETR_GOLDEN") or ROOT / "tests" / "golden")


def golden_file(name: str) -> Path:
    """The file or folder in the first golden folder that has it: the chosen one, tests/golden, ../shared/golden."""
    folders = (golden_dir(), ROOT / "tests" / "golden", SHARED / "golden")
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    raise FileNotFoundError(f"{name} is in none of {', '.join(str(folder) for folder in folders)}")


def shared_golden(name: str) -> Path:
    """A golden file that is too large for the repository; skips the test, with the reason, where it is not at hand."""
    try:
        return golden_file(name)
    except FileNotFoundError as error:
        pytest.skip(str(error))


def shared_data(name: str) -> Path:
    """A folder of real images; skips the test, with the reason, where it is not at hand."""
    folder = SHARED / "data" / name
    if not folder.is_dir():
        pytest.skip(f"real images: ../shared/data/{name} is not there")
    return folder


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
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of `api_cases`, which import what not every test needs."""
    from api_cases import write_checkpoint

    return write_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(checkpoint: Path) -> RTDETRv3:
    from rtdetr import RTDETRv3

    return RTDETRv3.from_pretrained(checkpoint, device="cpu")


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
