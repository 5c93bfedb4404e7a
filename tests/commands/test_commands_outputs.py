"""What is written where, and what is said when that fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from api_cases import PIXELS, write_checkpoint
from PIL import Image

from rtdetr.outputs import RunFailed, writing


def test_where_nobody_reads_on_it_ends_quietly(tmp_path: Path) -> None:
    """As in `rtdetr predict ... | head -1`."""
    checkpoint = write_checkpoint(tmp_path)
    for name in ("a.png", "b.png"):
        Image.fromarray(PIXELS).save(tmp_path / name)
    read, write = os.pipe()
    os.close(read)
    command = [
        sys.executable,
        "-u",
        "-m",
        "rtdetr",
        "predict",
        "-w",
        str(checkpoint),
        "--device",
        "cpu",
        "a.png",
        "b.png",
    ]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, cwd=tmp_path, text=True, timeout=120)
    os.close(write)
    assert ended.returncode == 141 and "error" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr
    assert json.loads((tmp_path / "output" / "predict" / "results.json").read_text())  # what was found so far


def test_a_broken_pipe_elsewhere_is_named() -> None:
    with pytest.raises(RunFailed, match=r"fifo: cannot be written \(Broken pipe\)"), writing(Path("fifo")):
        raise BrokenPipeError(32, "Broken pipe")
