"""What is written where, and what is said when that fails."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from api_cases import PIXELS, write_checkpoint
from format_sets import write_all
from PIL import Image

from rtdetr.cli import main
from rtdetr.outputs import RunFailed, writing


def predict(
    folder: Path, stdout: int | None, *options: str, copies: int = 0, closed: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs `rtdetr predict` on two images. copies: further images. closed: streams, as a shell writes it."""
    checkpoint = write_checkpoint(folder)
    for name in ("a.png", "b.png"):
        Image.fromarray(PIXELS).save(folder / name)
    more = [folder / f"{number:080}.png" for number in range(copies)]
    for each in more:
        each.symlink_to(folder / "a.png")
    command = [sys.executable, *options, "-m", "rtdetr", "predict", str(checkpoint), "a.png", "b.png", *more]
    command += ["--device", "cpu", "--output-dir", "new"]
    if closed:
        command = ["sh", "-c", f"{shlex.join(command)} {closed}"]
    return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, cwd=folder, text=True, timeout=120)


@pytest.mark.parametrize("words", ["train shapes --output-dir", "predict best.pth a.png --output-dir", "eval -w"])
def test_an_empty_name_is_not_the_working_folder(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*words.split(), ""])
    assert ended.value.code == 2 and "got an empty name" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_where_nobody_reads_on_it_ends_quietly(tmp_path: Path) -> None:
    """As in `rtdetr predict ... | head -1`."""
    read, write = os.pipe()
    os.close(read)
    ended = predict(tmp_path, write, "-u")
    os.close(write)
    assert ended.returncode == 141 and "error" not in ended.stderr and "Traceback" not in ended.stderr, ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_standard_stream_loses_nothing(closed: str, tmp_path: Path) -> None:
    ended = predict(tmp_path, None, closed=closed)
    assert ended.returncode == 0 and "Traceback" not in ended.stderr, ended.stderr
    assert len(json.loads((tmp_path / "new/results.json").read_text())) == 2


def test_a_full_standard_output_is_one_sentence() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    with full.open("wb") as stdout:
        command = [sys.executable, "-m", "rtdetr", "weights"]
        ended = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=120)
    assert ended.returncode == 1
    assert ended.stderr == "error: the output cannot be written (No space left on device)\n"


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_full_standard_output_is_not_the_fault_of_the_folder(options: list[str], tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with open("/dev/full", "wb") as stdout:
        ended = predict(tmp_path, stdout.fileno(), *options, copies=100)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == "error: standard output: cannot be written (No space left on device)"


def test_a_full_standard_output_is_not_the_fault_of_an_exported_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")

    def export_model(*_: object, say: Callable[[str], None], **options: object) -> None:
        say("writing nano as onnx")

    monkeypatch.setattr("rtdetr.export.export_model", export_model)
    stdout = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["export", str(write_checkpoint(tmp_path))]) == 1
    assert capsys.readouterr().err == "error: standard output: cannot be written (No space left on device)\n"
    monkeypatch.undo()
    with contextlib.suppress(OSError):
        stdout.close()


def test_a_full_standard_output_loses_no_converted_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    source, out = write_all(tmp_path / "sets")["yolo"], tmp_path / "out"
    out.mkdir()
    (out / "mine").touch()
    with contextlib.suppress(OSError), open("/dev/full", "w", buffering=1) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["convert-data", str(source), str(out), "--to", "coco", "--overwrite"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: standard output: cannot be written")
    assert (out / "annotations").is_dir() and (tmp_path / "out-old" / "mine").exists()


def test_a_broken_pipe_elsewhere_is_named() -> None:
    with pytest.raises(RunFailed, match=r"fifo: cannot be written \(Broken pipe\)"), writing(Path("fifo")):
        raise BrokenPipeError(32, "Broken pipe")
