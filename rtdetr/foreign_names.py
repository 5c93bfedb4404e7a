"""Names of other detectors in Python and their equivalents here. Commands: rtdetr/commands/foreign.py. `nothing: ` says
why there is no equivalent; rtdetr/wording.py builds the sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rtdetr.wording import meant

ON_NUMPY = "nothing: boxes and scores are NumPy arrays of the host"
BOXES_ONLY = "nothing: it detects boxes"
ATTRIBUTES = {
    "module 'rtdetr'": {
        "RTDETR": "RTDETRv3.from_pretrained(FILE)",
        "YOLO": "RTDETRv3.from_pretrained(FILE)",
        "RFDETRBase": "RTDETRv3.from_pretrained(FILE)",
        "load": "RTDETRv3.from_pretrained(FILE)",
    },
    "RTDETRv3": {
        "val": "evaluate()",
        "test": "evaluate()",
        "track": "`rtdetr predict --track`",
        "detect": "predict()",
        "predict_batch": "predict()",
        "predict_video": "predict()",
        "stream": "predict()",
        "infer": "predict()",
        "inference": "predict()",
        "forward": "predict(), or model.forward() of the network",
        "names": "classes.names",
        "class_names": "classes.names",
        "id2label": "classes.names and classes.category_ids",
        "nc": "len(classes)",
        "num_classes": "len(classes)",
        "warm_up": "warmup()",
        "optimize": "compile()",
        "float": "RTDETRv3.from_pretrained(..., half=False)",
        "load_state_dict": "model.load_state_dict(), of the network",
        "reset_weights": "RTDETRv3.from_pretrained(CONFIG, classes=[names])",
        "fit": "train()",
        "tune": "train()",
        "finetune": "train()",
        "config": "cfg",
        "metrics": "evaluate()",
        "add_callback": "train(callbacks=[...])",
        "summary": "info()",
        "quantize": "export(int8=True, calibrate=FOLDER)",
        "deploy": "export()",
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
        "xywh": "to_coco(), whose bbox is x, y, width, height",
        "xyxyn": "boxes, in pixels of width and height",
        "bboxes": "boxes",
        "orig_shape": "height and width",
        "size": "width and height",
        "filename": "source",
        "num_detections": "len(result)",
        "categories": "class_ids",
        "print": "print(result)",
        "verbose": "print(result)",
        "shape": "height and width",
        "render": "draw()",
        "annotate": "draw()",
        "crop": "image.crop(box), with the box of a detection",
        "to_df": "pandas.DataFrame(list(result))",
        "to_pandas": "pandas.DataFrame(list(result))",
        "pandas": "pandas.DataFrame(list(result))",
        "to_csv": "`rtdetr predict --format csv`",
        "speed": "`rtdetr benchmark infer`",
        "cpu": ON_NUMPY,
        "numpy": ON_NUMPY,
        "masks": BOXES_ONLY,
        "keypoints": BOXES_ONLY,
        "probs": BOXES_ONLY,
        "obb": BOXES_ONLY,
    },
    "Detection": {
        "boxes": "box; predict() of one image gives its Result, which has boxes",
        "xyxy": "box",
        "conf": "score",
        "confidence": "score",
        "cls": "category_id",
        "class_id": "category_id",
        "label": "name",
        "class_name": "name",
        "bbox": "box",
        "xywh": "box, which is x1, y1, x2, y2",
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
    "save_txt": "`rtdetr predict --format yolo`",
    "save_crop": "`rtdetr predict --crops`",
    "vid_stride": "`rtdetr predict --every N`",
    "augment": "nothing: images are searched once, or in slices=",
    "show": "show() of a result",
    "verbose": "nothing: it prints nothing",
    "classes": "nothing: results have names and class_ids to choose by",
    "max_det": "-u eval.max_detections=N of the config",
    "device": "device= of from_pretrained()",
    "model": "name",
    "weights": "name",
    "pretrain_weights": "name",
    "num_classes": "nothing: classes come from the file, or from classes=[names] of a new model",
    "task": BOXES_ONLY,
    "dtype": "half=",
    "torch_dtype": "half=",
    "device_map": "device=",
    "agnostic_nms": "nothing: there is no NMS",
}
EXPORT_ARGUMENTS = {
    "imgsz": "nothing: batch, height and width of an export stay open",
    "batch": "nothing: batch, height and width of an export stay open",
    "dynamic": "nothing: batch, height and width of an export stay open",
    "simplify": "nothing: layers are folded before an export",
    "nms": "nothing: there is no NMS",
    "opset": "`rtdetr export --portable --opset N`",
    "output_dir": "output=",
    "file": "output=",
}
EXPORT_FORMATS = {
    "engine": "tensorrt",
    "trt": "tensorrt",
    "torchscript": "torch-export",
    "pt2": "torch-export",
    "tflite": "litert",
    "mlmodel": "coreml",
    "mlpackage": "coreml",
    "pte": "executorch",
    "safetensors": "transformers",
    "huggingface": "transformers",
}


def no_attribute(owner: str, name: str) -> AttributeError:
    """AttributeError for a missing attribute: Python's message, with the name used here."""
    words = ATTRIBUTES[owner].get(name)
    return AttributeError(f"{owner} has no attribute {name!r}{meant(words) if words else ''}")


def check_arguments(method: str, others: Mapping[str, Any]) -> None:
    """Raises TypeError if the method lacks an argument; names the first such one."""
    table = EXPORT_ARGUMENTS if method == "export" else ARGUMENTS
    for name in others:
        raise TypeError(f"{method}() has no argument {name!r}{meant(table[name]) if name in table else ''}")


def unknown_format(name: str, formats: Iterable[str]) -> str:
    """Message for an unknown export format."""
    meant_format = meant(EXPORT_FORMATS[name]) if name in EXPORT_FORMATS else ""
    return f"expected one of {', '.join(formats)}, got {name!r}{meant_format}"
