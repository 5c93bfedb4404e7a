"""The predictors of a model that may be trained, loaded and modified at the same time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import nn

from rtdetr.config import Config, config_from_dict, config_to_dict
from rtdetr.data.classes import Classes, DataError
from rtdetr.inference.deploy import Auto, Compile
from rtdetr.inference.predictor import Predictor
from rtdetr.inference.processes import ReadingProcesses
from rtdetr.models.postprocess import EndToEnd
from rtdetr.models.rtdetrv3 import Network
from rtdetr.wording import counted

Half = Auto
Size = int | tuple[int, int] | None  # of the network's input, (h, w) or one side; None: from the config
Key = tuple[int, Compile, tuple[int, ...], Half]  # version of the weights, compile, (h, w) of the input, half


class LoadCounter:
    """Counts how often a module has loaded a state dict, by a hook that adds no cost to a call of the network."""

    def __init__(self) -> None:
        self.number = 0

    def __call__(self, *_: object) -> None:
        self.number += 1

    def watch(self, network: nn.Module) -> None:
        """Registers the hook with every module, as a part of a network may be loaded alone."""
        for module in network.modules():
            if self not in module._load_state_dict_post_hooks.values():
                module.register_load_state_dict_post_hook(self)


class Predictors:
    """One predictor per input size and precision, created on demand; thread-safe.

    Those of one precision share a folded copy of the model. Those of old weights are removed when a new one is created.
    """

    def __init__(
        self,
        model: Any,
        cfg: Config,
        classes: Classes,
        device: torch.device,
        compile: Compile,
        half: Half,
        build: Callable[[], Network] | None = None,
    ) -> None:
        """model: a network or an `EndToEnd` model. half: the meaning of "auto" in a call. build: makes the same network
        again, so that the first predictor need not copy it."""
        self._model, self._build = model, build
        self.cfg, self.classes, self.device = cfg, classes, device
        self.use_compile(compile)
        self.half = checked_half(half)
        self.exported = isinstance(model, EndToEnd)
        self.told, self.lock = LoadCounter(), threading.RLock()
        self.made: dict[Key, Predictor] = {}
        self.told.watch(model)
        self.processes = ReadingProcesses()  # shared by all predictors
        self.get()

    @property
    def model(self) -> Any:
        """The model, on the device. A network that the first predictor has folded is built when first asked for."""
        with self.lock:
            if self._model is None and self._build is not None:
                self._model, self._build = self._build().to(self.device), None
                self.told.watch(self._model)
            return self._model

    def refresh(self, model: Network) -> None:
        """Notes that the weights have changed, or that they are in another network. Raises DataError if that has other
        classes, or is none of ours."""
        network, got = getattr(model, "_orig_mod", model), f"a {type(model).__name__}"  # _orig_mod: of torch.compile
        if isinstance(network, Network):
            got = f"one of {network.decoder.score_heads[-1].get_parameter('bias').numel()}"
        if got != f"one of {len(self.classes)}":
            raise DataError(f"model: expected a network of {counted(len(self.classes), 'class')}, got {got}")
        self.told.watch(model)
        self._model, self._build = model, None
        self.told()

    def use_compile(self, mode: Any) -> None:
        """See `RTDETRv3.compile`. Raises DataError."""
        if not isinstance(mode, bool) and mode != "max":
            raise DataError(f'compile: expected True, False or "max", got {mode!r}')
        self.compile: Compile = mode

    def get(self, size: Size = None, half: Half = "auto") -> Predictor:
        """Returns the predictor for a size and precision. Raises ConfigError or DataError."""
        sides: Any = self.cfg.data.image_size
        if size is not None:
            sides = size if isinstance(size, (list, tuple)) else [size, size]
            if any(not isinstance(side, Integral) or int(side) % 32 for side in sides):
                raise DataError(f"size: expected a side, or (height, width), in multiples of 32, got {size!r}")
        half = self.half if (half := checked_half(half)) == "auto" else half
        key = self.told.number, self.compile, tuple(map(int, sides)), half
        if (predictor := self.made.get(key)) is None:
            with self.lock:
                predictor = self.made.get(key) or self._make(key)
        return predictor

    def warm_up(self, batch_sizes: int | Sequence[int], sizes: Size | list[Size]) -> None:
        """See `RTDETRv3.warmup`. Raises DataError."""
        numbers = batch_sizes if isinstance(batch_sizes, Sequence) else [batch_sizes]
        if any(not isinstance(each, Integral) or each < 1 for each in numbers):
            raise DataError(f"batch_sizes: expected whole numbers from 1, got {batch_sizes!r}")
        for size in sizes if isinstance(sizes, list) else [sizes]:
            for number in numbers:
                self.get(size).warm_up(int(number))

    def _make(self, key: Key) -> Predictor:
        (changes, compile_, sides, half), cfg = key, self.cfg
        if sides != cfg.data.image_size:
            cfg = config_from_dict(config_to_dict(cfg), cfg.name, [f"data.image_size={[*sides]}"], "predict()")
        kept = {each: old for each, old in self.made.items() if each[0] == changes}
        alike = next((old for each, old in kept.items() if (each[1], each[3]) == (compile_, half)), None)
        if alike is not None:
            made = copy.copy(alike)
            made.cfg = cfg
        else:
            first = self._build is not None and self._model is not None
            made = Predictor.of(self.model, cfg, self.classes, self.device, in_place=first, half=half, compile=compile_)
            if first:
                self._model = None
            made.processes = self.processes
        self.made = kept | {key: made}
        return made


def checked_half(half: Any) -> Half:
    """Returns a valid `half`. Raises DataError."""
    if not isinstance(half, (bool, np.bool_)) and half != "auto":
        raise DataError(f'half: expected True, False or "auto", got {half!r}')
    return "auto" if half == "auto" else bool(half)
