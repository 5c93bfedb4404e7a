"""Detects the format and the sets of annotations, and reads images and boxes of any format into one document."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rtdetr.data.classes import Classes, DataError, Match, some
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.defects import MOST_DROPPED, Refused
from rtdetr.data.formats import coco
from rtdetr.data.formats.cvat import cvat_file, find_cvat, read_cvat
from rtdetr.data.formats.document import CocoDocument, file_names, with_problems
from rtdetr.data.formats.huggingface import find_image_folder, has_metadata, packed_files, read_image_folder, unpack
from rtdetr.data.formats.labelme import find_labelme, has_labelme, read_labelme
from rtdetr.data.formats.labelstudio import is_labelstudio, read_labelstudio
from rtdetr.data.formats.records import IMAGE_SUFFIXES, SPLITS, DataSource, Format, Problems, split_folders, split_named
from rtdetr.data.formats.sniff import annotations_in
from rtdetr.data.formats.voc import ANNOTATIONS, find_voc, has_xml, read_voc
from rtdetr.data.formats.yolo import find_yolo, image_folder, read_yolo, undeclared_sets
from rtdetr.data.image_files import OTHERWISE, alike_in, slashes, stays_in
from rtdetr.data.images import MAX_MEGAPIXELS

ROBOFLOW = "_annotations.coco.json"
OTHER_JSON = (
    *("captions_", "panoptic_", "person_keypoints_", "stuff_", "image_info_"),
    *("dataset_dict.json", "dataset_info", "state.json"),  # Hugging Face
)
# Splits to use for the one asked for, in order of preference.
INSTEAD = {"train": ("train", "trainval"), "val": ("val", "test"), "test": ("test",)}
LOOKED_FOR = (
    "a COCO or LVIS JSON; annotations/instances_*.json; train/_annotations.coco.json; Pascal VOC's Annotations/*.xml "
    "and ImageSets/Main/*.txt; YOLO's data.yaml; images/train with labels/train, or train/images with train/labels; "
    "Label Studio's JSON; CVAT's annotations.xml; LabelMe's *.json; Hugging Face's metadata.jsonl"
)
ONE_FILE = ("coco", "labelstudio", "cvat")  # single files, whose images are searched nearby
BY_NAME = ("voc", "labelstudio", "cvat", "labelme")  # formats without class ids


class Layout(NamedTuple):
    """A format that is recognised by the files in its folder."""

    find: Callable[[Path], Any]  # the input of its reader; nothing for another format
    sets: Callable[[Any, Path], Mapping[str, tuple[Path, Path | None]]]  # (found, path) -> each set's location, images
    read: Callable[[Any, DataSource, Problems], CocoDocument]


def _in_folders(folders: Mapping[str, Path], path: Path) -> dict[str, tuple[Path, Path | None]]:
    return {split: (path, folder) for split, folder in folders.items()}


LAYOUTS: dict[Format, Layout] = {  # tried in this order
    "yolo": Layout(
        find_yolo, lambda yolo, _: {split: (yolo.path, image_folder(yolo, split)) for split in yolo.sets}, read_yolo
    ),
    "cvat": Layout(find_cvat, lambda subsets, path: dict.fromkeys(subsets, (cvat_file(path), None)), read_cvat),
    "voc": Layout(
        find_voc,
        lambda voc, path: {
            split: (path if path.is_file() else voc.root, each.images) for split, each in voc.sets.items()
        },
        read_voc,
    ),
    "labelme": Layout(find_labelme, _in_folders, read_labelme),
    "huggingface": Layout(find_image_folder, _in_folders, read_image_folder),
}


def find_sources(path: str | Path, max_megapixels: float = MAX_MEGAPIXELS) -> dict[str, DataSource]:
    """The sets of a file or folder by name: train, val, trainval, test, or "" for the only one. Does not read the
    annotations. Raises DataError, which lists what was looked for, if no format is recognised."""
    path = Path(path)
    json = DataSource("coco" if os.path.isdir(path) else _json_format(path), path, "", None, max_megapixels)
    if path.suffix.lower() == ".json" and not os.path.isdir(path):
        return {"": json}
    if not os.path.exists(path):
        raise DataError(f"{path}: no such annotation file or folder")
    if found := _recognised(path):
        return {split: each._replace(max_megapixels=max_megapixels) for split, each in found.items()}
    if packed_files(path):
        advice = f"unpack it with `rtdetr convert-data {path} OUT --to imagefolder`, and give OUT"
        raise DataError(f"{path}: holds its images inside of parquet or arrow files; {advice}")
    if path.is_file():
        return {"": json}  # its reader reports what the file looks like
    raise DataError(f"{path}: no annotations recognised; looked for {LOOKED_FOR}")


def _recognised(path: Path) -> dict[str, DataSource]:
    for format, layout in LAYOUTS.items():
        found = layout.find(path)
        if found and (sets := layout.sets(found, path)):
            return {split: DataSource(format, place, split, images) for split, (place, images) in sets.items()}
    return _coco(path)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """Context manager: the path, or, for parquet and arrow files with images in them, a temporary folder of these
    images. Raises DataError if they cannot be unpacked."""
    if not os.path.exists(path) or _recognised(path) or not packed_files(path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="rtdetr-unpacked-") as folder:
        unpack(path, Path(folder))
        yield Path(folder)


def source_of(path: str | Path, split: str, max_megapixels: float = MAX_MEGAPIXELS) -> DataSource:
    """The set of that name, its substitute, or the only set of a path without splits. "": the only one, whatever its
    name, else val. Raises DataError if there is none."""
    sources = find_sources(path, max_megapixels)
    if not split:
        split = next(iter(sources)) if len(sources) == 1 else "val"
    for name in ("", *INSTEAD.get(split, (split,))):
        if name in sources:
            return sources[name]
    advice = f"; add one, or choose another with data.{split}.split" if split in ("train", "val") else ""
    raise DataError(f"{path}: has no set `{split}`, only {some(sources)}{advice}")


def not_read(path: str | Path) -> list[Path]:
    """Files in a folder that look like sets but that `find_sources` does not return. Raises DataError."""
    path = Path(path)
    if not os.path.isdir(path):
        return []
    sources = list(find_sources(path).values())
    found = {each for names in SPLITS.values() for name in names if (each := path / name / ROBOFLOW).is_file()}
    if sources[0].format == "labelme":
        found.update(each for each in path.iterdir() if each.is_dir() and has_labelme(each))
    elif sources[0].format == "huggingface":
        found.update(each for each in path.iterdir() if has_metadata(each))
    else:  # the JSON files of these two are no sets
        found.update(_json_sets(path))
    if sources[0].format == "yolo":
        found.update(path / name for name in ANNOTATIONS if has_xml(path / name))
        found.update(_undeclared(path))
    return sorted(found - {each.path for each in sources} - {each.images for each in sources})


def _undeclared(path: Path) -> list[Path]:
    """Folders of images with labels that data.yaml does not name; empty if it names list files."""
    yolo = find_yolo(path)
    named = [each.resolve() for places in (yolo.sets.values() if yolo else ()) for each in places]
    if not all(each.is_dir() for each in named):
        return []
    there = [each for places in undeclared_sets(path).values() for each in places]
    return [each for each in there if not any(each.resolve().is_relative_to(own) for own in named)]


def not_read_line(paths: Sequence[Path]) -> str:
    return f"not read: {some(map(str, paths))}"


def read_document(source: DataSource | str | Path, limit: float | None = MOST_DROPPED) -> CocoDocument:
    """The images and boxes of a set, in pixels, under the ids of its own format; of a path, its only set, or its val.

    limit: the largest share of images, and of boxes, that may be dropped because of defects; None: no limit. Raises
    DataError if the set is unusable.
    """
    if not isinstance(source, DataSource):
        source = source_of(source, "")
    if source.format == "coco":
        return coco.read_coco(source.path, limit)
    problems = Problems()
    try:
        document = _read(source, problems, limit)
    except DataError as error:  # a consequence of the first problem, which is reported with it
        if not problems.found:
            raise
        first = problems.found[0]
        raise Refused(first.file, "unusable", f"{first.what}; {error}", None, problems.found) from error
    return with_problems(document, problems, source.path, limit)


def _read(source: DataSource, problems: Problems, limit: float | None) -> CocoDocument:
    if source.format == "labelstudio":
        groups = ([source.images],) if source.images else _folders_near(source)
        return read_labelstudio(source.path, groups, problems)
    layout = LAYOUTS[source.format]
    found = layout.find(source.path)
    # The annotations may have been moved since: COCO's reader says what is there instead.
    return layout.read(found, source, problems) if found else coco.read_coco(source.path, limit)


def open_set(
    annotations: str | Path,
    images: str | Path = "",
    split: str = "train",
    classes: Classes | None = None,
    drop_empty: bool = False,
    max_megapixels: float = MAX_MEGAPIXELS,
    match: Match = "id",
    limit: float | None = MOST_DROPPED,
) -> DetectionSet:
    """Opens a set of any format. images: the image folder of a JSON; if empty, and for folders that contain their
    images, it is searched. The other arguments are as in DetectionSet. Raises DataError if the set is unusable."""
    source = with_images(source_of(annotations, split, max_megapixels), images)
    document = read_document(source, limit=limit)
    source = source._replace(images=image_folder_of(source, document, Path(annotations), images))
    if passed_over := not_read(annotations):
        document = document._replace(notes=(*document.notes, not_read_line(passed_over)))
    if images and _is_elsewhere(images, source.images):
        document = document._replace(notes=(*document.notes, f"not used: the image folder {images}"))
    return DetectionSet(document, source, classes, drop_empty, _match(source.format, document, classes, match), limit)


def _is_elsewhere(images: str | Path, own: Path | None) -> bool:
    """Whether an image folder is neither `own` nor in it or above it: image names are relative to the whole set."""
    one, other = Path(images).resolve(), (own or Path(images)).resolve()
    return not (one.is_relative_to(other) or other.is_relative_to(one))


def check_images(source: DataSource, images: str | Path) -> None:
    """Raises DataError for an image folder that would not be used, as the set has its own."""
    own = with_images(source, images).images if source.format not in ONE_FILE else None
    if images and _is_elsewhere(images, own):
        raise DataError(f"{images}: is not used, as {source} has its own images in {own}; give no image folder")


def with_images(source: DataSource, images: str | Path) -> DataSource:
    """The source with the image folder `images`, for XML and LabelMe files without images in their folder."""
    if source.format not in ("voc", "labelme", "labelstudio") or not images or not Path(images).is_dir():
        return source
    own = source.images
    has_images = own is not None and any(each.suffix.lower() in IMAGE_SUFFIXES for each in own.rglob("*"))
    return source if has_images else source._replace(images=Path(images))


def _match(format: Format, document: CocoDocument, classes: Classes | None, match: Match) -> Match:
    """How to match classes. VOC has names and no ids; YOLO's ids are positions in its list of names. So both are
    matched by name if the model has every name, VOC always."""
    if classes is None or format == "coco":
        return match
    names = [each["name"] for each in document.categories]
    unique = all(len(set(each)) == len(each) for each in (names, classes.names))
    return "name" if format in BY_NAME or (unique and set(names) <= set(classes.names)) else match


def image_folder_of(source: DataSource, document: CocoDocument, given: Path, images: str | Path) -> Path:
    """The folder `images`, or the one that the format implies. Raises DataError if no images are found."""
    if images and source.format in ONE_FILE and not os.path.isdir(given):
        return Path(images)
    if source.format not in ONE_FILE and source.images is not None:
        return source.images
    likely, others = _folders_near(source)
    groups = ([Path(images)] if images else [], likely, others)  # in order of preference
    some_images = document.images[:20]  # a few may be missing
    if not some_images:
        raise DataError(f"{source.path}: has no image")
    for group in groups:  # others hold images of other sets, which may have the same names
        numbers = {each: _number_in(each, some_images) for each in group if each.is_dir()}
        best = [each for each, number in numbers.items() if number == max(numbers.values()) > 0]
        if len({each.resolve() for each in best}) == 1 or (best and group is not others):
            return best[0]
    how = "give their folder as --images, data.train.images or data.val.images"
    if best:
        raise DataError(f"{source.path}: its images may be those in {some(map(str, best))}; {how}")
    candidates = dict.fromkeys(folder for group in groups for folder in group)
    name = file_names(some_images, source.path.parent)[0]
    alike = [each for folder in candidates if (each := alike_in(folder, name))]
    seen = f"; {alike[0]} differs {OTHERWISE}" if alike else slashes(name)
    raise DataError(f"{source.path}: its images were not found in {some(map(str, candidates), 12)}{seen}; {how}")


def _number_in(folder: Path, images: Sequence[Mapping[str, Any]]) -> int:
    names = file_names(images, folder)
    return sum(stays_in(folder, name) and os.path.isfile(folder / name) for name in names)


def _folders_near(source: DataSource) -> tuple[list[Path], list[Path]]:
    """Folders that may hold the images of a file: those that are named as usual, likely ones first, and all others."""
    path = source.path
    root = path.parent.parent if path.parent.name.lower() in ("annotations", "labels") else path.parent
    own = re.sub(r"^(instances|lvis_v1|lvis)_", "", path.stem)
    names = [own, *SPLITS.get(source.split or split_named(path), ())]
    nested = [root / pattern.format(name) for name in names for pattern in ("{}", "images/{}", "{}/images")]
    likely = [path.parent, *nested, root / "images", root / "JPEGImages", root]
    inside = sorted(each for folder in {root, path.parent} if folder.is_dir() for each in folder.iterdir())
    return likely, [each for each in inside if each.is_dir() and each not in likely and each.name[0] != "."]


def _json_format(path: Path) -> Format:
    return "labelstudio" if is_labelstudio(path) else "coco"


def _json_sets(path: Path) -> list[Path]:
    """JSON files of a folder that may be data sets."""
    return [each for each in annotations_in(path) if not each.name.startswith((*OTHER_JSON, "rtdetr"))]


def _coco(path: Path) -> dict[str, DataSource]:
    if path.is_file():
        return {}
    folders = split_folders(path, lambda each: (each / ROBOFLOW).is_file())
    files = {split: folder / ROBOFLOW for split, folder in folders.items()}
    single = _json_sets(path)
    for each in single:
        files.setdefault(split_named(each), each)
    unnamed = [each for each in single if not split_named(each)]
    if len(unnamed) > 1 and len(files) == 1:
        raise DataError(f"{path}: holds several JSON files, {some(map(str, unnamed))}; choose one")
    if len(files) > 1:
        files.pop("", None)
    return {split: DataSource(_json_format(file), file, split) for split, file in files.items()}
