"""The examples that use an exported file elsewhere: without torch, in C++, in a browser."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from export_cases import write_checkpoint
from export_programs import PAGE, WEB, chromium_shows, run_alone
from PIL import Image

from rtdetr.config import Resize
from rtdetr.data.shapes import draw_image
from rtdetr.export.build import describe
from rtdetr.export.graph import make_graph
from rtdetr.export.onnx import write_onnx
from rtdetr.inference.export_metadata import RESIZES
from rtdetr.inference.runtimes import load

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "export"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `write_checkpoint` writes; model.onnx."""
    folder = tmp_path_factory.mktemp("examples")
    write_checkpoint(folder)
    model, metadata = describe(folder / "model.pth", "fp32", raw=False, input_type="uint8")
    write_onnx(make_graph(model, metadata, "torch"), metadata, folder / "model.onnx")
    return folder


@pytest.mark.parametrize("interpolation", ["cubic", "bilinear"])
def test_example_without_torch(folder: Path, tmp_path: Path, interpolation: Resize) -> None:
    import onnx

    image = min((folder / "shapes" / "val").glob("*.jpg"))
    changed = onnx.load(folder / "model.onnx")
    for entry in changed.metadata_props:
        entry.value = entry.value.replace('"interpolation": "cubic"', f'"interpolation": "{interpolation}"')
        entry.value = entry.value.replace(RESIZES["cubic"], RESIZES[interpolation])
    onnx.save(changed, tmp_path / "model.onnx")
    predictor = load(tmp_path / "model.onnx")
    assert predictor.cfg.data.interpolation == interpolation
    expected = predictor.predict([Image.open(image).convert("RGB")])[0]
    example = EXAMPLES / "onnxruntime_numpy.py"
    code = f"import runpy; runpy.run_path({str(example)!r}, run_name='__main__')"
    given = [str(example), str(tmp_path / "model.onnx"), str(image)]
    lines = [
        line.removeprefix(f"{image} ")
        for line in run_alone(code, {"torch", "rtdetr", "torchvision"}, given).splitlines()
    ]
    assert len(lines) >= len(expected) > 0  # the example keeps boxes that lie outside of the image
    assert all(any(line.startswith(f"{each.name} {each.score:.4f}"[:-1]) for line in lines) for each in expected)


def ort_web() -> Path:
    """The folder of onnxruntime-web; skips the test where nobody says it."""
    package = os.environ.get("RTDETR_ORT_WEB", "")
    if not package:
        pytest.skip("needs onnxruntime-web: `make browser` fetches it, or RTDETR_ORT_WEB says its folder")
    return Path(package)


@pytest.fixture(scope="module")
def image() -> Image.Image:
    """Larger than the network's input, and of another shape."""
    return Image.fromarray(draw_image(200, np.random.default_rng(1))[0][:150])


def agrees(found: list[dict[str, Any]], model: Path, image: Image.Image) -> None:
    """The name, score and box of what an example found with what `rtdetr predict` finds, from 0.1 on."""
    expected = load(model, threshold=0.1).predict([image])[0]
    assert [each["name"] for each in found] == [each.name for each in expected] and expected
    np.testing.assert_allclose([each["score"] for each in found], [each.score for each in expected], atol=2e-3)
    boxes = np.clip([each["box"] for each in found], 0, [image.width, image.height] * 2)
    np.testing.assert_allclose(boxes, [each.box for each in expected], atol=0.2)


def test_browser_example_in_node(folder: Path, image: Image.Image, tmp_path: Path) -> None:
    """What the page does between a canvas and its boxes, by onnxruntime-web."""
    if shutil.which("node") is None:
        pytest.skip("needs node")
    (tmp_path / "rgba").write_bytes(image.convert("RGBA").tobytes())
    (tmp_path / "web.js").write_text(WEB)
    arguments = [ort_web(), folder / "model.onnx", tmp_path / "rgba", EXAMPLES / "browser" / "detect.js"]
    command = ["node", str(tmp_path / "web.js"), *map(str, (*arguments, image.height, image.width))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    agrees(json.loads(done.stdout), folder / "model.onnx", image)


SOFTWARE_GPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")


@pytest.mark.parametrize(
    ("options", "says"),
    [(SOFTWARE_GPU, "choose an image"), (("--disable-gpu",), "this browser has no WebGPU, so the CPU computes")],
)
def test_browser_example_in_chromium(
    folder: Path, image: Image.Image, tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    """With WebGPU, computed in software, and with WASM where there is none."""
    page = tmp_path / "page"
    shutil.copytree(EXAMPLES / "browser", page)
    for file in (ort_web() / "dist").iterdir():
        if file.name.startswith(("ort.webgpu.min.", "ort-wasm-simd-threaded.asyncify.")):
            (page / file.name).symlink_to(file)
    (page / "model.onnx").symlink_to(folder / "model.onnx")
    image.save(page / "image.png")
    with open(page / "index.html", "a", encoding="utf-8") as file:
        file.write(f"<script>{PAGE}</script>")
    shown = chromium_shows(page, tmp_path / "profile", *options)
    assert "found" in shown and shown["said"].startswith(says), shown
    agrees(shown["found"], folder / "model.onnx", image)


def test_cpp_example(folder: Path, image: Image.Image, tmp_path: Path) -> None:
    root = Path(os.environ.get("RTDETR_ORT") or "nowhere")
    if not (root / "include" / "onnxruntime_cxx_api.h").exists() or shutil.which("g++") is None:
        pytest.skip("needs g++, and RTDETR_ORT: an unpacked release of ONNX Runtime")
    source = EXAMPLES / "onnxruntime.cpp"
    assert len(source.read_text(encoding="utf-8").splitlines()) <= 250
    program, libraries = str(tmp_path / "detect"), root / "lib"
    link = [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lonnxruntime"]
    subprocess.run(["g++", "-std=c++17", str(source), f"-I{root / 'include'}", *link, "-o", program], check=True)
    image.save(tmp_path / "image.ppm")
    command = [program, str(folder / "model.onnx"), str(tmp_path / "image.ppm"), "0.1"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    found = [line.rsplit(maxsplit=5) for line in lines]
    objects = [{"name": name, "score": float(score), "box": [*map(float, box)]} for name, score, *box in found]
    agrees(objects, folder / "model.onnx", image)
