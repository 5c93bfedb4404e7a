"""Measures the optimiser step of `rtdetr train`, on batches that are on the device already.

The batches are noise with numbers of boxes as in COCO: 2 to 60 in an image, one image of 40 or more. Each row is one
way to run the step: all of RT-DETRv3's supervision, or one query group as RT-DETRv2 has it; with kernels=plain; eager,
which is with kernels but without CUDA graphs; with CUDA graphs; and compiled.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rtdetr.benchmarks.timing import work_of
from rtdetr.boxes import cxcywh_to_xyxy
from rtdetr.config import STRIDES, Config, ConfigError, load_config
from rtdetr.engine import distributed
from rtdetr.engine.trainer import Trainer
from rtdetr.types import Batch, ImageInfo, Targets

NUM_CLASSES, NUM_BATCHES = 80, 8
Row = dict[str, Any]
ONE_GROUP = tuple(
    f"model.supervision.{each}" for each in ("num_noise_groups=0", "num_one_to_many_queries=0", "dense_head=false")
)
PLAIN, EAGER = ("kernels=plain",), ("train.compile=off", "train.graphs=off")
GRAPHS = ("train.compile=off", "train.graphs=auto")
COMPILED = ("train.compile=on", "train.graphs=auto")
MODES = {
    "plain": PLAIN,
    "eager": EAGER,
    "graphs": GRAPHS,
    "graphs, compiled": COMPILED,
    "one group, eager": (*EAGER, *ONE_GROUP),
    "one group, graphs": (*GRAPHS, *ONE_GROUP),
    "one group, graphs, compiled": (*COMPILED, *ONE_GROUP),
}


def modes_for(device: torch.device) -> list[str]:
    """Returns the modes that run on a device; a CPU has no CUDA graphs."""
    return [mode for mode in MODES if device.type == "cuda" or "graphs" not in mode]


def write_data(folder: Path, number: int) -> list[str]:
    """Writes the smallest data set that a training can read; returns config updates that point to it."""
    categories = [{"id": i, "name": f"class {i}"} for i in range(1, NUM_CLASSES + 1)]
    images = [{"id": i, "file_name": f"{i}.png", "width": 64, "height": 64} for i in range(1, number + 1)]
    boxes = [{"id": i, "image_id": i, "category_id": 1, "bbox": [8, 8, 32, 32], "area": 1024, "iscrowd": 0}
             for i in range(1, number + 1)]  # fmt: skip
    for each in images:
        Image.new("RGB", (64, 64)).save(folder / str(each["file_name"]))
    content = {"images": images, "annotations": boxes, "categories": categories}
    (folder / "boxes.json").write_text(json.dumps(content), encoding="utf-8")
    return [
        f"data.{split}.{key}"
        for split in ("train", "val")
        for key in (f"images={folder}", f"annotations={folder}/boxes.json")
    ]


def made_up(batch_size: int, size: int, device: torch.device, boxes: int | None, seed: int = 0) -> list[Batch]:
    """Batches with COCO's numbers of boxes, or with `boxes` in every image; uint8, as from the loader."""
    rng, batches = np.random.RandomState(seed), []
    for _ in range(NUM_BATCHES):
        counts = np.minimum(60, np.exp(rng.normal(1.45, 1.05, batch_size)).astype(int) + 1)
        counts[rng.randint(batch_size)] = max(counts.max(), 40)
        labels, cxcywh = [], []
        for count in counts if boxes is None else [boxes] * batch_size:
            sides = np.clip(np.exp(rng.normal(-1.9, 0.9, (count, 2))), 0.01, 0.9)
            centres = rng.uniform(sides / 2, 1 - sides / 2)
            cxcywh.append(torch.tensor(np.concatenate((centres, sides), axis=1), dtype=torch.float32))
            labels.append(torch.tensor(rng.randint(0, NUM_CLASSES, count)))
        pixels = [cxcywh_to_xyxy(each) * size for each in cxcywh]
        images = torch.randint(256, (batch_size, 3, size, size), device=device, dtype=torch.uint8)
        infos = tuple(ImageInfo(i, f"{i}.png", size, size) for i in range(batch_size))
        batches.append(Batch(images, Targets.stack(labels, cxcywh, pixels).to(device), infos))
    return batches


def check_size(size: int, cfg: Config) -> None:
    """Raises ConfigError for a size that the model does not take."""
    queries = max(cfg.model.decoder.num_queries, cfg.model.supervision.num_one_to_many_queries)
    cells = sum((size // side) ** 2 for side in STRIDES)
    if size % max(STRIDES):
        raise ConfigError(f"--size: expected a multiple of {max(STRIDES)}, got {size}")
    if cells < queries:
        raise ConfigError(f"--size: expected a cell for each of {queries} queries, got {size}, which has {cells}")


def measure_on(gpus: int, call: Callable[[], Row]) -> Row:
    """The row of `call`, a partial `measure`; with several GPUs, each with its own batches, that of the first one."""
    if gpus == 1:
        return call()
    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        torch.multiprocessing.spawn(measure_in_group, (gpus, port, Path(place) / "row.json", call), nprocs=gpus)
        return json.loads((Path(place) / "row.json").read_text(encoding="utf-8"))


def measure_in_group(rank: int, gpus: int, port: int, result: Path, call: Callable[[], Row]) -> None:
    """Runs one of several processes, with torchrun's environment."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(gpus)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    row = call()
    if rank == 0:
        result.write_text(json.dumps(row), encoding="utf-8")


def measure(
    config: str | Path, mode: str, batch_size: int, size: int, device: torch.device, steps: int, boxes: int | None,
    profiled: bool, updates: list[str],
) -> Row:  # fmt: skip
    with tempfile.TemporaryDirectory() as place, distributed.process_group(str(device)) as device:
        folder, gpus, on_gpu = Path(place), distributed.world_size(), device.type == "cuda"
        data = write_data(folder, batch_size * gpus)
        fixed = [f"data.train_batch_size={batch_size}", "data.num_workers=0", "train.estimate_memory=false"]
        cfg = load_config(config, [*data, *fixed, *MODES[mode], *updates])
        trainer = Trainer(cfg, folder / "run", device)
        batches = itertools.cycle(made_up(batch_size, size, device, boxes, seed=distributed.rank()))
        trainer.model.train()

        def run(count: int) -> Tensor:
            for _ in range(count):
                record = trainer.train_step([next(batches)])
            if record.ready is not None:
                record.ready.synchronize()
            return record.values[record.names.index("loss")]

        started = time.perf_counter()
        run(NUM_BATCHES * 3 + 2)  # every batch occurs often enough to be captured
        warm_up = time.perf_counter() - started
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        loss = run(steps)
        seconds = (time.perf_counter() - started) / steps
        each = "GPUs" if on_gpu else "processes"
        row: Row = {
            "mode": f"{mode}, {gpus} {each}" if gpus > 1 else mode,
            "boxes": str(boxes or "COCO's"),
            "images_per_s": gpus * batch_size / seconds,
            "ms": 1e3 * seconds,  # per step, one after the other
            "warm_up_s": warm_up,  # of the first steps, compilation included
            "loss": float(loss),
            # The graphs' permanent share included.
            "memory_gib": torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0,
            **profile_of(run, profiled and on_gpu),
        }
        trainer.release()  # graphs that communicate must be freed before the process group
        return row


def profile_of(run: Callable[[int], object], profiled: bool) -> Row:
    """What a step does on the GPU: busy milliseconds, kernels, waits of the host for it, and the kernels one by one
    with calls and milliseconds."""
    if not profiled:
        return {"gpu_ms": 0.0, "kernels": 0.0, "waits": 0.0, "top": []}
    work = work_of(lambda: run(NUM_BATCHES), number=1)
    top = [(name, calls / NUM_BATCHES, ms / NUM_BATCHES) for name, calls, ms in work.top]
    kernels, busy, waits = (each / NUM_BATCHES for each in work[:3])
    return {"gpu_ms": busy, "kernels": kernels, "waits": waits, "top": top}


HEADER = (
    "step                                   boxes  images/s      ms  GPU busy  kernels  waits    GiB  "
    "warm-up s     loss"
)
ROW = (
    "{mode:36s} {boxes:>7s} {images_per_s:9.1f} {ms:7.1f} {gpu_ms:9.1f} {kernels:8.0f} {waits:6.1f} {memory_gib:6.2f} "
    "{warm_up_s:10.1f} {loss:8.3f}"
)
