"""What the network's class indices stand for, and the error of data that cannot be used."""

from __future__ import annotations

from dataclasses import dataclass


class DataError(ValueError):
    """Data that cannot be used; the message is one sentence for the person who owns them."""


@dataclass(frozen=True)
class Classes:
    """The classes of a model: the network's index i stands for names[i], whose id in the data is category_ids[i]."""

    names: tuple[str, ...]
    category_ids: tuple[int, ...]  # ascending, gaps allowed

    def __len__(self) -> int:
        return len(self.names)
