"""`tools/benchmark.py infer|train` on a processor, with the smallest model."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_helpers import NANO, tiny_updates

TOOLS = Path(__file__).resolve().parents[1] / "tools"
TINY = [each for each in tiny_updates(TOOLS) if each.startswith(("model", "data.image_size"))]


def tool(monkeypatch: pytest.MonkeyPatch, name: str) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return importlib.import_module(name)


def test_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infer = tool(monkeypatch, "benchmarks.infer")
    infer.make_checkpoint_file(tmp_path / "model.pth", str(NANO), TINY)
    (tmp_path / "pictures").mkdir()
    infer.make_pictures(tmp_path / "pictures", 2)
    order = {
        "folder": str(tmp_path),
        "device": "cpu",
        "batches": [1, 2],
        "profile": False,
        "num_files": 6,
        "seconds": 0.02,
    }
    for name in ("float32 eager", "deployed eager", "files"):
        infer.work({"name": name, "started": time.time(), **order})
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["batch"]) for row in rows] == [
        *((name, batch) for name in ("float32 eager", "deployed eager") for batch in (1, 2)),
        ("files", 2),
    ]
    assert all(row["images_per_s"] > 0 and row["first_s"] >= row["load_s"] > 0 for row in rows)
    assert all(row["ms"] > 0 and row["shift"] < 1e-3 for row in rows[:4])
    assert len(infer.line(rows[4]).splitlines()) == 1 + len(rows[4]["parts"])


def test_a_row_that_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, infer = tool(monkeypatch, "benchmark"), tool(monkeypatch, "benchmarks.infer")
    order = {"folder": str(tmp_path), "device": "cpu", "batches": [1], "profile": False, "num_files": 1}
    (failed,) = infer._in_a_process({"name": "deployed eager", **order})
    assert "model.pth: no such weight file" in failed["error"]
    good = {"name": "deployed + graph", "batch": 1, "images_per_s": 9.0}
    monkeypatch.setattr(infer, "measure_rows", lambda *_: iter([failed, good]))
    assert benchmark.main(["infer", "--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "deployed eager" in lines[2] and "failed: " in lines[2] and lines[3].startswith("deployed + graph")
    assert json.loads((tmp_path / "rows.json").read_text())["measurements"] == [failed, good]


@pytest.mark.slow  # two more processes import and build everything
def test_the_training_step_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    train = tool(monkeypatch, "benchmarks.train")
    monkeypatch.setenv("PYTHONPATH", str(TOOLS), prepend=os.pathsep)  # theirs, too
    row = train.measure(NANO, "plain", 2, 64, torch.device("cpu"), 2, 4, False, TINY, gpus=2)
    assert row.mode == "plain, 2 GPUs"
    assert row.images_per_s == pytest.approx(2 * 2 * 1e3 / row.ms) and row.loss > 0
