"""Converts the `data` argument of the API to `data.` keys of a config: `data.train.images=...` and so on."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rtdetr.data.classes import DataError, shown

logger = logging.getLogger(__name__)

EXPECTED = (
    "expected (images, annotations) of a COCO set, {'train': (images, annotations), 'val': (images, annotations)}, or "
    "a folder or file that knows its images"
)
# Keys of the two splits in a mapping.
SPLIT_KEYS = {"train": ("train", "train2017", "train2014"), "val": ("val", "valid", "val2017", "val2014", "validation")}


def data_updates(data: Any, needed: tuple[str, ...] = ("train", "val")) -> list[str]:
    """`a.b=value` updates of a config that replace its data; empty for None.

    needed: the splits that will be used. Raises DataError if `data` has no known form.
    """
    if data is None:
        return []
    from rtdetr.data.formats.sources import check_images, find_sources, source_of  # here, as they are slow to import

    if isinstance(data, (str, os.PathLike)):
        path = path_of("data", data)
        find_sources(path)  # raises DataError if the format is unknown
        splits = dict.fromkeys(needed, ("", str(path)))
    elif isinstance(data, Mapping):
        splits = {_split_name(key): _pair(value) for key, value in data.items()}
    else:
        pair = _pair(data)
        if len(needed) > 1:
            logger.warning("data: one set for all, so validation looks at the images that were learned: %s", pair[1])
        splits = dict.fromkeys(needed, pair)
    if missing := [name for name in needed if name not in splits]:
        raise DataError(f"data: nothing is given for {' and '.join(missing)}; {EXPECTED}")
    for name, (images, file) in splits.items():
        if images and name in needed:
            check_images(source_of(file, name), images)
    return [
        f"data.{name}.{key}={json.dumps(os.fspath(value), ensure_ascii=False)}"
        for name, pair in splits.items()
        if name in needed
        for key, value in zip(("images", "annotations"), pair)
    ]


def _split_name(key: object) -> str:
    for name, names in SPLIT_KEYS.items():
        if key in names:
            return name
    raise DataError(f"data: a split is called train or val, got {shown(key)}; {EXPECTED}")


def _pair(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Mapping) and value.keys() == {"images", "annotations"}:
        value = value["images"], value["annotations"]
    if not isinstance(value, (list, tuple)) or len(value) != 2:
        raise DataError(f"data: {EXPECTED}, got {shown(value)}")
    for each in value:
        if not isinstance(each, (str, os.PathLike)):
            raise DataError(f"data: {EXPECTED}, got {shown(each)} in place of a path")
    return os.path.expanduser(value[0]), os.path.expanduser(value[1])


def path_of(argument: str, given: Any) -> Path:
    """The path that the user passed as an argument, with `~` expanded. Raises DataError if it is not a path."""
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str) or not os.fspath(given):
        raise DataError(f"{argument}: expected a path, got {given!r:.100}")
    return Path(os.path.expanduser(given))
