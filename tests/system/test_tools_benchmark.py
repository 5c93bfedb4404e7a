"""`rtdetr benchmark infer|train` on a processor, with the smallest model."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_helpers import NANO, tiny_updates

from rtdetr.ops import compiled

ROOT = Path(__file__).resolve().parents[2]
TINY = [each for each in tiny_updates(ROOT) if each.startswith(("model", "data.image_size"))]


def tool(name: str) -> ModuleType:
    return importlib.import_module(f"rtdetr.{name}")


def test_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    infer = tool("benchmarks.infer")
    infer.make_checkpoint_file(tmp_path / "model.pth", str(NANO), TINY)
    (tmp_path / "images").mkdir()
    infer.make_images(tmp_path / "images", 2)
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
    for name in infer.PUBLIC:
        tool("benchmarks.public").work({"name": name, "started": time.time(), **order})
    public = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["name"], row["batch"]) for row in public] == [*zip(infer.PUBLIC, (1, 8, 1, 1, 2))]
    assert all(row["images_per_s"] > 0 and row["first_s"] >= row["load_s"] > 0 for row in public)


def test_it_runs_from_a_wheel(tmp_path: Path) -> None:
    """Of the package alone, without the clone around it."""
    shutil.copytree(ROOT / "rtdetr", tmp_path / "rtdetr", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "configs", tmp_path / "rtdetr" / "configs")
    command = [sys.executable, "-m", "rtdetr", "benchmark", "infer", "--device", "cpu", "--config", NANO.stem]
    command += ["--rows", "predict, array", "--num-files", "1", "--batch", "1", "-u", *TINY]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *(p for p in sys.path if p != str(ROOT))])
    }
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("predict, array")


def test_a_row_that_fails_costs_itself_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, infer = tool("benchmarks.__main__"), tool("benchmarks.infer")
    order = {"folder": str(tmp_path), "device": "cpu", "batches": [1], "profile": False, "num_files": 1}
    (failed,) = infer._in_a_process({"name": "deployed eager", **order})
    assert "model.pth: no such weight file" in failed["error"]
    good = {"name": "deployed + graph", "batch": 1, "images_per_s": 9.0}
    monkeypatch.setattr(infer, "measure_rows", lambda *_, **__: iter([failed, good]))
    assert benchmark.main(["infer", "--device", "cpu", "--json", str(tmp_path / "rows.json")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "deployed eager" in lines[2] and "failed: " in lines[2] and lines[3].startswith("deployed + graph")
    assert json.loads((tmp_path / "rows.json").read_text())["measurements"] == [failed, good]


@pytest.mark.parametrize(("option", "expected"), [([], []), (["--kernels", "plain"], ["kernels=plain"])])
def test_kernels_reach_the_model(monkeypatch: pytest.MonkeyPatch, option: list[str], expected: list[str]) -> None:
    benchmark, infer = tool("benchmarks.__main__"), tool("benchmarks.infer")
    given: list[list[str]] = []
    monkeypatch.setattr(infer, "measure_rows", lambda _, updates, *__, **___: given.append(updates) or iter(()))
    assert benchmark.main(["infer", "--device", "cpu", "-u", "seed=1", *option]) == 0
    assert given == [["seed=1", *expected]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["infer", "--json", "/no/such/folder/rows.json"], "expected a file in a folder that exists"),
        (["eval", "--json", "/no/such/folder/rows.json"], "expected a file in a folder that exists"),
        (["infer", "--batch", "0"], "expected a whole number from 1"),
        (["train", "--steps", "0"], "expected a whole number from 1"),
        (["train", "--device", "gpu"], "device gpu: expected cpu, cuda or cuda:N"),
        (["assignment", "--device", "cuda:9"], "no GPU number 9, this machine has"),
        (["infer", "--device", "cpu", "--config", "nonsense"], "nonsense: no config of that name"),
        (["train", "--device", "cpu", "-u", "trian.epochs=1"], "unknown key"),
        (["train", "--device", "cpu", "-u", "trian.epochs=1", "-u", "seed=1"], "unknown key"),
        (
            ["train", "--device", "cpu", "--modes", "plain", "graphs"],
            "--modes: expected plain; eager; one group, eager",
        ),
        (["infer", "--device", "cpu", "-c", "nonsense"], "nonsense: no config of that name"),
        (["eval", "--conf", "3"], "--conf is not an option here"),
        (["eval", "5000"], "5000 is one argument too many"),
        (["inference"], "invalid choice: 'inference'"),
        ([], "arguments are required: command"),
        (["train", "--device", "cpu", "--size", "33"], "--size: expected a multiple of 32, got 33"),
        (["train", "--device", "cpu", "--size", "96"], "a cell for each of 450 queries, got 96, which has 189"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        sys.exit(tool("benchmarks.__main__").main(arguments))
    assert ended.value.code == 2
    output = capsys.readouterr()
    (said,) = output.err.splitlines()
    assert output.out == "" and said.startswith("error: ") and says in said


def test_without_a_gpu_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = tool("benchmarks.timing")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert timing.work_of(lambda: torch.rand(3) + 1, 2) == (0, 0, 0, [])


@pytest.mark.gpu
def test_waits_of_the_calls_alone_count(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = tool("benchmarks.timing")
    values = torch.rand(1000, device="cuda")
    quiet, waiting = (timing.work_of(call, 4) for call in (lambda: values + 1, lambda: (values + 1).sum().item()))
    assert quiet.waits == 0 and quiet.kernels == 1 and quiet.busy_ms > 0 and len(quiet.top) == 1
    assert waiting.waits == 1 and waiting.kernels >= 3  # the sum, and the copy of it


@pytest.mark.parametrize("why_not", [None, "nothing has been compiled"])
def test_assignment_beside_scipy_and_without_kernels(
    why_not: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, assignment = tool("benchmarks.__main__"), tool("benchmarks.assignment")
    monkeypatch.setattr(assignment, "COUNTS", {"221 boxes": (2, 1, 3)})
    monkeypatch.setattr(assignment, "LAYERS", 1)
    file = tmp_path / "rows.json"
    call = ["assignment", "--device", "cpu", "--profile", "--json", str(file)]
    why_not = why_not or compiled.WHY_NOT["cpu"]
    monkeypatch.setitem(compiled.WHY_NOT, "cpu", why_not)
    assert benchmark.main(call) == 0
    rows = json.loads(file.read_text())["measurements"]
    backends = ["scipy"] if why_not else ["scipy", "cpu"]
    assert [(row["costs"], row["backend"]) for row in rows] == [(c, b) for c in ("random", "trained") for b in backends]
    said = capsys.readouterr().out
    assert len(said.splitlines()) == 2 + bool(why_not) + len(rows) and (why_not or "") in said
    assert all(row["same_as_scipy"] == 1 and len(row["apart_ms"]) == 2 for row in rows)
    assert benchmark.main([*call[:-1], "/dev/full"]) == 1
    assert "/dev/full: cannot be written" in capsys.readouterr().err


def test_what_a_cpu_cannot_measure_of_the_op_is_null(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    benchmark, op = tool("benchmarks.__main__"), tool("benchmarks.op")
    monkeypatch.setattr(op, "CASES", (op.OpCase("R1", 1, 4, ((6, 6), (3, 3)), heads=2, channels=8, points=2),))
    file = tmp_path / "op.json"
    assert benchmark.main(["op", "--device", "cpu", "--backends", "torch", "cuda"]) == 2
    assert re.search(r"^error: backends: expected (cpu, )?torch, got cuda$", capsys.readouterr().err, re.MULTILINE)
    assert benchmark.main(["op", "--device", "cpu", "--backends", "torch", "--json", str(file)]) == 0
    content = json.loads(file.read_text(), parse_constant=pytest.fail)  # NaN is not JSON
    (row,) = content["measurements"]
    assert content["copy_bytes_per_second"] is row["forward_mib"] is row["share_of_copy"] is None
    assert row["forward_us"] > 0 and 0 < row["output_error"] < 1e-5


def test_the_gpu_that_is_named_takes_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    train = tool("benchmarks.train")
    monkeypatch.setattr(train.distributed, "process_group", lambda device: {}[device])
    with pytest.raises(KeyError, match="cuda:1"):
        train.measure(NANO, "plain", 2, 64, torch.device("cuda:1"), 2, 4, False, TINY)


@pytest.mark.heavy  # two more processes import and build everything
def test_the_training_step_in_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    train = tool("benchmarks.train")
    row = train.measure_on(2, partial(train.measure, NANO, "plain", 2, 64, torch.device("cpu"), 2, 4, False, TINY))
    assert row["mode"] == "plain, 2 processes"
    assert row["images_per_s"] == pytest.approx(2 * 2 * 1e3 / row["ms"]) and row["loss"] > 0
