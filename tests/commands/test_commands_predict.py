"""`rtdetr predict` on videos, cameras, addresses, lists of images and slices. Images: test_commands_table.py."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_cases import PIXELS, Web
from messages import message
from PIL import Image, ImageDraw
from plain_kernels import OurOperators

from rtdetr import cli
from rtdetr.data.classes import Classes
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import Predictor
from rtdetr.ops.compiled import WHY_NOT

NUM_IMAGES = 2000
TIMES = [33 * number + 5 * (number % 3) for number in range(300)]  # milliseconds; no two gaps need be the same


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(checkpoint: Path, *arguments: object) -> int:
    try:
        return cli.main(["predict", "-w", str(checkpoint), "--device", "cpu", *map(str, arguments)])
    except SystemExit as end:
        assert isinstance(end.code, int)
        return end.code


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def frame(number: int, size: tuple[int, int]) -> Image.Image:
    """A red and a blue square that pass each other in 300 frames, 160 x 120; a wall hides the red one for 0.4 s."""
    image = Image.new("RGB", size, (30, 30, 30))
    pen = ImageDraw.Draw(image)
    pen.rectangle((10 + 0.4 * number, 20, 29 + 0.4 * number, 39), fill=(230, 20, 20))
    pen.rectangle((130 - 0.4 * number, 70, 149 - 0.4 * number, 89), fill=(20, 20, 230))
    if 150 <= number < 162:
        pen.rectangle((60, 10, 110, 50), fill=(120, 120, 120))
    return image


def write_film(file: Path, num_frames: int, size: tuple[int, int] = (160, 120), **options: str) -> Path:
    av = pytest.importorskip("av", reason="videos: PyAV is not installed")
    with av.open(str(file), "w", options=options) as container:
        stream = container.add_stream("mpeg4", rate=30)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        stream.gop_size = 1  # frames of about one size, so that half a file holds about half of them
        for number in range(num_frames):
            image = av.VideoFrame.from_image(frame(number, size))
            image.pts, image.time_base = TIMES[number], Fraction(1, 1000)
            container.mux(stream.encode(image))
        container.mux(stream.encode())
    return file


def times_of(file: Path, size: tuple[int, int]) -> list[float]:
    """Seconds of all frames of a film, after a look at their size."""
    import av

    with av.open(str(file)) as container:
        frames = [*container.decode(video=0)]
    assert {(each.width, each.height) for each in frames} == {size}
    return [each.time for each in frames]


def squares(self: Predictor, images: list[Image.Image]) -> list[list[Detection]]:
    """In place of a trained model: the red and the blue square, where they can be seen."""
    found = []
    for image in images:
        pixels, detections = np.asarray(image).astype(int), []
        for category_id, channel in ((3, 0), (9, 2)):
            rows, columns = np.nonzero(pixels[..., channel] - pixels[..., 2 - channel] > 100)
            if len(rows) > 200:
                box = (float(columns.min()), float(rows.min()), float(columns.max()) + 1, float(rows.max()) + 1)
                detections.append(Detection(category_id, "square", 0.9, box))
        found.append(detections)
    return found


@pytest.mark.parametrize(("name", "size"), [("film.mp4", (160, 120)), ("film.mkv", (161, 121))])
def test_a_video_keeps_its_frames_times_and_size(
    name: str, size: tuple[int, int], checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    film = write_film(folder / name, 20, size)
    assert run(checkpoint, name, "--format", "coco", "--output-dir", "none") == 2 and not (folder / "none").exists()
    assert "--format: expected an image" in capsys.readouterr().err
    assert run(checkpoint, name, "--threshold", 0, "--every", 3, "--output-dir", "new", "--crops") == 0
    times = times_of(film, size)
    assert times_of(folder / "new" / "film.mp4", size) == pytest.approx(times, abs=1e-6) and len(times) == 20
    listed = lines(folder / "new" / "film.jsonl")
    assert [each["frame"] for each in listed] == [0, 3, 6, 9, 12, 15, 18]
    assert [each["seconds"] for each in listed] == pytest.approx(times[::3], abs=1e-6)
    assert set(listed[0]["detections"][0]) == {"category_id", "name", "score", "box"}
    for each in listed:
        assert len([*(folder / "new" / "crops" / "film" / str(each["frame"])).iterdir()]) == len(each["detections"])
    assert {each.name for each in (folder / "new").iterdir()} == {"film.mp4", "film.jsonl", "crops"}
    again = ("--threshold", 0, "--every", 9, "--output-dir", "new", "--crops", "--overwrite")
    assert run(checkpoint, name, *again) == 0
    assert {each.parent.name for each in (folder / "new" / "crops").rglob("*.jpg")} <= {"0", "9", "18"}
    assert "film" in (said := capsys.readouterr()).out and "20 frames" in said.out and "frames [" in said.err


def test_frames_in_between_show_the_last_boxes(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_film(folder / "film.mp4", 6)
    drawn: list[int] = []
    monkeypatch.setattr(Predictor, "predict", squares)
    monkeypatch.setattr(
        "rtdetr.inference.video_out.draw", lambda image, found, enlarge: drawn.append(len(found)) or image
    )
    assert run(checkpoint, "film.mp4", "--every", 4, "--output-dir", "new", "--batch-size", 3) == 0
    assert drawn == [2] * 6 and [each["frame"] for each in lines(folder / "new" / "film.jsonl")] == [0, 4]


@pytest.mark.parametrize("name", ["film.mp4", "film.mkv", "film.avi"])
def test_a_truncated_video_ends_with_what_it_had(
    name: str, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = (
        write_film(folder / name, 90, movflags="faststart") if name.endswith("mp4") else write_film(folder / name, 90)
    )
    assert run(checkpoint, name, "--output-dir", "whole") == 0
    content = whole.read_bytes()
    whole.write_bytes(content[: len(content) // 2])
    capsys.readouterr()
    assert run(checkpoint, name, "--output-dir", "new") == 1
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and f"error: {name}: cut off, it ends at " in errors[0]
    number = len(lines(folder / "new" / "film.jsonl"))
    assert 10 < number < 89 and f"after {number} frames" in errors[0]
    assert (
        times_of(folder / "new" / "film.mp4", (160, 120))
        == times_of(folder / "whole" / "film.mp4", (160, 120))[:number]
    )


def test_what_is_no_video_leaves_nothing(checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("av", reason="videos: PyAV is not installed")
    (folder / "words.mp4").write_bytes(b"words" * 100)
    assert run(checkpoint, "words.mp4", "--output-dir", "new") == 1
    assert message("not opened", "words.mp4", "video").search(capsys.readouterr().err) and not (folder / "new").exists()


def test_a_malformed_address_costs_itself_alone(
    checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (64, 64)).save("a.png")
    bad = [
        "http://a..b/x.png",
        f"http://{'a' * 64}.test/film.mp4",
        "http://１２７.0.0.1/",
        "http://[::1/",
        "rtsp://a:b/",
    ]
    assert run(checkpoint, bad[0], "a.png", *bad[1:]) == 1
    results = json.loads(Path("output/predict/results.json").read_text())
    assert [each["file"] for each in results] == [bad[0], "a.png", *bad[1:]]
    assert ["error" in each for each in results] == [True, False] + [True] * 4
    assert capsys.readouterr().err.count("not an address") == 5
    Path("list.txt").write_text("\n".join([bad[0], "a.png", *bad[1:]]))
    assert run(checkpoint, "--manifest", "list.txt", "--output-dir", "listed") == 1
    assert ["error" in each for each in lines(Path("listed/results.jsonl"))] == [True, False] + [True] * 4


def test_a_name_that_is_too_long_is_one_sentence(
    checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(checkpoint, "x" * 300) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message("not looked at", "File name too long").search(line) and not [*folder.iterdir()]


def test_a_camera_is_filmed_until_it_goes(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("av", reason="videos: PyAV is not installed")
    left = [3]

    class Camera:
        def __init__(self, index: int) -> None:
            assert index == 0

        def isOpened(self) -> bool:
            return True

        def read(self) -> tuple[bool, Any]:
            left[0] -= 1
            return left[0] >= 0, np.zeros((48, 64, 3), np.uint8)

        def release(self) -> None:
            pass

    monkeypatch.setattr("cv2.VideoCapture", Camera)
    assert run(checkpoint, "0", "--output-dir", "new") == 1
    assert "error: camera 0: delivers no more images" in capsys.readouterr().err
    assert (
        len(times_of(folder / "new" / "camera-0.mp4", (64, 48))) == len(lines(folder / "new" / "camera-0.jsonl")) == 3
    )


def test_a_stream_is_read_as_it_comes(checkpoint: Path, folder: Path) -> None:
    content = write_film(folder / "film.ts", 20).read_bytes()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(content)

        threading.Thread(target=send, daemon=True).start()
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert run(checkpoint, url, "--output-dir", "new") == 0
    assert (
        len(lines(folder / "new" / "127.0.0.1.jsonl"))
        == len(times_of(folder / "new" / "127.0.0.1.mp4", (160, 120)))
        == 20
    )


def test_ctrl_c_ends_a_video_where_it_is(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_film(folder / "film.mp4", 40)

    def press(self: Predictor, images: list[Image.Image]) -> list[list[Detection]]:
        signal.raise_signal(signal.SIGINT)
        return squares(self, images)

    monkeypatch.setattr(Predictor, "predict", press)
    assert run(checkpoint, "film.mp4", "film.mp4", "--output-dir", "new", "--batch-size", 4) == 130
    assert len(times_of(folder / "new" / "film.mp4", (160, 120))) == len(lines(folder / "new" / "film.jsonl")) == 1
    assert message("stopped", "Ctrl-C", "1 frame", "new/film.mp4").search(capsys.readouterr().err)


@pytest.mark.parametrize(("threshold", "limit"), [(0, 4096), (1, 4000)])  # meets the lines, meets the film
def test_a_disk_that_fills_up_is_one_sentence(
    threshold: int, limit: int, checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_film(folder / "film.mp4", 60)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        code = run(checkpoint, "film.mp4", "--threshold", threshold, "--output-dir", "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    err = capsys.readouterr().err
    assert code == 1 and "cannot be written (File too large)" in err and "Traceback" not in err
    assert not [*(folder / "new").glob(".*")]


@pytest.mark.parametrize("module", ["av", "trackers"])
def test_a_missing_package_is_one_sentence(
    module: str, checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "film.mp4").write_bytes(b"a film")
    monkeypatch.setitem(sys.modules, "av", sys)  # anything that can be imported
    monkeypatch.setitem(sys.modules, module, None)
    assert run(checkpoint, "film.mp4", "--track", "--output-dir", "new") == 2
    err = capsys.readouterr().err
    extra = {"av": "video", "trackers": "track"}[module]
    assert f'pip install "rtdetr[{extra}]"' in err and len(err.splitlines()) == 1 and not (folder / "new").exists()


def test_ids_stay_through_an_occlusion(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("trackers", "supervision"):
        pytest.importorskip(module, reason=f"tracking: {module} is not installed")
    film = write_film(folder / "film.mp4", 300)
    monkeypatch.setattr(Predictor, "predict", squares)
    assert run(checkpoint, "film.mp4", "--track", "--output-dir", "new") == 0
    listed = lines(folder / "new" / "film.jsonl")
    assert [each["frame"] for each in listed] == [*range(300)]
    assert times_of(folder / "new" / "film.mp4", (160, 120)) == pytest.approx(times_of(film, (160, 120)), abs=1e-6)
    hidden = [each["frame"] for each in listed if 3 not in {found["category_id"] for found in each["detections"]}]
    assert hidden == [*range(150, 162)]
    ids = {3: Counter[Any](), 9: Counter[Any]()}
    for each in listed:
        for found in each["detections"]:
            ids[found["category_id"]][found["track"]] += 1
    assert all(len(numbers.keys() - {None}) == 1 and numbers[None] <= 1 for numbers in ids.values()), ids


def test_an_address_is_an_image_as_a_file_is(checkpoint: Path, folder: Path, web: Web) -> None:
    Image.fromarray(PIXELS).save(folder / "a.png")
    web.files["/x/a.png"] = ("image/png", (folder / "a.png").read_bytes())
    urls = [f"{web.url}/x/a.png", f"{web.url}/nothing.png"]
    assert run(checkpoint, "a.png", *urls, "--output-dir", "new", "--threshold", 0) == 1
    here, there, missing = json.loads((folder / "new" / "results.json").read_text())
    assert there["file"] == urls[0] and there["detections"] == here["detections"] != []
    assert missing["file"] == urls[1] and urls[1] in missing["error"]
    assert (folder / "new" / "a_1.jpg").is_file()


def test_slices_and_crops(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The squares of a large image of four frames, as if they were too small in the whole."""
    image = Image.new("RGB", (320, 240))
    for place in ((0, 0), (160, 0), (0, 120), (160, 120)):
        image.paste(frame(40, (160, 120)), place)
    image.save(folder / "large.png")
    (folder / "page.png").write_text("<html>")

    def near(self: Predictor, images: list[Any]) -> list[list[Detection]]:
        return [[] if each.shape[1] > 160 else squares(self, [each])[0] for each in images]

    monkeypatch.setattr(Predictor, "predict", near)
    assert run(checkpoint, "large.png", "page.png", "--output-dir", "whole") == 1
    assert (
        run(checkpoint, "large.png", "page.png", "--slices", "2x2", "--overlap", "0", "--output-dir", "new", "--crops")
        == 1
    )
    listed = json.loads((folder / "new" / "results.json").read_text())
    assert "cannot be read" in listed[1]["error"]
    found = [(each["category_id"], *each["box"]) for each in listed[0]["detections"]]
    red, blue = (3, 26.0, 20.0, 46.0, 40.0), (9, 114.0, 70.0, 134.0, 90.0)
    moved = [(0, 0), (160, 0), (0, 120), (160, 120)]
    assert sorted(found) == sorted(
        (c, x1 + x, y1 + y, x2 + x, y2 + y) for c, x1, y1, x2, y2 in (red, blue) for x, y in moved
    )
    crops = folder / "new" / "crops" / "large"
    assert {each.name for each in crops.iterdir()} == {f"{number}.jpg" for number in range(1, 9)}
    for number, each in enumerate(listed[0]["detections"], start=1):
        crop = np.asarray(Image.open(crops / f"{number}.jpg")).astype(int)
        assert crop.shape == (20, 20, 3) and crop[10, 10, 0 if each["category_id"] == 3 else 2] > 180
    assert run(checkpoint, "large.png", "--output-dir", "new", "--crops") == 2


def test_the_arguments_reach_the_predictor(
    checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.fromarray(PIXELS).save(folder / "a.png")
    assert run(checkpoint, "a.png", "--half", "on", "--output-dir", "new") == 2
    assert message("expected", "half", "GPU", "cpu").search(capsys.readouterr().err)
    given: list[Any] = []
    monkeypatch.setattr(Predictor, "__init__", lambda self, *_, **options: given.append(options))
    monkeypatch.setattr(Predictor, "classes", Classes(("cat",), (3,)), raising=False)
    monkeypatch.setattr(Predictor, "cfg", type("", (), {"data": type("", (), {"max_megapixels": 1})}), raising=False)
    monkeypatch.setattr(Predictor, "predict_files", lambda self, files, size, **_: given.append(size) or iter(()))
    assert run(checkpoint, "a.png", "--half", "off", "--compile", "--batch-size", "3", "--output-dir", "new") == 0
    assert given == [{"half": False, "compile": True}, 3]
    assert run(checkpoint, "a.png", "--kernels", "plain", "--output-dir", "plain") == 0
    assert given[2] == {"half": "auto", "compile": False, "kernels": "plain"}


def test_plain_kernels(checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`auto` sees the same boxes, by operators of ours."""
    Image.fromarray(PIXELS).save(folder / "a.png")
    for kernels in ("auto", "plain"):
        with OurOperators() as called:
            assert run(checkpoint, "a.png", "--kernels", kernels, "--threshold", "0", "--output-dir", kernels) == 0
        assert (not called.names) == (kernels == "plain" or WHY_NOT["cpu"] is not None)
    plain, auto = (json.loads((folder / name / "results.json").read_text()) for name in ("plain", "auto"))
    assert len(plain[0]["detections"]) == len(auto[0]["detections"])
    (folder / "model.onnx").touch()
    assert run(folder / "model.onnx", "a.png", "--kernels", "plain", "--output-dir", "exported") == 2
    assert "--kernels are for checkpoints" in capsys.readouterr().err


def test_a_list_read_by_processes(checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for i in range(9):
        Image.new("RGB", (20 + i, 30), (9 * i, 0, 99)).save(folder / f"{i}.png")
    (folder / "3.png").write_text("no image")
    (folder / "list.txt").write_text("".join(f"{i}.png\n" for i in range(10)))
    for name, options in (("threads", []), ("processes", ["--processes", "2"])):
        arguments = ["--manifest", "list.txt", "--output-dir", name, "--batch-size", "4", *options]
        assert run(checkpoint, *arguments) == 1
    ours, theirs = (lines(folder / name / "results.jsonl") for name in ("processes", "threads"))
    assert [each | {"detections": 0} for each in ours] == [each | {"detections": 0} for each in theirs]
    assert (ours[1]["width"], ours[1]["height"]) == (21, 30) and "error" in ours[3] and "error" in ours[9]
    capsys.readouterr()
    assert run(checkpoint, "1.png", "--processes", "2", "--slices", "64") == 2
    assert "--processes cannot be used with URLs, with --slices" in capsys.readouterr().err


def test_a_killed_list_is_resumed_exactly(checkpoint: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    names = [f"p/{number:04}.bmp" for number in range(NUM_IMAGES)]
    (folder / "p").mkdir()
    for name in names:
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / name)
    (folder / names[7]).write_text("no image")
    (folder / "list.txt").write_text("\n".join([*names, "", names[0]]))
    arguments = ["--manifest", "list.txt", "--output-dir", "new", "--batch-size", "32"]
    command = [sys.executable, "-m", "rtdetr", "predict", "-w", str(checkpoint), "--device", "cpu", *arguments]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    results, deadline = folder / "new" / "results.jsonl", time.monotonic() + 120
    while not results.is_file() or results.read_bytes().count(b"\n") < 200:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = results.read_bytes()
    done = before.count(b"\n")
    assert 200 <= done < NUM_IMAGES
    results.write_bytes(before + b'{"file": "p/19')  # what a full disk or a lost machine leaves
    assert run(checkpoint, *arguments) == 2  # not by mistake
    assert "results.jsonl: exists already" in capsys.readouterr().err
    assert run(checkpoint, *arguments, "--resume") == 1  # one of them cannot be read
    listed = lines(results)
    assert [each["file"] for each in listed] == [*names, names[0]] and results.read_bytes().startswith(before)
    assert "error" in listed[7] and set(listed[8]) == {"file", "width", "height", "detections"}
    said = capsys.readouterr()
    assert f"{done} of 2001 images done" in said.out and "1 of 2001 files could not be read" in said.err
    whole = results.read_bytes()
    assert run(checkpoint, *arguments, "--resume") == 1 and results.read_bytes() == whole
    (folder / "list.txt").write_text("\n".join([*names[1:], names[0]]))
    assert run(checkpoint, *arguments, "--resume") == 2 and results.read_bytes() == whole
    assert message("other list", "line 1", "p/0000.bmp", "p/0001.bmp").search(capsys.readouterr().err)
