"""Resolves the name of a model given by the user: a path, a name that downloads, a model of the Hub, or a config."""

from __future__ import annotations

from pathlib import Path

from rtdetr.data.classes import DataError
from rtdetr.weights import hub
from rtdetr.weights.catalogue import NAME_SUFFIXES, NAMES, located
from rtdetr.weights.checkpoint import CheckpointError, exists


def find_weights(name: str, revision: str | None = None, new: bool = False) -> Path | None:
    """The path of the weights with that name, downloaded if necessary; None for a config, which has none. new: weights
    are not wanted, as the model gets other classes. Raises CheckpointError, DataError or MissingPackage."""
    path = Path(name)
    there = exists(path)
    bare = path.name == name and not path.suffix and not there
    if path.suffix in (".yml", ".yaml") or bare:
        return located(name) if name in NAMES and not new else None
    if new:
        raise DataError(f"classes: {name} knows its own; they are for new models, from a config")
    if there or not hub.HUB_ID.fullmatch(name) or path.suffix in (*NAME_SUFFIXES, ".pt2"):
        return path
    if revision is None and Path(path.parts[0]).exists():
        raise CheckpointError(
            f"{name}: no such file or folder; the Hub was not searched for that name, because {path.parts[0]} "
            "exists here: for a model of the Hub, give its revision, such as revision='main'"
        )
    return hub.from_hub(name, revision)
