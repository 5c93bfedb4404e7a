"""Loggers, which the config names, and user callbacks (`from rtdetr import Callback`), which receive a run's events.
This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rtdetr.config_file import ConfigError
from rtdetr.engine.failures import TrainingFailed

if TYPE_CHECKING:
    from PIL import Image

Outcome = Literal["finished", "stopped", "failed"]  # stopped: by a signal


class Run(NamedTuple):
    """A new or resumed run."""

    name: str
    folder: Path
    config: Mapping[str, Any]  # plain dicts and lists, as in config.yml
    classes: Sequence[str]
    iteration: int  # optimiser steps done so far: 0 in a new run
    total_iterations: int
    rows: Sequence[Mapping[str, str]]  # rows of metrics.csv written before this start
    renumbered: bool  # the images per step have changed since then, so the iterations of the rows were converted


class Callback:
    """Base class of user callbacks: override the methods that you need. They are called synchronously, in the main
    thread of the main process only. An exception ends the run, see docs/python.md."""

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if unknown := sorted(name for name in vars(cls) if name.startswith("on_") and not hasattr(Callback, name)):
            known = ", ".join(name for name in vars(Callback) if name.startswith("on_"))
            raise TypeError(f"{cls.__name__}.{unknown[0]}: a callback has no such method; there are {known}")

    def on_start(self, run: Run) -> None:
        """Called before the first step of a new or resumed run."""

    def on_step(self, iteration: int, epoch: int, values: Mapping[str, float]) -> None:
        """Called at the first step and every `train.log_every` steps: a row of metrics.csv. iteration: steps done."""

    def on_evaluation(self, iteration: int, epoch: int, figures: Mapping[str, float]) -> None:
        """Called with each evaluation row of metrics.csv; undefined figures are left out."""

    def on_images(self, iteration: int, images: Mapping[str, Image.Image]) -> None:
        """Called with the first training batch, and with some validation images at every evaluation."""

    def on_save(self, path: Path, iteration: int) -> None:
        """Called after last.pth or best.pth has been written, with the state at that iteration."""

    def on_end(self, outcome: Outcome) -> None:
        """Called once, when the run ends; also after an earlier `on_start` has failed."""


class CallbackFailed(TrainingFailed):
    """A callback has raised an exception, which is the `__cause__` of this one."""


class Listeners:
    """Dispatches events to loggers and callbacks. A logger that raises is switched off, with one warning by `warn`; an
    exception in a callback ends the run."""

    def __init__(
        self, loggers: Mapping[str, Callback], callbacks: Iterable[Callback], warn: Callable[[str], None]
    ) -> None:
        if not isinstance(callbacks, Iterable):
            raise ConfigError(f"callbacks: expected a list of rtdetr.Callback objects, got {callbacks!r}")
        self.loggers, self.callbacks, self.warn = dict(loggers), list(callbacks), warn
        self._started = False
        for each in self.callbacks:
            if not isinstance(each, Callback):
                raise ConfigError(f"callbacks: expected objects of classes derived from rtdetr.Callback, got {each!r}")

    @property
    def want_images(self) -> bool:
        return any(type(each).on_images is not Callback.on_images for each in (*self.loggers.values(), *self.callbacks))

    def tell(self, event: str, *values: Any) -> None:
        """Calls the Callback method named `event`. Raises CallbackFailed if a callback raises."""
        self._started = True
        self._tell_loggers(event, values)
        for each in self.callbacks:
            _tell_callback(each, event, values)

    def end(self, outcome: Outcome) -> None:
        """Sends on_end to all if any event was sent. Raises CallbackFailed for the first exception in a callback; those
        after it, and after a failed run all, only cause a warning."""
        if not self._started:
            return
        failed: CallbackFailed | None = None
        self._tell_loggers("on_end", (outcome,))
        for each in self.callbacks:
            try:
                _tell_callback(each, "on_end", (outcome,))
            except CallbackFailed as error:
                if outcome == "failed" or failed is not None:
                    self.warn(str(error))
                else:
                    failed = error
        if failed is not None:
            raise failed

    def _tell_loggers(self, event: str, values: Sequence[Any]) -> None:
        for name, logger in list(self.loggers.items()):
            try:
                getattr(logger, event)(*values)
            except Exception as error:
                del self.loggers[name]
                self.warn(f"{_sentence(f'train.loggers: {name}', event, error)}; it is off for the rest of this run")


def _tell_callback(callback: Callback, event: str, values: Sequence[Any]) -> None:
    try:
        getattr(callback, event)(*values)
    except Exception as error:
        raise CallbackFailed(_sentence(type(callback).__name__, event, error)) from error


def _sentence(who: str, event: str, error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{who}: {event} failed ({type(error).__name__}{': ' * bool(text)}{text})"
