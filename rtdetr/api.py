"""The Python API: `from rtdetr import RTDETRv3`. Each method does what the command of that name does."""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

from rtdetr.commands.configs import find_config
from rtdetr.commands.run_folder import choose_folder, prepare_folder
from rtdetr.config import Config, config_from_dict, config_to_dict, keyword_updates, load_config
from rtdetr.data.classes import Classes, DataError, new_classes
from rtdetr.data.locate import data_updates
from rtdetr.engine import distributed
from rtdetr.inference.draw import Detection
from rtdetr.inference.predictor import Found, Predictor
from rtdetr.inference.result import Result
from rtdetr.inference.slicing import predict_sliced, tile_size
from rtdetr.inference.sources import Item, Opener
from rtdetr.models.rtdetrv3 import RTDETRv3 as Network
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import WEIGHT_SUFFIXES, CheckpointError, make_checkpoint, save_checkpoint
from rtdetr.weights.hub import HUB_ID, from_hub, to_hub
from rtdetr.weights.load import model_from_content, read_checkpoint
from rtdetr.weights.official import guess_classes, sha256_of
from rtdetr.weights.pretrained import save_pretrained, weight_file
from rtdetr.weights.registry import OFFICIAL, official_checkpoint

if TYPE_CHECKING:
    from rtdetr.engine.evaluator import EvalResult

logger = logging.getLogger(__name__)

SUFFIXES = (*WEIGHT_SUFFIXES, ".safetensors", ".onnx", ".pt2", ".xml")  # of files, not of models on the Hub


class TrainResult(NamedTuple):
    """What a run left. `output_dir` also holds metrics.csv and curves.png."""

    output_dir: Path
    best: Path  # the checkpoint with the highest AP, last.pth when nothing was evaluated
    figures: dict[str, float]  # the twelve of COCO at the highest AP, as in EvalResult; none without evaluation
    stopped_by: int | None  # the signal that ended it early; train(resume=output_dir / "last.pth") goes on


class RTDETRv3:
    """A detector. Make one with `from_pretrained`.

    model: the network, an nn.Module, None for exported files. cfg: its config. classes: names and category ids, in the
    order of the network's outputs. device: where it runs. Errors are ValueErrors of one sentence.
    """

    def __init__(
        self, predictor: Predictor, model: Network | None, weights: Path | None, source: dict[str, str] | None
    ) -> None:
        self.cfg, self.classes, self.device = predictor.cfg, predictor.classes, predictor.device
        self.model = model
        self.weights = weights  # the file that the network came from, None for random weights
        self.source = source  # provenance and licence of the weights
        self._began: dict[str, Any] | None = None  # how the run began that the network came from
        self._as_loaded = self._as_prepared = _version(model)
        # By the size of the network's input, and half.
        self._predictors: dict[tuple[tuple[int, int], bool | str], Predictor] = {
            (self.cfg.data.image_size, "auto"): predictor
        }

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path,
        *,
        classes: Sequence[str] | None = None,
        device: str = "auto",
        revision: str | None = None,
    ) -> RTDETRv3:
        """The detector of a checkpoint (.pth), a folder or .safetensors file of `save_pretrained`, an exported file
        (.onnx, .pt2, OpenVINO), a config (.yml, or the name of a shipped one), or a model of the Hub (owner/model, with
        an optional `revision`).

        The name of an official model brings the official weights, which are downloaded once. With `classes`, the names
        that it is to learn, and for other configs, the weights are random.
        """
        path = _path("name", name)
        chosen = distributed.choose_device(device)
        try:
            there = path.exists()
        except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{str(name)!r}: cannot be looked at ({reason})") from error
        bare = path.name == str(name) and not path.suffix and not there
        if path.suffix in (".yml", ".yaml") or bare:
            if classes is not None or str(name) not in OFFICIAL:
                return cls._random(str(name), classes, chosen)
            path = official_checkpoint(str(name))
            there = True
        if classes is not None:
            raise DataError(f"classes: {name} knows its own; they are for new models, from a config")
        if not there and HUB_ID.fullmatch(str(name)) and path.suffix not in SUFFIXES:
            if revision is None and Path(path.parts[0]).exists():
                raise CheckpointError(
                    f"{name}: no such file or folder; the Hub was not asked for a model of that name, because "
                    f"{path.parts[0]} is here: for one of the Hub, give its revision, such as revision='main'"
                )
            path = from_hub(str(name), revision)
        if _is_exported(path):
            from rtdetr.inference.runtimes import load as load_runtime

            return cls(load_runtime(path, chosen), None, path, None)
        content = read_checkpoint(path)
        file = weight_file(path)
        source = {"checkpoint": file.name, "checkpoint_sha256": sha256_of(file), **(content["source"] or {})}
        made = cls._of(*model_from_content(content, path), chosen, path, source)
        made._began = content.get("began")
        return made

    @classmethod
    def _random(cls, name: str, names: Sequence[str] | None, device: torch.device) -> RTDETRv3:
        cfg = load_config(find_config(name))
        classes = guess_classes(cfg.num_classes or 80) if names is None else new_classes(names)
        cfg = dataclasses.replace(cfg, num_classes=0)
        logger.warning("%s: random weights, which find nothing before they are trained", name)
        return cls._of(build_model(cfg.model, len(classes)).eval(), cfg, classes, device)

    @classmethod
    def _of(
        cls,
        model: Network,
        cfg: Config,
        classes: Classes,
        device: torch.device,
        weights: Path | None = None,
        source: dict[str, str] | None = None,
    ) -> RTDETRv3:
        model = model.to(device)
        return cls(Predictor.of(model, cfg, classes, device), model, weights, source)

    def predict(
        self,
        source: Any,
        threshold: float = 0.5,
        batch_size: int = 8,
        size: int | tuple[int, int] | None = None,
        slices: int | tuple[int, int] | None = None,
        half: bool | Literal["auto"] = "auto",
        allow_private: bool = False,
    ) -> Any:
        """A Result for one picture, a list of them for several, an iterator for what has no known end.

        source: path, URL, PIL picture, uint8 RGB array (H, W, 3), tensor (3, H, W) or (B, 3, H, W), uint8 or in [0, 1];
        a list, folder or glob (a list comes out); a generator, video, stream or camera number (an iterator).
        threshold: lowest score, 0 to 1. batch_size: pictures at a time; live sources go one by one.
        size: (h, w) or side of the network's input, in place of the trained one.
        slices: (h, w) or side in pixels of overlapping tiles, in which large pictures are searched as well.
        half: float16, by default on a GPU. allow_private: URLs may lead into private networks.
        """
        if not isinstance(threshold, Real) or not 0 <= threshold <= 1:
            raise DataError(f"threshold: expected a number from 0 to 1, got {threshold!r}")
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise DataError(f"batch_size: expected a whole number from 1, got {batch_size!r}")
        if not isinstance(half, (bool, np.bool_)) and half != "auto":
            raise DataError(f'half: expected True, False or "auto", got {half!r}')
        half = half if half == "auto" else bool(half)
        tile = tile_size(slices) if slices is not None else None
        predictor = self._predictor(size, half)
        opened = Opener(self.cfg.data.max_megapixels, allow_private).open(source)
        if opened.files and tile is None:
            predictor.threshold = threshold
            return [*_results_of_files(predictor.predict_files(opened.files, batch_size), opened.tolerant)]

        def detect(pictures: list[Image.Image]) -> list[list[Detection]]:
            predictor.threshold = threshold  # here, because calls whose results are iterators may take turns
            if tile is None:
                return predictor.predict(pictures)
            return [predict_sliced(predictor.predict, picture, tile, batch_size) for picture in pictures]

        results = _results(detect, opened.items, 1 if opened.kind == "live" else batch_size)
        if opened.kind == "one":
            return next(results)
        return list(results) if opened.kind == "list" else results

    def train(
        self,
        data: Any = None,
        epochs: int | Literal["auto"] | None = None,
        *,
        output_dir: str | Path | None = None,
        resume: str | Path | None = None,
        overwrite: bool = False,
        **settings: Any,
    ) -> TrainResult:
        """Trains on `data`, from the present weights, and takes over the best ones.

        data: (images, annotations) of a COCO set, {"train": ..., "val": ...} of those, or a folder or file in a known
        format; None: the data of the config. output_dir: default output/NAME. resume: a last.pth to go on with.
        overwrite: move a run that is in the folder aside. settings: keys of the config, see `keyword_updates`.
        """
        from rtdetr.engine.trainer import Trainer  # here, because torchvision takes as long as torch to import

        self._network("train")
        given = settings | ({} if epochs is None else {"epochs": epochs})
        from_file = None if resume is None else _path("resume", resume)
        base = read_checkpoint(from_file)["config"] if from_file is not None else config_to_dict(self.cfg)
        updates = [*(["num_classes=0"] if data is not None else []), *data_updates(data), *keyword_updates(given)]
        cfg = config_from_dict(base, str(self.weights or self.cfg.name), updates, "train()")
        chosen = None if output_dir is None else _path("output_dir", output_dir)
        with (
            tempfile.TemporaryDirectory() as temporary,
            distributed.process_group(str(self.device), training=True) as device,
        ):
            folder = distributed.from_main(lambda: choose_folder(chosen, from_file, cfg.name, overwrite))
            tuning = None if from_file is not None else self._file_of_weights(Path(temporary))
            trainer = Trainer(cfg, folder, device, from_file, tuning)
            stopped_by = trainer.run(lambda: prepare_folder(folder, from_file, overwrite))
        left = [file for file in (folder / "best.pth", folder / "last.pth", from_file) if file and file.is_file()]
        best = left[0]
        trained = type(self).from_pretrained(best, device=str(self.device))
        self.__dict__.update(trained.__dict__)
        return TrainResult(folder, best, _best_figures(folder / "metrics.csv"), stopped_by)

    def evaluate(
        self, data: Any = None, *, match_classes: Literal["id", "name"] = "id", **settings: Any
    ) -> EvalResult | None:
        """The twelve COCO figures (`.figures`), the AP of every class (`.classes`) and the detections, on `data` as in
        `train`, by default the validation set of the config. Under torchrun the first process gets them alone."""
        from rtdetr.data.loader import build_val_loader  # here, as in train()
        from rtdetr.engine.evaluator import evaluate

        detector: Any = self.model if self.model is not None else next(iter(self._predictors.values())).model
        updates = [*data_updates(data, ("val",)), *keyword_updates(settings)]
        cfg = config_from_dict(config_to_dict(self.cfg), str(self.weights or self.cfg.name), updates, "evaluate()")
        with distributed.process_group(str(self.device)) as device:
            loader = build_val_loader(cfg, self.classes, distributed.rank(), distributed.world_size(), match_classes)
            return evaluate(detector, loader, loader.source.origin, loader.classes, cfg.eval, device)

    def export(
        self,
        format: str = "onnx",
        output: str | Path | None = None,
        half: bool = False,
        raw: bool = False,
        *,
        int8: bool = False,
        calibrate: str | Path | None = None,
        input_type: Literal["uint8", "float"] = "uint8",
        pictures: str | Path | None = None,
    ) -> Path:
        """The exported file or folder, whose certificate lies beside it. The arguments are explained at
        `rtdetr.export.export_model`."""
        from rtdetr.export import export_model  # here because it may bring onnx along

        network = self._network("export")
        for argument, given in (("output", output), ("calibrate", calibrate), ("pictures", pictures)):
            if given is not None:
                _path(argument, given)
        own: Any = (network, self.cfg, self.classes)
        if self.weights is not None and not self._changed():
            own = self.weights
        exported = export_model(
            own, format, output, half, raw, int8=int8, calibrate=calibrate, input_type=input_type, pictures=pictures
        )
        return Path(exported.path)

    def save_pretrained(self, folder: str | Path, licence: str | None = None) -> Path:
        """Writes model.safetensors and config.json into the folder, which it returns. licence: of the weights, where
        they do not bring theirs."""
        path = _path("folder", folder)
        save_pretrained(path, self._content(), licence or (self.source or {}).get("licence"))
        return path

    def push_to_hub(
        self, repo_id: str, licence: str | None = None, private: bool = False, token: str | None = None
    ) -> str:
        """Uploads what `save_pretrained` writes, with a short card, as owner/model; the address of the commit."""
        return to_hub(repo_id, self._content(), licence or (self.source or {}).get("licence"), private, token)

    def __repr__(self) -> str:
        return f"RTDETRv3({self.cfg.name}, {len(self.classes)} classes, on {self.device}, from {self.weights})"

    def _network(self, method: str) -> Network:
        if self.model is None:
            raise CheckpointError(
                f"{method}(): {self.weights} is an exported file, which detects only; load its weights"
            )
        return self.model

    def _content(self) -> dict[str, Any]:
        weights, source = self._network("save_pretrained").state_dict(), self.source
        if source is not None and self._changed():
            source = {key: value for key, value in source.items() if not key.startswith("checkpoint")}
        return make_checkpoint(self.cfg, self.classes, weights, source=source, began=self._began)

    def _changed(self) -> bool:
        """Whether somebody has worked on the network since it was loaded."""
        return _version(self.model) != self._as_loaded

    def _file_of_weights(self, folder: Path) -> Path | None:
        """The file that the network came from, or one in the folder with what has become of it since."""
        if not self._changed():
            return self.weights
        save_checkpoint(folder / "changed.pth", self._content())
        return folder / "changed.pth"

    def _predictor(self, size: int | tuple[int, int] | None, half: bool | Literal["auto"]) -> Predictor:
        """The predictor for an input size and a precision; each is made once. Raises ConfigError or ValueError."""
        cfg, first = self.cfg, next(iter(self._predictors.values()))
        if _version(self.model) != self._as_prepared:  # predictors work with folded copies
            self._predictors.clear()
            self._as_prepared = _version(self.model)
        if size is not None:
            sides = size if isinstance(size, (list, tuple)) else [size, size]
            if any(not isinstance(side, Integral) or int(side) % 32 for side in sides):
                raise DataError(f"size: expected a side, or (height, width), in multiples of 32, got {size!r}")
            updates = [f"data.image_size={[*map(int, sides)]}"]
            cfg = config_from_dict(config_to_dict(cfg), str(self.weights or cfg.name), updates, "predict()")
        key = cfg.data.image_size, half
        if key not in self._predictors:
            model: Any = self.model if self.model is not None else first.model  # an exported file is its own
            options: dict[str, Any] = {} if half == "auto" else {"half": half}
            self._predictors[key] = Predictor.of(model, cfg, self.classes, self.device, **options)
        return self._predictors[key]


def _version(model: Network | None) -> int:
    """Another number after every change in place, such as load_state_dict or the step of an optimiser."""
    return 0 if model is None else sum(tensor._version for tensor in (*model.parameters(), *model.buffers()))


def _path(argument: str, given: Any) -> Path:
    if not isinstance(given, (str, os.PathLike)) or not isinstance(os.fspath(given), str) or not os.fspath(given):
        raise DataError(f"{argument}: expected a path, got {given!r:.100}")
    return Path(given)


def _is_exported(path: Path) -> bool:
    return path.suffix in (".onnx", ".pt2", ".xml") or (path.is_dir() and any(path.glob("*.xml")))


def _results(
    detect: Callable[[list[Image.Image]], list[list[Detection]]], items: Iterator[Item], batch_size: int
) -> Iterator[Result]:
    while batch := list(islice(items, batch_size)):
        pictures = [item.picture for item in batch if item.picture is not None]
        found = iter(detect(pictures) if pictures else [])
        for item in batch:
            if item.picture is None:
                logger.warning(item.error)
            yield Result(item, [] if item.picture is None else next(found))


def _results_of_files(found: Iterable[Found], tolerant: bool) -> Iterator[Result]:
    for each in found:
        if each.error and not tolerant:
            raise DataError(each.error)
        if each.error:
            logger.warning(each.error)
        yield Result(Item(str(each.file), each.picture, each.error, Path(each.file)), each.detections)


def _best_figures(metrics: Path) -> dict[str, float]:
    from rtdetr.engine.evaluator import FIGURES
    from rtdetr.engine.metrics import read_rows

    evaluated = [row for row in read_rows(metrics) if row["kind"] == "eval" and row.get("AP")]
    if not evaluated:
        return {}
    best = max(evaluated, key=lambda row: float(row["AP"]))
    return {name: float(best.get(name) or -1) for name in FIGURES}  # empty: nothing to measure
