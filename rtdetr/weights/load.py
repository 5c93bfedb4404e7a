"""Loads any weight file into a model, with a report of the entries that matched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rtdetr.config import Config, config_from_dict
from rtdetr.data.class_names import COCO_CLASSES, OBJECTS365_CLASSES
from rtdetr.data.classes import Classes
from rtdetr.models.rtdetrv3 import Network, build_model
from rtdetr.weights.catalogue import as_detector, located
from rtdetr.weights.checkpoint import CheckpointError, checked, is_checkpoint, read_torch_file
from rtdetr.weights.class_rows import CarriedRows, carry_rows
from rtdetr.weights.compare import LoadReport, compare, describe
from rtdetr.weights.digest import weights_sha256
from rtdetr.weights.foreign import PADDLE_SUFFIXES
from rtdetr.weights.huggingface import is_huggingface, read_huggingface
from rtdetr.weights.official import convert, guess_classes, load_foreign_weights
from rtdetr.weights.pretrained import is_pretrained, read_pretrained
from rtdetr.weights.training_parts import spread_selector
from rtdetr.wording import counted


class WeightFile(NamedTuple):
    weights: dict[str, Tensor]  # under our names
    class_names: tuple[str, ...] | None  # in the order of the heads' rows; None: unknown
    names_from: str = ""  # note for the report if the names are guessed


def read_weights(path: str | Path) -> WeightFile:
    """Model entries of a checkpoint (its average if it has one), of a save_pretrained() folder, or of another project's
    weight file. Raises CheckpointError."""
    path = located(path)
    content = _content(path)
    if is_checkpoint(content):
        names = tuple(content["classes"]["names"])
        numbered = names == guess_classes(len(names)).names != COCO_CLASSES.names  # placeholder names
        return WeightFile(content["ema"] or content["model"], None if numbered else names)
    weights = load_foreign_weights(path)
    head = weights.get("decoder.score_heads.0.bias")
    for names, owner in ((COCO_CLASSES.names, "COCO's"), (OBJECTS365_CLASSES.names, "Objects365's")):
        if head is not None and len(head) == len(names):
            return WeightFile(weights, names, f"the file's {len(names)} are taken for {owner}; ")
    return WeightFile(weights, None)


def stored_content(path: str | Path) -> dict[str, Any] | None:
    """The content of a checkpoint or of a save_pretrained() folder; None for another project's weight file. Raises
    CheckpointError."""
    content = _content(located(path))
    return content if is_checkpoint(content) else None


def _content(path: str | Path) -> Any:
    """The content of a weight file; None for Paddle's, which has its own reader. Raises CheckpointError."""
    if is_huggingface(path):
        return read_huggingface(path)
    if is_pretrained(path):
        return read_pretrained(path)
    if Path(path).suffix in PADDLE_SUFFIXES:
        return None
    content = read_torch_file(path)
    return checked(content, path) if is_checkpoint(content) else content


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """The content of a checkpoint, from a checkpoint file, a folder of save_pretrained() or transformers, a file of
    RT-DETR v1, v2 or v3 by its authors, or a name (catalogue.py). Raises CheckpointError."""
    path = located(path)
    content = _content(path)
    return content if is_checkpoint(content) else as_detector(convert(path), path)


def warm_start(
    model: nn.Module, path: str | Path, classes: Classes | None = None, copy_selector: bool = True
) -> LoadReport:
    """Loads all matching weights of a file and reports the rest. Raises CheckpointError if none match.

    classes: of the model. With them the rows of the heads are matched by class name, else by index. copy_selector: if
    the file has one query selector, the other query groups get copies of it; False: they are new.
    """
    file = read_weights(path)
    weights = spread_selector(file.weights, model.state_dict()) if copy_selector else file.weights
    carried = CarriedRows(weights, [], "")
    if classes is not None:
        carried = carry_rows(model.state_dict(), weights, classes.names, file.class_names)
    report = compare(model.state_dict(), carried.weights)
    whole = [name for name in report.matched if name not in set(carried.partial)]
    if not whole:
        raise CheckpointError(
            f"{path}: weights of another model: none of its {len(file.weights)} entries fits; "
            f"its first names: {', '.join(list(file.weights)[:3])}"
        )
    model.load_state_dict({name: carried.weights[name] for name in report.matched}, strict=False)
    text = file.names_from + carried.text if carried.text else ""
    return report._replace(matched=whole, partial=carried.partial, classes=text)


def load_exactly(model: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Loads `weights` into the model; every entry must be present and fit. Raises CheckpointError."""
    report = compare(model.state_dict(), weights)
    if wrong := report.differing():
        given, expected = describe(weights), describe(model.state_dict())
        words = f"both look like {given}, but"  # models with equal descriptions can differ
        if given != expected:
            words = f"they look like {given}, expected {expected}, and"
        raise CheckpointError(
            f"{path}: weights of another model: {words} differ in "
            f"{counted(len(wrong), 'entry', 'entries')} (shape in the file, in the model): {', '.join(wrong[:3])}"
        )
    model.load_state_dict(weights, strict=all(name in weights for name in model.state_dict()))


def model_from_checkpoint(
    path: str | Path, updates: list[str] | None = None, cfg: Config | None = None
) -> tuple[Network, Config, Classes]:
    """The averaged model of a checkpoint or a save_pretrained() folder, in eval mode, its config and classes.

    updates: `a.b=value` changes of the stored config; cfg: replaces the stored one. Raises CheckpointError or
    ConfigError.
    """
    return model_from_content(read_checkpoint(path), path, updates, cfg)


def model_from_content(
    content: dict[str, Any], path: str | Path, updates: list[str] | None = None, cfg: Config | None = None
) -> tuple[Network, Config, Classes]:
    """`model_from_checkpoint` for content that is already read; `path` is its name in messages."""
    cfg = cfg or config_from_dict(content["config"], str(path), updates)
    classes = Classes.of(content["classes"])
    with NoRandomInit():
        model = build_model(cfg.model, len(classes))
    load_exactly(model, content["ema"] or content["model"], path)
    return model.eval(), cfg, classes


def differs(network: nn.Module, path: Path | None, as_made: str) -> bool:
    """Whether a network has other weights than its file, or, without one, than those with the digest `as_made`."""
    if path is not None:
        try:
            as_made = weights_sha256(model_from_checkpoint(path)[0].state_dict())
        except CheckpointError:  # the file was deleted or replaced
            return True
    return weights_sha256(network.state_dict()) != as_made


class NoRandomInit(TorchFunctionMode):
    """Mode in which random initialisation leaves tensors unchanged: it takes longer than loading the weights that
    replace it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.normal_, Tensor.uniform_, nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
