"""`rtdetr export --kernels plain`: the file holds no operator of this package, and is compared with PyTorch alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rtdetr import cli
from rtdetr.config import ConfigError
from rtdetr.ops import why_not_compiled
from rtdetr.ops.kernels import are_plain


@pytest.mark.parametrize("kernels", ["auto", "plain"])
def test_the_file_is_made_with_these_kernels(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernels: str
) -> None:
    seen: list[tuple[bool, bool]] = []

    def written(*arguments: Any) -> None:
        seen.append((arguments[-1], are_plain()))
        raise ConfigError("seen enough")

    monkeypatch.setattr("rtdetr.export.build.write_package", written)
    command = ["export", str(checkpoint), "--format", "aot", "-o", str(tmp_path / "model.aot.pt2")]
    assert cli.main([*command, "--kernels", kernels]) == 2
    built = why_not_compiled(torch.empty(0)) is None
    assert seen == [(built, False) if kernels == "auto" else (False, True)] and not are_plain()
