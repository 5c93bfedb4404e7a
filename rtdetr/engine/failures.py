"""Errors that end a run; the message of each is one sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rtdetr.weights.checkpoint import LAST
from rtdetr.wording import option

NOTHING_SAVED = "nothing of this run is saved yet"


class TrainingFailed(RuntimeError):
    """The run cannot continue; the message is one sentence."""

    exit_code = 1


class StepFailed(TrainingFailed):
    """The losses or gradients of a step are not finite; losses: by name, empty if they could not be computed."""

    def __init__(self, sentence: str, losses: dict[str, float]) -> None:
        self.losses = losses
        super().__init__(sentence)


class CannotWrite(TrainingFailed):
    """A file of the run cannot be written, as on a full disk; `reason`: the system's message."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path, self.reason = path, reason
        then = f"make room and continue with {option('-r', 'resume')}"
        if self.saved == NOTHING_SAVED:
            then = "make room and start again"
        super().__init__(f"{path}: cannot be written ({reason}); {self.saved}; {then}")

    @property
    def saved(self) -> str:
        """Whether the folder of the file, or this folder, has a state to resume from."""
        there = any((folder / LAST).is_file() for folder in (self.path, self.path.parent))
        return "the last saved state is intact" if there else NOTHING_SAVED


@contextmanager
def writing_run_file(path: Path) -> Iterator[None]:
    """Context manager for code that writes a file of the run. Raises CannotWrite if that fails."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__  # torch.save hides the system's message
        if not isinstance(cause, OSError):
            raise
        raise CannotWrite(path, cause.strerror or str(cause)) from error
