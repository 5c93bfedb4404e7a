"""Runs commands in processes of their own, each with a signal to its whole group at one moment:

    python tests/support/signal_runs.py OUT MOMENT COMMAND ARGUMENT ...

OUT/MOMENT.json gets the exit code, what the command said, and how many of its processes were left 10 s later. Several
commands are separated by "--" and share one import of everything: each is a fork in a session of its own.
"""

from __future__ import annotations

import io
import json
import multiprocessing.process
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rtdetr import cli
from rtdetr.data import loader
from rtdetr.engine import trainer
from rtdetr.engine.evaluation import evaluator
from rtdetr.engine.run_files import saving
from rtdetr.weights import checkpoint, load

GRACE = 10.0  # seconds that a group has to disappear


def send(number: int = signal.SIGTERM, to: int | None = None) -> None:
    """To the whole group, or to process `to`, from outside, as workers obey a SIGTERM of their own main process."""
    target = f"-{os.getpgrp()}" if to is None else str(to)
    # Not a fork: the handlers that run around one may be where the signal arrives.
    sender = os.posix_spawn("/bin/sh", ["sh", "-c", f"kill -{int(number)} {target}"], os.environ, setsid=True)
    os.waitpid(sender, 0)


def before(owner: Any, name: str, action: Callable[[], None], call: int = 1) -> None:
    """Makes the given call of owner.name begin with `action`; 0: every call."""
    original, calls = getattr(owner, name), [0]

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if call in (0, calls[0]):
            action()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def send_after_first_worker() -> None:
    """When one worker has just been forked and the next one has not."""
    before(multiprocessing.process.BaseProcess, "start", send, call=2)


def send_from_worker() -> None:
    """Between the birth of a worker and its preparation."""
    before(loader, "prepare_worker", send)


def send_again_while_saving() -> None:
    before(trainer.Trainer, "train_step", send, call=2)
    before(saving, "save_checkpoint", send)


def interrupt_twice() -> None:
    before(trainer.Trainer, "train_step", lambda: (send(signal.SIGINT), send(signal.SIGINT)), call=2)  # type: ignore


def kill_main() -> None:
    before(trainer.Trainer, "train_step", lambda: os.kill(os.getpid(), signal.SIGKILL), call=2)


def send_to_all_under_torchrun() -> None:
    """As a scheduler does: to torchrun too, which passes it on to the processes once more."""
    if os.environ["RANK"] == "0":
        before(trainer.Trainer, "train_step", lambda: send(to=os.getppid()), call=2)
    before(trainer.Trainer, "train_step", send, call=2)


def kill_at(event: int) -> Callable[[], None]:
    """SIGKILL at the given one of the moments that matter, in whatever thread: a step begins, a file of the run is half
    written, is about to be synced, to be linked, to be renamed. A step lasts at least as long as the save beside it."""
    lock, events = threading.Lock(), [0]

    def happened() -> None:
        with lock:
            events[0] += 1
            if events[0] == event:
                os.kill(os.getpid(), signal.SIGKILL)

    def half_written(content: Any, file: Any, **options: Any) -> None:
        if options:  # objects on their way to another process
            save(content, file, **options)
            return
        whole = io.BytesIO()
        save(content, whole)
        bytes_ = whole.getvalue()
        file.write(bytes_[: len(bytes_) // 2])
        file.flush()
        happened()
        file.write(bytes_[len(bytes_) // 2 :])

    def prepare() -> None:
        for name in ("fsync", "link", "replace"):
            before(os, name, happened, call=0)
        trainer.Trainer.train_step = long_step  # type: ignore[method-assign]
        checkpoint.torch.save = half_written

    def long_step(self: Any, batches: Any) -> Any:
        happened()
        record = train_step(self, batches)
        self.saver.wait()
        return record

    save, train_step = torch.save, trainer.Trainer.train_step
    return prepare


MOMENTS: dict[str, Callable[[], None]] = {
    "setup": lambda: before(trainer, "build_model", send),
    "first_worker": send_after_first_worker,
    "worker_init": send_from_worker,
    "step": lambda: before(trainer.Trainer, "train_step", send, call=2),
    "while_saving": send_again_while_saving,
    "evaluation": lambda: before(evaluator, "detect", send),
    "scoring": lambda: before(evaluator, "score", send),
    "eval_setup": lambda: before(load, "model_from_checkpoint", send),
    "eval_detecting": lambda: before(evaluator, "detect", send),
    "interrupted_twice": interrupt_twice,
    "killed": kill_main,
    "torchrun": send_to_all_under_torchrun,
    **{f"kill{event}": kill_at(event) for event in range(1, 1000)},
}


def processes_of(session: int) -> list[int]:
    """Processes of a session that still run; zombies do not."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, owner = stat.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended in between
        if int(owner) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def run(out: Path, moment: str, command: list[str]) -> None:
    said = out / f"{moment}.txt"
    child = os.fork()
    if child == 0:
        os.setsid()
        file = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        MOMENTS[moment]()
        sys.exit(cli.main(command))
    _, status = os.waitpid(child, 0)
    deadline = time.monotonic() + GRACE
    while processes_of(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = processes_of(child)
    if left:
        os.killpg(child, signal.SIGKILL)
    result = {"code": os.waitstatus_to_exitcode(status), "said": said.read_text(), "left": len(left)}
    (out / f"{moment}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer.draw_curves = lambda *_: None  # takes longer than these runs
    if "RANK" in os.environ:
        moment, *command = sys.argv[1:]
        MOMENTS[moment]()
        sys.exit(cli.main(command))
    folder, rest = Path(sys.argv[1]), sys.argv[2:]
    while rest:
        end = rest.index("--") if "--" in rest else len(rest)
        run(folder, rest[0], rest[1:end])
        rest = rest[end + 1 :]
