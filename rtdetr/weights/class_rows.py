"""Rows of the heads by class name: a new model takes those of the classes that it shares with a weight file.

Row i of a class entry belongs to the network's class index i: the score heads of decoder layers and selectors, the
label embedding of denoising, and the class convolutions of the dense head. In query selection, an unknown class starts
as the mean of the known ones, which already tells objects from background.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from rtdetr.data.classes import pair_names
from rtdetr.weights.compare import listed

SELECTION = re.compile(r"\.score_head\.")
CLASS_ENTRY = re.compile(r"\.(score_heads?|class_heads)(\.\d+)?\.(weight|bias)$|\.label_embedding\.weight$")


class CarriedRows(NamedTuple):
    """Weights whose class entries fit the new classes."""

    weights: dict[str, Tensor]  # of the file; class entries have new rows for classes not in the file
    partial: list[str]  # class entries of which some rows, or all, are new
    text: str  # one line for the load report


def carry_rows(
    own: Mapping[str, Tensor], weights: dict[str, Tensor], names: Sequence[str], file_names: Sequence[str] | None
) -> CarriedRows:
    """Entries of a file for a model of other classes: shared classes keep their rows, others get new ones.

    own, weights: entries of the model and of the file; names, file_names: their classes in the order of the rows, None
    if the file does not name them. Class entries whose rows have another shape are returned unchanged.
    """
    entries = [name for name in weights if name in own and CLASS_ENTRY.search(name)]
    counts = {weights[name].shape[:1] for name in entries}  # one element, unless the file is inconsistent
    if not entries:
        return CarriedRows(weights, [], "")
    if file_names is None or counts != {(len(file_names),)}:
        became = "taken over by index" if counts == {(len(names),)} else "left new, their number differs"
        return CarriedRows(weights, [], f"class names of the file are unknown; rows were {became}")
    pairs = pair_names(names, file_names)
    rows = {}
    for name in entries:
        weight = re.sub("bias$", "weight", name)
        if weight in weights and own[weight].shape[1:] == weights[weight].shape[1:]:
            rows[name] = own[name].clone()
            if SELECTION.search(name):
                rows[name][:] = weights[name].mean(dim=0)
            rows[name][[*pairs]] = weights[name][[*pairs.values()]].to(own[name])
    text = _text(pairs, names, file_names) if rows else "the heads of the file are of another width; all rows stay new"
    # A bias without its weight is useless, and would be copied by index if the number of classes is equal.
    kept = {name: own[name] for name in entries if name not in rows and name.endswith("bias")}
    partial = [*kept, *(rows if len(pairs) < len(names) else ())]
    return CarriedRows({**weights, **rows, **kept}, partial, text)


def _text(pairs: Mapping[int, int], names: Sequence[str], file_names: Sequence[str]) -> str:
    old, new = [names[i] for i in pairs], [name for i, name in enumerate(names) if i not in pairs]
    text = f"{len(old)} of {len(names)} carried over by name"
    text += f" ({listed(old)})" if old else f" (the file has {listed(file_names)})"
    return text + (f"; new: {listed(new)}" if new else "")
