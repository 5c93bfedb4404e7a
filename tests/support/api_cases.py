"""What the tests of the Python API share: a tiny checkpoint with gaps in its ids, two images, and a server."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import torch
from engine_helpers import tiny_config, tiny_data
from PIL import Image

from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

NAMES, IDS = ("cat", "dog", "cow"), (3, 7, 9)
PIXELS = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint with random weights, and data to train it on in the same folder."""
    torch.manual_seed(0)
    cfg = tiny_config(tiny_data(folder))
    weights = build_model(cfg.model, len(NAMES)).state_dict()
    save_checkpoint(folder / "model.pth", make_checkpoint(cfg, Classes(NAMES, IDS), weights, source={"licence": "MIT"}))
    return folder / "model.pth"


def write_images(folder: Path) -> Path:
    """PIXELS as a.png and b.png; the path of the first."""
    for name in ("b.png", "a.png"):
        Image.fromarray(PIXELS).save(folder / name)
    return folder / "a.png"


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
        if request.path in ("/redirect", "/circle"):
            request.send_response(302)
            request.send_header("Location", "/circle" if request.path == "/circle" else "file:///etc/passwd")
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
