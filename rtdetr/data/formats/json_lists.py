"""Reads large JSON files of lists entry by entry, without the whole text in memory.

`read_lists` is the fast way, json.loads the plain one. Files that the fast one cannot read are read again by the plain
one, which reports what is wrong with them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, TextIO

WINDOW = 2**22  # characters per read
SPACE = re.compile(r"[ \t\n\r]*")


class DuplicateKeys(dict[str, Any]):
    """An object with a duplicate key; as in every reader, the last value is used."""


def one_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object_pairs_hook for json; marks objects with duplicate keys."""
    made = dict(pairs)
    return made if len(made) == len(pairs) else DuplicateKeys(pairs)


def read_lists(path: Path, takers: Mapping[str, Callable[[Any], object]]) -> bool:
    """Passes each entry of the top-level lists of a JSON object to the taker of its key, in the order of the file.

    Returns False if it cannot: invalid UTF-8, a byte order mark, broken JSON, no object at the top, or one of these
    keys duplicate, missing or not a list. The takers may have received entries before that. Raises OSError.
    """
    try:
        with open(path, encoding="utf-8", newline="") as file:
            return _ListsReader(file).hand_out(takers)
    except (ValueError, RecursionError):
        return False


class _ListsReader:
    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._scan = json.JSONDecoder(object_pairs_hook=one_object).scan_once  # type: ignore[attr-defined]

    def hand_out(self, takers: Mapping[str, Callable[[Any], object]]) -> bool:
        waiting = dict(takers)
        self._expect("{")
        while True:
            key = self._value()
            if not isinstance(key, str):
                self._fail()
            self._expect(":")
            if key not in takers:
                self._value()
            elif key not in waiting:
                return False
            else:
                take = waiting.pop(key)
                for entry in self._entries():
                    take(entry)
            if self._expect(",}") == "}":
                return not waiting and not self._more() and SPACE.fullmatch(self._text, self._at) is not None

    def _entries(self) -> Iterator[Any]:
        self._expect("[")
        if self._next() == "]":
            self._at += 1
            return
        while True:
            yield self._value()
            if self._expect(",]") == "]":
                return

    def _next(self) -> str:
        """The next character that is not whitespace; empty at the end."""
        while True:
            self._at = SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                return ""

    def _expect(self, characters: str) -> str:
        found = self._next()
        if not found or found not in characters:
            self._fail()
        self._at += 1
        return found

    def _value(self) -> Any:
        self._next()
        while True:
            try:
                value, end = self._scan(self._text, self._at)
            except (StopIteration, json.JSONDecodeError):  # the window may end inside the value
                end = len(self._text)
            if end < len(self._text):
                self._at = end
                return value
            if not self._more():
                self._fail()

    def _more(self) -> bool:
        """Moves the window on. It grows if one value fills it: the value is then scanned again from its start."""
        rest = self._text[self._at :]
        chunk = self._file.read(max(WINDOW, len(rest)))
        self._text, self._at = rest + chunk, 0
        return bool(chunk)

    def _fail(self) -> NoReturn:
        raise ValueError("not a JSON object of lists")
