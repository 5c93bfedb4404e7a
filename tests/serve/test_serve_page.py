"""The page of `rtdetr serve` in headless Chromium, where there is one."""

from __future__ import annotations

import base64
import io
import queue
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serve_cases import Detector, chromium, served

pytest.importorskip("fastapi", reason="serve: fastapi is not installed")
from rtdetr.serve.app import HERE

# Chooses files by script and waits for what the page says; `tried` sees, and what it saw is told.
HELPERS = """
const seen = {};
const pause = time => new Promise(done => setTimeout(done, time));
async function choose(name, type, bytes) {
  get("says").textContent = "";
  const files = new DataTransfer();
  files.items.add(new File([bytes], name, {type}));
  get("file").files = files.files;
  get("file").dispatchEvent(new Event("change"));
  while (["", "detecting"].includes(get("says").textContent)) await pause(20);
  return get("says").textContent;
}
function lines() {  // columns of a white image of 320 x 240 where the side of a box is drawn
  const context = get("canvas").getContext("2d"), found = [];
  const white = (x, y) => context.getImageData(x, y, 1, 1).data.every(each => each > 250);
  for (let x = 0; x < 320; x++) if (!white(x, 150)) found.push(x);
  return found;
}
function slide(value) {
  get("threshold").value = value;
  get("threshold").dispatchEvent(new Event("input"));
  return lines();
}
(async () => {
  while (!get("model").textContent) await pause(20);
  await tried();
  await fetch("told", {
    method: "POST", body: JSON.stringify(seen), headers: {"Content-Type": "application/json"},
  });
})();
"""
IMAGES = """
async function tried() {
  const canvas = document.createElement("canvas");
  Object.assign(canvas, {width: 320, height: 240});
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, 320, 240);
  const image = await new Promise(done => canvas.toBlob(done, "image/png"));
  seen.text = await choose("no.png", "image/png", "hello");
  seen.large = await choose("large.png", "image/png", new Uint8Array(60e6));
  limit = Infinity;
  seen.largeAtTheServer = await choose("large.png", "image/png", new Uint8Array(60e6));
  seen.image = await choose("a.png", "image/png", image);
  seen.size = [get("canvas").width, get("canvas").height];
  seen.lines = lines();
  seen.high = slide(0.8);
  seen.low = slide(0.1);
  seen.list = [...get("found").childNodes].map(each => each.textContent);
  const dog = document.querySelector("input[value=dog]");
  dog.focus();
  seen.focus = document.activeElement === dog;
  dog.click();
  seen.withoutDog = lines();
  seen.metrics = await (await fetch("metrics")).text();
  try { await fetch("http://192.0.2.1/"); } catch (error) { seen.outside = error.name; }
}
"""
VIDEO = """
async function tried() {
  seen.says = await choose("clip.webm", "video/webm", Uint8Array.from(atob("CLIP"), each => each.charCodeAt(0)));
  while (!get("pause").hidden) await pause(20);
  seen.size = [get("canvas").width, get("canvas").height];
  seen.lines = lines();
  seen.broken = await choose("clip.webm", "video/webm", "hello");
}
"""


def seen_in_the_browser(tmp_path: Path, detector: Detector, script: str) -> dict[str, Any]:
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1", "--remote-debugging-port=0"]
    browser, told = chromium(), queue.SimpleQueue[dict[str, Any]]()
    with served(detector, HELPERS + script, told.put) as url:
        command = [browser, *options, f"{url}/tried"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return told.get(timeout=60)
        finally:
            process.terminate()
            process.wait(30)


EDGES = [19, 20, 119, 120, 199, 200, 299, 300]  # a line of 2 pixels lies on both sides of the box's border


def test_images_boxes_slider_classes_and_messages(tmp_path: Path) -> None:
    """Slider and classes act without another request; nothing outside can be reached."""
    detector = Detector()
    seen = seen_in_the_browser(tmp_path, detector, IMAGES)
    assert seen["text"].startswith("the file cannot be read as an image (its bytes are of none of the formats")
    assert seen["large"].startswith("the file is larger than 20 MB")
    assert (
        seen["largeAtTheServer"].startswith("the file is larger than 20 MB") and "smaller" in seen["largeAtTheServer"]
    )
    assert seen["image"] == "2 of 3 detections shown, 320 x 240 pixels" and seen["size"] == [320, 240]
    assert seen["lines"] == EDGES and seen["high"] == EDGES[:4] and seen["low"] == EDGES
    assert seen["list"][2] == "cat 0.20: 150, 20, 190, 60" and len(seen["list"]) == 3
    assert seen["focus"] and seen["withoutDog"] == EDGES[:4]
    assert sum(detector.sizes) == 1 and 'path="/detect",status="200"} 1' in seen["metrics"]
    assert seen["outside"] == "TypeError"


def test_the_address_on_the_page_of_the_api() -> None:
    """Behind a proxy, below a path that begins as the page does."""
    if shutil.which("node") is None:
        pytest.skip("no Node.js on this machine")
    line = re.search(r"^const here = .*;$", (HERE / "docs.html").read_text(encoding="utf-8"), re.MULTILINE)
    assert line
    script = f"const location = {{href: 'http://a/docs-of-mine/docs?x#y'}}; {line[0]} console.log(`${{here}}detect`)"
    address = subprocess.run(["node", "-e", script], stdout=subprocess.PIPE, text=True, check=True).stdout
    assert address.strip() == "http://a/docs-of-mine/detect"


def test_frames_of_a_video(tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="making a video needs PyAV")
    file = io.BytesIO()
    with av.open(file, "w", format="webm") as clip:
        stream = clip.add_stream("libvpx", rate=10)
        stream.width, stream.height, stream.pix_fmt = 320, 240, "yuv420p"
        for _ in range(8):
            frame = av.VideoFrame.from_ndarray(np.full((240, 320, 3), 255, np.uint8), format="rgb24")
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())
    detector = Detector()
    script = VIDEO.replace("CLIP", base64.b64encode(file.getvalue()).decode())
    seen = seen_in_the_browser(tmp_path, detector, script)
    assert seen["says"] == "2 of 3 detections shown, 320 x 240 pixels" and seen["size"] == [320, 240]
    assert seen["lines"] == EDGES and detector.sizes
    assert seen["broken"] == "this browser cannot play the video"
