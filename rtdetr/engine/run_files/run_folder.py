"""The folder of a training run: its choice, and moving existing runs aside.

`choose_folder` decides before any work and creates nothing; `prepare_folder` acts, once the run can start.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from rtdetr.engine.run_files.run_lock import run_lock
from rtdetr.outputs import OutputError, check_folder, unused_path, writing
from rtdetr.wording import option

RUN = ("last.pth", "best.pth", "metrics.csv", "config.yml", "tensorboard")  # any of them makes a folder that of a run
BESIDE = (
    "last-1.pth",
    "curves.png",
    "train_batch.jpg",
    "data_report.json",
    "load_report.txt",
    "failed_batch*.pth",
    "loggers.json",
    "wandb",
)
HISTORY = ("best.pth", "metrics.csv", "tensorboard", "load_report.txt", "train_batch.jpg")


def choose_folder(output_dir: Path | None, resume: Path | None, name: str, overwrite: bool) -> Path:
    """The folder for a run: `output_dir`, or that of the checkpoint it resumes from, or output/NAME, with a number if
    it exists. Raises OutputError for a folder that holds a run, unless `overwrite`, or cannot be written to, and
    ConfigError for one in which a training is running."""
    default = Path("output") / name
    folder = output_dir or (resume.parent if resume else default if overwrite else unused_path(default))
    if overwrite and _goes_on_there(folder, resume):
        raise OutputError(
            f"{folder}: a resumed run continues in this folder and replaces no run; leave out "
            f"{option('--overwrite', 'overwrite=True')} or name another {option('--output-dir', 'output_dir')}"
        )
    _check_unused(folder, resume, overwrite)
    check_folder(folder)
    if any(_files_of_run(folder)):
        if not _is_untrained(folder):
            check_folder(_old_folder(folder))
        with run_lock(folder):
            pass
    return folder


def prepare_folder(folder: Path, resume: Path | None, overwrite: bool) -> None:
    """Moves an existing run to FOLDER-old, and copies the history of a run that resumes in another folder. Raises
    OutputError if another run has started there in the meantime, RunFailed if writing fails."""
    if _goes_on_there(folder, resume):
        return
    _check_unused(folder, resume, overwrite)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        in_the_way = [] if _is_untrained(folder) else list(_files_of_run(folder))
        if in_the_way:
            old = _old_folder(folder)
            old.mkdir()
            for each in in_the_way:
                shutil.move(each, old / each.name)
            print(f"{folder}: the old run is in {old} now")
        if resume is not None:
            _bring_history(resume, folder)


def _check_unused(folder: Path, resume: Path | None, overwrite: bool) -> None:
    found = [name for name in RUN if (folder / name).exists()]
    if not found or _is_untrained(folder) or overwrite or _goes_on_there(folder, resume):
        return
    last = folder / "last.pth"
    resumed = option(f"-r {shlex.quote(str(last))}", f"resume={str(last)!r}")
    how = f"continue with {resumed}, " if last.name in found else ""
    raise OutputError(
        f"{folder}: already holds a run ({', '.join(found)}); {how}choose another "
        f"{option('--output-dir', 'output_dir')}, or move that run with {option('--overwrite', 'overwrite=True')} "
        f"(to {_old_folder(folder).name})"
    )


def _is_untrained(folder: Path) -> bool:
    """Whether a run failed in the folder before it had weights, a logged step or a failed batch: its files are only
    settings, which the next run writes anew."""
    rows = folder / "metrics.csv"
    return (
        all((folder / name).is_file() for name in ("config.yml", "data_report.json"))
        and not any(folder.glob("*.pth"))
        and not (rows.is_file() and len(rows.read_bytes().splitlines()) > 1)
    )


def _goes_on_there(folder: Path, resume: Path | None) -> bool:
    return resume is not None and folder.resolve() == resume.parent.resolve()


def _old_folder(folder: Path) -> Path:
    """Path next to the folder itself, even if it is `.` or a link: moving on one disk is renaming."""
    folder = folder.resolve()
    return unused_path(folder.with_name(f"{folder.name}-old"))


def _files_of_run(folder: Path) -> Iterator[Path]:
    """Lists only the files of a run: the folder may be the user's working directory."""
    for pattern in (*RUN, *BESIDE):
        yield from sorted(folder.glob(pattern))


def _bring_history(checkpoint: Path, folder: Path) -> None:
    """Rows and curves after the checkpoint are dropped when the run opens its log."""
    shutil.copyfile(checkpoint, folder / "last.pth")
    for each in (checkpoint.parent / name for name in HISTORY):
        if each.is_dir():
            shutil.copytree(each, folder / each.name)
        elif each.is_file():
            shutil.copyfile(each, folder / each.name)
