"""Checkpoint files: written atomically, read without running code; invalid ones are refused with a sentence.

A file is a dict: format "rtdetr", version, config, classes, preprocess, model, ema, training, source and began; the
last four may be None, and old files lack `began`. torch.save stores a checksum of every part: a file with a changed
byte is refused.
"""

from __future__ import annotations

import errno
import functools
import logging
import math
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import torch
from torch import Tensor
from torch.utils.serialization import config as serialization

from rtdetr.config import Config, config_to_dict
from rtdetr.data.classes import Classes
from rtdetr.outputs import atomic_write
from rtdetr.wording import reason_of

logger = logging.getLogger(__name__)

LAST, BEFORE = "last.pth", "last-1.pth"  # the newest state of a run, and the one saved before it
FORMAT, VERSION = "rtdetr", 1
NONE = type(None)
PARTS = {"config": (dict,), "classes": (dict,), "model": (dict,), "ema": (dict, NONE), "training": (dict, NONE)}
WEIGHT_SUFFIXES = (".pth", ".pt", ".pdparams", ".pdema")
FOLDER = 0x10  # directory bit in the attributes of a zip entry
LEGACY_HEAD = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."  # pickled magic number of torch's old, non-zip format

# Exceptions of torch.load and zipfile for damaged files besides UnpicklingError, found by mutating bytes as
# test_weights_damaged.py does. LookupError: stack or memo of a pickle; AssertionError: torch's own checks.
DAMAGE = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, EOFError, struct.error)


class CheckpointError(ValueError):
    """A weight file cannot be used; the message is one sentence for the user."""

    exit_code = 2


def make_checkpoint(
    cfg: Config,
    classes: Classes,
    model: Mapping[str, Tensor],
    ema: Mapping[str, Tensor] | None = None,
    training: dict[str, Any] | None = None,
    source: dict[str, str] | None = None,
    began: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """began: the result of `how_it_began` in rtdetr/engine/planning/auto_config.py for the run that made the
    weights."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "config": config_to_dict(cfg),
        "classes": classes.entries(),
        "preprocess": {
            "size": list(cfg.data.image_size),
            "interpolation": cfg.data.interpolation,
            "scale": 1.0 / 255.0,
        },
        "model": dict(model),
        "ema": None if ema is None else dict(ema),
        "training": training,
        "source": source,
        "began": began,
    }


def save_checkpoint(path: Path, content: dict[str, Any], before: Path | None = None) -> None:
    """Writes a checkpoint, of which a reader never finds a part, and waits until it is on the disk.

    before: where the old file is kept, in the same folder. Raises OSError.
    """
    checksums = serialization.patch("save.compute_crc32", True)  # type: ignore[attr-defined]
    with atomic_write(path) as beside:
        with open(beside, "wb") as file, checksums:  # even if they are switched off
            _save(content, file)
            file.flush()
            os.fsync(file.fileno())
        if before is not None and path.is_file():
            _keep(path, before)
    _sync_folder(path.parent)


def _save(content: dict[str, Any], file: BinaryIO) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):  # which torch hides, as on a full disk
            raise error.__context__ from error
        raise


def _keep(path: Path, before: Path) -> None:
    """Gives the file at `path` the name `before` as well; no name is missing at any moment."""
    link = before.with_name(f".{before.name}.{os.getpid()}.part")
    try:
        os.link(path, link)
    except OSError:  # file system without hard links: until the caller replaces `path`, only `before` exists
        os.replace(path, before)
    else:
        os.replace(link, before)
        link.unlink(missing_ok=True)  # os.replace does nothing if both are one file, as after a kill in between


def _sync_folder(folder: Path) -> None:
    """Makes a renaming survive a power cut, if the file system can: some network ones refuse and do it anyway."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint of this project, on the CPU, without running code. Raises CheckpointError."""
    if os.path.isfile(last := Path(path) / LAST):  # of a run, whose best.pth cannot be resumed
        raise CheckpointError(f"{path}: is a folder; did you mean {last}?")
    content = read_torch_file(path)
    if not is_checkpoint(content):
        raise CheckpointError(
            f"{path}: not a checkpoint of this project; weights of other origin can start a training "
            "(`rtdetr train -t`) or become a checkpoint (`rtdetr convert`)"
        )
    return checked(content, path)


def is_checkpoint(content: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(content, dict) and content.get("format") == FORMAT


def checked(content: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Returns `content` if every part is present and of its type. Raises CheckpointError."""
    if content.get("version") != VERSION:
        raise CheckpointError(f"{path}: checkpoint version {content.get('version')!r}, this program reads {VERSION}")
    for part, kinds in PARTS.items():
        if not isinstance(content.get(part, ...), kinds):  # None is a valid value of some parts
            raise CheckpointError(f"{path}: the checkpoint is damaged, its part {part!r} is not there; copy it again")
    if not isinstance(content.get("began"), (dict, NONE)):
        raise CheckpointError(f"{path}: the checkpoint is damaged, its part 'began' is no dict; copy it again")
    names, ids = content["classes"].get("names"), content["classes"].get("category_ids")
    if not _all_are(str, names) or not _all_are(int, ids) or len(names) != len(ids):
        raise CheckpointError(f"{path}: the checkpoint is damaged, its classes do not fit their ids; copy it again")
    try:
        Classes.of(content["classes"])
    except ValueError as error:
        raise CheckpointError(f"{path}: the checkpoint is damaged, {error}; copy it again") from error
    for part in ("model", "ema"):
        check_tensors(content[part] or {}, path)
    return content


def check_tensors(entries: Mapping[Any, Any], path: str | Path) -> None:
    """Raises CheckpointError unless all entries are named, ordinary tensors that are not larger than the file."""
    size = Path(path).stat().st_size
    for name, tensor in entries.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            reason = "is not a tensor"
        elif (
            tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_complex() or tensor.is_quantized
        ):
            reason = "is not a plain tensor of numbers"
        elif math.prod(tensor.shape) * tensor.element_size() > size:  # few numbers expanded by strides of 0
            reason = f"claims the shape {tuple(tensor.shape)}, which is more than the file holds"
        else:
            continue
        raise CheckpointError(f"{path}: entry {name!r:.100} {reason}; copy or save the file again")


def read_torch_file(path: str | Path) -> Any:
    """Reads a file of torch.save on the CPU, without running code and with its checksums verified. Raises
    CheckpointError, which names the run's other state if the file is one of two."""
    path = Path(path)
    if reason := why_no_weight_file(path) or _why_no_torch_file(path):
        raise CheckpointError(f"{path}: {reason}{_other_state(path)}")
    # torch's own messages are not shown: one advises to load with weights_only=False, which runs the file.
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{path}: damaged, or holds Python objects other than tensors and plain values; nothing of it was run; "
            f"copy it again, or save its weights alone (a state dict) where it was made{_other_state(path)}"
        ) from error
    except DAMAGE as error:
        raise CheckpointError(f"{path}: the file is damaged; copy or download it again{_other_state(path)}") from error


def _other_state(path: Path) -> str:
    """The file to resume from instead of a damaged state of a run; empty if there is none."""
    name = {LAST: BEFORE, BEFORE: LAST}.get(path.name)
    if name is None or not (other := path.with_name(name)).is_file():
        return ""
    return f"; or resume from {other}, the run's {'newest state' if other.name == LAST else 'state before it'}"


def exists(path: Path) -> bool:
    """Whether there is a file or folder. Raises CheckpointError if the system does not say: a name that is too long, a
    folder that must not be read."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise CheckpointError(f"{str(path)!r}: cannot be accessed ({reason_of(error)})") from error
    return True


def why_no_weight_file(path: Path) -> str | None:
    """A sentence about a path that cannot be a weight file, else None. Raises CheckpointError as `exists` does."""
    if not exists(path):
        elsewhere = "; `rtdetr weights` lists those that download" if path.suffix in (".pt", "") else ""
        return f"no such weight file{elsewhere}"
    if path.is_dir():
        if (path / "model.safetensors").is_file():
            whole = (path / "config.json").is_file()
            return f"is the folder of a model, {'expected a file' if whole else 'but without its config.json'}"
        try:
            inside = sorted(each for each in path.iterdir() if each.suffix in WEIGHT_SUFFIXES)
        except OSError as error:
            return f"is a folder that cannot be read ({error.strerror})"
        best = [each for each in inside if each.name in ("best.pth", "last.pth")] or inside[:2]
        return (
            f"is a folder; did you mean {' or '.join(map(str, best))}?" if best else "is a folder without weight files"
        )
    if not path.is_file():
        return "is neither a file nor a folder"
    return None if path.stat().st_size else "the file is empty; copy or download it again"


def _why_no_torch_file(path: Path) -> str | None:
    """A sentence about a file that torch.save did not write, or not completely, else None."""
    try:
        with open(path, "rb") as file:
            head = file.read(len(LEGACY_HEAD))
        if head == LEGACY_HEAD:
            warn_unverified(path, "torch's old format has no checksums")
            return None
        if not head.startswith(b"PK"):
            return f"not a checkpoint nor other torch weights, it begins with {head!r}; check the path or copy it again"
        with zipfile.ZipFile(path) as parts:
            return _why_not_as_written(path, parts)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except (zipfile.BadZipFile, *DAMAGE):
        return "the file is cut off or damaged; copy or download it again"


def _why_not_as_written(path: Path, parts: zipfile.ZipFile) -> str | None:
    """A sentence about a file whose parts differ from what torch.save writes or wrote, else None."""
    entries = parts.infolist()
    packed = any(part.compress_type != zipfile.ZIP_STORED for part in entries)
    if packed or sum(part.file_size for part in entries) > path.stat().st_size:  # zip bombs
        return "holds packed or overlapping parts, which torch.save does not write; save it again with torch.save"
    if not any(part.CRC for part in entries):
        warn_unverified(path, "it was saved without checksums")
    # torch does not read parts marked as folders: their tensors would be uninitialised memory.
    elif damaged := parts.testzip() or next((part.filename for part in entries if part.external_attr & FOLDER), None):
        return f"damaged, its part {damaged!r:.100} has other bytes than were written; copy or download it again"
    return None


@functools.cache  # one warning per file, as a run reads its weights more than once
def warn_unverified(path: Path, why: str) -> None:
    logger.warning("%s: %s, so damage stays unnoticed; save the weights again to add them", path, why)


def _all_are(kind: type, values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) for each in values)
