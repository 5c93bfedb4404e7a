"""What a set of named formats says of itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rtdetr.data.dataset import DetectionSet


def everything(data: DetectionSet) -> list[Any]:
    infos = [data.info(i) for i in range(len(data))]
    return [
        (Path(info.file_name).name, info.height, info.width, *(array.tolist() for array in data.targets(i)))
        for i, info in enumerate(infos)
    ]
