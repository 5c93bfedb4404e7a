"""`rtdetr serve`: each answer and each refusal, batches, load, the end, and the page in a browser."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.request import Request, urlopen

import numpy as np
import pytest
from api_cases import write_checkpoint
from messages import message
from PIL import Image
from serve_cases import BOXES, Detector, Reply, image_bytes, request, served

from rtdetr.cli import main
from rtdetr.commands.serve import listener
from rtdetr.config import ConfigError
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import Predictor

FORM = b'--x\r\nContent-Disposition: form-data; name="%s"%s\r\nContent-Type: image/png\r\n\r\n%s\r\n--x--\r\n'


def form(data: bytes, file_name: bytes = b'; filename="a.png"') -> bytes:
    return FORM % (b"image", file_name, data)


MULTIPART = {"content_type": "multipart/form-data; boundary=x"}


def boxes_of(reply: Reply) -> list[list[float]]:
    return [each["box"] for each in reply.body["detections"]]


def test_an_image_as_body_and_as_form() -> None:
    with served(Detector()) as url:
        raw = request(f"{url}/detect", image_bytes())
        assert raw.status == 200 and (raw.body["width"], raw.body["height"]) == (320, 240)
        first = {"category_id": 3, "name": "cat", "score": 0.9, "box": [20, 40, 120, 200]}
        assert raw.body["detections"][0] == first and len(raw.body["detections"]) == 2
        assert request(f"{url}/detect", form(image_bytes()), **MULTIPART).body == raw.body
        assert boxes_of(request(f"{url}/detect?threshold=0", image_bytes())) == [list(each.box) for each in BOXES]
        assert boxes_of(request(f"{url}/detect?threshold=0.6", image_bytes(), content_type="image/png")) == boxes_of(
            raw
        )
        exif = Image.Exif()
        exif[0x0112] = 6
        sideways = request(f"{url}/detect", image_bytes(kind="JPEG", exif=exif))
        assert (sideways.body["width"], sideways.body["height"]) == (240, 320)


REFUSED = {
    "not an image": (b"hello, " * 100, {}, 415, "cannot be read as an image (its bytes are of none of the formats"),
    "half an image": (image_bytes(kind="JPEG")[:900], {}, 415, "the file cannot be read as an image"),
    "text by its type": (image_bytes(), {"content_type": "text/plain"}, 415, "got the type 'text/plain'"),
    "json": (b"{}", {"content_type": "application/json"}, 415, "expected an image"),
    "nothing": (b"", {}, 400, "has no image"),
    "form without file": (form(b"x", b""), MULTIPART, 400, "has no image"),
    "damaged form": (b"--y", MULTIPART, 400, ""),
    "large file": (b"x" * 30_000_000, {}, 413, "the file is larger than 1 MB"),
    "large file in a form": (form(b"x" * 1_030_000), MULTIPART, 413, "the file is larger than 1 MB"),
    "large image": (image_bytes((1500, 1000)), {}, 413, "more than 1 megapixels"),
}


@pytest.fixture(scope="module")
def small_limits() -> object:
    with served(Detector(), max_megabytes=1, max_megapixels=1) as url:
        yield url


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str, small_limits: str) -> None:
    data, headers, status, sentence = REFUSED[case]
    reply = request(f"{small_limits}/detect", data, **headers)
    assert reply.status == status and sentence in reply.body["detail"], reply
    assert "\n" not in reply.body["detail"] and "/picture" not in reply.body["detail"]
    assert request(f"{small_limits}/detect", image_bytes()).status == 200


def test_a_body_of_unknown_length_is_cut_off_too(small_limits: str) -> None:
    """In chunks, 20 times what is allowed."""
    host, port = small_limits.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as client:
        client.sendall(b"POST /detect HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(20):
            client.sendall(b"%x\r\n%s\r\n" % (10**6, b"x" * 10**6))
        client.sendall(b"0\r\n\r\n")
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_what_is_too_large_is_not_kept() -> None:
    """The second megabyte of an endless body is the last that is looked at."""
    from fastapi import HTTPException, Request

    from rtdetr.serve.uploads import Upload

    async def endless() -> dict[str, object]:
        return {"type": "http.request", "body": b"x" * 10**6, "more_body": True}

    upload = Upload(Request({"type": "http", "headers": []}, endless), 1)
    with pytest.raises(HTTPException) as refused:
        asyncio.run(upload.read())
    assert refused.value.status_code == 413 and upload.received == 2 * 10**6


def test_what_is_late_is_not_waited_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastapi import HTTPException, Request

    from rtdetr.serve import uploads

    asked: list[Request] = []

    async def silent() -> dict[str, object]:
        asked.append(request)
        return await asyncio.Future()

    async def read() -> None:
        async with uploads.Upload(request, 1) as upload:
            await upload.read()

    monkeypatch.setattr(uploads, "SECONDS", 0.05)
    request = Request({"type": "http", "headers": []}, silent)
    with pytest.raises(HTTPException) as refused:
        asyncio.run(read())
    assert refused.value.status_code == 408 and len(asked) == 1


def test_wrong_parameters_paths_and_methods(small_limits: str) -> None:
    for value in ("2", "-1", "nan", "high"):
        reply = request(f"{small_limits}/detect?threshold={value}", image_bytes())
        assert reply.status == 422 and reply.body["detail"].startswith("threshold: "), reply
    reply = request(f"{small_limits}/detect?threshold=kat=0.5", image_bytes())
    assert (reply.status, reply.body["detail"]) == (422, "threshold: the model has no class 'kat'; did you mean 'cat'?")
    reply = request(f"{small_limits}/detect?conf=0.1", image_bytes())
    assert (reply.status, reply.body["detail"]) == (422, "conf: no such parameter, expected threshold")
    assert request(f"{small_limits}/detect").status == 405 and request(f"{small_limits}/../etc/passwd").status == 404


def test_health_documentation_and_figures() -> None:
    with served(Detector()) as url:
        request(f"{url}/detect", image_bytes())
        request(f"{url}/detect", b"no")
        request(f"{url}/nowhere")
        with urlopen(Request(f"{url}/health", method="HEAD"), timeout=60) as answer:
            assert answer.status == 200 and not answer.read()
        health = request(f"{url}/health").body
        assert health["status"] == "ok" and health["max_megabytes"] == 20 and health["class_names"] == ["cat", "dog"]
        api = request(f"{url}/openapi.json").body
        assert set(api["paths"]["/detect"]["post"]["requestBody"]["content"]) == {"image/*", "multipart/form-data"}
        assert {"400", "413", "415", "503"} <= set(api["paths"]["/detect"]["post"]["responses"])
        figures = request(f"{url}/metrics").body
        for line in (
            'rtdetr_requests_total{path="/detect",status="200"} 1',
            'rtdetr_requests_total{path="/detect",status="415"} 1',
            'rtdetr_requests_total{path="other",status="404"} 1',
            "rtdetr_queue_depth 0",
            "rtdetr_requests_inside 0",
            'rtdetr_detect_seconds_bucket{le="+Inf"} 1',
            "rtdetr_detect_seconds_count 1",
            'rtdetr_batch_size_bucket{le="1"} 1',
        ):
            assert line in figures.splitlines()
        for path in ("/", "/docs"):
            page = request(f"{url}{path}?page=other")
            with urlopen(Request(f"{url}{path}", method="HEAD"), timeout=60) as answer:
                assert int(answer.headers["Content-Length"]) == len(page.body.encode()) and not answer.read()
            assert "http://" not in page.body and "https://" not in page.body and "src=" not in page.body
            assert "default-src 'none'" in page.headers["Content-Security-Policy"]


def until(condition: object) -> None:
    deadline = time.monotonic() + 30
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_batches_form_while_the_detector_is_at_work_and_more_is_refused() -> None:
    detector = Detector()
    detector.free.clear()
    with served(detector, slots=6, max_batch=4) as url, ThreadPoolExecutor(6) as pool:
        detect = f"{url}/detect"
        first = pool.submit(request, detect, image_bytes())
        until(lambda: detector.sizes == [1])  # a lone image does not wait
        rest = [pool.submit(request, detect, image_bytes()) for _ in range(5)]
        until(lambda: "rtdetr_requests_inside 6" in request(f"{url}/metrics").body)
        refused = request(detect, image_bytes() + b"x" * 10**6)
        assert refused.status == 503 and refused.headers["Retry-After"] == "1" and "try again" in refused.body["detail"]
        time.sleep(0.1)
        detector.free.set()
        assert [each.result().status for each in (first, *rest)] == [200] * 6
        assert request(detect, image_bytes()).status == 200
        assert sum(detector.sizes) == 7 and max(detector.sizes) == 4


def test_one_bad_file_costs_itself_alone_and_a_failure_is_answered() -> None:
    detector = Detector()
    detector.free.clear()
    with served(detector) as url, ThreadPoolExecutor(4) as pool:
        detect = f"{url}/detect"
        first = pool.submit(request, detect, image_bytes())
        until(lambda: detector.sizes == [1])
        files = (image_bytes(), b"no image", image_bytes())
        rest = [pool.submit(request, detect, each) for each in files]
        until(lambda: "rtdetr_requests_inside 4" in request(f"{url}/metrics").body)
        detector.free.set()
        assert [each.result().status for each in (first, *rest)] == [200, 200, 415, 200]
        detector.fails = True
        failed = request(detect, image_bytes())
        assert failed.status == 500 and failed.body["detail"] == "detection failed; the server's log says why"
        detector.fails = False
        assert request(detect, image_bytes()).status == 200


@pytest.mark.parametrize("pool", ["readers", "detector"])
def test_a_thread_that_cannot_start_costs_its_requests_alone(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from rtdetr.serve.batching import Batcher

    def refuses(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def ask() -> None:
        batcher = Batcher(Detector(), 8, 50.0, lambda _: None)
        async with batcher.running():
            with monkeypatch.context() as without, pytest.raises(RuntimeError, match="can't start new thread"):
                without.setattr(getattr(batcher, pool), "submit", refuses)
                await asyncio.wait_for(batcher.answer(image_bytes()), 30)
            assert (await asyncio.wait_for(batcher.answer(image_bytes()), 30)).detections == BOXES

    asyncio.run(ask())


def test_answers_are_sent_at_once() -> None:
    """asyncio disables Nagle's algorithm for sockets that name their protocol; else an answer waits for an ACK."""
    with listener("127.0.0.1", 0) as bound:
        assert bound.proto == socket.IPPROTO_TCP


def test_missing_packages_and_bad_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = ["serve", "-w", str(tmp_path / "none.pth")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main([*weights, "--port", str(taken.getsockname()[1])]) == 2
        assert message("not listened at", "Address already in use").search(capsys.readouterr().err)
    assert main([*weights, "--port", "0"]) == 2 and "none.pth" in capsys.readouterr().err
    assert main([*weights, "--host", "no..host"]) == 2 and "--host no..host" in capsys.readouterr().err
    for wrong in (["--port", "70000"], ["--queue", "0"], ["--max-batch", "-1"], ["--threshold", "2"]):
        with pytest.raises(SystemExit, match="2"):
            main([*weights, *wrong])
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(weights) == 2
    assert message("missing package", "rtdetr serve", "uvicorn", "rtdetr[serve]").search(capsys.readouterr().err)


def same(found: list[dict[str, object]], expected: list[Detection]) -> bool:
    """Whether detections agree, up to what the size of a batch does to the last digits, and to the order of scores."""
    if len(found) != len(expected):
        return False
    boxes = np.array([[each["category_id"], each["score"], *each["box"]] for each in found], float)  # type: ignore[misc]
    for each in expected:
        distance = np.abs(boxes - np.array([each.category_id, each.score, *each.box])) <= [0, 1e-4] + [0.02] * 4
        if not distance.all(axis=1).any():
            return False
    return True


def start(weights: Path, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The real command, and its URL."""
    command = [sys.executable, "-m", "rtdetr", "serve", "-w", str(weights), "--port", "0", "--device", "cpu"]
    process = subprocess.Popen(
        [*command, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("http://127.0.0.1:"), process.communicate()
    return process, line.split()[0]


def memory_of(process: subprocess.Popen[str]) -> int:
    """Most megabytes it ever held; 0 where the system does not tell."""
    status = Path(f"/proc/{process.pid}/status")
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    return int(peak[1]) // 1024 if peak else 0


def test_two_hundred_at_once_and_sigterm_in_the_middle(tmp_path: Path) -> None:
    """No error but 503, the predictor's own answers, and each request that was let in is answered after SIGTERM."""
    weights = write_checkpoint(tmp_path)
    rng = np.random.default_rng(0)
    files = []
    for number in range(10):
        file = tmp_path / f"{number}.png"
        Image.fromarray(rng.integers(0, 256, (150 + 10 * number, 200, 3), dtype=np.uint8)).save(file)
        files.append(file)
    predictor = Predictor(weights, "cpu", threshold=0.0)
    expected = [found.detections for found in predictor.predict_files(files)]
    data = [file.read_bytes() for file in files]
    process, url = start(weights, "--threshold", "0")
    try:
        ready = threading.Barrier(200)

        def ask(number: int) -> tuple[int, Reply, float]:
            ready.wait(60)
            began = time.perf_counter()
            return number % 10, request(f"{url}/detect", data[number % 10]), time.perf_counter() - began

        with ThreadPoolExecutor(200) as pool:
            replies = list(pool.map(ask, range(200)))
        assert {reply.status for _, reply, _ in replies} <= {200, 503}
        answered = [(number, reply, seconds) for number, reply, seconds in replies if reply.status == 200]
        assert len(answered) >= 64
        assert all(same(reply.body["detections"], expected[number]) for number, reply, _ in answered)
        assert all(reply.headers["Retry-After"] for _, reply, _ in replies if reply.status == 503)
        cuts = statistics.quantiles([seconds for *_, seconds in answered], n=100)
        print(f"\n{len(answered)} of 200 answered, {200 - len(answered)} times 503, ", end="")
        print(f"p50 {cuts[49]:.3f} s, p99 {cuts[98]:.3f} s, at most {memory_of(process)} MB")

        before = len(answered)
        late = [connect(url, data[number % 10], number < 20) for number in range(40)]
        until(lambda: sum(let_in(url)) == before + 40)
        _, inside = let_in(url)
        process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        for number, client in enumerate(late[20:], start=20):  # the other half of those that have sent half
            client.sendall(half(data[number % 10])[1])
        ends = [answer_of(client) for client in late]
        assert all(same(body["detections"], expected[number % 10]) for number, body in enumerate(ends))
        print(f"SIGTERM with {inside} requests inside: all 40 are answered")
        assert process.wait(30) == 0
        assert message("all answered").search(process.communicate()[1])
    finally:
        process.kill()
        process.communicate()


def let_in(url: str) -> tuple[int, int]:
    """Images that were answered, and requests that are in work."""
    figures = request(f"{url}/metrics").body
    done, inside = (
        re.search(pattern, figures) for pattern in (r'"/detect",status="200"} (\d+)', r"rtdetr_requests_inside (\d+)")
    )
    return int(done[1]) if done else 0, int(inside[1]) if inside else 0


def half(data: bytes) -> tuple[bytes, bytes]:
    return data[: len(data) // 2], data[len(data) // 2 :]


def connect(url: str, data: bytes, whole: bool) -> socket.socket:
    """A connection on which an image, or half of it, was posted; its answer is not yet read."""
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=60)
    head = b"POST /detect HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(data)
    client.sendall(head + (data if whole else half(data)[0]))
    return client


def answer_of(client: socket.socket) -> dict[str, list[dict[str, object]]]:
    """The JSON of a 200, after which the connection is closed."""
    with client:
        head, _, body = b"".join(iter(lambda: client.recv(65536), b"")).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    return json.loads(body)


def test_kernels_reach_the_predictor(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []

    def predictor(*_: object, **options: object) -> None:
        given.append(options)
        raise ConfigError("enough")

    monkeypatch.setattr("rtdetr.inference.predictor.Predictor", predictor)
    assert main(["serve", "-w", "x.pth", "--port", "0", "--device", "cpu", "--kernels", "plain"]) == 2
    assert given == [{"threshold": 0.0, "kernels": "plain"}]
