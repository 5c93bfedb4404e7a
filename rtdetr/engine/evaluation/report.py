"""An evaluation as one HTML file that needs no network: figures, curves, confusions, the worst errors."""

from __future__ import annotations

import base64
import html
import io
import re
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from rtdetr.data.dataset import DetectionSet
from rtdetr.engine.evaluation.error_analysis import BINS, KINDS, LOWEST, Mistake, Mistakes, find_mistakes
from rtdetr.engine.evaluation.evaluator import (
    FIGURE_NAMES,
    EvalResult,
    OperatingPoint,
    counted_truth,
    figure_text,
    mean_measured,
)
from rtdetr.outputs import write_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_CLASSES = 25  # in the confusion matrix, those with the most confusions
MOST_CURVES = 20
MOST_IMAGES = 24  # of wrong detections, and of missed objects
THUMBNAIL = 220  # pixels
SIZES = ("all", "small", "medium", "large")
RED, GREEN = (230, 40, 40), (40, 200, 80)
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em; color: #222 }
h2 { margin-top: 2em; border-bottom: 1px solid #ccc } table { border-collapse: collapse }
td, th { padding: .15em .8em; text-align: right } th { border-bottom: 1px solid #999 }
td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto }
h1, p, figure, td:first-child { overflow-wrap: anywhere } td:first-child { min-width: 5em }
.images { display: flex; flex-wrap: wrap; gap: 12px } figure { margin: 0; width: 220px; font-size: 12px }
figure img { display: block; border: 1px solid #ccc } .note { color: #666 }
.words td:last-child, .words th:last-child { text-align: left }
.matrix td { font-size: 12px; padding: .1em .4em; text-align: center } .matrix th { border: 0 }
.matrix tr:first-child th { writing-mode: vertical-rl; text-align: right; padding: .4em 0 }
.matrix th { font-size: 12px; font-weight: normal }
"""


def write_report(path: Path, title: str, result: EvalResult, source: DetectionSet) -> None:
    """Writes the file. source: the evaluated set. Raises RunFailed, and DataError for an unreadable image."""
    truth = counted_truth(source.origin, {info.image_id: (info.height, info.width) for info in source.infos()})
    mistakes = find_mistakes(truth, result.detections)
    names = {each["id"]: each["name"] for each in truth.categories}
    kinds = [(kind, mistakes.counts[kind], text) for kind, text in KINDS.items()]
    figures = [(FIGURE_NAMES[key], figure_text(value).strip()) for key, value in result.figures.items()]
    parts = [
        _heading("Figures", "Those of `rtdetr eval`, to the digit; a dash where there is nothing to measure."),
        _table(("figure", ""), figures),
        _heading("Classes", "AP at IoU .50:.95, also by size (32 and 96 pixels square); F1 at the threshold."),
        _class_table(result),
        _heading("Precision and recall", f"At IoU .5; the {MOST_CURVES} most frequent classes, and the mean of all."),
        _svg(_curves(result)),
        _heading("Mistakes", _about(mistakes)),
        _table(("kind", "number", "what it is"), kinds, "words"),
        _heading("Confusion", "Objects by row, detections by column. The diagonal is right; `nothing` is background."),
        _confusion(mistakes, [names[each["id"]] for each in truth.categories]),
        _heading("Calibration", _about_scores(mistakes)),
        _svg(_reliability(mistakes)),
        _heading("Wrong detections", "The most certain ones. Red: the detection. Green: the object it has to do with."),
        _album(mistakes.wrong, source, names),
        _heading("Missed objects", "The largest ones."),
        _album(mistakes.missed, source, names),
    ]
    page = f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{html.escape(title)}</title>"
    page += f"<style>{STYLE}</style>\n<h1>{html.escape(title)}</h1><p>{html.escape(source.summary())}</p>\n"
    write_text(path, page + "\n".join(parts) + "\n</html>\n")


def _heading(title: str, text: str) -> str:
    return f"<h2>{title}</h2><p class=note>{html.escape(text)}</p>"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]], kind: str = "") -> str:
    cells = ["".join(f"<th>{html.escape(each)}</th>" for each in head)]
    cells += ["".join(f"<td>{html.escape(str(each))}</td>" for each in row) for row in rows]
    return f"<table class='{kind}'>" + "".join(f"<tr>{row}</tr>\n" for row in cells) + "</table>"


def _class_table(result: EvalResult) -> str:
    rows = []
    for k, each in enumerate(result.classes):
        aps = [mean_measured(result.precision[:, :, k, size, -1]) for size in (1, 2, 3)]
        figures = (each.ap, each.ap50, *result.points.get(each.category_id, ()), *aps)
        rows.append((each.name, each.category_id, each.num_boxes, *(figure_text(value).strip() for value in figures)))
    more = OperatingPoint._fields if result.points else ()
    return _table(("class", "id", "boxes", "AP", "AP50", *more, "AP small", "AP medium", "AP large"), rows)


def _curves(result: EvalResult) -> Figure:
    figure, axes = _axes("recall", "precision")
    recalls = np.linspace(0, 1, result.precision.shape[1])
    curves = result.precision[0, :, :, 0, -1]  # (recalls, classes)
    measured = [k for k in range(curves.shape[1]) if (curves[:, k] > -1).any()]
    for k in sorted(measured, key=lambda k: -result.classes[k].num_boxes)[:MOST_CURVES]:
        # A $ would begin a formula, and a name with _ at its start would have no entry in the legend.
        axes.plot(recalls, curves[:, k], lw=1, alpha=0.7, label=f" {result.classes[k].name}".replace("$", r"\$"))
    if measured:
        axes.plot(recalls, curves[:, measured].mean(1), linewidth=3, color="black", label="mean of all")
        axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _reliability(mistakes: Mistakes) -> Figure:
    figure, axes = _axes("mean score", "share that is right")
    axes.plot([0, 1], [0, 1], color="#999", linestyle="--", linewidth=1)
    if mistakes.calibration:
        scores, shares, counts = zip(*mistakes.calibration)
        axes.bar(scores, shares, width=0.7 / BINS, color="#48c")
        for score, share, count in zip(scores, shares, counts):
            axes.annotate(str(count), (score, share), ha="center", va="bottom", fontsize=7)
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel=x, ylabel=y, xlim=(0, 1), ylim=(0, 1.08))
    axes.grid(alpha=0.3)
    return figure, axes


def _svg(figure: Figure) -> str:
    import matplotlib

    text = io.StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # missing here: texts stay texts, for the browser's fonts
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "rtdetr", "axes.unicode_minus": False}):
            figure.savefig(text, format="svg", metadata={"Date": None})
    drawn = text.getvalue()
    # Without the XML head and its URLs, which SVG inside HTML does not need.
    return re.sub(r'(?s)<metadata>.*?</metadata>| xmlns(:xlink)?="[^"]*"', "", drawn[drawn.index("<svg") :])


def _about(mistakes: Mistakes) -> str:
    return (
        f"Detections with a score of {mistakes.threshold:.3f} or more, where F1 is best ({mistakes.f1:.4f}), matched "
        f"at IoU .5. Objects found: {mistakes.found}, missed: {len(mistakes.missed)}; wrong detections: "
        f"{len(mistakes.wrong)}."
    )


def _about_scores(mistakes: Mistakes) -> str:
    return (
        f"Whether 8 of 10 detections with a score of .8 are right, from a score of {LOWEST} on. The numbers count "
        f"detections; the mean distance from the line is {mistakes.calibration_error:.4f}."
    )


def _confusion(mistakes: Mistakes, names: list[str]) -> str:
    """Confusion matrix of all classes, or of those with the most confusions."""
    matrix = mistakes.confusion
    off = matrix - np.diag(np.diag(matrix))
    chosen = sorted(np.argsort(-(off.sum(0) + off.sum(1))[:-1], kind="stable")[:MOST_CLASSES].tolist())
    left_out = len(names) - len(chosen)
    order = [*chosen, len(names)]
    labels = [*(names[i] for i in chosen), "nothing"]
    cells = ["<th></th>" + "".join(f"<th>{html.escape(each)}</th>" for each in labels)]
    for row, label in zip(order, labels):
        whole = max(1, int(matrix[row].sum()))
        tds = []
        for column in order:
            count = int(matrix[row, column])
            colour = "90,180,110" if row == column else "220,110,90"
            tds.append(f"<td style='background:rgba({colour},{count / whole:.2f})'>{count or ''}</td>")
        cells.append(f"<th>{html.escape(label)}</th>{''.join(tds)}")
    note = f"<p class=note>Classes with fewer confusions, not shown: {left_out}.</p>" if left_out else ""
    return "<table class=matrix>" + "".join(f"<tr>{row}</tr>\n" for row in cells) + f"</table>{note}"


def _album(mistakes: Sequence[Mistake], source: DetectionSet, names: dict[int, str]) -> str:
    """Crops of the evaluated images."""
    index = {info.image_id: i for i, info in enumerate(source.infos())}
    shown = []
    for each in mistakes[:MOST_IMAGES]:
        image, file_name = index[each.image_id], html.escape(source.info(index[each.image_id]).file_name)
        name, score = html.escape(names[each.category_id]), f" {each.score:.3f}" if each.score else ""
        data = base64.b64encode(_cut_out(source.image(image), each)).decode()
        shown.append(
            f"<figure><img alt='{each.kind}: {name}' src='data:image/jpeg;base64,{data}'>"
            f"<b>{each.kind}</b>: {name}{score}<br>{file_name}</figure>\n"
        )
    return f"<div class=images>{''.join(shown)}</div>" if shown else "<p>None.</p>"


def _cut_out(image: Image.Image, mistake: Mistake) -> bytes:
    """A JPEG of an error and its surroundings: both boxes, with a margin of half their extent on every side."""
    boxes = [(mistake.box, GREEN if mistake.kind == "missed" else RED)]
    boxes += [(mistake.other, GREEN)] if mistake.other else []
    corners = np.array([(x, y, x + w, y + h) for (x, y, w, h), _ in boxes])
    low, high = corners[:, :2].min(0), corners[:, 2:].max(0)
    margin = np.maximum((high - low) / 2, 16)
    left, top = np.clip(np.floor(low - margin), 0, np.array(image.size) - 1).astype(int).tolist()
    right, bottom = np.clip(np.ceil(high + margin), (left + 1, top + 1), image.size).astype(int).tolist()
    cut = image.crop((left, top, right, bottom))
    scale = THUMBNAIL / max(cut.size)
    cut = cut.resize((max(1, round(cut.width * scale)), max(1, round(cut.height * scale))), Image.Resampling.BICUBIC)
    draw = ImageDraw.Draw(cut)
    for (x, y, w, h), colour in reversed(boxes):
        x1, y1, x2, y2 = ((v - o) * scale for v, o in zip((x, y, x + w, y + h), (left, top, left, top)))
        draw.rectangle((x1, y1, max(x1, x2), max(y1, y2)), outline=colour, width=2)
    content = io.BytesIO()
    cut.save(content, "JPEG", quality=80)
    return content.getvalue()
