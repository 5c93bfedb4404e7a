"""Opens all data sets of a path, collects their defects, and decides whether training would accept them."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from rtdetr.config import ConfigError, load_config
from rtdetr.config_file import parse_yaml
from rtdetr.data.classes import DataError, match_classes, some
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import MOST_DROPPED, WITHOUT_AREA, Action, Defect, Refused, one_line
from rtdetr.data.doctor.counts import advise_sampling, describe
from rtdetr.data.doctor.files import copies, examine_files
from rtdetr.data.formats.records import DataSource
from rtdetr.data.formats.sources import (
    check_images,
    find_sources,
    image_folder_of,
    not_read,
    not_read_line,
    read_document,
    source_of,
    with_images,
)
from rtdetr.data.formats.yolo import of_yolo
from rtdetr.data.images import MAX_MEGAPIXELS
from rtdetr.wording import counted

WORST_FIRST: tuple[Action, ...] = ("refused", "dropped", "clipped", "kept")
SHOWN = 50  # defects of a kind, at most; --json lists all


class SetToExamine(NamedTuple):
    name: str  # train, val, ... or ""
    source: DataSource
    given: Path  # the path that the user passed
    images: str  # the image folder that the user passed; may be empty


class Examined(NamedTuple):
    asked: SetToExamine
    data: DetectionSet | None  # None: unreadable
    defects: list[Defect]
    gone: list[int]  # indices of the images of `data` dropped because of their files
    refused: Defect | None  # the reason why training refuses it


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
            yield one_line(not_read_line(self.not_read))
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
        asked, unknown, limit = _asked(path, images, max_megapixels)
    except (DataError, ConfigError, OSError) as error:
        return Report([], [_refused(error, path)])
    if one_set and len(asked) > 1:
        raise DataError(f"{path}: its {len(asked)} sets do not go into one file; name a folder")
    opened = [_open(each) for each in asked]
    num_images = sum(len(part.data) for part in opened if part.data)
    done = progress(num_images) if progress and num_images and not fast else lambda: None
    if not fast:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PIL warns of unusual files; relevant ones become defects
            opened = [_with_files(part, done) for part in opened]
    judged = [_judged(part, limit) for part in opened]
    if not fast:
        twice = copies([(part.asked.name, part.data) for part in judged if part.data])
        judged = [part._replace(defects=part.defects + twice.get(part.asked.name, [])) for part in judged]
    passed_over = [each for folder in dict.fromkeys(each.given for each in asked) for each in not_read(folder)]
    return Report(_matched(judged), unknown, passed_over)


def _asked(path: Path, images: str, max_megapixels: float | None) -> tuple[list[SetToExamine], list[Defect], float]:
    """The sets, errors in one of the two sets of a config, and the share of each set that may be dropped. Raises
    DataError or ConfigError for other errors."""
    if _is_config(path):
        data = load_config(path).data
        asked, unknown = [], []
        for name, split in (("train", data.train), ("val", data.val)):
            try:
                if not split.annotations:
                    raise ConfigError(f"{path}: data.{name}.annotations is empty, so there is nothing to look at")
                source = source_of(split.annotations, split.split or name, max_megapixels or data.max_megapixels)
            except (DataError, ConfigError, OSError) as error:
                unknown.append(_refused(error, Path(split.annotations or path)))
            else:
                asked.append(SetToExamine(name, source, Path(split.annotations), images or split.images))
        return asked, unknown, data.max_defects
    sources = find_sources(path, max_megapixels or MAX_MEGAPIXELS)
    if {"train", "val"} <= sources.keys():
        sources.pop("trainval", None)  # trainval is the union of both
    for source in sources.values():
        check_images(source, images)
    return [SetToExamine(name, source, path, images) for name, source in sources.items()], [], MOST_DROPPED


def _is_config(path: Path) -> bool:
    """Whether a YAML file is an rtdetr config and not a data.yaml of YOLO. False if it cannot be read."""
    if path.suffix.lower() not in (".yml", ".yaml") or not os.path.isfile(path):
        return False
    try:
        content = parse_yaml(path.read_bytes()[:1_000_000].decode(), str(path))
    except (OSError, UnicodeDecodeError, ConfigError):
        return False  # reported by its reader
    return not (isinstance(content, dict) and ("nc" in content or of_yolo(content, path.stem == "data")))


def _open(asked: SetToExamine) -> Examined:
    """Reads the records, and checks that the image files exist."""
    defects: list[Defect] = []
    try:
        source = with_images(asked.source, asked.images)
        document = read_document(source, limit=None)
        defects = list(document.defects)
        folder = image_folder_of(source, document, asked.given, asked.images)
        data = DetectionSet(document, source._replace(images=folder), limit=None)
    except (DataError, ConfigError, OSError) as error:
        refused = _refused(error, asked.source.path)
        defects += error.others if isinstance(error, Refused) else []
        return Examined(asked, None, [*defects, refused], [], refused)
    return Examined(asked, data, data.defects, [], None)


def _with_files(part: Examined, done: Callable[[], object]) -> Examined:
    if part.data is None:
        return part
    found, gone = examine_files(part.data, done)
    return part._replace(defects=part.defects + found, gone=gone)


def _judged(part: Examined, limit: float) -> Examined:
    """Adds the reason why training would refuse the set, as an extra defect unless one already contains it."""
    if part.data is None:
        return part
    data, defects = part.data, part.defects
    except_kinds = WITHOUT_AREA if part.asked.name in ("val", "test") else ()
    error: DataError | None = data.refusal(defects, limit, except_kinds, part.gone)
    left = len(data) - len(part.gone)
    if error is None and not left:
        error = DataError(f"{data.annotation_file}: no image is left to work on")
    if error is None and part.asked.name not in ("val", "test") and not data.num_boxes:
        error = DataError(f"{data.annotation_file}: {counted(left, 'image')} but no box to learn from")
    if error is None:
        return part
    if any(each.action == "refused" for each in defects):
        return part._replace(refused=_refused(error, data.annotation_file))
    what = str(error).removeprefix(f"{data.annotation_file}: ")
    verdict = Defect(str(data.annotation_file), None, "too_much", what, "refused")
    return part._replace(defects=[*defects, verdict], refused=verdict)


def _matched(parts: Sequence[Examined]) -> list[Examined]:
    """Compares the classes of the other sets with those of the training set, or else of the first. VOC and YOLO folders
    have one list of classes for all their sets."""
    trained = [part.data for part in parts if part.asked.name == "train"] or [part.data for part in parts]
    first = trained[0] if trained else None
    matched = []
    for part in parts:
        of_coco = part.asked.source.format in ("coco", "lvis")
        if first is not None and part.data is not None and part.data is not first and of_coco:
            try:
                match_classes(part.data.classes, first.classes, "id", part.data.annotation_file)
            except DataError as error:
                verdict = _refused(error, part.data.annotation_file)._replace(kind="classes_differ")
                part = part._replace(defects=[*part.defects, verdict], refused=part.refused or verdict)
        matched.append(part)
    return matched


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
    name = f"{part.asked.source}" if part.asked.source.split else f"{part.asked.name} {part.asked.source}".strip()
    bad = [each for each in part.defects if not each.is_note]
    actions = Counter(each.action for each in bad)
    by_action = ", ".join(f"{count} {action}" for action, count in sorted(actions.items()))
    notes = _notes(len(part.defects) - len(bad))
    if part.refused is not None:
        yield one_line(f"{name}: unusable")
    elif bad:
        yield f"{name}: {counted(len(bad), 'defect')} ({by_action}){notes}; training would survive them"
    else:
        yield f"{name}: sound{notes}"
    if part.data is not None:
        yield f"  {part.data.summary()}"
        yield from describe(part.data)
        if part.asked.name not in ("val", "test"):
            yield from advise_sampling(part.data)
