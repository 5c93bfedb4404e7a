"""Where the golden arrays and the real images lie; a test that needs what is not at hand is skipped with the reason."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
