"""Runs the blocks of a page in a folder where everything lies that the pages speak of, small.

Nothing of a command changes but its size: trainings get the smallest model, images of 64 pixels and one step, and
data where they name none of their own.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from docs_blocks import ROOT, Block, Command, commands_of
from docs_checks import Wrong, check_command, check_python
from engine_helpers import NUM_TRAIN, NUM_VAL, tiny_config, tiny_data, tiny_updates

from rtdetr import cli
from rtdetr.data.classes import Classes
from rtdetr.data.shapes import make_shapes
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint

DATA = ("data.train.", "data.val.")
FEW = ["--num-train", str(NUM_TRAIN), "--num-val", str(NUM_VAL), "--size", "96"]  # generated images
TRAININGS = ("train", "learning-curve")
ON_A_DEVICE = (*TRAININGS, "eval", "predict")


def furnish(folder: Path) -> None:
    """Checkpoints, images, annotations and a clip, under the names that pages use."""
    data = tiny_data(folder / "my" / "set")
    others = make_shapes(folder / "others", num_train=NUM_VAL, num_val=NUM_VAL, size=96, seed=1)
    truth = data / "annotations" / "instances_val.json"
    (others / "val").rename(data / "test")
    (others / "annotations" / truth.name).rename(truth.with_name("instances_test.json"))
    for name in ("train", "val", "test"):
        shutil.copytree(data / name, folder / "my" / name)
        shutil.copy(data / "annotations" / f"instances_{name}.json", folder / "my" / f"{name}.json")
    for name in ("my_data", "datasets/shapes", "datasets/bccd"):
        shutil.copytree(data, folder / name)
    for name in ("images", "more", "my/images"):
        shutil.copytree(data / "val", folder / name)
    shutil.copy(data / "val" / "000000.jpg", folder / "image.jpg")
    mini = folder / "datasets" / "coco_mini" / "annotations"
    mini.mkdir(parents=True)
    shutil.copy(truth, mini / "instances_train2017.json")
    (folder / "list.txt").write_text("images/000000.jpg\nimages/000001.jpg\n")
    torch.manual_seed(0)
    cfg = tiny_config(data, "train.max_iterations=1")
    categories = json.loads(truth.read_text())["categories"]
    classes = Classes(tuple(each["name"] for each in categories), tuple(each["id"] for each in categories))
    checkpoint = make_checkpoint(cfg, classes, build_model(cfg.model, len(categories)).state_dict())
    for name in ("best.pth", "WEIGHTS", "RUN/best.pth", "runs/demo/best.pth"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        save_checkpoint(folder / name, checkpoint)
    _write_clip(folder / "clip.mp4")
    for name in ("configs", "tools", "examples"):
        os.symlink(ROOT / name, folder / name)


def _write_clip(file: Path) -> None:
    import av

    with av.open(str(file), "w") as clip:
        stream = clip.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 96, 96, "yuv420p"
        for _ in range(4):
            frame = av.VideoFrame.from_ndarray(np.full((96, 96, 3), 90, np.uint8), format="rgb24")
            clip.mux(stream.encode(frame))
        clip.mux(stream.encode())


def run_block(block: Block, names: dict[str, object]) -> None:
    """Runs the block in the working directory. names: of the page's Python so far. Raises Wrong."""
    if block.setup:
        exec(compile(block.setup, f"setup of {block}", "exec"), names)
    if block.language == "python":
        check_python(block.text)
        if not block.reason:
            exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)
        return
    for command in commands_of(block):
        check_command(command)
        if block.runs(command.text):
            run_command(command)


def run_command(command: Command) -> None:
    program, *rest = command.words
    if program == "python":
        run_python_command(rest, command.here)
    elif program == "rtdetr":
        run_rtdetr(rest)
    else:
        raise Wrong(f"{program} is not run here: say why, `<!-- not run ({program}): REASON -->`")


def run_rtdetr(arguments: list[str]) -> None:
    """Raises MissingPackage, and Wrong unless it ends well; the self-test may fail, as it has one step here."""
    name, *rest = arguments + smaller(arguments)
    code = cli.run(name, rest)
    if code not in ((0, 1) if "--overfit" in arguments else (0,)):
        raise Wrong(f"exit code {code}")


def smaller(arguments: list[str]) -> list[str]:
    """What is added to the arguments, so that they take no time."""
    added = ["--device", "cpu"] if arguments[0] in ON_A_DEVICE else []
    if arguments[0] in TRAININGS:
        own_data = any(each.startswith(DATA) for each in arguments)
        updates = [each for each in tiny_updates(Path("my/set")) if not (own_data and each.startswith(DATA))]
        added += ["-u", *updates, "train.max_iterations=1"]
    return added


def run_python_command(arguments: list[str], here: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if arguments[0] == "-":
            exec(compile(here, "<stdin>", "exec"), {"__name__": "__main__"})
            return
        is_module = arguments[0] == "-m"
        name, *rest = arguments[1:] if is_module else arguments
        few = FEW if name == "rtdetr.data.shapes" else []
        patch.setattr(sys, "argv", [name, *rest, *few])
        try:
            if is_module:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / name), run_name="__main__")
        except SystemExit as error:
            if error.code:
                raise Wrong(f"exit code {error.code}") from error
