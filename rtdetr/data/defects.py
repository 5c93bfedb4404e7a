"""Defects of records of a data set, what training does about them, and when they are too many.

Every reader checks its records one by one and keeps valid ones. A set is refused if more than 5 % of its images or
boxes would be dropped, or the last box of a class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from rtdetr.data.classes import DataError, some

Action = Literal["kept", "clipped", "dropped", "refused"]

MOST_DROPPED = 0.05  # share of the images or of the boxes; data.max_defects sets another one

MOST_KEPT = 100  # defects of a kind that a set keeps in memory, of those that cost nothing

# Boxes that have no area in their image. Evaluation never counted them, so that they are too many for training alone.
WITHOUT_AREA = ("box_zero", "box_negative", "box_outside")
# Harmless: training reads such images correctly.
NOTES = (
    *("picture_exif", "picture_cmyk", "picture_gray", "picture_16bit", "picture_palette", "picture_alpha"),
    *("picture_1bit", "picture_animated", "box_copy"),
)


def one_line(text: str) -> str:
    """Text with every non-printing character escaped: names come from files of any author."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


class Defect(NamedTuple):
    """One defect of one record. Kinds are listed in docs/doctor.md; their names do not change."""

    file: str  # the annotation file, or the image at fault
    record: int | str | None  # its id; its place, such as annotations[3], where that is unusable; None: the whole file
    kind: str  # begins with box_, image_ (a record), image_ (its file), class_, or what cannot be read at all
    what: str
    action: Action

    @property
    def is_note(self) -> bool:
        return self.kind in NOTES

    def line(self) -> str:
        """The defect for a person; without line breaks, whatever names it contains."""
        return one_line(f"{'note' if self.is_note else self.action:8s}{self.kind:22s}{self.file}: {self.what}")

    def plain(self) -> dict[str, Any]:
        """The defect for a machine."""
        return {
            "file": self.file,
            "record": self.record,
            "defect": self.kind,
            "what": self.what,
            "action": self.action,
        }


class Refused(DataError):
    """An unusable set, as a sentence and as a defect."""

    def __init__(
        self,
        file: object,
        kind: str,
        what: str,
        record: int | str | None = None,
        others: Sequence[Defect] = (),  # that were found on the way
    ) -> None:
        super().__init__(one_line(f"{file}: {what}"))
        self.defect = Defect(str(file), record, kind, what, "refused")
        self.others = others


def as_defect(error: DataError, file: object) -> Defect:
    """The defect behind an error; `file` if the error does not name one."""
    if isinstance(error, Refused):
        return error.defect
    return Defect(str(file), None, "unusable", str(error).removeprefix(f"{file}: "), "refused")


@dataclass
class Totals:
    """Numbers of records in a file, before any are dropped. Crowds do not count."""

    images: int = 0
    boxes: int = 0
    boxes_of: Counter[int] = field(default_factory=Counter)  # by category id


class Dropped(NamedTuple):
    """Numbers of dropped records of a set."""

    images: int
    boxes: int


def condensed(defects: Sequence[Defect]) -> list[Defect]:
    """The defects, with one in place of each kind that dropped nothing and is frequent: a set may lack the size of
    every image, and this list is copied into every data worker."""
    kept = Counter(each.kind for each in defects if each.action == "kept")
    many = {kind: count for kind, count in kept.items() if count > MOST_KEPT}
    few = [each for each in defects if each.kind not in many or each.action != "kept"]
    for kind, count in many.items():
        first = next(each for each in defects if each.kind == kind)
        few.append(first._replace(record=None, what=f"{first.what}; and {count - 1} more of these"))
    return few


def count_dropped(defects: Iterable[Defect], except_kinds: Sequence[str] = ()) -> Dropped:
    """Each dropped record has one defect with that action. Boxes dropped with their image have none: they are valid."""
    kinds = [each.kind for each in defects if each.action == "dropped" and each.kind not in except_kinds]
    boxes = sum(kind.startswith("box_") for kind in kinds)
    return Dropped(len(kinds) - boxes, boxes)


class Names(NamedTuple):
    """Names of a set and its classes in messages."""

    annotation_file: str
    folder: str  # of the images; empty: not known here
    classes: Mapping[int, str]  # by category id


def refusal(
    names: Names,
    defects: Sequence[Defect],
    tally: Totals,
    left: Mapping[int, int],
    limit: float,
    except_kinds: Sequence[str] = (),
) -> Refused | None:
    """Why a set cannot be used, None if it can. left: the remaining boxes by category id. limit: the share of images,
    and of boxes, that may be dropped. except_kinds: defects that do not count."""
    for each in defects:
        if each.action == "refused":
            return Refused(each.file, each.kind, f"{each.what}; {_next(names)}", each.record)
    counted = [each for each in defects if each.action == "dropped" and each.kind not in except_kinds]
    if not counted:
        return None
    gone = count_dropped(counted)
    parts = [
        f"{part} of {of} {what}"
        for part, of, what in ((gone.images, tally.images, "images"), (gone.boxes, tally.boxes, "boxes"))
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
    images = f" --images {names.folder}" if names.folder else ""
    return f"`rtdetr doctor {names.annotation_file}{images}` names every defect"
