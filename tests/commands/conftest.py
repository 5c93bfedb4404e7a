from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from command_cases import write_folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_folder(folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `made`, with links in it, and the working folder of the test."""
    folder = shutil.copytree(made, tmp_path / "here")
    (folder / "in-images").symlink_to("images")
    (folder / "hard").mkdir()
    os.link(folder / "other" / "a.jpg", folder / "hard" / "a.jpg")
    (folder / "odd").mkdir()
    os.link(folder / "model.pth", folder / "odd" / "a.jpg")
    monkeypatch.chdir(folder)
    return folder
