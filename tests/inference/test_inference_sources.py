"""Every kind of source that `predict` takes, and each wrong one in one sentence."""

from __future__ import annotations

import io
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_cases import PIXELS, Web
from messages import message
from PIL import Image

from rtdetr import RTDETRv3
from rtdetr.data.classes import DataError
from rtdetr.extras import MissingPackage
from rtdetr.inference import fetch, slicing, video
from rtdetr.inference.draw import Detection
from rtdetr.inference.sources import Opener


def test_one_image_in_any_form_gives_the_same(model: RTDETRv3, image: Path, web: Web) -> None:
    expected = model.predict(PIXELS, threshold=0).boxes
    tensor = torch.from_numpy(PIXELS).permute(2, 0, 1)
    web.files["/a.png"] = ("image/png", image.read_bytes())
    for source in (image, str(image), Image.open(image), tensor, tensor / 255):
        np.testing.assert_array_equal(model.predict(source, threshold=0).boxes, expected)
    found = model.predict(f"{web.url}/a.png", threshold=0, allow_private=True)
    np.testing.assert_array_equal(found.boxes, expected)
    assert found.source == f"{web.url}/a.png"


def test_bytes_and_arrays_of_other_kinds(model: RTDETRv3, image: Path) -> None:
    expected = model.predict(PIXELS, threshold=0).boxes
    floats, alpha = PIXELS / 255, np.dstack([PIXELS, PIXELS[..., 0]])
    content = image.read_bytes()
    for source in (content, bytearray(content), memoryview(content), io.BytesIO(content)):
        np.testing.assert_array_equal(model.predict(source, threshold=0).boxes, expected)
    with open(image, "rb") as file:
        np.testing.assert_array_equal(model.predict(file, threshold=0).boxes, expected)
    for kind in (tempfile.TemporaryFile, tempfile.NamedTemporaryFile, tempfile.SpooledTemporaryFile):
        with kind() as file:  # type: ignore[operator]
            file.write(content)
            result = model.predict(file, threshold=0)  # at its end: all of it
            file.seek(0)
            np.testing.assert_array_equal(model.predict(file, threshold=0).boxes, result.boxes)
            np.testing.assert_array_equal(result.boxes, expected)
            assert isinstance(result.source, str)
    for source in (floats, floats.astype(np.float32), alpha, alpha / 255):
        np.testing.assert_array_equal(model.predict(source, threshold=0).boxes, expected)
    swapped = [PIXELS[..., ::-1], np.ascontiguousarray(PIXELS[..., ::-1]), alpha[..., [2, 1, 0, 3]], floats[..., ::-1]]
    for result in model.predict([*swapped, image], threshold=0, bgr=True):  # a file knows its order itself
        np.testing.assert_array_equal(result.boxes, expected)
    grey = model.predict(np.dstack([PIXELS[..., 0]] * 3), threshold=0).boxes
    for source in (PIXELS[..., 0], PIXELS[..., :1], PIXELS[..., 0] / 255):
        np.testing.assert_array_equal(model.predict(source, threshold=0).boxes, grey)
    assert not np.array_equal(model.predict(swapped[0], threshold=0).boxes, expected)
    assert [each.source for each in model.predict([content, PIXELS])] == ["bytes", "array"]


def test_several_images_give_a_list(model: RTDETRv3, image: Path) -> None:
    batch = torch.from_numpy(PIXELS).permute(2, 0, 1).expand(3, -1, -1, -1)
    sources: list[tuple[Any, int]] = [
        ([image, PIXELS, Image.fromarray(PIXELS)], 3),
        (batch, 3),
        (image.parent, 2),
        (str(image.parent / "*.png"), 2),
    ]
    expected = model.predict(PIXELS, threshold=0).boxes
    for source, number in [*sources, ([image, str(image)], 2)]:
        for options in ({}, {"slices": 200}):
            results = model.predict(source, threshold=0, batch_size=2, **options)
            assert isinstance(results, list) and len(results) == number
            if not options:
                np.testing.assert_allclose(results[-1].boxes, expected, atol=1e-3)


def test_a_generator_gives_an_iterator_that_asks_for_a_batch_at_a_time(model: RTDETRv3) -> None:
    asked = []

    def frames() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(5):
            asked.append(number)
            yield PIXELS

    results = model.predict(frames(), batch_size=2)
    assert asked == []
    next(results)
    assert asked == [0, 1]
    assert len(list(results)) == 4


def test_an_error_of_a_generator_comes_after_the_images_before_it(model: RTDETRv3, image: Path) -> None:
    def images() -> Iterator[Path]:
        yield from [image] * 5
        raise RuntimeError("the camera is gone")

    found = []
    with pytest.raises(RuntimeError, match="the camera is gone"):
        for each in model.predict(images(), batch_size=3):
            found.append(each)
    assert len(found) == 5
    found.clear()
    with pytest.raises(DataError, match=message("not an image", "none.jpg")):
        for each in model.predict(path for path in (image, "none.jpg", image)):
            found.append(each)
    assert len(found) == 1


def test_a_broken_image_of_a_folder_costs_itself_alone(model: RTDETRv3, image: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "good.png").write_bytes(image.read_bytes())
    for options in ({}, {"slices": 200}):
        broken, good = model.predict(tmp_path, **options)
        assert "cannot be read as an image" in broken.error and len(broken) == 0 and not good.error
        assert json.loads(broken.to_json())["error"] == broken.error and broken._repr_png_() is None


def closed_file() -> io.BytesIO:
    file = io.BytesIO(b"bytes")
    file.close()
    return file


WRONG: list[tuple[Any, str]] = [
    ("text.txt", "cannot be read as an image"),
    ("missing.jpg", "no image found"),
    ("", "names nothing"),
    ([], "the list is empty"),
    (["missing.jpg"], "missing.jpg: cannot be read as an image"),
    ([3], "got int"),
    ({"a": 1}, "got dict"),
    (b"bytes", r"^the file cannot be read as an image \("),
    (b"", r"^the file cannot be read as an image \(the file is empty\)"),
    (io.BytesIO(b"bytes"), "^the file cannot be read as an image"),
    (io.StringIO("words"), "expected a file that was opened with 'rb'"),
    (closed_file(), "the open file cannot be read .*closed.*'rb'"),
    (np.array("a.jpg")[()], "a.jpg: no image found"),
    (np.float64(0.5), "got float64"),
    ("x" * 5000, "cannot be accessed .File name too long"),
    (None, "got None, which is"),
    (True, "got bool"),
    (4711, "camera 4711: cannot be opened"),
    (np.int64(4711), "camera 4711: cannot be opened"),
    (-1, "camera -1: there is no such number"),
    (2**31, "camera 2147483648: there is no such number"),
    (np.zeros((8, 8, 2), np.uint8), r"expected grey, RGB or RGBA of shape .* got \(8, 8, 2\)"),
    (np.zeros((3, 8, 8), np.uint8), r"got \(3, 8, 8\)"),
    (np.full((8, 8, 3), 255.0), "expected floats from 0 to 1, not yet normalised, got 255 to 255"),
    (np.full((8, 8, 3), np.nan), "expected floats from 0 to 1"),
    (np.zeros((8, 8, 3), np.int64), "expected uint8, or floats from 0 to 1, got int64"),
    (np.zeros((0, 8, 3), np.uint8), r"got \(0, 8, 3\)"),
    (torch.zeros(0, 3, 8, 8), r"expected RGB of shape .* got \(0, 3, 8, 8\)"),
    (torch.zeros(8, 8, 3), r"expected RGB of shape \(3, H, W\)"),
    (torch.full((3, 8, 8), 2.0), "expected floats from 0 to 1"),
    (torch.full((3, 8, 8), torch.nan), "expected floats from 0 to 1"),
    (torch.zeros(3, 8, 8, dtype=torch.int64), "expected uint8"),
    (torch.zeros(3, 8, 8, device="meta"), "expected pixels in memory"),
    (torch.zeros(3, 8, 8).to_sparse(), "expected pixels in memory"),
    (torch.nested.nested_tensor([torch.zeros(3, 8, 8)], layout=torch.strided), "expected pixels in memory"),
    ([torch.zeros(1, 3, 8, 8)], r"outside a list .* got \(1, 3, 8, 8\)"),
    ("ftp://example.org/a.jpg", "expected http, https or a stream"),
    ("file:///etc/passwd", "expected http, https or a stream"),
    ("http://", "names no machine"),
    ("http://[::1/a.jpg", "not an address"),
]


@pytest.mark.parametrize(("source", "sentence"), WRONG, ids=[sentence for _, sentence in WRONG])
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
        ({"threshold": {"cat": 0.4}}, r"those of classes are thresholds=.'cat': 0.4"),
        ({"thresholds": {"cat": 2}}, "thresholds of cat: expected a number from 0 to 1, got 2"),
        ({"thresholds": {"cart": 0.4}}, "thresholds: the model has no class 'cart'; did you mean 'cat'"),
        ({"thresholds": [0.4]}, "thresholds: expected class names with numbers"),
        ({"batch_size": 0}, "batch_size: expected a whole number from 1"),
        ({"slices": 3}, "slices: expected the side of a tile"),
        ({"slices": "3x3"}, "slices: expected the side of a tile"),
        ({"slices": 64.0}, "slices: expected the side of a tile"),
        ({"slices": True}, "slices: expected the side of a tile"),
        ({"size": 100}, "size: expected a side, or .height, width., in multiples of 32, got 100"),
        ({"size": "big"}, "size: expected a side"),
        ({"size": (64, 64, 32)}, "data.image_size"),
        ({"half": "maybe"}, "half: expected True, False or .auto., got 'maybe'"),
        ({"half": 1}, "half: expected True, False or .auto., got 1"),
    ],
)
def test_a_wrong_option_is_one_sentence(model: RTDETRv3, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        model.predict(PIXELS, **options)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("/missing.png", r"the server answers 404 \(Not Found\)"),
        ("/page", "the server sends text/html, a web page, expected an image"),
        ("/huge", "3,000,000,000 bytes, more than the 100,000,000"),
        ("/endless", "more than the 50,000"),
        ("/slow", "not here after 0.3 s"),
        ("/cut", "ended 990 bytes too early"),
        ("/redirect", "the server answers 302"),
        ("/circle", "the server answers 302"),
        ("/text.png", "/text.png: cannot be read as an image"),
    ],
)
def test_a_wrong_address_is_one_sentence(
    model: RTDETRv3, web: Web, path: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path in ("/endless", "/slow"):
        from rtdetr.inference import sources

        monkeypatch.setattr(sources, "IMAGE", fetch.IMAGE._replace(max_bytes=50_000, seconds=0.3))
    web.files["/page"] = ("text/html", b"<html>")
    web.files["/text.png"] = ("image/png", b"words")
    with pytest.raises(DataError, match=sentence) as raised:
        model.predict(f"{web.url}{path}", allow_private=True)
    assert "\n" not in str(raised.value)


def test_a_machine_that_does_not_answer_is_one_sentence(model: RTDETRv3, web: Web) -> None:
    with pytest.raises(DataError, match="cannot be fetched"):
        model.predict("http://127.0.0.1:9/a.png", allow_private=True)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "8.8.8.8"])
def test_a_stream_needs_to_be_trusted(model: RTDETRv3, web: Web, host: str) -> None:
    """Whatever its address is: FFmpeg follows it to any other."""
    web.asked.clear()
    for url in ("rtsp://%s:%d/a", "tcp://%s:%d", "http://%s:%d/a.m3u8", "https://%s:%d/a.mpd"):
        with pytest.raises(DataError, match=message("other addresses", "allow_private=True")):
            model.predict(url % (host, web.server.server_port))
    assert web.asked == []


MALFORMED = (
    "http://a..b/x.png",
    f"http://{'a' * 64}.test/",
    "http://１２７.0.0.1/",
    "http://[::1/",
    "http://a:b/x.png",
)


@pytest.mark.parametrize("url", [*MALFORMED, "http://127.0.0.1:9/x.png", "http://%31%32%37.0.0.1/x.png"])
def test_an_address_in_a_list_costs_itself_alone(model: RTDETRv3, image: Path, url: str) -> None:
    both: list[dict[str, Any]] = [{}, {"slices": 200}]
    for options in both:
        first, bad, last = model.predict([image, url, str(image)], threshold=0, batch_size=1, **options)
        assert bad.error and bad.source == url and len(bad) == 0
        assert first.error == last.error == "" and len(first) == len(last) > 0
    results = list(model.predict(iter([PIXELS, url, PIXELS]), threshold=0))
    assert [bool(each.error) for each in results] == [False, True, False]
    with pytest.raises(DataError, match=r"not an address|private network"):
        model.predict(url)


@pytest.mark.parametrize("kind", ["m3u8", "mpd", "sdp", "concat"])
def test_a_fetched_video_leads_nowhere_else(model: RTDETRv3, web: Web, tmp_path: Path, kind: str) -> None:
    """A playlist that calls itself a video is no playlist: FFmpeg opens no address, and no other file."""
    pytest.importorskip("av", reason="videos: PyAV is not installed")
    (tmp_path / "secret.mp4").write_bytes(b"words")
    web.asked.clear()
    for target in (f"{web.url}/secret", tmp_path / "secret.mp4"):
        playlist = {
            "m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{target}\n#EXT-X-ENDLIST\n",
            "mpd": '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static"><Period>'
            f'<AdaptationSet mimeType="video/mp4"><Representation id="1"><BaseURL>{target}</BaseURL></Representation>'
            "</AdaptationSet></Period></MPD>",
            "sdp": f"v=0\nc=IN IP4 127.0.0.1\nm=video {web.server.server_port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
            "concat": f"ffconcat version 1.0\nfile '{target}'\n",
        }[kind]
        web.files["/film.mp4"] = ("video/mp4", playlist.encode())
        with pytest.raises(DataError, match="cannot be opened as a video"):
            next(model.predict(f"{web.url}/film.mp4", allow_private=True))
    assert set(web.asked) == {"/film.mp4"}


def test_a_video_is_an_iterator_over_its_frames(model: RTDETRv3, tmp_path: Path, web: Web) -> None:
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


def test_a_video_is_not_fetched_where_nothing_reads_it(
    model: RTDETRv3, web: Web, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    web.files["/film.mp4"] = ("video/mp4", b"words")
    web.asked.clear()
    url = f"{web.url}/film.mp4"
    for ask in (
        model.predict,
        lambda url, allow_private: Opener(allow_private=allow_private).open_video(url, tmp_path),
    ):
        with pytest.raises(MissingPackage, match=rf'^{url}: .*pip install "rtdetr\[video\]"'):
            ask(url, allow_private=True)
    assert web.asked == []


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
    frame = next(video.open_camera(0).frames)
    assert (frame.image.getpixel((0, 0)), frame.seconds) == ((0, 0, 255), 0.0)
    results = model.predict(0)
    assert [next(results).source, next(results).source] == ["frame 0", "frame 1"]
    with pytest.raises(DataError, match="camera 0: delivers no more images"):
        next(results)


@pytest.mark.parametrize("overlap", [0.0, 0.2, 0.5, 0.85])
def test_a_grid_has_the_rows_and_columns_that_were_asked_for(overlap: float) -> None:
    for rows, columns in ((1, 1), (2, 3), (5, 4)):
        slices = slicing.Slices.of(f"{rows}x{columns}", overlap)
        for size in ((100, 70), (641, 479), (1920, 1080)):
            areas = slicing.tiles(size, slices.tile(size), overlap)
            assert len({area[1] for area in areas}) == rows and len({area[0] for area in areas}) == columns
            assert max(area[2] for area in areas) == size[0] and max(area[3] for area in areas) == size[1]
            starts = sorted({(area[0], area[2]) for area in areas})
            assert all(right >= left for (_, right), (left, _) in pairwise(starts))  # no gap
    assert slicing.Slices.of("640").tile((9, 9)) == (640, 640)


def test_tiles_cover_the_image_and_boxes_are_merged() -> None:
    areas = slicing.tiles((100, 70), (40, 50))
    covered = np.zeros((70, 100), bool)
    for x1, y1, x2, y2 in areas:
        assert (x2 - x1, y2 - y1) == (50, 40)
        covered[y1:y2, x1:x2] = True
    assert covered.all() and len(set(areas)) == len(areas)
    assert slicing.tiles((30, 20), (40, 50)) == [(0, 0, 30, 20)]

    def predict(images: list[Image.Image]) -> list[list[Detection]]:
        """Finds the white square wherever it is whole."""
        found = []
        for each in images:
            box = each.getbbox()
            whole = box is not None and (box[2] - box[0], box[3] - box[1]) == (6, 6)
            found.append([Detection(1, "square", 0.9, tuple(map(float, box)))] if whole and box else [])
        return found

    image = Image.new("RGB", (100, 70))
    image.paste("white", (61, 40, 67, 46))
    (only,) = slicing.predict_sliced(predict, image, (40, 50), batch_size=2)
    assert only.box == (61, 40, 67, 46)
    other = Detection(2, "other", 0.8, only.box)
    assert slicing.merge([only._replace(score=0.5), other, only]) == [only, other]


def test_sliced_inference_runs(model: RTDETRv3) -> None:
    assert len(model.predict(PIXELS, threshold=0, slices=(48, 64), size=(64, 96)))
    by_numpy = model.predict(PIXELS, threshold=0, slices=np.int64(48), size=np.int64(64), half=np.False_)
    assert by_numpy.to_json() == model.predict(PIXELS, threshold=0, slices=48, size=64).to_json()
