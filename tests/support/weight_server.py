"""A server of one weight file on this machine, which can break off and knows ranges, or does not."""

from __future__ import annotations

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rtdetr.weights.download import OfficialFile

CONTENT = bytes(range(256)) * 100
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Server:
    def __init__(self) -> None:
        self.ranges: list[str | None] = []
        self.content = CONTENT
        self.sent = 1 << 40  # bytes after which the connection breaks
        self.kind = "application/octet-stream"
        self.knows_ranges = True
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked = self.headers["Range"]
                server.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and server.knows_ranges else 0
                if start >= len(server.content):
                    self.send_error(416)
                    return
                self.send_response(206 if start else 200)
                self.send_header("Content-Type", server.kind)
                self.send_header("Content-Length", str(len(server.content) - start))
                self.end_headers()
                self.wfile.write(server.content[start : start + server.sent])

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def file(self, num_bytes: int | None = len(CONTENT), sha256: str | None = SHA256) -> OfficialFile:
        return OfficialFile(f"http://127.0.0.1:{self.http.server_port}/file", num_bytes, sha256)
