"""Processes find and draw what threads do, stay for the next list, and never outlive whoever started them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rtdetr import RTDETRv3, cli
from rtdetr.data.classes import DataError
from rtdetr.inference import fonts
from rtdetr.inference.draw import Detection, save_drawn
from rtdetr.inference.predictor import FileResult, Predictor
from rtdetr.inference.processes import Readers, ReadingProcesses
from rtdetr.inference.reading import Task
from rtdetr.inference.results import ResultsFolder
from rtdetr.outputs import RunFailed


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """23 of them, of growing height, one of which is none."""
    generator, folder = np.random.default_rng(0), tmp_path / "images"
    folder.mkdir()
    for i in range(23):
        pixels = generator.integers(0, 256, (40 + i, 50, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i:02}.{'png' if i % 2 else 'jpg'}")
    (folder / "04.jpg").write_bytes(b"no image")
    return folder


def as_text(found: list[FileResult]) -> list[Any]:
    return [(each.file, each.error, each.size, each.best_score, list(each.detections)) for each in found]


def pids_of(processes: ReadingProcesses) -> list[int]:
    return [each.ask(os.getpid).result() for each in processes.running]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline, f"process {pid} still runs"
            time.sleep(0.02)


def test_they_begin_without_torch() -> None:
    code = (
        "import sys, rtdetr.inference.reading, rtdetr.inference.draw\n"
        "heavy = {'torch', 'torchvision', 'rtdetr.config'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_they_read_what_threads_read_and_stay_for_the_next_list(checkpoint: Path, images: Path, device: str) -> None:
    predictor, files = Predictor(checkpoint, device, 0.0), sorted(images.iterdir())
    expected = as_text(list(predictor.predict_files(files, 3)))
    found = list(predictor.predict_files(iter(files), 3, num_processes=2))
    assert all(each.image is None and (each.kept is None) == bool(each.error) for each in found)
    if device == "cpu":  # a GPU's graphs come after a few batches
        assert as_text(found) == expected
    for ours, theirs in zip(found, expected):
        assert ours.best_score == pytest.approx(theirs[3], abs=1e-6 if device == "cpu" else 2e-2)
    assert [(each.file, each.error, each.size) for each in found] == [each[:3] for each in expected]
    running = pids_of(predictor.processes)
    again = list(predictor.predict_files(files, 5, num_processes=2, with_images=False))
    assert all(each.kept is None for each in again) and [each.size for each in again] == [each[2] for each in expected]
    assert pids_of(predictor.processes) == running and len(set(running)) == 2
    with pytest.raises(ValueError, match="read: only threads call it, expected num_processes=0, got 2"):
        next(predictor.predict_files(files, read=predictor.read_file, num_processes=2))
    with pytest.raises(ValueError, match="batch_size: expected a whole number from 1, got 0"):
        next(predictor.predict_files(files, 0))
    results = predictor.predict_files(files, 2, num_processes=2)
    next(results)
    results.close()  # nobody waits for the rest
    assert not predictor.processes.running
    wait_until_gone(running)


def test_a_kept_image_is_forgotten_with_its_object(checkpoint: Path, images: Path) -> None:
    predictor, files = Predictor(checkpoint), sorted(images.glob("*.png"))
    found = list(predictor.predict_files(files, 4, num_processes=1))
    kept = found[2].kept
    assert kept is not None and kept.ask(np.shape).result() == (45, 50, 3)
    gone = found[3].kept
    assert gone is not None
    process, number = gone.process, gone.number
    del found, gone
    assert kept.ask(np.shape).result() == (45, 50, 3) and not process.forgotten
    with pytest.raises(RunFailed, match="a process that reads images has died"):
        type(kept)(process, number).ask(np.shape).result()


def test_threads_serve_whoever_comes_meanwhile(model: RTDETRv3, images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_threads = [each.to_json() for each in model.predict(images, threshold=0)]
    monkeypatch.setattr(Readers, "choose", classmethod(lambda cls, *_: cls(1, 2)))
    with ThreadPoolExecutor(8) as pool:
        lists = list(pool.map(lambda _: [each.to_json() for each in model.predict(images, threshold=0)], range(8)))
    assert lists == [by_threads] * 8 and len(by_threads) == 23
    predictor = model._predictors.get()
    assert len(predictor.processes.running) == 2 and model._predictors.get(96).processes is predictor.processes
    files = sorted(images.iterdir())
    interleaved = itertools.zip_longest(*(predictor.predict_files(files, 2, num_processes=2) for _ in range(2)))
    for ours, theirs in interleaved:
        assert as_text([ours]) == as_text([theirs]) and theirs.kept is None


def test_a_folder_is_drawn_alike(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    written = []
    for number in (0, 2):
        options = [
            "--threshold",
            "0.005",
            "--crops",
            "--format",
            "coco,yolo",
            "--batch-size",
            "4",
            "--output-dir",
            "out",
        ]
        arguments = ["images", "-w", str(checkpoint), "--device", "cpu", "--processes", str(number), *options]
        assert cli.main(["predict", *arguments]) == 1  # one is no image
        out = tmp_path / "out"
        written.append({file.relative_to(out): file.read_bytes() for file in out.rglob("*") if file.is_file()})
        out.rename(tmp_path / f"out{number}")
    assert written[0] == written[1] and len(written[0]) > 22 * 3
    listed = json.loads(written[1][Path("results.json")])
    assert len(listed) == 23 and "error" in listed[4] and listed[5]["annotated"] == "out/05.jpg"
    assert any(each["detections"] for each in listed if "error" not in each)


def test_what_cannot_be_written_is_said(checkpoint: Path, images: Path, tmp_path: Path) -> None:
    predictor = Predictor(checkpoint)
    found = next(iter(list(predictor.predict_files(sorted(images.iterdir())[:1], num_processes=1))))
    (tmp_path / "file").touch()
    assert found.kept is not None
    with pytest.raises(FileExistsError):
        found.kept.ask(save_drawn, [], tmp_path / "file" / "a.jpg").result()


def test_fonts_are_missed_once_and_here(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fonts, "_installed", list)
    monkeypatch.setattr(fonts, "_warned", False)
    fonts._file_for.cache_clear()
    predictor = Predictor(checkpoint)
    detections = [Detection(1, "\u676f", 0.5, (1.0, 2.0, 30.0, 40.0))]
    with ResultsFolder(tmp_path / "out", [], predictor.classes) as results, caplog.at_level(logging.WARNING):
        for found in predictor.predict_files(sorted(images.iterdir())[:3], num_processes=2):
            results.begin_drawing(found._replace(detections=detections), Path(Path(found.file).name)).result()
    assert [each.message.count("no font here shows") for each in caplog.records] == [1]
    fonts._file_for.cache_clear()


def test_paths_begin_in_the_folder_of_the_moment(
    checkpoint: Path, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = Predictor(checkpoint)
    for folder, start in ((tmp_path, "images/"), (images, "")):
        monkeypatch.chdir(folder)
        found = list(predictor.predict_files([Path(f"{start}03.png"), Path(f"{start}04.jpg")], num_processes=1))
        assert found[0].size == (50, 43) and found[1].error.startswith(f"{start}04.jpg: cannot be read as an image")


def test_modules_of_the_working_folder_are_not_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numpy.py").write_text("raise SystemExit('the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    processes = ReadingProcesses()
    processes.start(1)
    assert processes.running[0].ask(os.getcwd).result() == str(tmp_path)


def test_a_lost_process_is_said_and_replaced(checkpoint: Path, images: Path) -> None:
    predictor, files = Predictor(checkpoint), sorted(images.iterdir())
    assert len(list(predictor.predict_files(files, num_processes=2))) == 23
    lost = pids_of(predictor.processes)[1]
    results = predictor.predict_files(itertools.cycle(files), num_processes=2)
    next(results)
    os.kill(lost, signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"a process that reads images has died, .*; 0 processes read in threads"):
        for _ in range(1000):
            next(results)
    assert len(list(predictor.predict_files(files, num_processes=2))) == 23
    os.kill(pids_of(predictor.processes)[0], signal.SIGKILL)
    assert predictor.processes._teams[0].parent.wait(60) == 1
    assert len(list(predictor.predict_files(files, num_processes=2))) == 23


def test_signals_are_the_main_process_s(checkpoint: Path, images: Path) -> None:
    processes = ReadingProcesses()
    processes.start(2)
    pids = pids_of(processes)
    for pid in pids:
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
    assert pids_of(processes) == pids
    assert processes.taken(2)
    [(_, _, gone)] = processes.batches(iter([Path("gone.png")]), 4, Task((8, 8), "cubic", 1.0, False, ""), False)
    assert isinstance(gone[0][1], DataError) and "gone.png: cannot be read" in str(gone[0][1])
    del processes
    wait_until_gone(pids)


def test_they_end_with_a_killed_main_process() -> None:
    code = (
        "import time\n"
        "from rtdetr.inference.processes import ReadingProcesses\n"
        "processes = ReadingProcesses()\n"
        "processes.start(2)\n"
        "print(*(each.ask(__import__('os').getpid).result() for each in processes.running), flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as main:
        assert main.stdout is not None
        pids = [int(each) for each in main.stdout.readline().split()]
        main.kill()
    assert len(pids) == 2
    wait_until_gone(pids)


def test_ctrl_c_leaves_whole_files_and_no_process(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    for i in range(1000):
        Image.new("RGB", (20, 30), (i % 256, 0, 99)).save(tmp_path / "images" / f"{i}.bmp")
    arguments = ["images", "-w", str(checkpoint), "--device", "cpu", "--processes", "2", "--output-dir", "out"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "rtdetr", "predict", *arguments]
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "text": True, "start_new_session": True}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options) as main:
        results, deadline = tmp_path / "out" / "results.json", time.monotonic() + 120
        while not results.is_file() or results.read_bytes().count(b"\n") < 20:
            assert main.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        os.killpg(main.pid, signal.SIGINT)  # as a terminal does, to all of them
        said, _ = main.communicate(timeout=120)  # the processes hold this pipe as well
    assert main.returncode == 130 and "stopped by Ctrl-C" in said and "Traceback" not in said
    listed = json.loads(results.read_text())
    assert 20 <= len(listed) < 1000
    for each in listed:
        Image.open(tmp_path / each["annotated"]).load()
    assert not [*(tmp_path / "out").rglob("*.part")]
