"""Counts unreadable images: each is reported once, and too many of them end the run."""

from __future__ import annotations

from collections.abc import Sequence

from tqdm import tqdm

from rtdetr.engine.evaluation.evaluator import EvalResult
from rtdetr.engine.failures import TrainingFailed
from rtdetr.engine.run_files.run_state import RunState
from rtdetr.types import Batch

MIN_UNREADABLE = 10  # images, or more than half of the set; fewer do not stop a run unless data.max_defects is 0


class Unreadable:
    """Counts the unreadable images that one process has met."""

    def __init__(self, state: RunState) -> None:
        self.state = state
        self.sentences: set[str] = set()  # one per unreadable training image
        self.replaced = self.seen = 0  # images, including repetitions
        self._named: set[str] = set()  # sentences already printed, including those of evaluation

    def count(self, batches: list[Batch]) -> None:
        """Counts the unreadable images of a training step. Raises TrainingFailed if there are too many."""
        for batch in batches:
            self.seen += len(batch.infos)
            self.replaced += len(batch.unreadable)
            self.sentences.update(batch.unreadable)
            self._name(batch.unreadable, "training takes another image instead")
        bad, num_images = len(self.sentences), self.state.pace.num_images
        self._refuse(bad, min(self.seen, num_images), "images seen so far", MIN_UNREADABLE)
        self._refuse(bad, num_images, "images of the set", num_images // 2 + 1)

    def figures_of(self, result: EvalResult, num_images: int) -> dict[str, float]:
        """Returns the figures of an evaluation of `num_images` images. Raises TrainingFailed if too many are
        unreadable."""
        self._name(result.unreadable, "evaluation does without it")
        self._refuse(len(result.unreadable), num_images, "validation images", min(MIN_UNREADABLE, num_images))
        return result.figures

    def _name(self, sentences: Sequence[str], instead: str) -> None:
        for sentence in sentences:
            if sentence not in self._named:
                self._named.add(sentence)
                tqdm.write(f"{sentence}; {instead}")

    def _refuse(self, bad: int, of: int, what: str, least: int) -> None:
        share = self.state.cfg.data.max_defects
        if bad > share * of and bad >= (least if share else 1):
            raise TrainingFailed(
                f"{bad} of the {of} {what} cannot be read (above), more than data.max_defects={share:g} allows; "
                "`rtdetr doctor CONFIG` lists them all"
            )
