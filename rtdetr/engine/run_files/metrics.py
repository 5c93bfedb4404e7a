"""The figures of a run: metrics.csv and curves.png."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rtdetr.outputs import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, Any]

# The dense head's losses have the official names, which say neither dense nor head; see docs/training.md.
COLUMNS = {
    "loss_aux_o2m": "dense",
    "loss_cls_aux_o2m": "dense_class",
    "loss_iou_aux_o2m": "dense_iou",
    "loss_dfl_aux_o2m": "dense_dfl",
    "loss_l1_aux_o2m": "dense_l1",
    "loss_scale": "loss_scale",
}


class MetricsLog:
    """Appends rows to metrics.csv. Columns are added when a row has new ones.

    resume_at: iteration at which a resumed run continues; None: a new run. saved_at: the same iteration as the earlier
    run counted it. Rows after it belong to steps that will be repeated and are dropped, and so is its evaluation if
    that is still due; if the two numbers differ, because the images per step changed, earlier rows are renumbered.
    """

    def __init__(
        self, folder: Path, resume_at: int | None, saved_at: int | None = None, evaluation_due: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.csv"
        self.columns: list[str] = []
        self._waiting: list[Row] = []  # rows that wait for room on the disk
        self.aside: Path | None = None  # new place of a metrics.csv that no run wrote
        if resume_at is None:
            self.path.unlink(missing_ok=True)
        else:
            rows = self._rows_until(resume_at, saved_at or resume_at, evaluation_due)
            self._rewrite(rows, [])

    def _rows_until(self, resume_at: int, saved_at: int, evaluation_due: bool) -> list[Row]:
        """The earlier rows, in present iterations. A file that was changed by other programs is moved aside."""
        due = ("eval", saved_at) if evaluation_due else None
        try:
            rows = [row | {"iteration": int(row["iteration"]), "kind": row["kind"]} for row in read_rows(self.path)]
        except (ValueError, TypeError, KeyError, csv.Error):
            self.aside = self.path.with_name("metrics-other.csv")
            self.path.replace(self.aside)
            return []
        rows = [row for row in rows if row["iteration"] <= saved_at and (row["kind"], row["iteration"]) != due]
        return [row | {"iteration": math.ceil(row["iteration"] * resume_at / saved_at)} for row in rows]

    def write(self, kind: str, iteration: int, epoch: int, values: Mapping[str, float | None]) -> None:
        """kind: "train" or "eval"; iteration: optimiser steps done so far. None: this figure does not exist.

        Raises OSError if writing fails: metrics.csv stays intact, and a later call writes the row.
        """
        row: Row = {"kind": kind, "iteration": iteration, "epoch": epoch}
        row |= {short_name(name): "" if value is None else f"{value:.6g}" for name, value in values.items()}
        self._waiting.append(row)
        new = [name for row in self._waiting for name in row if name not in self.columns]
        if new or not self.path.is_file():  # the user may have moved it
            self._rewrite(read_rows(self.path), new)
        size = self.path.stat().st_size
        try:
            with open(self.path, "a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerows(self._waiting)
        except OSError:
            os.truncate(self.path, size)  # no partial row
            raise
        self._waiting.clear()

    def _rewrite(self, rows: list[Row], new_columns: list[str]) -> None:
        columns = list(dict.fromkeys([*(rows[0] if rows else self.columns), *new_columns]))
        if not columns:
            return
        with atomic_write(self.path) as beside, open(beside, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(rows)
        self.columns = columns


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.csv as text; none if there is no file. An incomplete last line, from a crash, is left out.
    Files of older versions get the present columns, empty for -1."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(line for line in file if line.endswith("\n"))
        return [
            {short_name(name): "" if value == "-1.0" else value for name, value in row.items() if name is not None}
            for row in reader
        ]


def best_row(path: Path, best_ap: float) -> Row | None:
    """The first evaluation with that AP of a metrics.csv, which may hold better ones on other validation data; None if
    there is none."""
    rows = [row for row in read_rows(path) if row["kind"] == "eval" and row.get("AP")]
    return next((row for row in rows if math.isclose(float(row["AP"]), best_ap, rel_tol=1e-5)), None)


def short_name(name: str) -> str:
    """The column of a loss: "l1_aux_dn" for "loss_bbox_aux_dn". Other names stay."""
    return COLUMNS.get(name) or name.removeprefix("loss_").replace("bbox", "l1").replace("o2m_branch", "o2m")


def draw_curves(metrics: Path, image: Path) -> None:
    """Loss, learning rate and AP over the iterations, as a PNG."""
    curves(read_rows(metrics)).savefig(image, dpi=100)


def curves(rows: list[Row]) -> Figure:
    """Draws the curves; the axes follow the data, and missing values are not drawn."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4), layout="tight")
    plots = (
        ("train", ["loss"], "training loss"),
        ("train", ["lr"], "learning rate"),
        ("eval", ["AP", "AP50", "AP75", "AR100"], "validation"),
    )
    for axis, (kind, names, title) in zip(figure.subplots(1, 3), plots):
        for name in names:
            points = [(int(r["iteration"]), float(r[name])) for r in rows if r["kind"] == kind and r.get(name)]
            if points:
                marker = "o" if len(points) == 1 else "." if len(points) < 100 else None
                axis.plot(*zip(*points), label=name, marker=marker)
        axis.set(title=title, xlabel="iteration")
        axis.grid(alpha=0.3)
        if len(names) > 1 and axis.lines:
            axis.legend()
    return figure
