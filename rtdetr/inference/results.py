"""Detections as files, written image by image: after an interruption they are valid and contain all finished images.
The image ids in COCO results match those of the annotations."""

from __future__ import annotations

import csv
import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TextIO

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
        self.file.write(b"[" + self.END)

    def extend(self, items: list[Any]) -> None:
        if not items:
            return
        lines = ",\n".join(json.dumps(item) for item in items).encode()
        place = self.file.seek(-len(self.END), os.SEEK_END)
        try:
            self._write((b",\n" if place > 1 else b"\n") + lines + self.END)
        except OSError:  # a full disk: the earlier items stay readable
            self.file.truncate(place)
            self.file.seek(place)
            self._write(self.END)
            raise

    def _write(self, content: bytes) -> None:
        while content:  # a disk that fills up takes a part, and raises for the rest
            content = content[self.file.write(content) :]

    def close(self) -> None:
        self.file.close()


class Done(NamedTuple):
    """What a file contains already."""

    images: int = 0
    errors: int = 0  # of these
    objects: int = 0
    size: int = 0  # bytes, without an incomplete last line


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
            done = Done(number, done.errors + error, done.objects + objects, done.size + len(line))
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

    docs/predict.md describes them. crops: also write crops/NAME/1.jpg, 2.jpg, etc. ids: of the images in coco.json;
    default: their positions in results.json, from 1. Context manager. Raises OSError.
    """

    def __init__(
        self,
        folder: Path,
        formats: list[Format],
        classes: Classes,
        crops: bool = False,
        ids: Mapping[File, int] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "results.json"
        self.crops, self.labels = folder / "crops" if crops else None, folder / "labels" if "yolo" in formats else None
        self.ids, self.num_images = ids or {}, 0
        self.places = {category_id: place for place, category_id in enumerate(classes.category_ids)}
        self.threads = ThreadPoolExecutor(Readers.choose().threads, "rtdetr-draw")
        self.list = JsonList(self.file)
        self.coco = JsonList(folder / "coco.json") if "coco" in formats else None
        self.csv: TextIO | None = None
        if self.labels is not None:
            names = "".join(f"{one_line(name)}\n" for name in classes.names)
            (folder / "classes.txt").write_text(names, encoding="utf-8")
        if "csv" in formats:
            path = folder / "detections.csv"
            self.csv = open(path, "w", newline="", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115
            csv.writer(self.csv).writerow(COLUMNS)

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
        labels = None if self.labels is None else self.labels / f"{name}.txt"
        self.list.extend([item_of(found, annotated=str(target))])
        if found.error:
            target.unlink(missing_ok=True)  # of an earlier run, as below
            if labels is not None:
                labels.unlink(missing_ok=True)
            if self.crops is not None:
                remove_crops(self.crops / name)
            return None
        if self.coco is not None:
            self.coco.extend(coco_results(found, self.ids.get(found.file, self.num_images)))
        if labels is not None:
            labels.parent.mkdir(parents=True, exist_ok=True)
            labels.write_text(yolo_lines(found, self.places), encoding="utf-8")
        if self.csv is not None:
            csv.writer(self.csv).writerows(csv_rows(found))
            self.csv.flush()
        return target

    def __enter__(self) -> ResultsFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(cancel_futures=True)
        for each in (self.list, self.coco, self.csv):
            if each is not None:
                each.close()


def _save_drawn_here(found: FileResult, target: Path, crops: Path | None) -> None:
    if (image := found.as_pil) is not None:
        save_drawn(image, found.detections, target, crops)


def coco_results(found: FileResult, image_id: int) -> list[dict[str, Any]]:
    return [
        {
            "image_id": image_id,
            "file_name": str(found.file),
            "category_id": each.category_id,
            "bbox": [round(v, 2) for v in (*each.box[:2], each.box[2] - each.box[0], each.box[3] - each.box[1])],
            "score": round(each.score, 5),
        }
        for each in found.detections
    ]


def yolo_lines(found: FileResult, places: Mapping[int, int]) -> str:
    """Returns one line per box: class cx cy w h score, relative to the size of the image. places: of each category id
    in classes.txt, from 0."""
    lines = []
    for each in found.detections:
        x1, y1, x2, y2 = (value / extent for value, extent in zip(each.box, found.size * 2))
        values = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1, each.score)
        lines.append(" ".join([str(places[each.category_id]), *(f"{value:.6f}" for value in values)]) + "\n")
    return "".join(lines)


def csv_rows(found: FileResult) -> Iterator[list[Any]]:
    """Yields one row of COLUMNS per box; corners in pixels of the image."""
    for each in found.detections:
        box = (round(value, 2) for value in each.box)
        yield [found.file, each.category_id, each.name, round(each.score, 5), *box]


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
    """Returns the id of the only image in the same folders as each file, of as many as possible, else of the only one
    with its name."""
    from rtdetr.data.formats.sources import read_document  # here: the readers take long to import

    by_path: dict[tuple[str, ...], list[int]] = defaultdict(list)
    by_name: dict[str, list[int]] = defaultdict(list)
    for image in read_document(annotations, limit=None).images:
        parts = PurePosixPath(image["file_name"]).parts
        by_path[parts].append(image["id"])
        by_name[parts[-1]].append(image["id"])
    candidates: dict[File, list[int]] = {}
    for file in files:
        path = Path(os.path.abspath(file)).parts
        ends = (path[start:] for start in range(len(path)))  # the longest first
        candidates[file] = next((by_path[end] for end in ends if end in by_path), by_name[path[-1]])
    if unknown := [str(file) for file, ids in candidates.items() if len(ids) != 1]:
        raise DataError(
            f"{annotations}: names no image, or several, for {some(unknown)}; leave them or --annotations out"
        )
    file_of: dict[int, File] = {}
    for file, (number,) in candidates.items():
        if (other := file_of.setdefault(number, file)) != file:
            both = f"{other} and {file}"
            raise DataError(f"{annotations}: names one image for {both}; leave one of them or --annotations out")
    return {file: number for number, file in file_of.items()}
