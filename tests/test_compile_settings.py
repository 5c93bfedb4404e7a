"""Where torch.compile keeps its code."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from rtdetr.compile_settings import CACHE_KEY, prepare_compiler


@pytest.mark.parametrize("given", [None, str(Path(tempfile.gettempdir(), "torchinductor_me")), "/somewhere/else"])
def test_compiled_code_is_kept_unless_a_folder_is_chosen(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision imports torch._dynamo, which chooses a temporary folder."""
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv(CACHE_KEY, given or "")
    if given is None:
        monkeypatch.delenv(CACHE_KEY)
    with torch._dynamo.config.patch(recompile_limit=8):
        prepare_compiler()
        assert torch._dynamo.config.recompile_limit == 64
    assert os.environ[CACHE_KEY] == (given if given == "/somewhere/else" else "/home/me/.cache/rtdetr/inductor")
