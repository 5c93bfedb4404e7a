"""W&B offline and MLflow's file store after kill -9: one run, no double row, the curves of metrics.csv."""

from __future__ import annotations

import importlib.util
import json
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engine_helpers import tiny_data
from run_cases import NEVER, SCRIPT, environment, first, going_on, rows_of

KILLS = (17, 14)  # moments of kill_at: of the new run, and of the resumed one
Curves = dict[str, list[tuple[int, float]]]  # by name: (iteration, value) as they came

pytestmark = [
    pytest.mark.slow,  # W&B's own process outlives a killed run by seconds
    pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="counts processes in /proc"),
]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_killed_and_resumed_it_is_one_run_with_the_curves_of_metrics_csv(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f'needs the package {name}: pip install "rtdetr[{name}]"')
    for variable in ("WANDB_PROJECT", "WANDB_DIR", "WANDB_NAME", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    data, folder = tiny_data(tmp_path / "shapes"), tmp_path / "run"
    start, again = first(data, folder, "train.eval_every=1", f"train.loggers=[{name}]"), going_on(folder)
    commands = [f"kill{KILLS[0]}", *start, "--", f"kill{KILLS[1]}", *again, "--", NEVER, *again]
    subprocess.run([sys.executable, SCRIPT, tmp_path, *commands], env=environment(), check=True, timeout=300)
    codes = [
        json.loads((tmp_path / f"{each}.json").read_text())["code"] for each in (*map("kill{}".format, KILLS), NEVER)
    ]
    assert codes == [-9, -9, 0]
    ids, curves = curves_of_wandb(folder) if name == "wandb" else curves_of_mlflow()
    assert ids == {json.loads((folder / "loggers.json").read_text())[name]["id"]}
    expected: Curves = {}
    for iteration, values in rows_of(folder):
        for key, value in values.items():
            expected.setdefault(key, []).append((iteration, value))
    assert curves == expected and len(curves["train/loss"]) == 9 and len(curves["eval/AP"]) == 3


def curves_of_wandb(folder: Path) -> tuple[set[str], Curves]:
    from wandb.proto.wandb_internal_pb2 import Record

    ids, steps = set(), []
    curves: Curves = {}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records_of(file):
            record = Record.FromString(content)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            elif record.WhichOneof("record_type") == "history":
                row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                steps.append(row["_step"])
                for key, value in row.items():
                    if "/" in key:
                        curves.setdefault(key, []).append((row["iteration"], value))
    assert steps == list(range(len(steps)))
    return ids, curves


def records_of(file: Path) -> Iterator[bytes]:
    """The records of W&B's file, which is a log of LevelDB with 7 bytes before it."""
    content, record, at = file.read_bytes(), b"", 7
    while at < len(content):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, part = struct.unpack("<IHB", content[at : at + 7])
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if part in (1, 4):  # whole, or the last part
            yield record
            record = b""


def curves_of_mlflow() -> tuple[set[str], Curves]:
    from mlflow import MlflowClient

    client = MlflowClient()
    experiment = client.get_experiment_by_name("rtdetr")
    runs = client.search_runs([experiment.experiment_id])
    curves = {}
    for run in runs:
        assert run.info.status == "FINISHED" and run.data.params["train.eval_every"] == "1"
        for name in run.data.metrics:
            history = client.get_metric_history(run.info.run_id, name)
            curves[name] = [(metric.step, metric.value) for metric in sorted(history, key=lambda each: each.step)]
    return {run.info.run_id for run in runs}, curves
