"""What the network's class indices stand for, and the error of data that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence for the person who owns them."""


def some(items: Iterable[str], most: int = 5) -> str:
    """A list for a message: the first few, and how many more there are."""
    listed = list(items)
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def shown(value: object, most: int = 160) -> str:
    """A value of the data for a message: as Python writes it (strings in quotes), cut where it is long."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


@dataclass(frozen=True)
class Classes:
    """The classes of a model: the network's index i stands for names[i], whose id in the data is category_ids[i]."""

    names: tuple[str, ...]
    category_ids: tuple[int, ...]  # ascending, gaps allowed

    def __len__(self) -> int:
        return len(self.names)
