"""Guesses what a file is that is not a COCO detection JSON, for error messages."""

from __future__ import annotations

import re
from pathlib import Path

from rtdetr.data.classes import some
from rtdetr.data.formats.records import walk

# First bytes of files that are mistaken for a COCO JSON.
BEGINNINGS = {
    rb"version https://git-lfs": "a Git LFS pointer; `git lfs pull` fetches the file",
    rb"\x89PNG|\xff\xd8\xff|GIF8|RIFF....WEBP|II\*\x00|MM\x00\*": "an image; give the file with the boxes",
    rb"PK\x03\x04": "a zip archive or a checkpoint",
    rb"\x1f\x8b": "a gzip archive; unpack it",
    rb"\s*<(!DOCTYPE html|html)": "a web page",
    rb"\s*(<\?xml[^>]*>\s*)?<annotation": "a Pascal VOC annotation of one image",
    rb"\s*<": "XML",
    rb"\s*\d+([ \t]+-?\d*\.?\d+(e-?\d+)?){4,}\s": "YOLO labels of one image",
    rb"\s*\{[^\n]*\}[ \t]*\r?\n\s*\{": "JSON Lines, one document per line",
    rb"\s*(train|val|path|names|nc):": "a YOLO data.yaml",
}
# Top-level keys of a JSON, all of which the kind has.
KEYS = {
    ("shapes", "imagePath"): "a LabelMe annotation of one image; give the folder of all",
    ("_via_img_metadata",): "a VIA project",
    ("features", "type"): "GeoJSON",
}
ENTRY_KEYS = {
    ("image_id", "category_id", "score"): "a COCO results list, detections instead of annotations",
    ("image_id", "caption"): "a list of captions",
    ("image", "annotations"): "a CreateML list",
    ("file", "detections"): "a results.json of `rtdetr predict`",
    ("annotations", "data"): "a Label Studio export",
}


def kind_of_bytes(content: bytes) -> str:
    """The end of a message on a file that is not JSON: "; it looks like ...", empty if the kind is unknown."""
    if not content.strip():
        return "; the file is empty"
    head = content[:2000].removeprefix(b"\xef\xbb\xbf")
    kinds = [kind for beginning, kind in BEGINNINGS.items() if re.match(beginning, head + b"\n", re.IGNORECASE)]
    return f"; it looks like {kinds[0]}" if kinds else ""


def kind_of_json(document: object) -> str:
    """The end of a message on a JSON without COCO's three lists: "; it looks like ..." or its top-level keys."""
    if isinstance(document, list):
        first = document[0] if document and isinstance(document[0], dict) else {}
        kinds = [kind for keys, kind in ENTRY_KEYS.items() if first.keys() >= set(keys)]
        return f"; it looks like {kinds[0]}" if kinds else f"; it is a list of length {len(document)}"
    if not isinstance(document, dict):
        return f"; it is {kind_of_value(document)}"
    kinds = [kind for keys, kind in KEYS.items() if document.keys() >= set(keys)]
    if "annotations" not in document and "images" in document and document.keys() & {"info", "categories"}:
        kinds.append("a COCO list of images without annotations, as of a test set")
    return f"; it looks like {kinds[0]}" if kinds else f"; at its top are {some(map(repr, document)) or 'no keys'}"


def kind_of_value(value: object) -> str:
    """The JSON type of a value that is not a list."""
    if value is None:
        return "null"
    kinds = {dict: "an object", str: "text", bool: "true or false"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "a number")


def annotations_in(folder: Path) -> list[Path]:
    """JSON files in a folder and its annotations/, with instances_* first."""
    files = [each for place in (folder, folder / "annotations") for each in walk(place, (".json",), deep=False)]
    return sorted(files, key=lambda file: (not file.name.startswith("instances_"), file))
