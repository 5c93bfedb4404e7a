"""The Python API: every kind of source, each wrong one in one sentence, training, evaluation, saving and sharing."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from PIL import Image

import rtdetr
from rtdetr import RTDETRv3
from rtdetr.commands.predict import run as predict_command
from rtdetr.config import ConfigError, keyword_updates
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.locate import data_updates
from rtdetr.extras import MissingPackage
from rtdetr.inference import fetch, slicing, video
from rtdetr.inference.draw import Detection
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import CheckpointError, make_checkpoint, save_checkpoint

NAMES, IDS = ("cat", "dog", "cow"), (3, 7, 9)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def checkpoint(data: Path) -> Path:
    torch.manual_seed(0)
    cfg = tiny_config(data)
    path = data / "model.pth"
    weights = build_model(cfg.model, len(NAMES)).state_dict()
    save_checkpoint(path, make_checkpoint(cfg, Classes(NAMES, IDS), weights, source={"licence": "MIT"}))
    return path


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> RTDETRv3:
    return RTDETRv3.from_pretrained(checkpoint, device="cpu")


@pytest.fixture(scope="module")
def pixels() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def picture(data: Path, pixels: np.ndarray[Any, Any]) -> Path:
    folder = data / "pictures"
    folder.mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(pixels).save(folder / name)
    return folder / "a.png"


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, rtdetr; assert 'torch' not in sys.modules; assert 'RTDETRv3' in dir(rtdetr)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_there_is_nothing_else_in_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RTDETR'"):
        rtdetr.RTDETR  # noqa: B018
    assert rtdetr.RTDETRv3 is RTDETRv3
    assert (Path(rtdetr.__file__).parent / "py.typed").is_file()


def test_a_result_is_arrays_names_and_what_others_expect(model: RTDETRv3, picture: Path) -> None:
    result = model.predict(picture, threshold=0)
    n = len(result)
    assert n and result.boxes.shape == (n, 4) and result.boxes.dtype == np.float32
    assert result.scores.shape == (n,) and (np.diff(result.scores) <= 0).all()
    assert set(result.class_ids.tolist()) <= set(IDS)
    assert result.names == [NAMES[IDS.index(each)] for each in result.class_ids]
    assert (result.width, result.height, result.source) == (90, 70, str(picture))
    assert (result.boxes.min(axis=0) >= 0).all() and (result.boxes.max(axis=0) <= [90, 70, 90, 70]).all()
    first = next(iter(result))
    hf, coco = result.to_hf()[0], result.to_coco(5)[0]
    assert hf["label"] == first.name and list(hf["box"].values()) == list(first.box)
    x1, y1, x2, y2 = first.box
    assert coco == {
        "image_id": 5,
        "category_id": first.category_id,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "score": hf["score"],
    }
    written = json.loads(result.to_json())
    assert len(written["detections"]) == n and written["detections"][0]["category_id"] == first.category_id
    assert result.draw().width == 7 * 90 and result._repr_png_().startswith(b"\x89PNG")


def test_the_file_is_as_good_as_the_command_line_says(
    model: RTDETRv3, checkpoint: Path, picture: Path, tmp_path: Path
) -> None:
    """The five lines and the one line find the same."""
    assert (
        predict_command([str(picture), "-w", str(checkpoint), "--threshold", "0", "--output-dir", str(tmp_path)]) == 0
    )
    (listed,) = json.loads((tmp_path / "results.json").read_text())
    assert listed["detections"] == json.loads(model.predict(picture, threshold=0).to_json())["detections"]


def test_one_picture_in_any_form_gives_the_same(
    model: RTDETRv3, picture: Path, pixels: np.ndarray[Any, Any], web: Web
) -> None:
    expected = model.predict(pixels, threshold=0).boxes
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    web.files["/a.png"] = ("image/png", picture.read_bytes())
    for source in (picture, str(picture), Image.open(picture), tensor, tensor / 255):
        np.testing.assert_array_equal(model.predict(source, threshold=0).boxes, expected)
    found = model.predict(f"{web.url}/a.png", threshold=0, allow_private=True)
    np.testing.assert_array_equal(found.boxes, expected)
    assert found.source == f"{web.url}/a.png"


def test_several_pictures_give_a_list(model: RTDETRv3, picture: Path, pixels: np.ndarray[Any, Any]) -> None:
    batch = torch.from_numpy(pixels).permute(2, 0, 1).expand(3, -1, -1, -1)
    sources: list[tuple[Any, int]] = [
        ([picture, pixels, Image.fromarray(pixels)], 3),
        (batch, 3),
        (picture.parent, 2),
        (str(picture.parent / "*.png"), 2),
    ]
    for source, number in sources:
        results = model.predict(source, batch_size=2)
        assert isinstance(results, list) and len(results) == number


def test_a_generator_gives_an_iterator_that_asks_for_a_batch_at_a_time(
    model: RTDETRv3, pixels: np.ndarray[Any, Any]
) -> None:
    asked = []

    def frames() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(5):
            asked.append(number)
            yield pixels

    results = model.predict(frames(), batch_size=2)
    assert asked == []
    next(results)
    assert asked == [0, 1]
    assert len(list(results)) == 4


def test_a_broken_picture_of_a_folder_costs_itself_alone(model: RTDETRv3, picture: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    (tmp_path / "good.png").write_bytes(picture.read_bytes())
    broken, good = model.predict(tmp_path)
    assert "cannot be read as a picture" in broken.error and len(broken) == 0 and not good.error
    assert json.loads(broken.to_json())["error"] == broken.error and broken._repr_png_() is None


WRONG: list[tuple[Any, str]] = [
    ("text.txt", "cannot be read as a picture"),
    ("missing.jpg", "no picture found"),
    ("", "names nothing"),
    ([], "the list is empty"),
    (["missing.jpg"], "missing.jpg: cannot be read as a picture"),
    ([3], "got int"),
    ({"a": 1}, "got dict"),
    (b"bytes", "got bytes"),
    (None, "got NoneType"),
    (True, "got bool"),
    (4711, "camera 4711: cannot be opened"),
    (np.zeros((8, 8), np.uint8), r"expected a uint8 RGB array \(H, W, 3\)"),
    (np.zeros((8, 8, 3)), "got dtype float64"),
    (np.zeros((0, 8, 3), np.uint8), "got dtype uint8 and shape"),
    (torch.zeros(8, 8, 3), r"expected RGB of shape \(3, H, W\)"),
    (torch.full((3, 8, 8), 2.0), "expected floats from 0 to 1"),
    (torch.full((3, 8, 8), torch.nan), "expected floats from 0 to 1"),
    (torch.zeros(3, 8, 8, dtype=torch.int64), "expected uint8"),
    ("ftp://example.org/a.jpg", "expected http, https or a stream"),
    ("file:///etc/passwd", "expected http, https or a stream"),
    ("http://", "names no machine"),
    ("http://[::1/a.jpg", "not an address"),
]


@pytest.mark.parametrize(("source", "sentence"), WRONG, ids=lambda value: str(value)[:30])
def test_a_wrong_source_is_one_sentence(
    model: RTDETRv3, source: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("words")
    with pytest.raises(DataError, match=sentence) as raised:
        model.predict(source)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threshold": 2}, "threshold: expected a number from 0 to 1, got 2"),
        ({"batch_size": 0}, "batch_size: expected a whole number from 1"),
        ({"slices": 3}, "slices: expected the side of a tile"),
        ({"size": 100}, "data.image_size"),
        ({"size": (64, 64, 3)}, "data.image_size"),
    ],
)
def test_a_wrong_option_is_one_sentence(
    model: RTDETRv3, pixels: np.ndarray[Any, Any], options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        model.predict(pixels, **options)


class Web:
    """A server on this machine: files by path; what else it can do is in `special`."""

    def __init__(self) -> None:
        self.files: dict[str, tuple[str, bytes]] = {}
        web = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.asked: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        self.asked.append(request.path)
        if request.path == "/redirect":
            request.send_response(302)
            request.send_header("Location", "file:///etc/passwd")
            request.end_headers()
        elif request.path in ("/huge", "/cut"):
            request.send_response(200)
            request.send_header("Content-Type", "image/png")
            request.send_header("Content-Length", str(3 * 10**9 if request.path == "/huge" else 1000))
            request.end_headers()
            request.wfile.write(b"x" * 10)
        elif request.path == "/endless":
            request.send_response(200)
            request.end_headers()
            request.wfile.write(b"x" * 100_000)
        elif request.path == "/slow":
            for letter in b"HTTP/1.0 200 OK":
                request.wfile.write(bytes([letter]))
                time.sleep(0.05)
        elif request.path in self.files:
            kind, content = self.files[request.path]
            start = int(request.headers["Range"].removeprefix("bytes=").rstrip("-")) if request.headers["Range"] else 0
            request.send_response(206 if start else 200)
            request.send_header("Content-Type", kind)
            request.send_header("Content-Length", str(len(content) - start))
            request.end_headers()
            request.wfile.write(content[start:])
        else:
            request.send_error(404)


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    server = Web()
    yield server
    server.server.shutdown()
    server.server.server_close()


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/missing.png", r"the server answers 404 \(Not Found\)"),
        ("/page", "the server sends text/html, a web page, expected a picture"),
        ("/huge", "3,000,000,000 bytes, more than the 100,000,000"),
        ("/endless", "more than the 50,000"),
        ("/slow", "not here after 0.3 s"),
        ("/cut", "ended 990 bytes too early"),
        ("/redirect", "the server answers 302"),
        ("/text.png", "/text.png: cannot be read as a picture"),
    ],
)
def test_a_wrong_address_is_one_sentence(
    model: RTDETRv3, web: Web, path: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path in ("/endless", "/slow"):
        from rtdetr.inference import sources

        monkeypatch.setattr(sources, "PICTURE", fetch.PICTURE._replace(max_bytes=50_000, seconds=0.3))
    web.files["/page"] = ("text/html", b"<html>")
    web.files["/text.png"] = ("image/png", b"words")
    with pytest.raises(DataError, match=sentence) as raised:
        model.predict(f"{web.url}{path}", allow_private=True)
    assert "\n" not in str(raised.value)


def test_a_machine_that_does_not_answer_is_one_sentence(model: RTDETRv3, web: Web) -> None:
    with pytest.raises(DataError, match="cannot be fetched"):
        model.predict("http://127.0.0.1:9/a.png", allow_private=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "10.1.2.3", "169.254.169.254", "[::1]", "[::ffff:7f00:1]"])
def test_private_addresses_are_refused(model: RTDETRv3, web: Web, host: str) -> None:
    web.asked.clear()
    for scheme in ("http", "rtsp"):
        with pytest.raises(DataError, match="on this machine or in a private network"):
            model.predict(f"{scheme}://{host}:{web.server.server_port}/a.png")
    assert web.asked == []


def test_a_name_that_leads_elsewhere_the_second_time_is_refused(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was looked up and found public may be private when it is asked for."""
    monkeypatch.setattr(fetch, "refuse_private", lambda url: None)
    web.asked.clear()
    with pytest.raises(DataError, match="on this machine or in a private network"):
        fetch.fetch(f"{web.url}/a.png", Path("/dev/null"), fetch.PICTURE)
    assert web.asked == []


def test_a_redirect_to_a_private_address_is_refused(web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first address counts as public here, the one that it redirects to does not."""
    seen: list[str] = []

    def refuse_second(url: str) -> None:
        seen.append(url)
        if len(seen) > 1:
            raise DataError("second address refused")

    web.files["/here.png"] = ("image/png", b"")
    monkeypatch.setattr(fetch, "refuse_private", refuse_second)
    monkeypatch.setattr(fetch, "_refuse_address", lambda address, host: None)
    monkeypatch.setattr(web, "answer", lambda request: _redirect(request, f"{web.url}/here.png"))
    with pytest.raises(DataError, match="second address refused"):
        fetch.fetch(f"{web.url}/start", tmp_path / "file", fetch.PICTURE)


def _redirect(request: BaseHTTPRequestHandler, target: str) -> None:
    request.send_response(302)
    request.send_header("Location", target)
    request.end_headers()


def test_a_video_is_an_iterator_over_its_frames(
    model: RTDETRv3, tmp_path: Path, pixels: np.ndarray[Any, Any], web: Web
) -> None:
    av = pytest.importorskip("av", reason="videos: PyAV is not installed")
    file = tmp_path / "film.mp4"
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width, stream.height, stream.pix_fmt = 96, 64, "yuv420p"
        for _ in range(3):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((64, 96, 3), np.uint8))))
        container.mux(stream.encode())
    results = list(model.predict(file))
    assert [each.source for each in results] == ["frame 0", "frame 1", "frame 2"]
    assert (results[0].width, results[0].height) == (96, 64)
    web.files["/film.mp4"] = ("video/mp4", file.read_bytes())
    assert len(list(model.predict(f"{web.url}/film.mp4", allow_private=True))) == 3


def test_a_broken_video_is_one_sentence(model: RTDETRv3, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="videos: PyAV is not installed")
    (tmp_path / "film.mp4").write_bytes(b"words" * 100)
    with pytest.raises(DataError, match="cannot be opened as a video"):
        model.predict(tmp_path / "film.mp4")
    with pytest.raises(DataError, match="cannot be opened as a video"):
        model.predict("rtsp://127.0.0.1:9/stream", allow_private=True)


class Camera:
    """In place of cv2.VideoCapture: two frames, then unplugged."""

    def __init__(self, index: int) -> None:
        self.left, self.released = 2, False

    def isOpened(self) -> bool:
        return True

    def read(self) -> tuple[bool, Any]:
        self.left -= 1
        return self.left >= 0, np.full((8, 8, 3), (255, 0, 0), np.uint8)

    def release(self) -> None:
        self.released = True


def test_a_camera_delivers_until_it_is_closed(model: RTDETRv3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cv2.VideoCapture", Camera)
    frames = video.camera_frames(0)
    assert next(frames).getpixel((0, 0)) == (0, 0, 255)
    results = model.predict(0)
    assert [next(results).source, next(results).source] == ["frame 0", "frame 1"]
    with pytest.raises(DataError, match="camera 0: delivers no more pictures"):
        next(results)


def test_a_missing_package_is_one_sentence(
    model: RTDETRv3, tmp_path: Path, picture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("av", "supervision", "huggingface_hub", "safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "film.mp4").touch()
    result = model.predict(picture)
    calls: dict[str, Any] = {
        "video": lambda: model.predict(tmp_path / "film.mp4"),
        "supervision": result.to_supervision,
        "hub": lambda: model.save_pretrained(tmp_path / "model"),
    }
    for extra, call in calls.items():
        with pytest.raises(MissingPackage, match=rf'pip install "rtdetr\[{extra}\]"'):
            call()
    for call in (lambda: RTDETRv3.from_pretrained("owner/model"), lambda: model.push_to_hub("owner/model")):
        with pytest.raises(MissingPackage, match=r'pip install "rtdetr\[hub\]"'):
            call()


def test_supervision_gets_its_detections(model: RTDETRv3, picture: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "supervision", types.SimpleNamespace(Detections=dict))
    result = model.predict(picture, threshold=0)
    given: Any = result.to_supervision()
    assert given["xyxy"] is not None and given["class_id"].tolist() == result.class_ids.tolist()
    assert given["data"]["class_name"].tolist() == result.names


def test_tiles_cover_the_picture_and_boxes_are_merged() -> None:
    areas = slicing.tiles((100, 70), (40, 50))
    covered = np.zeros((70, 100), bool)
    for x1, y1, x2, y2 in areas:
        assert (x2 - x1, y2 - y1) == (50, 40)
        covered[y1:y2, x1:x2] = True
    assert covered.all() and len(set(areas)) == len(areas)
    assert slicing.tiles((30, 20), (40, 50)) == [(0, 0, 30, 20)]

    def predict(pictures: list[Image.Image]) -> list[list[Detection]]:
        """Finds the white square wherever it is whole."""
        found = []
        for each in pictures:
            box = each.getbbox()
            whole = box is not None and (box[2] - box[0], box[3] - box[1]) == (6, 6)
            found.append([Detection(1, "square", 0.9, tuple(map(float, box)))] if whole and box else [])
        return found

    picture = Image.new("RGB", (100, 70))
    picture.paste("white", (61, 40, 67, 46))
    (only,) = slicing.predict_sliced(predict, picture, (40, 50), batch_size=2)
    assert only.box == (61, 40, 67, 46)
    other = Detection(2, "other", 0.8, only.box)
    assert slicing.merge([only._replace(score=0.5), other, only]) == [only, other]


def test_sliced_inference_runs(model: RTDETRv3, pixels: np.ndarray[Any, Any]) -> None:
    assert len(model.predict(pixels, threshold=0, slices=(48, 64), size=(64, 96)))


def test_saved_as_safetensors_and_read_again(model: RTDETRv3, checkpoint: Path, picture: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    folder = model.save_pretrained(tmp_path / "model")
    assert sorted(each.name for each in folder.iterdir()) == ["config.json", "model.safetensors"]
    about = json.loads((folder / "config.json").read_text())
    assert about["classes"] == {"names": list(NAMES), "category_ids": list(IDS)} and about["licence"] == "MIT"
    assert about["rtdetr_version"] == rtdetr.__version__ and about["preprocess"]["size"] == [64, 64]
    assert about["source"]["checkpoint"] == "model.pth" and len(about["source"]["checkpoint_sha256"]) == 64
    expected = model.predict(picture, threshold=0).boxes
    for path in (folder, folder / "model.safetensors"):
        again = RTDETRv3.from_pretrained(path)
        np.testing.assert_array_equal(again.predict(picture, threshold=0).boxes, expected)
        assert again.source == model.source
        out = tmp_path / f"out-{path.name}"
        assert predict_command([str(picture), "-w", str(path), "--output-dir", str(out)]) == 0
    again.save_pretrained(folder)  # its own files may be replaced
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"not the config\.json of a model of this project"):
        model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "no such weight file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "the file is empty"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "damaged, or no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}"), "damaged"),
        (lambda f: (f / "config.json").unlink(), "no such weight file|config.json: not there|is a folder"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text('{"format": "rtdetr"}'), "checkpoint version None"),
    ],
    ids=range(8),
)
def test_a_damaged_folder_is_one_sentence(model: RTDETRv3, damage: Any, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    folder = model.save_pretrained(tmp_path / "model")
    damage(folder)
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(CheckpointError, match=sentence) as raised:
            RTDETRv3.from_pretrained(path)
        assert "\n" not in str(raised.value)


def test_the_hub_gives_and_takes_a_model(
    model: RTDETRv3, picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    taken: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            pass

        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
            taken["repo"] = repo_id, private

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> str:
            taken["files"] = {each.name: each.read_bytes() for each in Path(folder_path).iterdir()}
            return "https://hub/commit"

    def snapshot_download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        if repo_id != "owner/model":
            raise OSError("404 Client Error\nmore")
        for name in allow_patterns:
            (tmp_path / name).write_bytes(taken["files"][name])
        return str(tmp_path)

    errors = types.SimpleNamespace(HfHubHTTPError=OSError)
    fake = types.SimpleNamespace(HfApi=Api, snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert model.push_to_hub("owner/model", private=True) == "https://hub/commit"
    assert taken["repo"] == ("owner/model", True) and b"license: mit" in taken["files"]["README.md"]
    again = RTDETRv3.from_pretrained("owner/model")
    np.testing.assert_array_equal(again.predict(picture, threshold=0).boxes, model.predict(picture, threshold=0).boxes)
    with pytest.raises(CheckpointError, match=r"owner/other: .*not to be had from the Hub \(404 Client Error\)"):
        RTDETRv3.from_pretrained("owner/other")
    with pytest.raises(CheckpointError, match="expected owner/model"):
        model.push_to_hub("model")


def test_a_shipped_config_with_classes_is_a_new_model(caplog: pytest.LogCaptureFixture) -> None:
    new = RTDETRv3.from_pretrained("rtdetrv3_nano_shapes", classes=["a", "b"])
    assert new.classes == Classes(("a", "b"), (1, 2)) and "random weights" in caplog.text
    with pytest.raises(CheckpointError, match="exported file, which detects only"):
        new.model = None
        new.train()


def test_names_that_lead_nowhere_are_one_sentence(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="no such weight file"):
        RTDETRv3.from_pretrained("missing.pth")
    with pytest.raises(DataError, match="knows its own"):
        RTDETRv3.from_pretrained(checkpoint, classes=["a"])


def test_train_evaluate_and_detect(data: Path, checkpoint: Path, tmp_path: Path) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    result = model.train(data, epochs=1, output_dir=tmp_path / "run", eval_every=1, optimizer__lr=1e-4)
    assert result.best == tmp_path / "run" / "best.pth" and set(result.figures) >= {"AP", "AP50"}
    assert model.weights == result.best and len(model.classes) == 5  # those of the data
    assert model.cfg.optimizer.lr == 1e-4 and model.cfg.train.epochs == 1
    evaluated = model.evaluate()
    assert evaluated is not None and evaluated.figures["AP"] == pytest.approx(result.figures["AP"], abs=1e-5)
    assert len(evaluated.classes) == 5 and len(evaluated.figures) == 12
    pair = data / "val", data / "annotations" / "instances_val.json"
    again = model.evaluate(pair)
    assert again is not None and again.figures == evaluated.figures


def test_data_is_whatever_knows_its_pictures(tmp_path: Path) -> None:
    coco, roboflow = tmp_path / "coco", tmp_path / "roboflow"
    for folder, file in (
        (coco / "train2017", coco / "annotations/instances_train2017.json"),
        (coco / "images/val2017", coco / "annotations/instances_val2017.json"),
        (roboflow / "train", roboflow / "train/_annotations.coco.json"),
        (roboflow / "valid", roboflow / "valid/_annotations.coco.json"),
    ):
        folder.mkdir(parents=True)
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert data_updates(None) == []
    assert data_updates(coco) == [
        f'data.train.images="{coco}/train2017"',
        f'data.train.annotations="{coco}/annotations/instances_train2017.json"',
        f'data.val.images="{coco}/images/val2017"',
        f'data.val.annotations="{coco}/annotations/instances_val2017.json"',
    ]
    assert data_updates(str(roboflow), ("val",))[1] == f'data.val.annotations="{roboflow}/valid/_annotations.coco.json"'
    pairs = {"train": ("a", "a.json"), "valid": {"images": "b", "annotations": "b.json"}}
    assert data_updates(pairs)[3] == 'data.val.annotations="b.json"'
    assert data_updates(("a", "a.json"), ("val",)) == ['data.val.images="a"', 'data.val.annotations="a.json"']


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("missing", "missing: no such data"),
        ({"train": ("a", "b")}, "nothing is given for val"),
        ({"training": ("a", "b")}, "a split is called train or val, got 'training'"),
        (("a", "b", "c"), "expected .images, annotations."),
        (("a", 3), "got 3 in place of a path"),
        (3, "expected .images, annotations."),
    ],
)
def test_wrong_data_is_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        data_updates(data)


def test_keys_of_the_config_as_keywords() -> None:
    assert keyword_updates({"epochs": 3, "batch_size": 2, "lr": 1e-5, "optimizer__betas": (0.9, 0.99), "seed": 1}) == [
        "train.epochs=3",
        "data.train_batch_size=2",
        "optimizer.lr=1e-05",
        "optimizer.betas=[0.9, 0.99]",
        "train.seed=1",
    ]
    assert keyword_updates({"name": "mine", "model.backbone.depth": 18}) == ['name="mine"', "model.backbone.depth=18"]
    with pytest.raises(ConfigError, match="hidden_dim: is the end of several keys"):
        keyword_updates({"hidden_dim": 3})


def test_a_misspelt_keyword_names_its_neighbour(model: RTDETRv3, data: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key `train.epoch`, the nearest valid key is `train.epochs`"):
        model.train(data, train__epoch=1)
