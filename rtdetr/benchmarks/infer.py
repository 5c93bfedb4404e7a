"""Measures detection through the public predictor: tensors or files in, detections out, postprocess included.

Every row runs in its own process, so that its memory and first result are its own, and a failing row does not affect
others. The weights are random. Images are uint8 on the device; the results stay there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rtdetr.garbage_collection import collection_paused
from rtdetr.gpu_startup import wake_gpu

if __name__ == "__main__":  # the process of a row, which starts as `rtdetr predict` does
    wake_gpu(json.loads(sys.argv[1])["device"])

with collection_paused():
    import torch
    from PIL import Image
    from torch import Tensor

    from rtdetr.benchmarks.timing import latency, wait, work_of
    from rtdetr.inference.deploy import CAPTURE_AT
    from rtdetr.inference.predictor import Predictor

# Options for each row: of the predictor, except for `autocast`.
ROWS: dict[str, dict[str, Any]] = {
    "float32 eager": {"fold": False, "graphs": False},
    "autocast eager": {"fold": False, "graphs": False, "autocast": True},
    "deployed eager": {"graphs": False},
    "deployed + graph": {},
    "deployed, fused ReLU + graph": {"fuse_relu": True},
    "deployed + compile + graph": {"compile": True},
    "deployed + compile max + graph": {"compile": "max"},
}
SLOW = "deployed + compile max + graph"  # takes minutes, so it only runs if requested by name
FILES: dict[str, dict[str, Any]] = {
    "files": {},
    "files, resized on the device": {"resize": "device"},
    "files, decoded on the device": {"decode": "device"},
}
# Through `RTDETRv3.predict`, see public.py.
PUBLIC = ("predict, tensor", "predict, 8 tensors", "predict, array", "predict, JPEG", "predict, list of JPEGs")
ON_CPU = ("float32 eager", "deployed eager", "files", "predict, array", "predict, JPEG")


def rows_for(device: torch.device) -> list[str]:
    return list(ON_CPU) if device.type == "cpu" else [name for name in (*ROWS, *FILES, *PUBLIC) if name != SLOW]


def make_checkpoint_file(path: Path, config: str, updates: list[str]) -> None:
    """Writes a checkpoint of a config with random weights, whose scores and boxes differ between cells."""
    from rtdetr.config import load_config
    from rtdetr.data.classes import Classes
    from rtdetr.models.rtdetrv3 import build_model
    from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

    cfg = load_config(config, updates)
    torch.manual_seed(0)
    model = build_model(cfg.model, 80)
    decoder = model.decoder
    for head in (decoder.selector.score_head, *decoder.score_heads):
        torch.nn.init.normal_(head.weight, std=0.1)
    for head in (decoder.selector.box_head, *decoder.box_heads):
        torch.nn.init.normal_(head.linears()[-1].weight, std=0.02)
    classes = Classes(tuple(f"class {i}" for i in range(80)), tuple(range(1, 81)))
    save_checkpoint(path, make_checkpoint(cfg, classes, model.state_dict()))


def make_images(folder: Path, number: int) -> None:
    """Writes JPEGs of 640 x 480 pixels, about 150 kB each, as in COCO."""
    import numpy as np

    generator = np.random.default_rng(0)
    for i in range(number):
        coarse = Image.fromarray(generator.integers(0, 256, (24, 32, 3), dtype=np.uint8)).resize((640, 480))
        noisy = np.asarray(coarse) + generator.normal(0, 12, (480, 640, 1))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{i:05d}.jpg", quality=90)


def measure_rows(config: str, updates: list[str], names: list[str], **order: Any) -> Iterator[dict[str, Any]]:
    """Yields one dict per row and batch size once measured; a failed row has `error`. order: device, batches,
    num_files and profile, for the process of each row."""
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint_file(Path(folder, "model.pth"), config, updates)
        if {*FILES, *PUBLIC} & set(names):
            Path(folder, "images").mkdir()
            make_images(Path(folder, "images"), min(order["num_files"], 256))
        for name in names:
            for row in _in_a_process({"name": name, "folder": folder, **order}):
                yield {"config": config, **row}


def _in_a_process(order: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the rows that a new process measures."""
    module = f"rtdetr.benchmarks.{'public' if order['name'] in PUBLIC else 'infer'}"
    command = [sys.executable, "-m", module, json.dumps(order | {"started": time.time()})]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # a clone works without being installed
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        yield from (json.loads(output) for output in child.stdout or () if output.startswith("{"))
        if child.wait():
            errors.seek(0)
            said = [each for each in errors.read().splitlines() if each.strip()]
            yield {"name": order["name"], "error": said[-1] if said else f"exit code {child.returncode}"}


COLUMNS = (  # title, key of a row, width, digits
    ("ms", "ms", 8, 3),
    ("images/s", "images_per_s", 9, 0),
    ("MiB", "mib", 7, 0),
    ("first s", "first_s", 8, 2),
    ("warm s", "warm_s", 7, 1),
    ("shift", "shift", 8, 4),
    ("kernels", "kernels", 8, 0),
    ("busy ms", "busy_ms", 8, 3),
    ("waits", "waits", 5, 1),
)


def header() -> str:
    return " ".join([f"{'row':38s} {'batch':>5s}", *(f"{title:>{width}s}" for title, _, width, _ in COLUMNS)])


def line(row: dict[str, Any]) -> str:
    """A row of the table, followed by its profile if there is one."""
    if "error" in row:
        return f"{row['name']:38s} failed: {row['error']}"
    shown = {key: f"{row[key]:.{digits}f}" for _, key, _, digits in COLUMNS if row.get(key) is not None}
    numbers = " ".join(f"{shown.get(key, '-'):>{width}s}" for _, key, width, _ in COLUMNS)
    lines = [f"{row['name']:38s} {row['batch']:5d} {numbers}"]
    lines += [f"    {label}: {value:.3f} ms" for label, value in row.get("parts", {}).items()]
    lines += [f"    {number:6.1f} x {ms:7.3f} ms in all  {kernel}" for kernel, number, ms in row.get("top", [])[:14]]
    return "\n".join(lines)


def work(order: dict[str, Any]) -> None:
    """Runs in the process of one row, and prints its rows as JSON."""
    imported = time.time()
    order = {"seconds": 1.0, **order}
    device, options = torch.device(order["device"]), dict((ROWS | FILES)[order["name"]])
    autocast = options.pop("autocast", False)
    predictor = Predictor(Path(order["folder"], "model.pth"), device, threshold=0.5, **options)
    loaded = time.time()
    with torch.autocast(device.type, torch.float16, enabled=autocast):
        predictor.predict_tensors(noise(predictor, 1)).scores.tolist()
        first, started = time.time(), order["started"]
        fresh = {"first_s": first - started, "import_s": imported - started, "load_s": loaded - imported}
        by_batch = (measure_tensors(predictor, batch, order) for batch in order["batches"])
        for row in [measure_files(predictor, order)] if order["name"] in FILES else by_batch:
            print(json.dumps({"name": order["name"], **row, **fresh}), flush=True)


def noise(predictor: Predictor, batch: int) -> Tensor:
    """Images (B, 3, H, W) uint8 of the network's size, on the host."""
    shape, generator = (batch, *predictor.cfg.data.image_size, 3), torch.Generator().manual_seed(1)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).permute(0, 3, 1, 2)


def seconds_of(call: Callable[[], object], number: int, on_gpu: bool) -> float:
    """The time of calls without waiting in between."""
    wait(on_gpu)
    start = time.perf_counter()
    for _ in range(number):
        call()
    wait(on_gpu)
    return time.perf_counter() - start


def measure_tensors(predictor: Predictor, batch: int, order: dict[str, Any]) -> dict[str, Any]:
    images = noise(predictor, batch).to(predictor.device)
    sizes = torch.tensor([[480.0, 640.0]] * batch, device=predictor.device)
    on_gpu = predictor.device.type == "cuda"

    def call() -> Tensor:
        return predictor.predict_tensors(images, sizes).scores

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    row: dict[str, Any] = {"batch": batch}
    row["warm_s"] = seconds_of(call, CAPTURE_AT + 1, on_gpu)  # plainly, captured, replayed
    scores, first = call().float().cpu(), Path(order["folder"], f"scores{batch}.pt")
    if not first.is_file():
        torch.save(scores, first)
    # The largest difference between the best scores of each rank and those of the first row; 1 if it is not a number.
    row["shift"] = float((scores - torch.load(first, weights_only=True)).abs().nan_to_num(nan=1.0).max())
    row["ms"] = latency(call, order["seconds"], on_gpu)
    number = max(2, min(500, round(1000 * order["seconds"] / row["ms"])))
    row["images_per_s"] = batch * number / seconds_of(call, number, on_gpu)
    if on_gpu:
        row["mib"] = torch.cuda.max_memory_reserved() / 2**20
        if order["profile"]:
            row |= work_of(call, number=5)._asdict()
    return row


def measure_files(predictor: Predictor, order: dict[str, Any]) -> dict[str, Any]:
    """Images per second from a folder of JPEGs to lists of detections, and the time of one image on one thread."""
    from rtdetr.inference.prefetch import one_opencv_thread
    from rtdetr.inference.processes import usable_cores

    batch, number, seconds = max(order["batches"]), order["num_files"], order["seconds"]
    files = sorted(Path(order["folder"], "images").iterdir())
    files = (files * (number // len(files) + 1))[:number]
    pixels, image = predictor._empty_batch(batch), predictor.read_file(files[0])
    for i in range(batch):
        pixels.put(i, image)
    images, sizes = pixels.on(predictor.device), pixels.sizes.to(predictor.device)

    def detect() -> object:
        return predictor._reported(predictor._start(pixels), 0.5)

    for _ in range(CAPTURE_AT):
        detect()
    pending = predictor._start(pixels)
    predictor._reported(pending, 0.5)
    with one_opencv_thread():
        parts = {
            "decode, one thread, an image": latency(lambda: predictor.read_file(files[0]), seconds),
            "into its place in the batch, one thread, an image": latency(lambda: pixels.put(0, image), seconds),
            "PIL's image for the caller, one thread": latency(lambda: Image.fromarray(image), seconds),
        }
    on_gpu = predictor.device.type == "cuda"
    parts |= {
        f"copy to the device and detect, {batch} images": latency(detect, seconds, on_gpu),
        f"detect alone, {batch} images": latency(lambda: predictor.predict_tensors(images, sizes), seconds, on_gpu),
        f"lists of detections, {batch} images": latency(lambda: predictor._reported(pending, 0.5), seconds),
    }
    cores, rates = usable_cores(), []
    choices: list[dict[str, Any]] = [{"num_threads": 1}, {"num_threads": cores}, {"num_processes": cores}]
    for readers in choices[:2] if predictor.plan.decode == "device" else choices:
        least = files if cores in readers.values() else files[: max(batch, number // 8)]
        list(predictor.predict_files(files[:batch], batch, **readers))  # processes start once
        start = time.perf_counter()
        done = sum(not each.error for each in predictor.predict_files(least, batch, **readers))
        taken = time.perf_counter() - start
        parts |= {f"{name}={value}, an image": 1e3 * taken / done for name, value in readers.items()}
        rates.append(done / taken)
    return {"batch": batch, "images_per_s": max(rates), "parts": parts}


if __name__ == "__main__":
    work(json.loads(sys.argv[1]))
