"""A model for sharing: one model.safetensors, and a config.json with everything else about it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from rtdetr import __version__
from rtdetr.extras import optional
from rtdetr.outputs import atomic_write
from rtdetr.weights.checkpoint import DAMAGE, FORMAT, CheckpointError, checked, warn_unverified, why_no_weight_file
from rtdetr.weights.digest import json_sha256, weights_sha256

WEIGHTS, CONFIG = "model.safetensors", "config.json"
PROCESSOR = "preprocessor_config.json"  # in folders of transformers
PICKLED = "pytorch_model.bin"  # in place of WEIGHTS in old folders of transformers
OWN_FOLDER, OWN_KEY = "rtdetr", "rtdetr_folder"  # in folders of both formats: our subfolder, and the key naming it
# Both files hold the weights' digest; config.json holds its own, which a user who edits the file replaces by "edited".
WEIGHTS_DIGEST, CONFIG_DIGEST, EDITED = "weights_sha256", "config_sha256", "edited"
MAX_CONFIG_BYTES = 10_000_000  # of a config.json; 1203 classes of LVIS have 100,000


def is_pretrained(path: str | Path) -> bool:
    """Whether a path is a folder with a config.json, or a safetensors file."""
    path = Path(path)
    return path.suffix == ".safetensors" or (path / CONFIG).is_file()


def weight_file(path: Path) -> Path:
    """The weight file of a path to it or to its folder."""
    if not path.is_dir():
        return path
    path = path / OWN_FOLDER if holds_own(path) else path
    return path / PICKLED if (path / PICKLED).is_file() and not (path / WEIGHTS).is_file() else path / WEIGHTS


def holds_own(folder: Path) -> bool:
    """Whether a folder in transformers' format also contains this project's format. Raises CheckpointError."""
    about = read_settings(folder / CONFIG) if (folder / CONFIG).is_file() else None
    return isinstance(about, dict) and about.get(OWN_KEY) == OWN_FOLDER


def save_pretrained(folder: Path, content: dict[str, Any], licence: str | None) -> None:
    """Writes a checkpoint's content as model.safetensors and config.json: the averaged weights if there are any,
    without the training state. Replaces existing files of a model; raises CheckpointError for any other files."""
    safetensors = optional("safetensors.torch", "hub", "save_pretrained()")
    check_target(folder, lambda about: about.get("format") == FORMAT)
    weights = content["ema"] or content["model"]
    plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in weights.items()}
    names = content["classes"]["names"]
    about = {
        "format": FORMAT,
        "version": content["version"],
        "model_type": "rtdetrv3",
        "rtdetr_version": __version__,
        "licence": licence,
        "source": content["source"],
        "classes": content["classes"],
        "id2label": {str(index): name for index, name in enumerate(names)},  # by index, as in transformers
        "preprocess": content["preprocess"],
        "config": _without_paths(content["config"]),
        "began": content.get("began"),
        WEIGHTS_DIGEST: weights_sha256(plain),
    }
    about[CONFIG_DIGEST] = json_sha256(about, without=CONFIG_DIGEST)
    metadata = {"format": "pt", WEIGHTS_DIGEST: about[WEIGHTS_DIGEST]}
    write_folder(folder, safetensors.save(plain, metadata=metadata), {CONFIG: about})


def read_pretrained(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint, from a folder or the safetensors file in it, on the CPU. Raises CheckpointError, and
    MissingPackage if safetensors is not installed."""
    file = weight_file(Path(path))
    weights, metadata = read_safetensors(file)
    about = _read_config(file.with_name(CONFIG))
    parts = {key: about.get(key) for key in ("version", "config", "classes", "preprocess", "source", "began")}
    if about.get("licence"):
        parts["source"] = {**(parts["source"] or {}), "licence": about["licence"]}
    content = checked({"format": FORMAT, **parts, "model": weights, "ema": None, "training": None}, file)
    _verify(file, weights, metadata.get(WEIGHTS_DIGEST), about)
    return content


def replace_thresholds(path: Path, thresholds: Sequence[float]) -> None:
    """Changes the config.json of a folder, or of the safetensors file in it, and updates its digest. Raises
    CheckpointError and OSError."""
    read_pretrained(path)  # raises if the digests are wrong
    file = weight_file(path).with_name(CONFIG)
    about = _read_config(file)
    about["classes"]["thresholds"] = list(thresholds)
    if about.get(CONFIG_DIGEST) not in (None, EDITED):
        about[CONFIG_DIGEST] = json_sha256(about, without=CONFIG_DIGEST)
    with atomic_write(file) as beside:
        beside.write_bytes(_json(about))


def read_safetensors(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Reads the entries of a file onto the CPU, and its metadata. Raises CheckpointError or MissingPackage."""
    if reason := why_no_weight_file(file):
        raise CheckpointError(f"{file}: {reason}")
    safetensors = optional("safetensors", "hub", f"{file}: reading safetensors")
    load = optional("safetensors.torch", "hub", f"{file}: reading safetensors").load_file
    try:
        weights = load(file, device="cpu")
        with safetensors.safe_open(file, "pt") as opened:
            return weights, opened.metadata() or {}
    except (safetensors.SafetensorError, OSError, *DAMAGE) as error:
        raise CheckpointError(f"{file}: damaged, or no safetensors file; copy or download it again") from error


def _verify(file: Path, weights: dict[str, Tensor], noted: str | None, about: dict[str, Any]) -> None:
    """Raises CheckpointError if config or weights have changed since they were written; files without digests, as old
    versions wrote them, are accepted. noted: the digest in the weight file."""
    config, own = file.with_name(CONFIG), about.get(CONFIG_DIGEST)
    digests = [each for each in (noted, about.get(WEIGHTS_DIGEST)) if each is not None]
    if not digests and own is None:
        warn_unverified(file, f"neither it nor its {CONFIG} has a digest")
    elif own not in (EDITED, json_sha256(about, without=CONFIG_DIGEST)):
        raise CheckpointError(
            f"{config}: damaged, or changed since it was written; copy or download it again, or, if you changed it "
            f'yourself, write "{CONFIG_DIGEST}": "{EDITED}" into it'
        )
    elif set(digests) - {weights_sha256(weights)}:
        raise CheckpointError(
            f"{file}: damaged, or not the weights that {config.name} was written with; copy or download both again"
        )


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """The config without paths and modules of this machine, which are private and useless elsewhere."""
    shared = copy.deepcopy(config)
    for split in ("train", "val"):
        shared["data"][split] |= {"images": "", "annotations": ""}
    shared["data"]["augment"]["custom"] = ""
    shared["model"]["backbone"].pop("weights", None)  # a key of older files
    return shared


def read_settings(file: Path) -> Any:
    """The content of a settings file; None if it is too long for one. Raises CheckpointError."""
    try:
        with open(file, "rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
        return json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{file}: not there; weights in safetensors need the {CONFIG} that save_pretrained() writes beside them"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read as JSON ({error}); copy or download it again") from error


def _read_config(file: Path) -> dict[str, Any]:
    about = read_settings(file)
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise CheckpointError(f"{file}: not the {CONFIG} of a model of this project; was it written by another one?")
    if not isinstance(about.get("source") or {}, dict):
        raise CheckpointError(f"{file}: `source` must be a mapping; copy or download it again")
    return about


def check_target(folder: Path, ours: Callable[[dict[str, Any]], bool]) -> None:
    """Raises CheckpointError unless existing files are a model that may be replaced. ours: says so of its config."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder}: is a file, expected a folder to write to")
    there = [file for file in (folder / CONFIG, folder / WEIGHTS) if file.exists()]
    about = read_settings(folder / CONFIG) if folder / CONFIG in there else None
    if there and not (isinstance(about, dict) and ours(about)):
        raise CheckpointError(
            f"{there[0]}: already exists, not written by this project in this format; choose another folder"
        )


def write_folder(folder: Path, weights: bytes, settings: Mapping[str, Any]) -> None:
    """Writes WEIGHTS, and the settings by file name. New ones are never beside old ones: until all are there, the
    folder has no weights. Raises CheckpointError."""
    try:
        with ExitStack() as whole:  # the last file is put in place first
            whole.enter_context(atomic_write(folder / WEIGHTS)).write_bytes(weights)
            for name, content in settings.items():
                whole.enter_context(atomic_write(folder / name)).write_bytes(_json(content))
            (folder / WEIGHTS).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"{folder}: cannot be written ({error.strerror}); choose another folder") from error


def _json(content: Any) -> bytes:
    return json.dumps(content, indent=1, ensure_ascii=False).encode("utf-8", "surrogatepass")
