"""Detects objects with an exported ONNX file, ONNX Runtime, NumPy and OpenCV; neither torch nor rtdetr is needed.

pip install onnxruntime opencv-python-headless
python onnxruntime_numpy.py model.onnx image.jpg ...
"""

from __future__ import annotations

import json
import sys

import cv2
import numpy as np
import onnxruntime

THRESHOLD = 0.5


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
        resized = cv2.resize(rgb, (width, height), interpolation=cv2.INTER_CUBIC)
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
