"""What was found in one picture, as Python wants it."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rtdetr.data.pictures import MAX_MEGAPIXELS, read_picture
from rtdetr.extras import optional
from rtdetr.inference.draw import Detection, draw
from rtdetr.inference.sources import Item


class Result:
    """The n detections of a picture, best first. `len(result)` is n; iterating gives one Detection after the other.

    boxes: (n, 4) float32 xyxy, pixels of the picture. scores: (n,) float32. class_ids: (n,) int64, the category ids of
    the data. names: n class names. source: file or URL, or what was given. width, height: of the picture, pixels.
    error: why a file of a folder could not be read, else empty.
    """

    def __init__(self, item: Item, detections: Sequence[Detection] = ()) -> None:
        self.source, self.error, self.detections = item.name, item.error, list(detections)
        self.width, self.height = item.picture.size if item.picture is not None else (0, 0)
        # Results of a folder would fill the memory with its pictures.
        self._picture: Image.Image | Path | None = item.file or item.picture
        self.boxes: NDArray[np.float32] = np.array([each.box for each in detections], np.float32).reshape(-1, 4)
        self.scores: NDArray[np.float32] = np.array([each.score for each in detections], np.float32)
        self.class_ids: NDArray[np.int64] = np.array([each.category_id for each in detections], np.int64)
        self.names = [each.name for each in detections]

    def __len__(self) -> int:
        return len(self.detections)

    def __iter__(self) -> Iterator[Detection]:
        return iter(self.detections)

    def __repr__(self) -> str:
        if self.error:
            return f"Result({self.error})"
        found = ", ".join(f"{each.name} {each.score:.2f}" for each in self.detections[:5])
        more = ", ..." if len(self) > 5 else ""
        return f"Result({self.source}, {self.width} x {self.height}, {len(self)} objects: {found}{more})"

    @property
    def picture(self) -> Image.Image:
        """The RGB picture; one that came from a file is read again. Raises DataError when that is gone."""
        if isinstance(self._picture, Path):
            return read_picture(self._picture, max_megapixels=max(MAX_MEGAPIXELS, self.width * self.height / 1e6))
        if self._picture is None:
            raise ValueError(f"{self.source}: there is no picture to show")
        return self._picture

    def draw(self) -> Image.Image:
        """The picture with boxes, names and scores; a tiny one enlarged by a whole number."""
        return draw(self.picture, self.detections)

    def show(self) -> None:
        """Shows the drawn picture in the notebook, or in the viewer of the system."""
        ipython = sys.modules.get("IPython")  # loaded wherever there is a notebook
        if ipython is not None and ipython.get_ipython() is not None:
            ipython.display.display(self.draw())
        else:
            self.draw().show()

    def _repr_png_(self) -> bytes | None:
        """What a notebook shows of a result at the end of a cell."""
        if self.error:
            return None
        png = io.BytesIO()
        self.draw().save(png, format="PNG")
        return png.getvalue()

    def to_supervision(self) -> Any:
        """supervision.Detections, with the names under data["class_name"]."""
        supervision = optional("supervision", "supervision", "to_supervision()")
        return supervision.Detections(
            xyxy=self.boxes.reshape(-1, 4),
            confidence=self.scores,
            class_id=self.class_ids,
            data={"class_name": np.array(self.names, dtype=str)},
        )

    def to_hf(self) -> list[dict[str, Any]]:
        """As the object-detection pipeline of transformers says it: score, label and box (xmin, ymin, xmax, ymax)."""
        corners = ("xmin", "ymin", "xmax", "ymax")
        return [{"score": each.score, "label": each.name, "box": dict(zip(corners, each.box))} for each in self]

    def to_coco(self, image_id: int | None = None) -> list[dict[str, Any]]:
        """COCO results: image_id, category_id, bbox (x, y, width, height in pixels) and score. image_id: by default the
        number by which a file is called, as COCO's are (000000000139.jpg is 139), else 0."""
        if image_id is None:
            name = Path(self.source).stem
            image_id = int(name) if name.isdecimal() and name.isascii() else 0
        return [
            {
                "image_id": image_id,
                "category_id": each.category_id,
                "bbox": [each.box[0], each.box[1], each.box[2] - each.box[0], each.box[3] - each.box[1]],
                "score": each.score,
            }
            for each in self
        ]

    def to_json(self) -> str:
        """The item that `rtdetr predict` writes to results.json, as text."""
        if self.error:
            return json.dumps({"file": self.source, "error": self.error})
        boxes = [{**each._asdict(), "box": [round(value, 2) for value in each.box]} for each in self]
        return json.dumps({"file": self.source, "width": self.width, "height": self.height, "detections": boxes})
