"""Programs that use exported files in processes of their own."""

from __future__ import annotations

import functools
import http.server
import json
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

WEB = """
const fs = require("fs");
const [ort, file, pixels] = [require(process.argv[2]), process.argv[3], process.argv[4]];
const { detect, metadata, resized } = require(process.argv[5]);
(async () => {
  ort.env.wasm.numThreads = 1;
  const bytes = new Uint8Array(fs.readFileSync(file));
  const about = metadata(bytes);
  const size = JSON.parse(about.preprocess).size;
  const session = await ort.InferenceSession.create(bytes, { executionProviders: ["wasm"] });
  const original = process.argv.slice(6).map(Number);
  const rgba = resized(new Uint8Array(fs.readFileSync(pixels)), original, size);
  console.log(JSON.stringify(await detect(ort, session, rgba, size, original, JSON.parse(about.names), 0.1)));
})();
"""

# Chooses image.png on the page, once the model is there, and posts what the page said before and what it draws.
PAGE = """
const tell = (what) => fetch("told", { method: "POST", body: JSON.stringify(what) });
const drawn = decode;
let said;
decode = (...all) => { const found = drawn(...all); tell({ found, said }); return found; };
(async () => {
  const status = document.getElementById("status"), input = document.getElementById("file"), files = new DataTransfer();
  while (status.textContent.startsWith("loading")) await new Promise((done) => setTimeout(done, 20));
  said = status.textContent;
  if (!said.endsWith("choose an image")) return tell({ said });
  files.items.add(new File([await (await fetch("image.png")).blob()], "image.png", { type: "image/png" }));
  document.getElementById("threshold").value = 0.1;
  input.files = files.files;
  input.dispatchEvent(new Event("change"));
})();
"""

RUN_PROGRAM = """
import torch
if len(sys.argv) > 3:
    torch.ops.load_library(sys.argv[3])
inputs = torch.load(sys.argv[1])
if {packaged}:
    run = torch._inductor.aoti_load_package(sys.argv[2])
else:
    run = torch.export.load(sys.argv[2]).module()
torch.save([tuple(run(*each)) for each in inputs], sys.argv[1])
"""

ALONE = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ImportError(f"{{name}} is blocked")
sys.meta_path.insert(0, Nothing())
sys.argv = {argv}
"""


def run_alone(code: str, blocked: set[str], argv: list[str]) -> str:
    """Output of code in a fresh process that cannot import some packages."""
    text = ALONE.format(blocked=blocked, argv=argv) + code
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def chromium_shows(page: Path, profile: Path, *options: str) -> dict[str, Any]:
    """What a script on index.html in the folder `page` posts to /told; skips the test where there is no Chromium."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    told = queue.SimpleQueue[bytes]()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_POST(self) -> None:
            told.put(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(page)))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    usual = ["--headless", "--no-sandbox", f"--user-data-dir={profile}", "--remote-debugging-port=0"]
    command = [browser, *usual, *options, f"http://127.0.0.1:{server.server_port}/index.html"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        shown: dict[str, Any] = json.loads(told.get(timeout=180))
        return shown
    finally:
        process.terminate()
        process.wait(30)
        server.shutdown()
        server.server_close()
