"""Weights by name: where a name leads, and what becomes of the file here.

Besides the official ones (registry.py) there are those of RT-DETR v1 and v2, in PyTorch, by their authors (lyuwenyu),
whose models are v3's without what only trains; and every model of the Hub as owner/model.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import NamedTuple

from rtdetr.config import Config, Resize
from rtdetr.data.classes import Classes
from rtdetr.data.coco_names import COCO_CLASSES
from rtdetr.data.objects365_names import OBJECTS365_CLASSES
from rtdetr.weights.checkpoint import WEIGHT_SUFFIXES, CheckpointError, make_checkpoint, save_checkpoint
from rtdetr.weights.compare import listed
from rtdetr.weights.hub import HUB_ID, from_hub
from rtdetr.weights.official import convert
from rtdetr.weights.registry import OFFICIAL, OfficialFile, download, official_checkpoint, verify, weights_folder
from rtdetr.weights.training_parts import with_training_parts

logger = logging.getLogger(__name__)

STORAGE = "https://github.com/lyuwenyu/storage/releases/download/"
NAME_SUFFIXES = (*WEIGHT_SUFFIXES, ".safetensors", ".bin", ".onnx", ".xml", ".yml", ".yaml")  # of files


class Release(NamedTuple):
    """A file of weights that knows detection alone."""

    file: OfficialFile
    ap: float | None = None  # COCO AP as its authors report; None: not on COCO
    classes: Classes = COCO_CLASSES
    interpolation: Resize = "cubic"  # of their evaluation: Paddle's, or PyTorch's


def _release(path: str, ap: float | None, classes: Classes = COCO_CLASSES) -> Release:
    # The authors publish no hashes: that of the first download is noted.
    return Release(OfficialFile(STORAGE + path), ap, classes, "cubic" if "from_paddle" in path else "bilinear")


# The links and figures are those of the README of lyuwenyu/RT-DETR.
RELEASES = {
    "rtdetr_r34vd_coco": _release("v0.1/rtdetr_r34vd_dec4_6x_coco_from_paddle.pth", 48.9),
    "rtdetr_r18vd_coco_o365": _release("v0.1/rtdetr_r18vd_5x_coco_objects365_from_paddle.pth", 49.0),
    "rtdetr_r50vd_coco_o365": _release("v0.1/rtdetr_r50vd_2x_coco_objects365_from_paddle.pth", 55.2),
    "rtdetr_r101vd_coco_o365": _release("v0.1/rtdetr_r101vd_2x_coco_objects365_from_paddle.pth", 56.2),
    "rtdetr_r18vd_o365": _release("v0.1/rtdetr_r18vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetr_r50vd_o365": _release("v0.1/rtdetr_r50vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetr_r101vd_o365": _release("v0.1/rtdetr_r101vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetrv2_r18vd_coco": _release("v0.2/rtdetrv2_r18vd_120e_coco_rerun_48.1.pth", 48.1),
    "rtdetrv2_r34vd_coco": _release("v0.1/rtdetrv2_r34vd_120e_coco_ema.pth", 49.9),
    "rtdetrv2_r50vd_coco": _release("v0.1/rtdetrv2_r50vd_6x_coco_ema.pth", 53.4),
}
NAMES = {*OFFICIAL, *RELEASES}  # that download
# Of the official v3: its README's figures.
OFFICIAL_AP = {"rtdetrv3_r18vd_6x_coco": 48.1, "rtdetrv3_r34vd_6x_coco": 49.9, "rtdetrv3_r50vd_6x_coco": 53.4}


def located(path: str | Path) -> Path:
    """Where the weights of a path or name are, downloaded if need be; what is neither stays as it is, for whoever opens
    it. Raises CheckpointError or MissingPackage."""
    name, path = str(path), Path(path)
    if name in OFFICIAL and not os.path.exists(path):
        return official_checkpoint(name)
    if name in RELEASES and not os.path.exists(path):
        return release_checkpoint(name)
    on_hub = HUB_ID.fullmatch(name) and path.suffix not in NAME_SUFFIXES
    if on_hub and not os.path.exists(path) and not os.path.isdir(path.parent):
        return from_hub(name)
    return path


def checkpoint_of(name: str) -> Path:
    """Where the checkpoint of a named model is, or will be."""
    return weights_folder() / f"{name}.pth"


def release_checkpoint(name: str) -> Path:
    """The checkpoint of a release, downloaded, verified and made where it is not there yet. Raises CheckpointError."""
    release, checkpoint = RELEASES[name], checkpoint_of(name)
    if checkpoint.is_file():
        return checkpoint
    file = weights_folder() / "releases" / release.file.url.rsplit("/", 1)[1]
    if not file.is_file():
        logger.info("%s: downloading the weights (%s) to %s", name, release.file.licence, file)
        download(release.file, file)
    verify(release.file, file)
    save_detector(file, name, release, checkpoint)
    return checkpoint


def save_detector(file: Path, name: str, release: Release, checkpoint: Path) -> None:
    """Writes the checkpoint of a file of RT-DETR v1 or v2, with new parts for training. Raises CheckpointError."""
    made = convert(file, classes=release.classes)
    report = made.report
    lacking = [each for each in report.missing if not each.startswith(("query_groups.", "dense_head."))]
    rows = len(made.weights["decoder.score_heads.0.bias"])
    if lacking or report.mismatched or report.unexpected or rows != len(release.classes):
        wrong = [*lacking, *report.mismatched, *report.unexpected]
        raise CheckpointError(
            f"{file}: not the detector of {len(release.classes)} classes that {name} stands for: {rows} classes, "
            f"{len(wrong)} entries differ{': ' if wrong else ''}{listed(wrong, 3)}"
        )
    data = dataclasses.replace(made.config.data, interpolation=release.interpolation)
    cfg: Config = dataclasses.replace(made.config, name=name, data=data)
    weights = with_training_parts(made.weights, cfg.model, rows)
    source = {"file": file.name, "sha256": made.sha256, "licence": release.file.licence, "url": release.file.url}
    save_checkpoint(checkpoint, make_checkpoint(cfg, release.classes, weights, source=source))
