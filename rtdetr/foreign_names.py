"""Words of other detectors in Python, and what they are called here. Commands: rtdetr/commands/foreign.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ATTRIBUTES = {
    "RTDETRv3": {
        "val": "evaluate()",
        "track": "`rtdetr predict --track`",
        "names": "classes.names",
        "fit": "train()",
        "tune": "train()",
        "load": "RTDETRv3.from_pretrained()",
        "save": "save_pretrained()",
        "fuse": "nothing: layers are folded wherever it detects",
        "optimize_for_inference": "compile()",
        "to": "RTDETRv3.from_pretrained(..., device=)",
        "cuda": "RTDETRv3.from_pretrained(..., device=)",
        "cpu": "RTDETRv3.from_pretrained(..., device=)",
        "half": "RTDETRv3.from_pretrained(..., half=True)",
        "eval": "evaluate(), which gives AP; it detects without a mode",
        "parameters": "model.parameters(), of the network",
        "state_dict": "model.state_dict(), of the network",
        "benchmark": "`rtdetr benchmark infer`",
    },
    "Result": {
        "xyxy": "boxes",
        "conf": "scores",
        "confidence": "scores",
        "cls": "class_ids",
        "class_id": "class_ids",
        "labels": "names, or class_ids",
        "plot": "draw()",
        "orig_img": "image",
        "path": "source",
        "tojson": "to_json()",
        "summary": "to_hf()",
        "save_txt": "`rtdetr predict --format yolo`",
        "save_crop": "`rtdetr predict --crops`",
        "masks": "nothing: it detects boxes",
        "keypoints": "nothing: it detects boxes",
    },
    "Detection": {
        "boxes": "box; predict() of one image gives its Result, which has boxes",
        "xyxy": "box",
        "conf": "score",
        "confidence": "score",
        "cls": "category_id",
        "class_id": "category_id",
        "label": "name",
        "plot": "draw() of the Result",
    },
}
ARGUMENTS = {
    "conf": "threshold=",
    "confidence": "threshold=",
    "score_threshold": "threshold=",
    "imgsz": "size=",
    "resolution": "size=",
    "batch": "batch_size=",
    "iou": "nothing: there is no NMS",
    "stream": "nothing: videos and generators give an iterator",
    "save": "save() of a result",
    "show": "show() of a result",
    "verbose": "nothing: it prints nothing",
    "classes": "nothing: results have names and class_ids to choose by",
    "max_det": "-u eval.max_detections=N of the config",
    "device": "device= of from_pretrained()",
    "model": "name",
    "weights": "name",
    "pretrain_weights": "name",
    "num_classes": "nothing: classes come from the file, or from classes=[names] of a new model",
    "task": "nothing: it detects boxes",
    "dtype": "half=",
}


def no_attribute(owner: str, name: str) -> AttributeError:
    """What Python says of an attribute that is not there, and what it is called here."""
    meant = ATTRIBUTES[owner].get(name)
    return AttributeError(f"{owner} has no attribute {name!r}" + (f"; did you mean {meant}?" if meant else ""))


def check_arguments(method: str, others: Mapping[str, Any]) -> None:
    """Raises TypeError for the first argument that the method does not have."""
    for name in others:
        meant = f"; did you mean {ARGUMENTS[name]}?" if name in ARGUMENTS else ""
        raise TypeError(f"{method}() has no argument {name!r}{meant}")
