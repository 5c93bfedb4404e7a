"""Checks by file name alone which images of a set can be opened."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path, PureWindowsPath

from rtdetr.data.classes import DataError, shown, some
from rtdetr.data.defects import Defect

KINDS = {
    "(it is a ": "picture_directory",  # also for a device
    "larger than data.max_megapixels": "picture_bomb",
    "none of the formats": "picture_not_a_picture",
    "the file is empty": "picture_not_a_picture",
    "No such file": "picture_missing",
    "cannot be trusted": "picture_size",
    "save it in 8 or 16 bits": "picture_range",
}
OTHERWISE = "in upper and lower case, or in how its accents are encoded"


def judge_names(
    folder: Path, annotation_file: object, ids: Sequence[int], names: Sequence[str]
) -> tuple[list[bool], list[Defect]]:
    """Returns which images can be opened, and the defects of the others: the file is missing, or its name leaves the
    folder. Symbolic links in the folder are followed wherever they lead: linked sets are common, and links are created
    by the owner of the folder, not by the author of the annotations."""
    present = Folders(folder)
    usable, missing, defects = [], [], []
    for own, name in zip(ids, names):
        inside = stays_in(folder, name)
        usable.append(inside and name in present)
        if not inside:
            what = f"image {own}: `file_name` {shown(name)} leaves the image folder {folder} and is not opened"
            defects.append(Defect(str(annotation_file), own, "picture_path_outside", what, "dropped"))
        elif not usable[-1]:
            missing.append((own, name))
    if missing:
        advice = where_else(folder, missing[0][1])
        first = f"no such image; {len(missing)} of the {len(names)} in {annotation_file} are missing, "
        for i, (own, name) in enumerate(missing):
            what = f"{first}this is the first; {advice}" if i == 0 else f"no such image, of image {own}"
            defects.append(Defect(str(folder / name), own, "picture_missing", what, "dropped"))
    return usable, defects


def unreadable(path: Path, record: int, error: DataError) -> Defect:
    """The defect of an image file that exists and cannot be read."""
    what = str(error).removeprefix(f"{path}: ")
    kind = next((kind for words, kind in KINDS.items() if words in what), "picture_damaged")
    return Defect(str(path), record, kind, what, "dropped")


def stays_in(folder: Path, name: str) -> bool:
    """Whether a file name stays inside the folder, judged by its text. Any `..` is refused: after a symbolic link it
    may lead anywhere."""
    if ".." not in name and not os.path.isabs(name):  # fast path for nearly all names; Path is slow
        return True
    path = Path(name)
    if ".." in path.parts:
        return False
    return not path.is_absolute() or path.is_relative_to(os.path.abspath(folder))


def alike_in(folder: Path, name: str) -> Path | None:
    """The file in a folder whose name differs from `name` in case, or in how its accents are encoded, alone."""

    def alike(text: str) -> str:
        return unicodedata.normalize("NFC", text).casefold()

    try:
        there = sorted(os.listdir((folder / name).parent)) if "\0" not in name else []
    except OSError:  # no such folder
        return None
    wanted = os.path.basename(name)
    return next(((folder / name).with_name(each) for each in there if alike(each) == alike(wanted)), None)


def where_else(folder: Path, name: str) -> str:
    """Advice on a missing image. Looks in the parent folder, the sibling folders and the subfolders."""
    roots = [root for root in (folder, folder.parent) if os.access(root, os.R_OK)]
    around = sorted(Path(each) for root in roots for each in os.scandir(root) if each.is_dir())
    near = [folder.parent, *around]
    right = [str(each) for each in near if os.path.isfile(each / name)]
    if right:
        return f"one of that name is in {some(right, 3)}; is that the image folder?"
    plain = PureWindowsPath(name)  # accepts both / and \\
    if os.path.isfile(folder / plain.name):
        return f"{folder / plain.name} is there: remove the folder from `file_name`"
    if (alike := alike_in(folder, name)) is not None:
        return f"{alike} is there, which differs {OTHERWISE}"
    return f"check the image folder{slashes(name)}"


def slashes(name: str) -> str:
    """Advice on a name with Windows separators."""
    return "; write names with / instead of \\" if "\\" in name and os.sep == "/" else ""


class Folders:
    """The files below a folder. Lists each folder once, as checking single files is slow on network drives."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._present: dict[str, set[str]] = {}

    def __contains__(self, name: str) -> bool:
        folder, file = os.path.split(name)
        if folder not in self._present:
            try:
                self._present[folder] = set(os.listdir(self.root / folder))
            except OSError:  # no such folder, a loop of links, too long a name: nothing in it can be opened
                self._present[folder] = set()
        return file in self._present[folder]
