"""The images of the documentation that show a training: `python tools/figures.py RUN` draws its learning curves,
detections, the report of `rtdetr eval` and the page of `rtdetr serve`. The others are edited by hand.

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
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a clone works without being installed


def detections(model: Any, files: list[Path], side: int = 300, gap: int = 4) -> Any:
    """Eight images with their boxes, in two rows."""
    from PIL import Image, ImageOps

    sheet = Image.new("RGB", (4 * side + 3 * gap, 2 * side + gap), "white")
    for i, result in enumerate(model.predict(files[:8])):
        sheet.paste(ImageOps.contain(result.draw(), (side, side)), (i % 4 * (side + gap), i // 4 * (side + gap)))
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

    sys.path.append(str(ROOT / "tests/support"))
    from serve_cases import running

    predictor = Predictor(weights, "cpu", threshold=0.0)
    app = build_app(predictor.predict, Settings(weights.name, predictor.classes.names))
    page = (HERE / "page.html").read_text(encoding="utf-8").replace("</html>", f"<script>{CHOOSE}</script></html>")
    app.add_api_route("/figure", lambda: HTMLResponse(page, headers=OWN_ONLY))
    image = BytesIO()
    ImageOps.scale(Image.open(file).convert("RGB"), 3).save(image, "JPEG", quality=95)
    app.add_api_route("/image", lambda: Response(image.getvalue(), media_type="image/jpeg"))
    with listener("127.0.0.1", 0) as socket, running(app, socket) as url:
        yield f"{url}/figure"


def screenshot(address: str, size: str, file: Path) -> None:
    """Writes a page as a PNG of 256 colours. Raises SystemExit where there is no Chromium."""
    from PIL import Image

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        raise SystemExit("error: no Chromium on this machine, which the screenshots need")
    with TemporaryDirectory() as folder:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=20000"]
        options += [f"--user-data-dir={folder}/profile", f"--screenshot={folder}/page.png", f"--window-size={size}"]
        subprocess.run([browser, *options, address], check=True, timeout=120, stderr=subprocess.DEVNULL)
        Image.open(f"{folder}/page.png").convert("RGB").quantize(256).save(file, optimize=True)


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
        screenshot(address, "900,1100", output / "serve.png")
    with TemporaryDirectory() as folder:
        here = f"data.val.annotations={os.path.relpath(val.annotations)}"  # the report shows this path
        if code := command(["eval", str(weights), "--report", folder, "--device", "cpu", "--overwrite", "-u", here]):
            raise SystemExit(code)
        screenshot(Path(folder, "report.html").as_uri(), "1100,1100", output / "report.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    figures_of(args.run, args.output)
    for file in sorted(args.output.iterdir()):
        print(f"{file}  {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
