"""Defects of data set records, how training handles them, and when a set has too many.

Every reader checks its records one by one and keeps the valid ones. A set is refused if more than 5 % of its images or
boxes would be dropped, or all boxes of a class.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rtdetr.data.classes import DataError, some

Action = Literal["kept", "clipped", "dropped", "refused"]

MOST_DROPPED = 0.05  # default of data.max_defects: share of the images or of the boxes

MOST_KEPT = 100  # defects of a kind with action "kept" or "clipped" that a set lists one by one

# Boxes without area in their image. Evaluation never counted them, so only training counts them towards the limit.
WITHOUT_AREA = ("box_zero", "box_negative", "box_outside")
# Harmless kinds: training reads such images correctly.
NOTES = (
    *("picture_exif", "picture_cmyk", "picture_gray", "picture_16bit", "picture_palette", "picture_alpha"),
    *("picture_1bit", "picture_animated", "box_copy"),
)


def one_line(text: str) -> str:
    """Escapes all non-printable characters: names come from untrusted files."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Defect(NamedTuple):
    """One defect of one record. Kinds are listed in docs/doctor.md; their names are stable."""

    file: str  # the annotation file, or the image at fault
    record: int | str | None  # its id, or place, such as annotations[3], if it has none; None: the whole file
    kind: str  # begins with box_, image_ (record), picture_ (image file), class_, or names the file that is unusable
    what: str
    action: Action

    @property
    def is_note(self) -> bool:
        return self.kind in NOTES

    def line(self) -> str:
        """One line for the terminal, without line breaks whatever names it contains."""
        return one_line(f"{'note' if self.is_note else self.action:8s}{self.kind:22s}{self.file}: {self.what}")

    def plain(self) -> dict[str, Any]:
        """The defect as a dictionary for JSON."""
        return {"file": self.file, "record": self.record, "defect": self.kind, "what": self.what, "action": self.action}


class Refused(DataError):
    """The error for a set that cannot be used at all, with its defect. others: defects found before."""

    def __init__(
        self, file: object, kind: str, what: str, record: int | str | None = None, others: Sequence[Defect] = ()
    ) -> None:
        super().__init__(one_line(f"{file}: {what}"))
        self.defect = Defect(str(file), record, kind, what, "refused")
        self.others = others


@dataclass
class Totals:
    """Number of records in a file before anything is dropped, without crowd boxes."""

    images: int = 0
    boxes: int = 0
    boxes_of: Counter[int] = field(default_factory=Counter)  # by category id


def condensed(defects: Sequence[Defect]) -> list[Defect]:
    """Replaces the defects of a kind that dropped nothing by one if there are many: a set may lack all image sizes, and
    this list is copied to every data worker."""
    of_kind: dict[tuple[str, Action], list[Defect]] = {}
    for each in defects:
        of_kind.setdefault((each.kind, each.action), []).append(each)
    found = []
    for (_, action), alike in of_kind.items():
        if action in ("kept", "clipped") and len(alike) > MOST_KEPT:
            alike = [alike[0]._replace(record=None, what=f"{alike[0].what}; and {len(alike) - 1} more of these")]
        found += alike
    return found


def count_dropped(defects: Iterable[Defect], except_kinds: Sequence[str] = ()) -> tuple[int, int]:
    """The numbers of dropped images and boxes, each of which has one such defect. Boxes dropped with their image have
    none."""
    kinds = [each.kind for each in defects if each.action == "dropped" and each.kind not in except_kinds]
    boxes = sum(kind.startswith("box_") for kind in kinds)
    return len(kinds) - boxes, boxes


class Names(NamedTuple):
    """Names of a set and its classes for messages."""

    annotation_file: str
    folder: str  # of the images; empty: unknown
    classes: Mapping[int, str]  # by category id


def refusal(
    names: Names,
    defects: Sequence[Defect],
    tally: Totals,
    left: Mapping[int, int],
    limit: float,
    except_kinds: Sequence[str] = (),
) -> Refused | None:
    """Why a set cannot be used; None if it can. left: remaining boxes by category id. limit: the largest share of
    images, and of boxes, that may be dropped. except_kinds: defects that do not count."""
    for each in defects:
        if each.action == "refused":
            return Refused(each.file, each.kind, f"{each.what}; {_next(names)}", each.record)
    counted = [each for each in defects if each.action == "dropped" and each.kind not in except_kinds]
    if not counted:
        return None
    images, boxes = count_dropped(counted)
    parts = [
        f"{part} of {of} {what}"
        for part, of, what in ((images, tally.images, "images"), (boxes, tally.boxes, "boxes"))
        if part > limit * of
    ]
    first = counted[0]
    if parts:
        allowed = f"more than {limit:.0%}" if limit else "and none may be"
        sentence = f"{first.what}; {' and '.join(parts)} would be dropped, {allowed}; {_next(names)}"
        return Refused(first.file, first.kind, sentence, first.record)
    vanished = [i for i, count in tally.boxes_of.items() if count and not left.get(i)]
    if vanished and not except_kinds:
        listed = some(repr(names.classes.get(i, str(i))) for i in vanished)
        what = f"no box of class {listed} would be left of {sum(tally.boxes_of[i] for i in vanished)}"
        sentence = f"{what}, the first that is dropped is in {first.file}: {first.what}; {_next(names)}"
        return Refused(names.annotation_file, "class_vanished", sentence)
    return None


def _next(names: Names) -> str:
    images = f" --images {shlex.quote(names.folder)}" if names.folder else ""
    return f"`rtdetr doctor {shlex.quote(names.annotation_file)}{images}` names every defect"
