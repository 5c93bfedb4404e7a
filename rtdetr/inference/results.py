"""Detections as files, written image by image: after an interruption they are valid and contain all finished images.
The image ids in COCO results match those of the annotations."""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from rtdetr.data.classes import Classes, DataError, some
from rtdetr.data.defects import one_line
from rtdetr.inference.draw import Detection, remove_crops, save_drawn
from rtdetr.inference.files import manifest_paths
from rtdetr.inference.fonts import font_file
from rtdetr.inference.predictor import File, FileResult
from rtdetr.inference.processes import FutureAnswer, Readers

Format = Literal["coco", "yolo", "csv"]
COLUMNS = ("file", "category_id", "name", "score", "x1", "y1", "x2", "y2")


class JsonList:
    """A JSON list in a file, one item per line, that is valid after every `extend`.

    The closing bracket is overwritten by the next items and written again in the same call, so a list of 100,000
    images costs no more per image than a short one.
    """

    END = b"\n]\n"

    def __init__(self, path: Path) -> None:
        self.file = open(path, "wb", buffering=0)  # noqa: SIM115 - until close()
        self.empty = True
        self.file.write(b"[" + self.END)

    def extend(self, items: list[Any]) -> None:
        if not items:
            return
        lines = ",\n".join(json.dumps(item) for item in items).encode()
        place = self.file.seek(-len(self.END), os.SEEK_END)
        try:
            self._write((b"\n" if self.empty else b",\n") + lines + self.END)
        except OSError:  # a full disk: the earlier items stay readable
            self.file.truncate(place)
            self.file.seek(place)
            self._write(self.END)
            raise
        self.empty = False

    def _write(self, content: bytes) -> None:
        while content:  # a disk that fills up takes a part, and raises for the rest
            content = content[self.file.write(content) :]

    def close(self) -> None:
        self.file.close()


class Done(NamedTuple):
    """Counts of the results that a file contains already."""

    images: int = 0
    errors: int = 0  # of these
    objects: int = 0


def cut_partial_line(results: Path) -> None:
    """Removes the last line of a file if it is incomplete. Raises OSError."""
    with open(results, "r+b") as file:
        file.truncate(sum(len(line) for line in file if line.endswith(b"\n")))


def already_done(results: Path, manifest: Path) -> Done:
    """Counts the complete lines of results, which belong to the first images of the manifest, in its order. An
    incomplete last line does not count.

    Raises DataError if they belong to other images, and OSError.
    """
    done = Done()
    paths = manifest_paths(manifest)
    with open(results, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                item = json.loads(line)
                name, error, objects = item["file"], "error" in item, len(item.get("detections", ()))
            except (ValueError, KeyError, TypeError, AttributeError) as problem:
                raise DataError(f"{results}: line {number} is no result of an image; it cannot be resumed") from problem
            expected = next(paths, None)
            if name != str(expected):
                raise DataError(
                    f"{results}: line {number} is that of {name}, the manifest has {expected or 'no more images'}; "
                    "resume with the manifest that began it"
                )
            done = Done(number, done.errors + error, done.objects + objects)
    return done


def as_json(detections: Sequence[Detection]) -> list[dict[str, Any]]:
    """Returns detections as written to files: boxes to a hundredth of a pixel."""
    return [{**each._asdict(), "box": [round(value, 2) for value in each.box]} for each in detections]


def item_of(found: FileResult, **more: str) -> dict[str, Any]:
    """Returns the entry of a file in the results: file, width, height, `more`, detections; or file and error."""
    if found.error:
        return {"file": str(found.file), "error": found.error}
    width, height = found.size
    return {"file": str(found.file), "width": width, "height": height, **more, "detections": as_json(found.detections)}


class ResultsFolder:
    """The output of `rtdetr predict`: results.json, an image with boxes for each file, and other formats.

    docs/predict.md describes them. crops: also write crops/NAME/1.jpg, 2.jpg, etc. ids: of the images in coco.json.
    Context manager. Raises OSError.
    """

    def __init__(
        self,
        folder: Path,
        formats: list[Format],
        classes: Classes,
        crops: bool = False,
        ids: Mapping[File, int] = MappingProxyType({}),
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.crops = folder / "crops" if crops else None
        self.folder, self.file = folder, folder / "results.json"
        self.num_images = 0
        self.threads = ThreadPoolExecutor(Readers.choose().threads, "rtdetr-draw")
        self.list = JsonList(self.file)
        self.writers: list[CocoWriter | YoloWriter | CsvWriter] = []
        if "coco" in formats:
            self.writers.append(CocoWriter(folder, ids))
        if "yolo" in formats:
            self.writers.append(YoloWriter(folder, classes))
        if "csv" in formats:
            self.writers.append(CsvWriter(folder))

    def begin_drawing(self, found: FileResult, name: Path) -> Future[None] | FutureAnswer:
        """Starts to write the image with boxes, and crops, in a thread or in the process that keeps the image. name:
        relative to the folder, no suffix."""
        files = self.folder / f"{name}.jpg", None if self.crops is None else self.crops / name
        if found.kept is None:
            return self.threads.submit(_save_drawn_here, found, *files)
        for each in found.detections:
            font_file(each.name)  # warns of characters that no font shows
        return found.kept.ask(save_drawn, list(found.detections), *files)

    def list_found(self, found: FileResult, name: Path) -> Path | None:
        """Adds a result to results.json and the other formats; returns the image with boxes, if there is one."""
        self.num_images += 1
        target = self.folder / f"{name}.jpg"
        if found.error:
            self.list.extend([item_of(found)])
            target.unlink(missing_ok=True)  # of an earlier run, as below
            if any(isinstance(each, YoloWriter) for each in self.writers):
                (self.folder / "labels" / f"{name}.txt").unlink(missing_ok=True)
            if self.crops is not None:
                remove_crops(self.crops / name)
            return None
        self.list.extend([item_of(found, annotated=str(target))])
        for writer in self.writers:
            writer.add(self.num_images, name, found)
        return target

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for each in (self.list, *self.writers):
            each.close()


def _save_drawn_here(found: FileResult, target: Path, crops: Path | None) -> None:
    if (image := found.as_pil) is not None:
        save_drawn(image, found.detections, target, crops)


class CocoWriter(JsonList):
    """Writes coco.json: COCO results. image_id is that of `ids`, else the image's position in results.json, from 1."""

    def __init__(self, folder: Path, ids: Mapping[File, int]) -> None:
        super().__init__(folder / "coco.json")
        self.ids = ids

    def add(self, number: int, name: Path, found: FileResult) -> None:
        self.extend([
            {
                "image_id": self.ids.get(found.file, number),
                "file_name": str(found.file),
                "category_id": each.category_id,
                "bbox": [round(v, 2) for v in (*each.box[:2], each.box[2] - each.box[0], each.box[3] - each.box[1])],
                "score": round(each.score, 5),
            }
            for each in found.detections
        ])  # fmt: skip


class YoloWriter:
    """Writes labels/NAME.txt for every image, one line per box: class cx cy w h score, relative to the size of the
    image; class counts from 0 in the order of classes.txt."""

    def __init__(self, folder: Path, classes: Classes) -> None:
        self.folder = folder / "labels"
        self.classes = {category_id: i for i, category_id in enumerate(classes.category_ids)}
        (folder / "classes.txt").write_text("".join(f"{one_line(name)}\n" for name in classes.names), encoding="utf-8")

    def add(self, number: int, name: Path, found: FileResult) -> None:
        lines = []
        for each in found.detections:
            x1, y1, x2, y2 = (value / extent for value, extent in zip(each.box, found.size * 2))
            values = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, each.score)
            lines.append(" ".join([str(self.classes[each.category_id]), *(f"{value:.6f}" for value in values)]) + "\n")
        target = self.folder / f"{name}.txt"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text("".join(lines), encoding="utf-8")

    def close(self) -> None:
        pass


class CsvWriter:
    """Writes detections.csv: one row per box, with the columns of COLUMNS; corners in pixels of the image."""

    def __init__(self, folder: Path) -> None:
        path = folder / "detections.csv"
        self.file = open(path, "w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
        self.rows = csv.writer(self.file)
        self.rows.writerow(COLUMNS)

    def add(self, number: int, name: Path, found: FileResult) -> None:
        for each in found.detections:
            box = (round(value, 2) for value in each.box)
            self.rows.writerow([found.file, each.category_id, each.name, round(each.score, 5), *box])
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def file_number(name: File) -> int | None:
    """Returns the number in a file name such as COCO's (000000000139.jpg is 139), else None."""
    stem = Path(name).stem
    return int(stem) if stem.isdecimal() and stem.isascii() else None


def image_ids(files: Collection[File], annotations: Path | None = None) -> dict[File, int]:
    """Returns the ids in the annotations; without annotations the numbers of the files or, if one has none or two are
    equal, their positions in the list, from 1. Raises DataError for files that the annotations do not name."""
    if annotations is not None:
        return _annotated(files, annotations)
    numbers = {each: file_number(each) for each in files}
    if None in numbers.values() or len({*numbers.values()}) < len(numbers):
        return {each: place for place, each in enumerate(files, start=1)}
    return {each: number for each, number in numbers.items() if number is not None}


def _annotated(files: Collection[File], annotations: Path) -> dict[File, int]:
    from rtdetr.data.formats.sources import read_document  # here: the readers take long to import

    by_name: dict[str, list[tuple[tuple[str, ...], int]]] = defaultdict(list)
    for image in read_document(annotations, limit=None).images:
        parts = PurePosixPath(image["file_name"]).parts
        by_name[parts[-1]].append((parts, image["id"]))
    ids = {each: _id_of(each, by_name[Path(each).name]) for each in files}
    if unknown := [str(each) for each, number in ids.items() if number is None]:
        raise DataError(
            f"{annotations}: names no image, or several, for {some(unknown)}; leave them or --annotations out"
        )
    file_of: dict[int | None, File] = {}
    for file, number in ids.items():
        if file_of.setdefault(number, file) != file:
            both = f"{file_of[number]} and {file}"
            raise DataError(f"{annotations}: names one image for {both}; leave one of them or --annotations out")
    return {each: number for each, number in ids.items() if number is not None}


def _id_of(file: File, candidates: list[tuple[tuple[str, ...], int]]) -> int | None:
    """Returns the id of the only image in the same folders, of as many as possible, else of the only one with this
    name, else None."""
    path = Path(os.path.abspath(file)).parts
    same = [(len(parts), number) for parts, number in candidates if path[-len(parts) :] == parts]
    most = max((depth for depth, _ in same), default=0)
    chosen = [number for depth, number in same if depth == most] or [number for _, number in candidates]
    return chosen[0] if len(chosen) == 1 else None
