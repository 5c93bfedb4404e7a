"""A Hub of Hugging Face with one folder per model, on this machine: what huggingface_hub asks when it downloads and
when it uploads small files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LARGE = (".safetensors", ".bin")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class HubServer:
    """models/OWNER/NAME holds the files; asked: the paths that were asked for; sent: bytes of a file after which the
    connection breaks."""

    def __init__(self, models: Path) -> None:
        self.models, self.asked, self.sent = models, list[str](), 1 << 40
        handler = type("Handler", (_Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer

    def do_GET(self) -> None:
        self.hub.asked.append(self.path)
        path = self.path.split("?")[0]
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/[^/]+", path):
            return self._about(match[1])
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+", path):
            return self._json([self._entry(self.hub.models / match[1], each) for each in self._files(match[1])])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            return self._file(self.hub.models / match[1] / match[2])
        self._missing("EntryNotFound")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        self.hub.asked.append(self.path)
        path, body = self.path.split("?")[0], self.rfile.read(int(self.headers["Content-Length"] or 0))
        if path == "/api/repos/create":
            about = json.loads(body)
            name = f"{about['organization']}/{about['name']}"
            (self.hub.models / name).mkdir(parents=True, exist_ok=True)
            return self._json({"url": f"{self.hub.url}/{name}", "name": name, "id": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [each["path"] for each in json.loads(body)["files"]]
            plain: dict[str, Any] = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self._json({"files": [{"path": each, **plain} for each in files]})
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
            return self._commit(self.hub.models / match[1], body)
        self._missing("EntryNotFound")

    def _about(self, name: str) -> None:
        folder = self.hub.models / name
        if not folder.is_dir():
            return self._missing("RepoNotFound")
        self._json({"id": name, "sha": COMMIT, "siblings": [{"rfilename": each} for each in self._files(name)]})

    def _files(self, name: str) -> list[str]:
        folder = self.hub.models / name
        return [each.relative_to(folder).as_posix() for each in sorted(folder.rglob("*")) if each.is_file()]

    def _entry(self, folder: Path, file: str) -> dict[str, Any]:
        content = (folder / file).read_bytes()
        oid = hashlib.sha256(content).hexdigest()
        lfs = {"lfs": {"oid": oid, "size": len(content), "pointerSize": 130}} if file.endswith(LARGE) else {}
        return {"type": "file", "path": file, "size": len(content), "oid": oid[:40], **lfs}

    def _file(self, file: Path) -> None:
        if not file.is_file():
            return self._missing("EntryNotFound")
        content = file.read_bytes()
        asked = self.headers["Range"]
        start = int(asked.removeprefix("bytes=").split("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start : start + self.hub.sent])
            self.close_connection = True

    def _commit(self, folder: Path, body: bytes) -> None:
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                file = folder / line["value"]["path"]
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(base64.b64decode(line["value"]["content"]))
        self._json(
            {"commitUrl": f"{self.hub.url}/{folder.parent.name}/{folder.name}/commit/{COMMIT}", "commitOid": COMMIT}
        )

    def _json(self, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _missing(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass
