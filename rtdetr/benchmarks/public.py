"""Measures `RTDETRv3.predict` with its default options, as in a user's script: one row in its own process.

Latencies are those of a caller that waits for the boxes of each call.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rtdetr import RTDETRv3

LEAST, MOST = 20, 200  # number of calls per median


def work(order: dict[str, Any]) -> None:
    """Prints the row as JSON."""
    imported = time.time()
    model = RTDETRv3.from_pretrained(Path(order["folder"]) / "model.pth", device=order["device"])
    loaded = time.time()
    files = sorted((Path(order["folder"]) / "images").iterdir())
    len(model.predict(files[0]))
    first = time.time()
    row = {"first_s": first - order["started"], "import_s": imported - order["started"], "load_s": loaded - imported}
    row |= _measured(model, files, order)
    print(json.dumps({"name": order["name"], **row}), flush=True)


def _measured(model: RTDETRv3, files: list[Path], order: dict[str, Any]) -> dict[str, Any]:
    name, number = order["name"], order["num_files"]
    if name == "predict, list of JPEGs":
        batch = max(order["batches"])
        listed: Any = (files * (number // len(files) + 1))[:number]
        model.warmup(batch)
        start = time.perf_counter()
        done = sum(len(each.boxes) >= 0 for each in model.predict(listed, batch_size=batch))
        return {"batch": batch, "images_per_s": done / (time.perf_counter() - start)}
    sources = {"predict, JPEG": lambda: files[0], "predict, array": lambda: _image(model).permute(1, 2, 0).numpy()}
    source = sources.get(name, lambda: _on_device(model, name))()
    batch = 8 if name == "predict, 8 tensors" else 1
    found: Callable[[], Any] = lambda: model.predict(source)  # noqa: E731
    ms = 1e3 * _median(found, order.get("seconds", 1.0))
    return {"batch": batch, "ms": ms, "images_per_s": 1e3 * batch / ms}


def _image(model: RTDETRv3) -> Any:
    """(3, h, w) uint8 of the network's size, in memory as an array (h, w, 3)."""
    import torch

    size = model.cfg.data.image_size
    return torch.randint(256, (*size, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)).permute(
        2, 0, 1
    )


def _on_device(model: RTDETRv3, name: str) -> Any:
    """(3, h, w), or (8, 3, h, w)."""
    image = _image(model).contiguous().to(model.device)
    return image.expand(8, -1, -1, -1).contiguous() if name == "predict, 8 tensors" else image


def _median(call: Callable[[], Any], seconds: float) -> float:
    """Median seconds per call; calls that capture CUDA graphs are excluded."""
    for _ in range(8):
        call()
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < 3 or (time.perf_counter() < end and len(taken) < MOST) or len(taken) < LEAST * (seconds >= 1):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
