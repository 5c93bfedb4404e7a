from __future__ import annotations

from pathlib import Path

import pytest
from sound_set import write_images


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made") / "images"
    write_images(folder)
    return folder
