"""Early stopping: ends a run whose AP has stopped improving."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rtdetr.wording import counted


class EarlyStop:
    """Counts evaluations in a row whose AP did not beat the best; `over` after `patience` of them (0: never), or as
    soon as AP50 reaches `goal`. Processes that see the same figures decide alike."""

    def __init__(self, patience: int, goal: float = math.inf) -> None:
        self.patience, self.goal = patience, goal
        self.best, self.best_iteration, self.waited = -math.inf, 0, 0
        self.ap50, self.reached = -math.inf, False

    def see(self, figures: Mapping[str, float], iteration: int) -> None:
        """Records the figures of an evaluation. AP is -1 if the set has no boxes, which does not count."""
        self.ap50 = figures["AP50"]
        self.reached = self.ap50 >= self.goal
        if figures["AP"] < 0:
            return
        if figures["AP"] > self.best:
            self.best, self.best_iteration, self.waited = figures["AP"], iteration, 0
        else:
            self.waited += 1

    @property
    def over(self) -> bool:
        return self.reached or 0 < self.patience <= self.waited

    def sentence(self, iteration: int) -> str:
        """Why the run ended early."""
        if self.reached:
            return f"ended at iteration {iteration}: AP50 has reached {self.goal:g}"
        return (
            f"ended at iteration {iteration}: {counted(self.waited, 'evaluation')} since iteration "
            f"{self.best_iteration} without an AP above its {self.best:.4f}; raise train.patience to continue"
        )

    def state(self) -> dict[str, float]:
        return {"best": self.best, "best_iteration": self.best_iteration, "waited": self.waited}

    def load(self, state: Mapping[str, float]) -> None:
        """Restores what `state` returned."""
        self.best, self.best_iteration = state["best"], int(state["best_iteration"])
        self.waited = int(state["waited"])
