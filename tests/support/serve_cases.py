"""What the tests of the server share: one in a thread with a made-up detector, and requests by urllib."""

from __future__ import annotations

import io
import json
import shutil
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from PIL import Image

from rtdetr.inference.draw import Detection

BOXES = [
    Detection(3, "cat", 0.9, (20.0, 40.0, 120.0, 200.0)),
    Detection(7, "dog", 0.6, (200.0, 100.0, 300.0, 180.0)),
    Detection(3, "cat", 0.2, (150.0, 20.0, 190.0, 60.0)),
]

Tell = Callable[[Any], object]


class Reply(NamedTuple):
    status: int
    body: Any  # of JSON, else text
    headers: Any


def image_bytes(size: tuple[int, int] = (320, 240), kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, (255, 255, 255)).save(file, kind, **options)
    return file.getvalue()


def request(url: str, data: bytes | None = None, **headers: str) -> Reply:
    """GET, or POST of the data; header names with _ for -."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, named), timeout=60) as answer:
            return _reply(answer.status, answer)
    except urllib.error.HTTPError as error:
        return _reply(error.code, error)


def _reply(status: int, answer: Any) -> Reply:
    text = answer.read().decode()
    return Reply(status, json.loads(text) if "json" in answer.headers["Content-Type"] else text, answer.headers)


class Detector:
    """Finds BOXES in everything, once `free` is set; `fails` makes it raise. sizes: of the batches it saw."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.free.set()
        self.fails = False
        self.sizes: list[int] = []

    def __call__(self, images: list[Image.Image]) -> list[list[Detection]]:
        self.sizes.append(len(images))
        assert self.free.wait(30)
        if self.fails:
            raise RuntimeError("the detector is broken")
        return [BOXES for _ in images]


@contextmanager
def running(app: Any, socket_: socket.socket, log_level: str = "critical") -> Iterator[str]:
    """Context manager: serves an application in a thread until the block ends, and returns its URL. socket_: bound."""
    from rtdetr.serve.server import build_server

    server = build_server(app, log_level)
    thread = threading.Thread(target=server.run, args=([socket_],))
    thread.start()
    socket_.listen()  # requests wait until the server takes them
    try:
        yield f"http://127.0.0.1:{socket_.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)


@contextmanager
def served(
    detector: Detector, extra: str = "", told: Tell | None = None, log_level: str = "critical", **settings: Any
) -> Iterator[str]:
    """The URL of a server in this process. extra: a script, in the page at /tried; what it posts to /told goes to
    `told`."""
    from fastapi import Request, Response
    from fastapi.responses import HTMLResponse

    from rtdetr.commands.serve import listener
    from rtdetr.serve.app import HERE, OWN_ONLY, Settings, build_app

    app = build_app(detector, Settings("model.pth", ("cat", "dog"), **settings))
    page = (HERE / "page.html").read_text(encoding="utf-8").replace("</html>", f"<script>{extra}</script></html>")
    app.add_api_route("/tried", lambda: HTMLResponse(page, headers=OWN_ONLY))

    async def tell(request: Request) -> Response:
        if told is not None:
            told(await request.json())
        return Response()

    app.router.add_route("/told", tell, methods=["POST"])

    with listener("127.0.0.1", 0) as socket, running(app, socket, log_level) as url:
        try:
            yield url
        finally:
            detector.free.set()


def chromium() -> str:
    """The path of a Chromium; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no Chromium on this machine")
    return found
