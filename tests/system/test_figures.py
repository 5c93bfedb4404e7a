"""The images of the documentation, of which tools/figures.py makes those of a training."""

from __future__ import annotations

import os
import runpy
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from PIL import Image

from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "tools" / "figures.py"))


def test_the_design_names_what_is_there() -> None:
    drawing = ElementTree.parse(IMAGES / "design.svg").getroot()
    files = [text.text or "" for text in drawing.iterfind("{*}text[@class='f']")]
    assert len(files) > 10 and [file for file in files if not (ROOT / "rtdetr" / file).exists()] == []


def test_the_images_are_small() -> None:
    assert sum(file.stat().st_size for file in IMAGES.iterdir()) <= 600_000


def test_the_figures_of_a_run(figures: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastapi", reason='the page of the server needs pip install "rtdetr[serve]"')
    if not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        pytest.skip("no Chromium on this machine")
    monkeypatch.chdir(tmp_path)
    cfg = tiny_config(tiny_data(tmp_path / "shapes"))
    names = ("circle", "square", "triangle", "star", "cross")
    torch.manual_seed(0)
    model = build_model(cfg.model, len(names))
    save_checkpoint(Path("run/best.pth"), make_checkpoint(cfg, Classes(names, (2, 3, 5, 7, 11)), model.state_dict()))
    Path("run/metrics.csv").write_text("kind,iteration,epoch,loss,lr,AP\ntrain,1,0,9,.1,\neval,1,1,,,.5\n")
    os.mkdir("made")
    figures["figures_of"](Path("run"), Path("made"))
    sizes = {file.name: Image.open(file).size for file in Path("made").iterdir()}
    assert sizes == {
        "curves.png": (1500, 400),
        "demo.jpg": (1212, 604),
        "report.png": (1100, 1100),
        "serve.png": (900, 1100),
    }
    for name in ("serve.png", "report.png"):
        assert len(Image.open(f"made/{name}").convert("RGB").getcolors(1 << 24) or ()) > 16, f"{name} is blank"
