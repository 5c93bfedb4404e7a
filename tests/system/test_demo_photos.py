"""`make demo-photos`: its set is sound and licensed, its commands are commands of today, and the set trains."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from docs_blocks import ROOT, Command
from docs_checks import check_command
from engine_helpers import tiny_updates

from rtdetr.cli import main

CELLS = ROOT / "examples" / "blood_cells"


def test_the_set_is_small_sound_and_licensed(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(each.stat().st_size for each in CELLS.rglob("*") if each.is_file()) < 3e6
    assert main(["doctor", str(CELLS)]) == 0
    said = capsys.readouterr().out
    assert "sound: no defects" in said
    for split, images, boxes in (("train", 205, "2804"), ("val", 87, "1137")):
        assert f"instances_{split}.json: {images} images, {boxes} boxes of 3 classes" in said
        assert len([*(CELLS / split).glob("*.jpg")]) == images
    assert "MIT License" in (CELLS / "LICENSE").read_text() and "examples/blood_cells" in (ROOT / "NOTICE").read_text()


@pytest.mark.parametrize("config", ["rtdetrv3_r18vd_small", "rtdetrv3_nano_shapes -u train.epochs=30"])
def test_its_commands_are_commands_of_today(config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("make") is None or not Path(sys.prefix, "bin/python").exists():
        pytest.skip("needs make, and the Python of an environment")
    monkeypatch.setenv("VIRTUAL_ENV", sys.prefix)
    made = ["make", "-n", "-C", str(ROOT), "demo-photos", f"PHOTOS_CONFIG={config}", "PHOTOS=runs/demo-photos"]
    said = subprocess.run(made, stdout=subprocess.PIPE, check=True).stdout.decode().replace(f"{sys.prefix}/bin/", "")
    lines = [line for line in said.splitlines() if line.startswith(("python tools/", "python -m rtdetr"))]
    assert [line.split()[1] for line in lines] == ["tools/train.py", "tools/eval.py", "tools/demo.py", "-m"]
    assert config in lines[0] and "--report" in lines[1]
    for line in lines:
        check_command(Command(0, line, line.split()))


def test_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One step of a tiny model, scored on all validation images; no file of the set changes."""
    before = {path: path.stat().st_mtime_ns for path in CELLS.rglob("*")}
    tiny = [each for each in tiny_updates(CELLS) if not each.startswith(("data.train.", "data.val."))]
    given = ["--output-dir", str(tmp_path / "run"), "--device", "cpu", "-u", *tiny, "train.max_iterations=1"]
    assert main(["train", str(CELLS), "-c", "rtdetrv3_nano_shapes", *given]) == 0
    assert (tmp_path / "run" / "best.pth").is_file() and (tmp_path / "run" / "curves.png").is_file()
    assert {path: path.stat().st_mtime_ns for path in CELLS.rglob("*")} == before
