"""Names here -> the same in Python in other detectors. Commands: rtdetr/commands/foreign.py. `nothing: ` says why there
is no equivalent; rtdetr/wording.py reads the tables and builds the sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rtdetr.wording import meant, name_here

ATTRIBUTES = {
    "module 'rtdetr'": {"RTDETRv3.from_pretrained(FILE)": "RTDETR YOLO RFDETRBase load"},
    "RTDETRv3": {
        "evaluate()": "val test metrics",
        "`rtdetr predict --track`": "track",
        "predict()": "detect predict_batch predict_video stream infer inference",
        "predict(), or model.forward() of the network": "forward",
        "classes.names": "names class_names",
        "classes.names and classes.category_ids": "id2label",
        "len(classes)": "nc num_classes",
        "warmup()": "warm_up",
        "compile()": "optimize optimize_for_inference",
        "RTDETRv3.from_pretrained(..., half=False)": "float",
        "model.load_state_dict(), of the network": "load_state_dict",
        "RTDETRv3.from_pretrained(CONFIG, classes=[names])": "reset_weights",
        "train()": "fit tune finetune",
        "cfg": "config",
        "train(callbacks=[...])": "add_callback",
        "info()": "summary",
        "export(int8=True, calibrate=FOLDER)": "quantize",
        "export()": "deploy",
        "RTDETRv3.from_pretrained()": "load",
        "save_pretrained()": "save",
        "nothing: layers are folded wherever it detects": "fuse",
        "RTDETRv3.from_pretrained(..., device=)": "to cuda cpu",
        "RTDETRv3.from_pretrained(..., half=True)": "half",
        "evaluate(), which gives AP; it detects without a mode": "eval",
        "model.parameters(), of the network": "parameters",
        "model.state_dict(), of the network": "state_dict",
        "`rtdetr benchmark infer`": "benchmark",
    },
    "Result": {
        "boxes": "xyxy bboxes",
        "scores": "conf confidence",
        "class_ids": "cls class_id categories",
        "names, or class_ids": "labels",
        "draw()": "plot render annotate",
        "image": "orig_img",
        "source": "path filename",
        "to_json()": "tojson",
        "to_hf()": "summary",
        "`rtdetr predict --format yolo`": "save_txt",
        "`rtdetr predict --crops`": "save_crop",
        "to_coco(), whose bbox is x, y, width, height": "xywh",
        "boxes, in pixels of width and height": "xyxyn",
        "height and width": "orig_shape shape",
        "width and height": "size",
        "len(result)": "num_detections",
        "print(result)": "print verbose",
        "image.crop(box), with the box of a detection": "crop",
        "pandas.DataFrame(list(result))": "to_df to_pandas pandas",
        "`rtdetr predict --format csv`": "to_csv",
        "`rtdetr benchmark infer`": "speed",
        "nothing: boxes and scores are NumPy arrays of the host": "cpu numpy",
        "nothing: it detects boxes": "masks keypoints probs obb",
    },
    "Detection": {
        "box; predict() of one image gives its Result, which has boxes": "boxes",
        "box": "xyxy bbox",
        "score": "conf confidence",
        "category_id": "cls class_id",
        "name": "label class_name",
        "box, which is x1, y1, x2, y2": "xywh",
        "draw() of the Result": "plot",
    },
}
ARGUMENTS = {
    "threshold=": "conf confidence score_threshold",
    "size=": "imgsz resolution",
    "batch_size=": "batch",
    "nothing: there is no NMS": "iou agnostic_nms",
    "nothing: videos and generators give an iterator": "stream",
    "save() of a result": "save",
    "`rtdetr predict --format yolo`": "save_txt",
    "`rtdetr predict --crops`": "save_crop",
    "`rtdetr predict --every N`": "vid_stride",
    "nothing: images are searched once, or in slices=": "augment",
    "show() of a result": "show",
    "nothing: it prints nothing": "verbose",
    "nothing: results have names and class_ids to choose by": "classes",
    "-u eval.max_detections=N of the config": "max_det",
    "device= of from_pretrained()": "device",
    "name": "model weights pretrain_weights",
    "nothing: classes come from the file, or from classes=[names] of a new model": "num_classes",
    "nothing: it detects boxes": "task",
    "half=": "dtype torch_dtype",
    "device=": "device_map",
}
EXPORT_ARGUMENTS = {
    "nothing: batch, height and width of an export stay open": "imgsz batch dynamic",
    "nothing: layers are folded before an export": "simplify",
    "nothing: there is no NMS": "nms",
    "`rtdetr export --portable --opset N`": "opset",
    "output=": "output_dir file",
}
EXPORT_FORMATS = {
    "tensorrt": "engine trt",
    "torch-export": "torchscript pt2",
    "litert": "tflite",
    "coreml": "mlmodel mlpackage",
    "executorch": "pte",
    "transformers": "safetensors huggingface",
}


def no_attribute(owner: str, name: str) -> AttributeError:
    """AttributeError for a missing attribute: Python's message, with the name used here."""
    return AttributeError(f"{owner} has no attribute {name!r}{meant(name_here(ATTRIBUTES[owner], name))}")


def check_arguments(method: str, others: Mapping[str, Any]) -> None:
    """Raises TypeError if the method lacks an argument; names the first such one."""
    table = EXPORT_ARGUMENTS if method == "export" else ARGUMENTS
    for name in others:
        raise TypeError(f"{method}() has no argument {name!r}{meant(name_here(table, name))}")


def unknown_format(name: str, formats: Iterable[str]) -> str:
    return f"expected one of {', '.join(formats)}, got {name!r}{meant(name_here(EXPORT_FORMATS, name))}"
