"""Measures `RTDETRv3.predict` with its default options, as in a user's script: one row in its own process.

Latencies are those of a caller that waits for the boxes of each call.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from rtdetr import RTDETRv3
from rtdetr.benchmarks.timing import latency


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
    source = _source(model, name, files)

    def call() -> Any:
        return model.predict(source)

    for _ in range(8):  # some of these capture CUDA graphs
        call()
    batch, seconds = 8 if name == "predict, 8 tensors" else 1, order.get("seconds", 1.0)
    ms = latency(call, seconds, least=20 if seconds >= 1 else 3)
    return {"batch": batch, "ms": ms, "images_per_s": 1e3 * batch / ms}


def _source(model: RTDETRv3, name: str, files: list[Path]) -> Any:
    """A file, or uint8 of the network's size: an array (h, w, 3), or on the device (3, h, w) or (8, 3, h, w)."""
    import torch

    if name == "predict, JPEG":
        return files[0]
    generator = torch.Generator().manual_seed(1)
    image = torch.randint(256, (*model.cfg.data.image_size, 3), dtype=torch.uint8, generator=generator)
    if name == "predict, array":
        return image.numpy()
    image = image.permute(2, 0, 1).contiguous().to(model.device)
    return image.expand(8, -1, -1, -1).contiguous() if name == "predict, 8 tensors" else image


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
