"""Saves a run in the background: a step waits for a copy in memory only, never for the disk."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from rtdetr.engine import distributed
from rtdetr.engine.failures import CannotWrite, writing_run_file
from rtdetr.engine.log import say
from rtdetr.engine.run_files.run_lock import run_lock
from rtdetr.engine.run_files.run_state import RunState
from rtdetr.weights.checkpoint import BEFORE, LAST, make_checkpoint, save_checkpoint

BEST = "best.pth"


class Saver:
    """Writes last.pth, last-1.pth (the state saved before it) and best.pth of a run, in the main process.

    A file that cannot be written, as on a full disk, causes a warning, and the next save tries again; only a final save
    must succeed. resume: the checkpoint that the run resumes from. saved: called with every written file and the
    iteration of its state, in the thread that calls `save` or `wait`.
    """

    def __init__(self, state: RunState, folder: Path, resume: Path | None, saved: Callable[[Path, int], None]) -> None:
        self.state, self.folder, self.saved = state, folder, saved
        self._last_is_good = resume is None or resume.name != BEFORE  # resumed from last-1.pth: last.pth may be damaged
        self._best: dict[str, Any] | None = None  # to be written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saving")
        self._job: Future[list[tuple[Path, int]]] | None = None
        self._saved, self._place = time.perf_counter(), ExitStack()

    def begin(self) -> None:
        """Locks the folder and removes unfinished files of a killed run. Raises ConfigError if another run holds it."""
        self._place.enter_context(run_lock(self.folder, wait=False))  # else a short run could end, and be replaced
        for each in self.folder.glob(".*.part"):
            each.unlink(missing_ok=True)

    def due(self) -> bool:
        """Whether train.save_seconds have passed and the last save is finished; the same in every process."""
        if self._job is not None and self._job.done():
            self.wait()
        waited = time.perf_counter() - self._saved >= self.state.cfg.train.save_seconds
        return distributed.any_process(distributed.is_main() and waited and self._job is None)

    def keep_best(self) -> None:
        """Schedules the current average for best.pth: the next save writes it before last.pth, which records its AP."""
        self.wait()
        if distributed.is_main():
            ema = self.state.ema.model.state_dict()
            self._best = on_host(make_checkpoint(self.state.cfg, self.state.classes, ema, began=self.state.began))

    def save(self, background: bool = False, final: bool = False) -> None:
        """Saves the current state; every process must call it. Raises CannotWrite if the final save fails."""
        self.wait()
        content = self.state.content()
        self._saved = time.perf_counter()
        if content is not None and background:
            self._job = self._thread.submit(self._write, on_host(content))
        elif content is not None:
            for each in self._write(content, final):
                self.saved(*each)

    def wait(self) -> None:
        """Waits for pending writes."""
        if (job := self._job) is not None:
            self._job = None
            for each in job.result():
                self.saved(*each)

    def end(self) -> None:
        """Waits for pending writes and unlocks the folder."""
        with self._place, self._thread:
            if self._job is not None:
                self._job.result()

    def _write(self, content: dict[str, Any], final: bool = False) -> list[tuple[Path, int]]:
        """Returns the written files, with the iteration of `content`."""
        written = []
        try:
            if self._best is not None:
                with writing_run_file(self.folder / BEST):
                    save_checkpoint(self.folder / BEST, self._best)
                self._best = None
                written.append(self.folder / BEST)
            with writing_run_file(self.folder / LAST):
                save_checkpoint(self.folder / LAST, content, self.folder / BEFORE if self._last_is_good else None)
            self._last_is_good = True
            written.append(self.folder / LAST)
        except CannotWrite as error:
            if final:
                raise
            say(
                f"{error.path}: cannot be written ({error.reason}); training continues, {error.saved}; make room; the "
                f"next save is in {self.state.cfg.train.save_seconds:g} s or at an evaluation"
            )
        return [(path, content["training"]["iteration"]) for path in written]


def on_host(value: Any) -> Any:
    """Copies nested dicts, lists and tuples, with their tensors copied to host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: on_host(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(on_host(each) for each in value)
    return value
