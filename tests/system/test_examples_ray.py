"""examples/ray_predict.py on a cluster of two workers, one of which is killed. It runs where Ray is installed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from docs_runner import furnish
from PIL import Image

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ray_predict.py"
NUM_SHARDS, SHARD = 16, 40  # images


def make_shards(folder: Path) -> list[str]:
    """The images that are listed; the last of them is none."""
    rng, names = np.random.default_rng(0), []
    for name in ("p", "shards"):
        (folder / name).mkdir()
    for shard in range(NUM_SHARDS):
        files = [folder / "p" / f"{shard:02}_{number:02}.bmp" for number in range(SHARD)]
        for file in files:
            Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(file)
        (folder / "shards" / f"{shard:02}.txt").write_text("\n".join(map(str, files)))
        names += map(str, files)
    Path(names[-1]).write_text("no image")
    return names


def parent(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("PPid")))


@pytest.mark.slow
def test_a_lost_worker_costs_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A cluster of processes takes 10 s to start."""
    pytest.importorskip("ray.data", reason='the example needs Ray: pip install "rtdetr[ray]"')
    from ray.cluster_utils import Cluster

    furnish(tmp_path)
    names, output = make_shards(tmp_path), tmp_path / "found"
    memory = {"object_store_memory": 100_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False, **memory})
    command = [sys.executable, str(SCRIPT), "-w", str(tmp_path / "best.pth"), str(tmp_path / "shards")]
    environment = os.environ | {"RAY_ADDRESS": cluster.address, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    try:
        for _ in range(2):
            cluster.add_node(num_cpus=2, **memory)
        process = subprocess.Popen([*command, "--output-dir", str(output)], env=environment)
        deadline, at_work = time.monotonic() + 200, []
        while len(list(output.glob("*.jsonl"))) < 3 or not at_work:
            assert process.poll() is None and time.monotonic() < deadline
            at_work = [int(each.name.split(".")[-1]) for each in output.glob(".*.*.*")]
            time.sleep(0.02)
        worker = parent(at_work[0])  # raylet: the worker that the actor belongs to, which goes with all of its actors
        assert "raylet" in Path(f"/proc/{worker}/cmdline").read_text()
        os.kill(worker, signal.SIGKILL)
        assert len(list(output.glob("*.jsonl"))) < NUM_SHARDS
        assert process.wait(200) == 1  # one of them cannot be read
    finally:
        cluster.shutdown()
    assert f"{len(names)} images, " in capfd.readouterr().out
    results = sorted(output.iterdir())
    assert [each.name for each in results] == [f"{shard:02}.jsonl" for shard in range(NUM_SHARDS)]
    found = [json.loads(line) for each in results for line in each.read_text().splitlines()]
    assert [each["file"] for each in found] == names
    assert ["error" in each for each in found] == [False] * (len(names) - 1) + [True]
