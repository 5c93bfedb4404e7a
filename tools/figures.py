"""The images of the documentation: `python tools/figures.py` draws the design, `python tools/figures.py RUN` also the
figures of a training: its learning curves, detections, the report of `rtdetr eval` and the page of `rtdetr serve`.

RUN is a run folder, such as that of `make demo`, with its validation images where its config says. The last two figures
are screenshots and need Chromium, and `pip install "rtdetr[serve]"`. `--output DIR`: default docs/images.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone works without being installed


class Part(NamedTuple):
    """A box of the design: its corner, what happens, the file in rtdetr/ that does it, and notes."""

    x: int
    y: int
    title: str
    file: str
    notes: tuple[str, ...]
    colour: str


DATA, MODEL, RESULT, TRAINING = "#fff4d6", "#e8f0fe", "#e3f4e1", "#fde7e4"
PARTS = (
    Part(20, 40, "file to pixels", "data/images.py", ("RGB, upright",), DATA),
    Part(20, 136, "augmentation, batch", "data/transforms.py", ("loader.py: (B, 3, H, W), Targets",), DATA),
    Part(280, 40, "backbone", "models/backbone.py", ("maps of stride 8, 16, 32",), MODEL),
    Part(280, 136, "encoder", "models/encoder.py", ("the same maps, fused",), MODEL),
    Part(280, 232, "memory, selection", "models/decoder.py", ("best Q cells become queries",), MODEL),
    Part(
        280,
        362,
        "decoder layers",
        "models/decoder.py",
        ("3 to 6 layers refine the boxes;", "look forward twice"),
        MODEL,
    ),
    Part(280, 476, "the op", "ops", ("deformable attention",), MODEL),
    Part(20, 362, "boxes in pixels", "models/postprocess.py", ("detecting: of the last layer",), RESULT),
    Part(540, 136, "dense head", "models/dense_head.py", ("a box for every cell",), TRAINING),
    Part(770, 136, "its loss", "losses/dense_criterion.py", ("ATSS, then task-aligned",), TRAINING),
    Part(540, 232, "query groups", "models/query_groups.py", ("noise groups, one-to-many,", "denoising.py"), TRAINING),
    Part(540, 362, "split", "models/query_groups.py", ("predictions of each group",), TRAINING),
    Part(770, 362, "matching", "losses/matcher.py", ("ops/assignment.py",), TRAINING),
    Part(770, 252, "set losses", "losses/criterion.py", ("class, L1, GIoU",), TRAINING),
    Part(770, 476, "step", "engine/step.py", ("backward pass, optimiser",), TRAINING),
)
ARROWS = (
    "M120 106V136", "M220 169H250V73H280", "M380 106V136", "M380 202V232", "M380 298V362", "M380 446V476",
    "M280 395H220", "M480 169H540", "M740 169H770", "M480 265H540", "M560 316V339H440V362", "M480 404H540",
    "M740 395H770", "M870 362V318", "M970 285H975V509H970", "M970 169H980V494H970",
)  # fmt: skip
STYLE = (
    ".f{font:12px monospace;fill:#555}.t{font-size:15px;fill:#111}.n{font-size:12px;fill:#555}"
    ".b{stroke:#333;stroke-width:1.2}.a{stroke:#333;stroke-width:1.5;fill:none;marker-end:url(#h)}"
)
HEAD = '<marker id="h" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
TRAINING_AREA = (
    '<rect x="520" y="34" width="474" height="512" rx="8" fill="none" stroke="#c0392b" stroke-dasharray="2 4"/>'
)


def design() -> str:
    """The way of an image through the files, as SVG."""
    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1000 560" font-family="sans-serif" role="img" '
        'aria-label="From an image file to boxes and loss">',
        f"<style>{STYLE}</style>",
        f'<defs>{HEAD}<path d="M0 0L8 4L0 8z" fill="#333"/></marker></defs>',
        '<rect width="1000" height="560" fill="#fff"/>',
        '<text class="t" x="20" y="26">always</text><text class="t" x="540" y="26">in training only</text>',
        TRAINING_AREA,
    ]
    for part in PARTS:
        texts = [("t", part.title), ("f", part.file), *(("n", note) for note in part.notes)]
        height = 32 + 17 * len(part.notes) + 17
        lines.append(
            f'<rect class="b" x="{part.x}" y="{part.y}" width="200" height="{height}" rx="6" fill="{part.colour}"/>'
        )
        lines += [
            f'<text class="{kind}" x="{part.x + 10}" y="{part.y + 22 + round(17.5 * line)}">{text}</text>'
            for line, (kind, text) in enumerate(texts)
        ]
    lines += [f'<path class="a" d="{arrow}"/>' for arrow in ARROWS]
    return "\n".join([*lines, "</svg>", ""])


def detections(model: Any, files: list[Path], side: int = 300, gap: int = 4) -> Any:
    """Eight images with their boxes, in two rows."""
    from PIL import Image

    sheet = Image.new("RGB", (4 * side + 3 * gap, 2 * side + gap), "white")
    for i, result in enumerate(model.predict(files[:8])):
        drawn = result.draw()
        drawn.thumbnail((side, side))
        sheet.paste(drawn, (i % 4 * (side + gap), i // 4 * (side + gap)))
    return sheet


# Chooses the file at /image on the page of the server, as a user would.
CHOOSE = """
(async () => {
  const file = new File([await (await fetch("image")).blob()], "image.jpg", {type: "image/jpeg"});
  const files = new DataTransfer();
  files.items.add(file);
  get("file").files = files.files;
  get("file").dispatchEvent(new Event("change"));
})();
"""


@contextmanager
def served(weights: Path, file: Path) -> Iterator[str]:
    """The address of the page of `rtdetr serve`, with this image chosen, three times as large."""
    from fastapi import Response
    from fastapi.responses import HTMLResponse
    from PIL import Image, ImageOps

    from rtdetr.commands.serve import listener
    from rtdetr.inference.predictor import Predictor
    from rtdetr.serve.app import HERE, OWN_ONLY, Settings, build_app
    from rtdetr.serve.server import running

    predictor = Predictor(weights, "cpu", threshold=0.0)
    app = build_app(predictor.predict, Settings(weights.name, predictor.classes.names))
    page = (HERE / "page.html").read_text(encoding="utf-8").replace("</html>", f"<script>{CHOOSE}</script></html>")
    app.add_api_route("/figure", lambda: HTMLResponse(page, headers=OWN_ONLY))
    image = BytesIO()
    ImageOps.scale(Image.open(file).convert("RGB"), 3).save(image, "JPEG", quality=95)
    app.add_api_route("/image", lambda: Response(image.getvalue(), media_type="image/jpeg"))
    with listener("127.0.0.1", 0) as socket, running(app, socket) as url:
        yield f"{url}/figure"


def screenshot(address: str, size: tuple[int, int]) -> bytes:
    """A page as a PNG of 256 colours. Raises SystemExit where there is no Chromium."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("error: no Chromium on this machine, which the screenshots need")
    with TemporaryDirectory() as folder:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
        options += [f"--user-data-dir={folder}/profile", f"--screenshot={folder}/page.png"]
        options += [f"--window-size={size[0]},{size[1]}"]
        subprocess.run([browser, *options, address], check=True, timeout=120, stderr=subprocess.DEVNULL)
        written = BytesIO()
        Image.open(f"{folder}/page.png").convert("RGB").quantize(256).save(written, "PNG", optimize=True)
    return written.getvalue()


def figures_of(run: Path, output: Path) -> None:
    from rtdetr import RTDETRv3
    from rtdetr.cli import main as command
    from rtdetr.engine.run_files.metrics import draw_curves

    weights = run / "best.pth"
    model = RTDETRv3.from_pretrained(weights, device="cpu")
    val = model.cfg.data.val
    files = sorted(Path(val.images).iterdir())[:80:10]
    draw_curves(run / "metrics.csv", output / "curves.png")
    detections(model, files).save(output / "demo.jpg", quality=85)
    with served(weights, files[0]) as address:
        (output / "serve.png").write_bytes(screenshot(address, (900, 1100)))
    with TemporaryDirectory() as folder:
        here = f"data.val.annotations={os.path.relpath(val.annotations)}"  # the report shows this path
        if code := command(["eval", str(weights), "--report", folder, "--device", "cpu", "--overwrite", "-u", here]):
            raise SystemExit(code)
        (output / "report.png").write_bytes(screenshot(Path(folder, "report.html").as_uri(), (1100, 1100)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", metavar="RUN", help="a run folder; default: the design alone")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "design.svg").write_text(design(), encoding="utf-8")
    if args.run:
        figures_of(args.run, args.output)
    for file in sorted(args.output.iterdir()):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
