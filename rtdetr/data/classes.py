"""The classes behind the network's indices, and the error for unusable data."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from rtdetr.wording import option

logger = logging.getLogger(__name__)

Match = Literal["id", "name"]  # how categories of a file are matched to classes of a model
NO_ID = -(2**63) - 1  # id of a class that is missing from the data; smaller than any real id
# COCO classes to which some label files, such as those of transformers' RT-DETR, give Pascal VOC's names.
VOC_NAMES = {
    **{"aeroplane": "airplane", "motorbike": "motorcycle", "sofa": "couch", "tvmonitor": "tv"},
    **{"pottedplant": "potted plant", "diningtable": "dining table"},
}


class DataError(ValueError):
    """Unusable data; the message is one sentence for the user."""

    exit_code = 2


def some(items: Iterable[str], most: int = 5) -> str:
    """A list for a message: the first few items, and how many more there are."""
    listed = list(items)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def shown(value: object, most: int = 160) -> str:
    """The repr of a value for a message, truncated if it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


@dataclass(frozen=True)
class Classes:
    """The classes of a model: the network's index i is the class names[i], whose id in the data is category_ids[i]."""

    names: tuple[str, ...]
    category_ids: tuple[int, ...]  # gaps allowed; ascending, unless matched by name
    thresholds: tuple[float, ...] = ()  # lowest reported score of each class; empty: not set

    def __len__(self) -> int:
        return len(self.names)

    def entries(self) -> dict[str, Any]:
        """The classes as a dictionary for a checkpoint."""
        chosen = {"thresholds": list(self.thresholds)} if self.thresholds else {}
        return {"names": list(self.names), "category_ids": list(self.category_ids), **chosen}

    def listed(self) -> str:
        """The ids and names of the first ten classes, for messages."""
        return some((f"{i} ({name!r})" for i, name in zip(self.category_ids, self.names)), 10)

    @classmethod
    def of(cls, entries: Mapping[str, Any]) -> Classes:
        """Builds the classes from `entries`. Raises KeyError, TypeError or ValueError if they are invalid."""
        names, ids, thresholds = entries["names"], entries["category_ids"], entries.get("thresholds", [])
        fit = all(isinstance(each, list) for each in (names, ids, thresholds)) and len(names) == len(ids)
        if not fit or len(thresholds) not in (0, len(names)):
            raise ValueError("the classes do not fit their ids or thresholds")
        if not all(isinstance(each, float) and 0 <= each <= 1 for each in thresholds):
            raise ValueError("a threshold of its classes is no number from 0 to 1")
        return cls(tuple(names), tuple(ids), tuple(thresholds))


def new_classes(names: Any) -> Classes:
    """Classes of a new model, with ids from 1. Raises DataError unless `names` is a list of distinct names."""
    listed = isinstance(names, Sequence) and not isinstance(names, str)
    if not listed or not names or not all(isinstance(each, str) for each in names):
        raise DataError(f"classes: expected a list of names, got {shown(names)}")
    if blank := [i for i, name in enumerate(names) if not name.strip()]:
        raise DataError(f"classes: every class needs a name, number {blank[0]} of the list is {names[blank[0]]!r}")
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise DataError(f"classes: names that are there more than once: {some(map(repr, twice))}")
    return Classes(tuple(names), tuple(range(1, len(names) + 1)))


def match_classes(own: Classes, model: Classes, match: Match, path: Path) -> Classes:
    """The classes of the model, with the category ids that detections on this file use.

    own: the categories of the file. Each must be a class of the model, by the same id, or by the same name; the latter
    returns the file's ids, and NO_ID for classes that the file lacks. Raises DataError if one does not match.
    """
    if match not in get_args(Match):
        raise DataError(f"match_classes: expected id or name, got {match!r}")
    pairs = pair_names(own.names, model.names)
    indices = [pairs.get(i) for i in range(len(own))]
    if match == "id":
        _check_ids(own, model, path, names_agree=None not in indices)
        return model
    unknown = [f"{i} ({name!r})" for i, name, index in zip(own.category_ids, own.names, indices) if index is None]
    if unknown:
        raise DataError(
            f"{path}: categories whose name is that of no class of the model, or of more than one: {some(unknown)}; "
            f"it was trained for {some(map(repr, model.names), 10)}"
        )
    id_of = dict(zip(indices, own.category_ids))
    ids = tuple(id_of.get(index, NO_ID) for index in range(len(model)))
    return Classes(model.names, ids, model.thresholds)


def pair_names(names: Sequence[str], file_names: Sequence[str]) -> dict[int, int]:
    """Maps indices in `names` to indices in `file_names` of the same class: by exact name, else without regard to case
    and outer spaces. A name of several classes on one side pairs nothing."""
    if list(names) == list(file_names):
        return dict(enumerate(range(len(names))))
    pairs: dict[int, int] = {}
    for new, old in ((names, file_names), ([plain_name(n) for n in names], [plain_name(n) for n in file_names])):
        new_counts, old_counts = Counter(new), Counter(old)
        for i, name in enumerate(new):
            if new_counts[name] == old_counts[name] == 1:
                pairs.setdefault(i, old.index(name))
    return dict(sorted(pairs.items()))


def plain_name(name: str) -> str:
    """A name in lower case without outer spaces; COCO's name instead of Pascal VOC's."""
    plain = name.strip().casefold()
    return VOC_NAMES.get(plain, plain)


def _check_ids(own: Classes, model: Classes, path: Path, names_agree: bool) -> None:
    """Raises DataError unless every category of the file is a class of the model under the same id."""
    name_of = dict(zip(model.category_ids, model.names))
    id_of = dict(zip(model.names, model.category_ids))
    by_name = option("`rtdetr eval --match-classes name`", "evaluate(match_classes='name')")
    advice = f"; all names agree: {by_name} goes by them, training wants equal ids" if names_agree else ""
    unknown = [f"{i} ({name!r})" for i, name in zip(own.category_ids, own.names) if i not in name_of]
    if unknown:
        raise DataError(
            f"{path}: category ids unknown to the model: {some(unknown)}; it was trained for {model.listed()}{advice}"
        )
    renamed = [(i, name) for i, name in zip(own.category_ids, own.names) if name != name_of[i]]
    for category_id, name in renamed:
        if id_of.get(name, category_id) != category_id:
            raise DataError(
                f"{path}: category {name!r} has id {category_id}, but the model knows it as id {id_of[name]}{advice}"
            )
    if renamed:
        pairs = some(f"category {i} is called {name!r}, by the model {name_of[i]!r}" for i, name in renamed)
        logger.warning("%s: %s", path, pairs)
