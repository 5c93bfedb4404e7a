"""Opens all data sets of a path, collects their defects, and decides whether training would accept them."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rtdetr.config import ConfigError, load_config
from rtdetr.config_file import parse_yaml
from rtdetr.data.classes import DataError, match_classes, some
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import MOST_DROPPED, WITHOUT_AREA, Action, Defect, Refused, one_line
from rtdetr.data.doctor.counts import advise_sampling, describe
from rtdetr.data.doctor.files import copies, examine_files
from rtdetr.data.formats import sources
from rtdetr.data.formats.records import DataSource
from rtdetr.data.formats.yolo import of_yolo
from rtdetr.data.images import MAX_MEGAPIXELS
from rtdetr.wording import counted

WORST_FIRST: tuple[Action, ...] = ("refused", "dropped", "clipped", "kept")
SHOWN = 50  # defects of a kind, at most; --json lists all


@dataclass(eq=False)
class Examined:
    """A set, filled step by step by `examine`."""

    name: str  # train, val, ... or ""
    source: DataSource
    given: Path  # the path that the user passed
    images: str  # the image folder that the user passed; may be empty
    data: DetectionSet | None = None  # None: unreadable
    defects: list[Defect] = field(default_factory=list)
    gone: list[int] = field(default_factory=list)  # indices of the images of `data` dropped because of their files
    refused: Defect | None = None  # the reason why training refuses it

    @property
    def is_trained_on(self) -> bool:
        return self.name not in ("val", "test")


class Report(NamedTuple):
    sets: list[Examined]
    others: list[Defect]  # defects that belong to no single set
    not_read: Sequence[Path] = ()  # files in the folder that look like sets but were not read

    def defects(self) -> list[Defect]:
        return [each for part in self.sets for each in part.defects] + self.others

    def reasons(self) -> list[Defect]:
        """The reason for refusal of each set that training refuses."""
        of_sets = [part.refused for part in self.sets if part.refused is not None]
        return of_sets + [each for each in self.others if each.action == "refused"]

    def code(self) -> int:
        """0: sound, 1: training would survive, 2: unusable."""
        return 2 if self.reasons() else int(not all(each.is_note for each in self.defects()))

    def verdict(self) -> str:
        """The reason for the exit code."""
        reasons = self.reasons()
        bad = Counter(each.kind for each in self.defects() if not each.is_note)
        notes = _notes(len(self.defects()) - bad.total())
        said = f"sound: no defects{notes}"
        if reasons:
            more = f"; and {counted(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
            said = f"unusable: {reasons[0].file}: {reasons[0].what}{more}"
        elif bad:
            kinds = some((f"{count} {kind}" for kind, count in bad.most_common()), 10)
            said = f"training would survive: {counted(bad.total(), 'defect')} ({kinds}){notes}"
        return one_line(f"{said}; exit code {self.code()}")

    def lines(self) -> Iterator[str]:
        """Lines for the terminal: the defects, the notes, each set, and the reason for the exit code."""
        bad = [each for each in self.defects() if not each.is_note]
        yield from _listed(sorted(bad, key=lambda each: WORST_FIRST.index(each.action)))
        yield from _listed([each for each in self.defects() if each.is_note])
        for part in self.sets:
            yield from _lines_of(part)
        if self.not_read:
            yield one_line(sources.not_read_line(self.not_read))
        yield self.verdict()


def examine(
    path: Path,
    images: str = "",
    fast: bool = False,
    progress: Callable[[int], Callable[[], object]] | None = None,
    max_megapixels: float | None = None,
    one_set: bool = False,
) -> Report:
    """Reports all defects of the sets of a config, an annotation file or a folder. images: the image folder. fast: do
    not open images. progress: receives the number of images and returns a function to call after each. max_megapixels:
    larger images are defects; default: the config's limit. one_set: refuse several."""
    try:
        parts, unknown, limit = _sets_of(path, images, max_megapixels)
    except (DataError, ConfigError, OSError) as error:
        return Report([], [_refused(error, path)])
    if one_set and len(parts) > 1:
        raise DataError(f"{path}: its {len(parts)} sets do not go into one file; name a folder")
    for part in parts:
        _open(part)
    opened = [(part, part.data) for part in parts if part.data is not None]
    if not fast:
        num_images = sum(len(data) for _, data in opened)
        done = progress(num_images) if progress and num_images else lambda: None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of unusual files; relevant ones become defects
            for part, data in opened:
                found, part.gone = examine_files(data, done)
                part.defects += found
    for part, data in opened:
        _judge(part, data, limit)
    if not fast:
        twice = copies([(part.name, data) for part, data in opened])
        for part, _ in opened:
            part.defects += twice.get(part.name, [])
    _match(parts)
    passed_over = [each for folder in dict.fromkeys(part.given for part in parts) for each in sources.not_read(folder)]
    return Report(parts, unknown, passed_over)


def _sets_of(path: Path, images: str, max_megapixels: float | None) -> tuple[list[Examined], list[Defect], float]:
    """The sets, errors in one of the two sets of a config, and the share of each set that may be dropped. Raises
    DataError or ConfigError for other errors."""
    if not _is_config(path):
        found = sources.find_sources(path, max_megapixels or MAX_MEGAPIXELS)
        if {"train", "val"} <= found.keys():
            found.pop("trainval", None)  # trainval is the union of both
        for source in found.values():
            sources.check_images(source, images)
        return [Examined(name, source, path, images) for name, source in found.items()], [], MOST_DROPPED
    data = load_config(path).data
    parts, unknown = [], []
    for name, split in (("train", data.train), ("val", data.val)):
        try:
            if not split.annotations:
                raise ConfigError(f"{path}: data.{name}.annotations is empty, so there is nothing to look at")
            source = sources.source_of(split.annotations, split.split or name, max_megapixels or data.max_megapixels)
            parts.append(Examined(name, source, Path(split.annotations), images or split.images))
        except (DataError, ConfigError, OSError) as error:
            unknown.append(_refused(error, Path(split.annotations or path)))
    return parts, unknown, data.max_defects


def _is_config(path: Path) -> bool:
    """Whether a YAML file is an rtdetr config and not a data.yaml of YOLO. False if it cannot be read."""
    if path.suffix.lower() not in (".yml", ".yaml") or not os.path.isfile(path):
        return False
    try:
        content = parse_yaml(path.read_bytes()[:1_000_000].decode(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return False  # reported by its reader
    return not (isinstance(content, dict) and ("nc" in content or of_yolo(content, path.stem == "data")))


def _open(part: Examined) -> None:
    """Reads the records, and checks that the image files exist."""
    try:
        source = sources.with_images(part.source, part.images)
        document = sources.read_document(source, limit=None)
        part.defects = [*document.defects]
        folder = sources.image_folder_of(source, document, part.given, part.images)
        part.data = DetectionSet(document, source._replace(images=folder), limit=None)
        part.defects = [*part.data.defects]
    except (DataError, ConfigError, OSError) as error:
        part.refused = _refused(error, part.source.path)
        part.defects += [*(error.others if isinstance(error, Refused) else ()), part.refused]


def _judge(part: Examined, data: DetectionSet, limit: float) -> None:
    """Adds the reason why training would refuse the set, as an extra defect unless one already contains it."""
    file, left = data.annotation_file, len(data) - len(part.gone)
    except_kinds = () if part.is_trained_on else WITHOUT_AREA
    error: DataError | None = data.refusal(part.defects, limit, except_kinds, part.gone)
    if error is None and not left:
        error = DataError(f"{file}: no image is left to work on")
    if error is None and part.is_trained_on and not data.num_boxes:
        error = DataError(f"{file}: {counted(left, 'image')} but no box to learn from")
    if error is None:
        return
    if any(each.action == "refused" for each in part.defects):
        part.refused = _refused(error, file)
    else:
        part.refused = Defect(str(file), None, "too_much", str(error).removeprefix(f"{file}: "), "refused")
        part.defects.append(part.refused)


def _match(parts: Sequence[Examined]) -> None:
    """Compares the classes of the other sets with those of the training set, or else of the first. VOC and YOLO folders
    have one list of classes for all their sets."""
    trained = [part.data for part in parts if part.name == "train"] or [part.data for part in parts]
    for part in parts:
        data, first = part.data, trained[0]
        if first is not None and data is not None and data is not first and part.source.format == "coco":
            try:
                match_classes(data.classes, first.classes, "id", data.annotation_file)
            except DataError as error:
                part.defects.append(_refused(error, data.annotation_file)._replace(kind="classes_differ"))
                part.refused = part.refused or part.defects[-1]


def _refused(error: DataError | ConfigError | OSError, path: Path) -> Defect:
    """The defect of an error; `path` is used if the error names no file."""
    if isinstance(error, Refused):
        return error.defect
    if isinstance(error, OSError):  # a folder without permission, a disk that was removed
        what = f"cannot be read ({error.strerror or error})"
        return Defect(str(error.filename or path), None, "file_unreadable", what, "refused")
    kind = "unusable" if isinstance(error, DataError) else "yaml_broken"
    return Defect(str(path), None, kind, str(error).removeprefix(f"{path}: "), "refused")


def _listed(defects: Sequence[Defect]) -> Iterator[str]:
    shown: Counter[str] = Counter()
    for each in defects:
        shown[each.kind] += 1
        if shown[each.kind] <= SHOWN:
            yield each.line()
    for kind, count in shown.items():
        if count > SHOWN:
            yield f"... and {count - SHOWN} more of {kind}; --json FILE lists them all"


def _notes(number: int) -> str:
    return f", {counted(number, 'note')}" if number else ""


def _lines_of(part: Examined) -> Iterator[str]:
    name = f"{part.source}" if part.source.split else f"{part.name} {part.source}".strip()
    bad = [each for each in part.defects if not each.is_note]
    notes = _notes(len(part.defects) - len(bad))
    if part.refused is not None:
        yield one_line(f"{name}: unusable")
    elif bad:
        by_action = ", ".join(f"{count} {action}" for action, count in sorted(Counter(x.action for x in bad).items()))
        yield f"{name}: {counted(len(bad), 'defect')} ({by_action}){notes}; training would survive them"
    else:
        yield f"{name}: sound{notes}"
    if part.data is not None:
        yield f"  {part.data.summary()}"
        yield from describe(part.data)
        if part.is_trained_on:
            yield from advise_sampling(part.data)
