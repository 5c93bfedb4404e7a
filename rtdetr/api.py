"""The Python API: `from rtdetr import RTDETRv3`. Each method does what the command of that name does."""

from __future__ import annotations

import json
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, get_args

from rtdetr.config import ConfigError, Kernels, config_from_dict, config_to_dict, keyword_updates, load_config
from rtdetr.data.classes import DataError, new_classes
from rtdetr.data.data_arguments import data_updates, path_of
from rtdetr.engine.run_files.run_folder import choose_folder, prepare_folder
from rtdetr.foreign_names import check_arguments, no_attribute
from rtdetr.garbage_collection import collection_paused
from rtdetr.gpu_startup import wake_gpu
from rtdetr.wording import counted

if TYPE_CHECKING:  # `from_pretrained` imports torch, while the GPU starts
    import torch

    from rtdetr.engine.callbacks import Callback
    from rtdetr.engine.evaluation.evaluator import EvalResult
    from rtdetr.inference.model_info import ModelInfo
    from rtdetr.inference.predictors import Compile, Half, Predictors, Size
    from rtdetr.models.rtdetrv3 import Network
    from rtdetr.weights.hub import Format

logger = logging.getLogger(__name__)


class TrainResult(NamedTuple):
    """The result of a run. `output_dir` also holds metrics.csv and curves.png."""

    output_dir: Path
    best: Path  # the checkpoint with the highest AP, last.pth when nothing was evaluated
    figures: dict[str, float]  # those of EvalResult at the highest AP; none without evaluation
    stopped_by: int | None  # the signal that ended it early; train(resume=output_dir / "last.pth") resumes


class RTDETRv3:
    """A detector. Create one with `from_pretrained`.

    model: the network, an nn.Module, None for exported files. cfg: its config. classes: names and category ids, in the
    order of the network's outputs. device: where it runs. Errors are ValueErrors of one sentence. Several threads may
    call `predict`.
    """

    def __init__(
        self, predictors: Predictors | None = None, weights: Path | None = None, source: dict[str, str] | None = None
    ) -> None:
        from rtdetr.inference.predictors import Predictors

        if not isinstance(predictors, Predictors):
            name = repr(predictors) if isinstance(predictors, (str, os.PathLike)) else "NAME OR FILE"
            raise DataError(f"RTDETRv3(): a model is opened by RTDETRv3.from_pretrained({name})")
        self.cfg, self.classes, self.device = predictors.cfg, predictors.classes, predictors.device
        self.weights = weights  # the file of the network's weights, None for random weights
        self.source = source  # provenance and licence of the weights
        self._began: dict[str, Any] | None = None  # how the run that trained these weights began
        self._predictors = predictors
        self._as_made = ""  # digest of random weights, which have no file

    @property
    def model(self) -> Network | None:
        """The network. `predict` notices a loaded state dict and another network put here. After a change in place,
        such as a step of your own optimiser, call `refresh`."""
        return None if self._predictors.exported else self._predictors.model

    @model.setter
    def model(self, network: Network) -> None:
        if self._predictors.exported:
            self._network("model")  # raises
        self._predictors.refresh(network)

    def refresh(self) -> None:
        """Makes `predict` use the current weights; call it after changing `model.model` in place."""
        self._predictors.refresh(self._network("refresh"))

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = "",
        *,
        classes: Sequence[str] | None = None,
        device: str = "auto",
        revision: str | None = None,
        compile: Compile = False,
        half: Half = "auto",
        kernels: Kernels | None = None,
        **others: Any,
    ) -> RTDETRv3:
        """The detector of a checkpoint (.pth), a folder or .safetensors file of `save_pretrained`, an exported file or
        folder, a config (.yml, or the name of a shipped one), or a model of the Hub (owner/model, optional `revision`).

        Weights by name are downloaded once. classes: names for a new model; it and configs have random weights.
        kernels: "auto" or "plain"; default: from the config. compile: as `compile()`. half: float16; default: on a GPU.
        """
        check_arguments("from_pretrained", others)
        if kernels not in (None, *get_args(Kernels)):
            raise ConfigError(f"kernels: expected auto or plain, got {kernels!r}")
        options = (compile, half)
        if path_of("name", name).suffix not in (".onnx", ".pt2", ".xml"):
            wake_gpu(str(device))
        with collection_paused():
            from rtdetr.engine import distributed
            from rtdetr.inference.deploy import starting_gpu
            from rtdetr.inference.predictors import Predictors
            from rtdetr.inference.runtimes import is_exported, load_model
            from rtdetr.weights.catalogue import find_weights
            from rtdetr.weights.checkpoint import CheckpointError
            from rtdetr.weights.digest import file_sha256
            from rtdetr.weights.load import model_from_content, read_checkpoint
            from rtdetr.weights.pretrained import weight_file

        chosen = distributed.choose_device(str(device))
        updates = [] if kernels is None else [f"kernels={kernels}"]
        name = os.path.expanduser(name)
        path = find_weights(name, revision, new=classes is not None)
        if path is None:
            return cls._random(name, classes, chosen, updates, *options)
        if is_exported(path):
            if compile or half != "auto" or kernels is not None:
                raise CheckpointError(f"{name}: runs as it was exported; compile, half and kernels are for checkpoints")
            return cls(Predictors(*load_model(path, chosen), chosen, *options), path)
        with starting_gpu(chosen), ThreadPoolExecutor(1) as pool:
            digest = pool.submit(file_sha256, weight_file(path))
            content = read_checkpoint(path)
            kept = content | {"model": content["ema"] or content["model"], "ema": None, "training": None}
            build = partial(model_from_content, kept, path, updates)
            predictors = Predictors(*build(), chosen, *options, build=lambda: build()[0])
        source = {"checkpoint": weight_file(path).name, "checkpoint_sha256": digest.result()}
        made = cls(predictors, path, {**source, **(content["source"] or {})})
        made._began = content.get("began")
        return made

    @classmethod
    def _random(
        cls, name: str, names: Sequence[str] | None, device: torch.device, updates: list[str], *options: Any
    ) -> RTDETRv3:
        from rtdetr.inference.predictors import Predictors
        from rtdetr.models.rtdetrv3 import build_model
        from rtdetr.weights.digest import weights_sha256
        from rtdetr.weights.official import guess_classes

        cfg = load_config(name, updates)
        classes = guess_classes(80) if names is None else new_classes(names)
        logger.warning("%s: random weights; train the model before it can detect", name)
        network = build_model(cfg.model, len(classes)).eval()  # folded on the CPU, as by `rtdetr predict`
        made = cls(Predictors(network, cfg, classes, device, *options))
        network.to(device)
        made._as_made = weights_sha256(network.state_dict())
        return made

    def predict(
        self,
        source: Any,
        threshold: float | None = None,
        batch_size: int = 8,
        size: Size = None,
        slices: int | tuple[int, int] | None = None,
        half: Half = "auto",
        allow_private: bool = False,
        *,
        thresholds: Mapping[str, float] | None = None,
        bgr: bool = False,
        **others: Any,
    ) -> Any:
        """A Result for one image, a list of them for several, an iterator for sources without a known end.

        source: path, URL, PIL image, bytes or an open file of an image, array (H, W), (H, W, 3) or (H, W, 4), tensor
        (3, H, W) or (B, 3, H, W), uint8 or in [0, 1]; a list, folder or glob (returns a list); a generator, video,
        stream or camera number (returns an iterator). bgr: arrays have OpenCV's channel order. threshold: lowest score,
        0 to 1; default: those in the file, else 0.5. thresholds: of single classes, by name. batch_size: images per
        batch; live sources are detected one by one. size: (h, w) or side of the network's input. slices: (h, w) or side
        in pixels of overlapping tiles, also searched in large images. half: float16; default: as in `from_pretrained`.
        allow_private: URLs may lead into private networks.
        """
        from rtdetr.inference.result import results_of
        from rtdetr.inference.slicing import tile_size
        from rtdetr.inference.sources import Opener
        from rtdetr.inference.thresholds import lowest_scores

        check_arguments("predict", others)
        lowest = lowest_scores(self.classes, threshold, thresholds)
        if not isinstance(batch_size, Integral) or batch_size < 1:
            raise DataError(f"batch_size: expected a whole number from 1, got {batch_size!r}")
        tile = tile_size(slices) if slices is not None else None
        predictor = self._predictors.get(size, half)
        opened = Opener(self.cfg.data.max_megapixels, allow_private, bgr).open(source)
        return results_of(predictor, opened, lowest, int(batch_size), tile)

    __call__ = predict

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "RTDETRv3: cannot be pickled or copied, as its threads and CUDA graphs belong to one process; give the "
            "file of its weights to from_pretrained() there, or use copy.deepcopy(model.model) for the network"
        )

    def info(self) -> ModelInfo:
        """Parameters, GFLOPs, input size, classes and source of the weights; `print` shows them as lines."""
        from rtdetr.inference.model_info import model_info

        return model_info(self.cfg, self.classes, self.weights, self.source)

    def compile(self, mode: Compile = True) -> None:
        """Use torch.compile from now on: minutes once per size and batch, then faster; the result is cached on disk for
        the next process. "max" also searches for the fastest kernels. False: stop using it."""
        self._network("compile")
        self._predictors.use_compile(mode)

    def warmup(self, batch_sizes: int | Sequence[int] = 1, sizes: Size | list[Size] = None) -> None:
        """Compile and record CUDA graphs now instead of at the first calls of `predict`. batch_sizes: images per batch.
        sizes: of the network's input, several as a list; default: its own."""
        self._predictors.warm_up(batch_sizes, sizes)

    def train(
        self,
        data: Any = None,
        epochs: int | Literal["auto"] | None = None,
        *,
        output_dir: str | Path | None = None,
        resume: str | Path | None = None,
        overwrite: bool = False,
        callbacks: Sequence[Callback] = (),
        augment: str | Callable[..., Any] | None = None,
        **settings: Any,
    ) -> TrainResult:
        """Trains on `data`, from the present weights; the model then has the best weights.

        data: (images, annotations) of a COCO set, {"train": ..., "val": ...} of those, or a folder or file in a known
        format; None: the data of the config. output_dir: default output/NAME. resume: a last.pth to resume.
        overwrite: move an existing run to FOLDER-old. callbacks: objects of rtdetr.Callback, called in the main
        process; an exception in one ends the run as CallbackFailed. augment: a function or its name, see docs/data.md.
        settings: config keys, see `keyword_updates`. Random generators and torch's settings are restored afterwards.
        """
        import torch

        from rtdetr.process_state import process_restored

        self._network("train")
        if torch.is_autocast_enabled(self.device.type):  # its cache of weights would outlast the steps
            raise ConfigError("train(): leave torch.autocast first; the key train.precision sets the precision")
        from_file = None if resume is None else path_of("resume", resume)
        given = settings if epochs is None else {"epochs": epochs, **settings}
        # max_iterations of an earlier run would end this one sooner
        first = [] if epochs is None or from_file is not None else ["train.max_iterations=0"]
        updates = [*data_updates(data), *first, *keyword_updates(given)]
        with process_restored(), tempfile.TemporaryDirectory() as temporary:
            # Here, because importing torchvision takes as long as torch, and sets an environment variable.
            from rtdetr.data.custom import KEY, name_of, without_custom
            from rtdetr.engine import distributed
            from rtdetr.engine.evaluation.evaluator import FIGURE_NAMES
            from rtdetr.engine.run_files.metrics import best_row
            from rtdetr.engine.trainer import Trainer
            from rtdetr.weights.checkpoint import load_checkpoint

            base = load_checkpoint(from_file)["config"] if from_file else without_custom(self.cfg, self.weights)
            if augment is not None:
                updates.append(f"{KEY}={json.dumps(name_of(augment))}")
            cfg = config_from_dict(base, str(self.weights or self.cfg.name), updates, "train()")
            chosen = None if output_dir is None else path_of("output_dir", output_dir)
            with distributed.process_group(str(self.device), training=True) as device:
                folder = distributed.from_main(lambda: choose_folder(chosen, from_file, cfg.name, overwrite))
                tuning = None if from_file is not None else self._file_of_weights(Path(temporary))
                trainer = Trainer(cfg, folder, device, from_file, tuning, callbacks=callbacks, augment=augment)
                stopped_by = trainer.run(lambda: prepare_folder(folder, from_file, overwrite))
        best = next(file for file in (folder / "best.pth", folder / "last.pth", from_file) if file and file.is_file())
        options: Any = {"compile": self._predictors.compile, "half": self._predictors.half}
        self.__dict__.update(vars(type(self).from_pretrained(best, device=str(self.device), **options)))
        row = best_row(folder / "metrics.csv", trainer.state.best_ap) or {}
        figures = {each: float(row[each] or -1) for each in FIGURE_NAMES if each in row}  # empty: not measured
        return TrainResult(folder, best, figures, stopped_by)

    def evaluate(
        self, data: Any = None, *, match_classes: Literal["id", "name"] = "id", **settings: Any
    ) -> EvalResult | None:
        """The twelve COCO figures (`.figures`), the AP of every class (`.classes`), the threshold with its best F1
        (`.thresholds`, `.points`) and the detections, on `data` as in `train`, by default the config's validation set.
        Under torchrun only the first process gets them."""
        from rtdetr.engine import distributed
        from rtdetr.engine.evaluation.evaluator import evaluate
        from rtdetr.ops.kernels import using
        from rtdetr.process_state import process_restored

        detector = self._predictors.model
        updates = [*data_updates(data, ("val",)), *keyword_updates(settings)]
        cfg = config_from_dict(config_to_dict(self.cfg), str(self.weights or self.cfg.name), updates, "evaluate()")
        for section in ("model", "loss", "optimizer", "ema", "train"):
            if getattr(cfg, section) != getattr(self.cfg, section):
                raise ConfigError(f"evaluate(): keys of `{section}` have no effect on it; leave them out")
        with process_restored(), distributed.process_group(str(self.device)) as device, using(cfg.kernels):
            from rtdetr.data.loader import build_val_loader  # here, as in train()

            loader = build_val_loader(cfg, self.classes, distributed.rank(), distributed.world_size(), match_classes)
            result = evaluate(detector, loader, loader.source.origin, loader.classes, cfg.eval, device)
            return None if result is None else result.with_points(loader.source.origin)

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
        images: str | Path | None = None,
        **others: Any,
    ) -> Path:
        """Exports the model; returns the file or folder. Arguments: see `rtdetr.export.export_model`."""
        from rtdetr.export import export_model  # here because it may bring onnx along

        check_arguments("export", others)
        network = self._network("export")
        for argument, given in (("output", output), ("calibrate", calibrate), ("images", images)):
            if given is not None:
                path_of(argument, given)
        same = self.weights is not None and not self._changed()
        own: Any = self.weights if same else (network, self.cfg, self.classes)
        return export_model(
            own, format, output, half, raw, int8=int8, calibrate=calibrate, input_type=input_type, images=images
        ).path

    def save_pretrained(self, folder: str | Path, licence: str | None = None, format: Format = "rtdetr") -> Path:
        """Writes model.safetensors and config.json into the folder, which it returns. licence: of the weights, if
        their file has none. format: "transformers" for AutoModelForObjectDetection, without training parts; "both"
        writes that and, in the folder `rtdetr` inside it, the format of this project."""
        from rtdetr.weights.hub import saver

        path = path_of("folder", folder)
        saver(format)(path, self._content(), licence or (self.source or {}).get("licence"))
        return path

    def push_to_hub(
        self,
        repo_id: str,
        licence: str | None = None,
        private: bool = False,
        token: str | None = None,
        format: Format = "rtdetr",
        figures: Mapping[str, float] | None = None,  # of `evaluate`, for the card
    ) -> str:
        """Uploads what `save_pretrained` writes, with a card, as owner/model; returns the URL of the commit."""
        from rtdetr.weights.hub import to_hub

        licence = licence or (self.source or {}).get("licence")
        return to_hub(repo_id, self._content("push_to_hub"), licence, private, token, format, figures)

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class")
        return f"RTDETRv3({self.cfg.name}, {classes}, on {self.device}, from {self.weights})"

    def __getattr__(self, name: str) -> NoReturn:
        raise no_attribute("RTDETRv3", name)

    def _network(self, method: str) -> Network:
        if self.model is None:
            from rtdetr.weights.checkpoint import CheckpointError

            raise CheckpointError(
                f"{method}(): {self.weights} is an exported file, which can only detect; load its weights"
            )
        return self.model

    def _content(self, method: str = "save_pretrained") -> dict[str, Any]:
        from rtdetr.weights.checkpoint import make_checkpoint

        weights, source = self._network(method).state_dict(), self.source
        if source is not None and self._changed():
            source = {key: value for key, value in source.items() if not key.startswith("checkpoint")}
        return make_checkpoint(self.cfg, self.classes, weights, source=source, began=self._began)

    def _changed(self) -> bool:
        """Whether the weights of the network differ from those of its file, or from its initial random ones."""
        from rtdetr.weights.load import differs

        return differs(self._network("save_pretrained"), self.weights, self._as_made)

    def _file_of_weights(self, folder: Path) -> Path | None:
        """Returns the weight file, or writes a new one to the folder if the weights have changed."""
        if not self._changed():
            return self.weights
        from rtdetr.weights.checkpoint import save_checkpoint

        save_checkpoint(folder / "changed.pth", self._content())
        return folder / "changed.pth"
