"""Weights by name: their addresses, download and conversion.

The official ones of v3; RT-DETR v1 and v2 in PyTorch, by their authors (lyuwenyu), whose models are v3's without the
training parts; and every model of the Hub as owner/model.
"""

from __future__ import annotations

import dataclasses
import os
from collections import ChainMap
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.config import Config, Resize
from rtdetr.data.class_names import COCO_CLASSES, OBJECTS365_CLASSES
from rtdetr.data.classes import Classes, DataError
from rtdetr.weights.checkpoint import WEIGHT_SUFFIXES, CheckpointError, exists, make_checkpoint, save_checkpoint
from rtdetr.weights.compare import listed
from rtdetr.weights.download import OfficialFile, fetched
from rtdetr.weights.foreign import PADDLE_SUFFIXES
from rtdetr.weights.hub import HUB_ID, from_hub
from rtdetr.weights.huggingface_names import TRAINING_ONLY
from rtdetr.weights.official import Conversion, convert, save_conversion
from rtdetr.weights.training_parts import OTHER_SELECTOR, with_training_parts
from rtdetr.wording import counted

DRIVE = "https://drive.usercontent.google.com/download?export=download&confirm=t&id="
STORAGE = "https://github.com/lyuwenyu/storage/releases/download/"
NAME_SUFFIXES = (*WEIGHT_SUFFIXES, ".safetensors", ".bin", ".onnx", ".xml", ".yml", ".yaml")  # of files


class Release(NamedTuple):
    """A weight file by its authors."""

    file: OfficialFile
    ap: float | None = None  # COCO AP as they report it; None: not on COCO
    classes: Classes = COCO_CLASSES
    interpolation: Resize = "cubic"  # of the authors' evaluation: cubic in Paddle, bilinear in PyTorch


def _release(path: str, ap: float | None, classes: Classes = COCO_CLASSES) -> Release:
    # The authors publish no hashes; the hash of the first download is recorded.
    return Release(OfficialFile(STORAGE + path), ap, classes, "cubic" if "from_paddle" in path else "bilinear")


def _official(drive_id: str, num_bytes: int, sha256: str, ap: float) -> Release:
    return Release(OfficialFile(DRIVE + drive_id, num_bytes, sha256), ap)


# Config name -> official file of v3. Links and figures are from the README of the official repository
# (clxia12/RT-DETRv3, March 2025), which offers no weights for R101 and LVIS, and publishes no hashes. These were
# recorded by the detrs project in July 2026, which measured 48.05 AP on COCO with that R18 file; the files have not
# been seen here.
OFFICIAL = {
    "rtdetrv3_r18vd_6x_coco": _official(
        "1zIDOjn1qDccC3TBsDlGQHOjVrehd26bk",
        91_945_530,
        "f32dbd008bd7e5311c877d522f6d8c9e349795978c889f53823588b5e5d74a5f",
        48.1,
    ),
    "rtdetrv3_r34vd_6x_coco": _official(
        "12-wqAF8i67eqbocaWPK33d4tFkN2wGi2",
        137_016_081,
        "29b09c64d6c372cde46d94caee1b57a23cee0aae24bd7bd3e2937cf57e581a68",
        49.9,
    ),
    "rtdetrv3_r50vd_6x_coco": _official(
        "1wfJE-QgdgqKE0IkiTuoD5HEbZwwZg3sQ",
        182_331_170,
        "e8b1d5db3208ce0f9edba5a914f23c918141b608ab4cd409db9d9204f7ed4b08",
        53.4,
    ),
}
# RT-DETR v1 and v2, whose files hold the detection parts only. Links and figures are from the README of
# lyuwenyu/RT-DETR.
RELEASES = {
    "rtdetr_r18vd_coco": _release("v0.1/rtdetr_r18vd_dec3_6x_coco_from_paddle.pth", 46.4),
    "rtdetr_r34vd_coco": _release("v0.1/rtdetr_r34vd_dec4_6x_coco_from_paddle.pth", 48.9),
    "rtdetr_r50vd_coco": _release("v0.1/rtdetr_r50vd_6x_coco_from_paddle.pth", 53.1),
    "rtdetr_r101vd_coco": _release("v0.1/rtdetr_r101vd_6x_coco_from_paddle.pth", 54.3),
    "rtdetr_r18vd_coco_o365": _release("v0.1/rtdetr_r18vd_5x_coco_objects365_from_paddle.pth", 49.0),
    "rtdetr_r50vd_coco_o365": _release("v0.1/rtdetr_r50vd_2x_coco_objects365_from_paddle.pth", 55.2),
    "rtdetr_r101vd_coco_o365": _release("v0.1/rtdetr_r101vd_2x_coco_objects365_from_paddle.pth", 56.2),
    "rtdetr_r18vd_o365": _release("v0.1/rtdetr_r18vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetr_r50vd_o365": _release("v0.1/rtdetr_r50vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetr_r101vd_o365": _release("v0.1/rtdetr_r101vd_1x_objects365_from_paddle.pth", None, OBJECTS365_CLASSES),
    "rtdetrv2_r18vd_coco": _release("v0.2/rtdetrv2_r18vd_120e_coco_rerun_48.1.pth", 48.1),
    "rtdetrv2_r34vd_coco": _release("v0.1/rtdetrv2_r34vd_120e_coco_ema.pth", 49.9),
    "rtdetrv2_r50vd_coco": _release("v0.1/rtdetrv2_r50vd_6x_coco_ema.pth", 53.4),
    "rtdetrv2_r101vd_coco": _release("v0.1/rtdetrv2_r101vd_6x_coco_from_paddle.pth", 54.3),
}
NAMED = ChainMap(OFFICIAL, RELEASES)  # all names that download


def located(path: str | Path) -> Path:
    """The path of the weights with a name, downloaded if necessary; everything else is returned unchanged. Raises
    CheckpointError or MissingPackage."""
    name, path = str(path), Path(path)
    if exists(path):
        return path
    if name in NAMED:
        return named_checkpoint(name)
    return from_hub(name) if is_hub_name(name) else path


def is_hub_name(name: str) -> bool:
    """Whether a name that is no path here is asked for on the Hub: owner/model, without a folder `owner`."""
    path = Path(name)
    return bool(HUB_ID.fullmatch(name)) and path.suffix not in NAME_SUFFIXES and not os.path.isdir(path.parent)


def find_weights(name: str, revision: str | None = None, new: bool = False) -> Path | None:
    """The path of the weights with the name that a user gives, downloaded if necessary; None for a config, which has
    none. new: weights are not wanted, as the model gets other classes. Raises CheckpointError, DataError or
    MissingPackage."""
    path = Path(name)
    there = exists(path)
    bare = path.name == name and not path.suffix and not there
    on_hub = not there and HUB_ID.fullmatch(name) and path.suffix not in (*NAME_SUFFIXES, ".pt2")
    if revision is not None and not on_hub:
        raise CheckpointError(f"revision: only models of the Hub (owner/model) have one, got {name!r}; leave it out")
    if path.suffix in (".yml", ".yaml") or bare:
        return located(name) if name in NAMED and not new else None
    if new:
        raise DataError(f"classes: {name} knows its own; they are for new models, from a config")
    if not on_hub:
        return path
    if revision is None and Path(path.parts[0]).exists():
        raise CheckpointError(
            f"{name}: no such file or folder; the Hub was not searched for that name, because {path.parts[0]} "
            "exists here: for a model of the Hub, give its revision, such as revision='main'"
        )
    return from_hub(name, revision)


def weights_folder() -> Path:
    """The folder of downloaded weights: RTDETR_WEIGHTS, else ~/.cache/rtdetr/weights (or below XDG_CACHE_HOME)."""
    if chosen := os.environ.get("RTDETR_WEIGHTS"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rtdetr" / "weights"


def checkpoint_of(name: str) -> Path:
    """The path of a named model's checkpoint, whether it exists or not."""
    return weights_folder() / f"{name}.pth"


def original_of(name: str) -> Path:
    """The path of a named model's original file, whether it exists or not."""
    if name in OFFICIAL:
        return weights_folder() / f"{name}.pdparams"
    return weights_folder() / "releases" / RELEASES[name].file.url.rsplit("/", 1)[1]


def size_of(name: str) -> int | None:
    """Size in bytes of a named model's download; None if unknown."""
    file = original_of(name)
    return NAMED[name].file.num_bytes or (file.stat().st_size if file.is_file() else None)


def named_checkpoint(name: str) -> Path:
    """The checkpoint of a named model, downloaded, verified and converted if necessary. Raises CheckpointError, with
    advice for machines without a network."""
    release, file, checkpoint = NAMED[name], original_of(name), checkpoint_of(name)

    def save() -> None:
        if name in OFFICIAL:
            save_conversion(convert(file), file, checkpoint, release.file.licence)
        else:
            save_checkpoint(checkpoint, detector_content(convert(file), file, name, release))

    return fetched(release.file, file, checkpoint, save)


def detects_alone(made: Conversion) -> bool:
    """Whether a file contains the detection parts only, as those of RT-DETR v1 and v2 do."""
    return not any(OTHER_SELECTOR.match(name) for name in made.weights)


def as_detector(made: Conversion, file: Path, classes: Classes | None = None) -> dict[str, Any]:
    """The content of a checkpoint, from a file of RT-DETR v1, v2 or v3 by its authors, whether its name is known or
    not.

    classes: by default COCO's or Objects365's if their number matches, else numbers. Raises CheckpointError.
    """
    for name, release in RELEASES.items():
        if release.file.url.endswith(f"/{file.name}"):
            return detector_content(made, file, name, release._replace(classes=classes or release.classes))
    if classes is None:
        classes = OBJECTS365_CLASSES if len(made.classes) == len(OBJECTS365_CLASSES) else made.classes
    in_torch = detects_alone(made) and file.suffix not in PADDLE_SUFFIXES
    release = Release(OfficialFile(""), None, classes, "bilinear" if in_torch else "cubic")
    return detector_content(made, file, file.stem, release)


def detector_content(made: Conversion, file: Path, name: str, release: Release) -> dict[str, Any]:
    """The content of a checkpoint, from a detector's file, with new training parts if it has none. Raises
    CheckpointError."""
    report = made.report
    lacking = [each for each in report.missing if not each.startswith(TRAINING_ONLY)]
    rows = len(made.classes)
    if lacking or report.mismatched or report.unexpected or rows != len(release.classes):
        wrong = [*lacking, *report.mismatched, *report.unexpected]
        named = f"the detector of {counted(len(release.classes), 'class')} that {name} stands for"
        raise CheckpointError(
            f"{file}: not {named if name in RELEASES else 'a whole detector'}: {counted(rows, 'class')}, "
            f"differs in {counted(len(wrong), 'entry', 'entries')}{': ' if wrong else ''}{listed(wrong, 3)}"
        )
    data = dataclasses.replace(made.config.data, interpolation=release.interpolation)
    cfg: Config = dataclasses.replace(made.config, name=name, data=data)
    source = {"file": file.name, "sha256": made.sha256}
    if release.file.url:
        source |= {"licence": release.file.licence, "url": release.file.url}
    return make_checkpoint(cfg, release.classes, with_training_parts(made.weights, cfg.model, rows), source=source)
