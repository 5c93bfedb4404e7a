"""examples/ops run, and say what they should."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest
from ops_cases import require

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ops"


def output_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    runpy.run_path(str(FOLDER / name), run_name="__main__")
    return capsys.readouterr().out


def test_every_example_is_tested_here() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert all(f'"{path.name}"' in text for path in FOLDER.glob("*.py"))


def test_simple(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of("simple.py", capsys)
    assert "output (1, 2, 256)" in text
    assert float(re.findall(r"plain PyTorch by (\S+)", text)[0]) < 1e-5


def test_gradcheck(capsys: pytest.CaptureFixture[str]) -> None:
    require("cpu", "cpu")
    text = output_of("gradcheck.py", capsys)
    assert "cpu: numerical gradients agree" in text and "torch.bfloat16" in text


def test_benchmark_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "op.png"
    monkeypatch.setattr(
        sys, "argv", ["benchmark_plot.py", "--queries", "1", "10", "--seconds", "0.01", "--out", str(out)]
    )
    assert f"wrote {out}" in output_of("benchmark_plot.py", capsys)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_encoder_learns_in_forty_lines(capsys: pytest.CaptureFixture[str]) -> None:
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", output_of("encoder.py", capsys))]
    assert losses[-1] < 0.25 * losses[0]
    assert len((FOLDER / "encoder.py").read_text(encoding="utf-8").splitlines()) <= 40
