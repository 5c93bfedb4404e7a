"""Detects objects with an exported ONNX file, ONNX Runtime, NumPy, OpenCV and Pillow, without torch and rtdetr.

pip install onnxruntime opencv-python-headless pillow
python onnxruntime_numpy.py model.onnx image.jpg ...
"""

from __future__ import annotations

import json
import sys

import cv2
import numpy as np
import onnxruntime
from PIL import Image

THRESHOLD = 0.5


def resize(rgb: np.ndarray, width: int, height: int, how: str) -> np.ndarray:
    """how: `resize` of the file's preprocess; models of other projects were trained with Pillow's filters."""
    if how.startswith("OpenCV cubic"):
        return cv2.resize(rgb, (width, height), interpolation=cv2.INTER_CUBIC)
    kind = Image.Resampling[how.split()[0].upper()]  # bilinear, bicubic
    return np.asarray(Image.fromarray(rgb).resize((width, height), kind))


def main(model: str, *files: str) -> None:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    about = session.get_modelmeta().custom_metadata_map
    names, preprocess = json.loads(about["names"]), json.loads(about["preprocess"])
    height, width = preprocess["size"]
    for file in files:
        pixels = cv2.imread(file, cv2.IMREAD_COLOR)  # upright, (H, W, 3) BGR
        if pixels is None:
            sys.exit(f"{file}: cannot be read as an image")
        rgb = cv2.cvtColor(pixels, cv2.COLOR_BGR2RGB)
        resized = resize(rgb, width, height, preprocess["resize"])
        images = resized.transpose(2, 0, 1)[None]  # (1, 3, height, width)
        if preprocess["input"] == "float":
            images = images.astype(np.float32) / np.float32(255)
        sizes = np.array([pixels.shape[:2]], dtype=np.int64)
        labels, boxes, scores = session.run(None, {"images": images, "sizes": sizes})
        for label, box, score in zip(labels[0], boxes[0], scores[0]):
            if score >= THRESHOLD:
                print(file, names[label], f"{score:.4f}", *(f"{side:.1f}" for side in box))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
