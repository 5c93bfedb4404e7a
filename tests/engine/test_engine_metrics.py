"""What a run leaves to look at: columns with short names, nothing where there is nothing, axes that follow the data."""

from __future__ import annotations

import re
import resource
import signal
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rtdetr.engine.callbacks import Listeners, Run
from rtdetr.engine.log import FOUND, OBJECT, SIDE, album
from rtdetr.engine.run_files.loggers import TensorBoardLogger
from rtdetr.engine.run_files.metrics import MetricsLog, curves, draw_curves, read_rows
from rtdetr.engine.trainer import Trainer

DOCS = Path(__file__).resolve().parents[2] / "docs" / "training.md"
OLD = (
    "kind,iteration,epoch,loss_class,loss_bbox_aux_dn,loss_giou_aux_o2m_branch,loss_cls_aux_o2m,loss_aux_o2m,loss,"
    "loss_scale,lr,AP,APs\n"
    "train,3,0,0.1237652450799942,2.5,1.5,0.5,0.25,40.5,16.0,0.002,,\n"
    "eval,3,1,,,,,,,,,0.25,-1.0\n"
)
NEW = "kind,iteration,epoch,class,l1_aux_dn,giou_aux_o2m,dense_class,dense,loss,loss_scale,lr,AP,APs"


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder)).Reload()
    return {
        tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }  # fmt: skip


def test_figures_that_do_not_exist_are_empty(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path, None)
    log.write("train", 1, 0, {"loss_bbox_aux": 0.1237652450799942, "lr": 2.5e-7})
    log.write("eval", 1, 1, {"AP": 0.5, "APs": None})
    lines = ["kind,iteration,epoch,l1_aux,lr,AP,APs", "train,1,0,0.123765,2.5e-07,,", "eval,1,1,,,0.5,"]
    assert (tmp_path / "metrics.csv").read_text().splitlines() == lines


def started(folder: Path, iteration: int = 0) -> TensorBoardLogger:
    board = TensorBoardLogger()
    board.on_start(Run("nano", folder, {}, ["circle"], iteration, 9, [], False))
    return board


def test_tensorboard_shows_earlier_rows_where_metrics_csv_numbers_them_anew(tmp_path: Path) -> None:
    board = started(tmp_path)
    for step in (1, 2):
        board.on_step(step, 0, {"loss": step / 2})
    rows = [{"kind": "train", "iteration": "3", "epoch": "0", "loss": "0.5", "AP": ""}]
    rows.append({"kind": "eval", "iteration": "6", "epoch": "0", "loss": "", "AP": "0.25"})
    resumed = TensorBoardLogger()
    resumed.on_start(Run("nano", tmp_path, {}, ["circle"], 6, 9, rows, True))
    resumed.on_step(7, 0, {"loss": 0.125})
    assert scalars(tmp_path / "tensorboard") == {"train/loss": [(3, 0.5), (7, 0.125)], "eval/AP": [(6, 0.25)]}


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # of the writer
def test_tensorboard_is_switched_off_by_a_full_disk(tmp_path: Path) -> None:
    warnings: list[str] = []
    listeners = Listeners({"tensorboard": started(tmp_path)}, [], warnings.append)
    listeners.tell("on_step", 1, 0, {"loss": 3.0})
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = next((tmp_path / "tensorboard").iterdir()).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, before[1]))
    try:
        for _ in range(10):
            listeners.tell("on_step", 2, 0, {"loss": 2.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    (warning,) = warnings
    assert "tensorboard" in warning and "File too large" in warning and not listeners.loggers
    started(tmp_path, 2).on_step(3, 0, {"loss": 0.5})  # a run that goes on from step 2
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [(1, 3.0), (3, 0.5)]


def test_a_folder_that_somebody_moved_away_is_made_again(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "run", None)
    log.write("train", 1, 0, {"loss": 3.0})
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    log.write("train", 2, 0, {"loss": 2.0})
    log.write("train", 3, 0, {"loss": 1.0})
    assert [row["iteration"] for row in read_rows(tmp_path / "run" / "metrics.csv")] == ["2", "3"]


def test_tensorboard_shows_images_of_every_evaluation(tmp_path: Path) -> None:
    data = tiny_data(tmp_path / "shapes")
    updates = [
        "train.max_iterations=6",
        "train.eval_every=1",
        "data.augment.crop_prob=0",
        "train.loggers=[tensorboard]",
    ]
    trainer = Trainer(tiny_config(data, *updates), tmp_path / "run", torch.device("cpu"))
    trainer.run()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert events.Tags()["images"] == ["train_batch", *(f"images/{number}" for number in range(4))]
    assert [each.step for each in events.Images("images/0")] == [3, 6]
    source, image = trainer.val_loader.source, events.Images("images/0")[0]
    assert (image.width, image.height) == (SIDE, SIDE)
    box, found = source.targets(0)[0][0].tolist(), {"image_id": source.info(0).image_id, "score": 0.9}
    found |= {"category_id": trainer.classes.category_ids[0], "bbox": [1.0, 2.0, 30.0, 20.0]}
    drawn = next(album(source, trainer.classes, [found]))
    zoom = SIDE / source.info(0).width
    assert drawn.getpixel((round(zoom * box[0]), round(zoom * (box[1] + box[3]) / 2))) == OBJECT
    assert drawn.getpixel((round(zoom), round(zoom * 12))) == FOUND


def test_files_of_before_go_on_with_the_columns_of_today(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text(OLD)
    log = MetricsLog(tmp_path, 3, 3)
    log.write("eval", 6, 2, {"AP": 0.5, "APs": None})
    header, *rows = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == NEW
    assert rows == ["train,3,0,0.1237652450799942,2.5,1.5,0.5,0.25,40.5,16.0,0.002,,", "eval,3,1" + "," * 9 + "0.25,",
                    "eval,6,2" + "," * 9 + "0.5,"]  # fmt: skip


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_every_column_is_documented(tmp_path: Path, precision: str) -> None:
    cfg = tiny_config(tiny_data(tmp_path / "shapes"), "train.max_iterations=1", f"train.precision={precision}")
    Trainer(cfg, tmp_path / "run", torch.device("cpu")).run()
    section = DOCS.read_text(encoding="utf-8").partition("## The run folder")[2].partition("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    for suffix in ("_aux", "_dn", "_aux_dn", "_o2m", "_aux_o2m"):
        documented |= {name + suffix for name in ("class", "l1", "giou")}
    columns = set(read_rows(tmp_path / "run" / "metrics.csv")[0])
    assert columns <= documented and max(map(len, columns)) <= len("class_aux_o2m")


def test_the_validation_axis_follows_the_data(tmp_path: Path) -> None:
    rows = [{"kind": "eval", "iteration": str(i), "AP": str(0.601 + i / 1000), "AP50": "", "AR100": "0.61"}
            for i in range(3)]  # fmt: skip
    axis = curves(rows).axes[2]
    low, high = axis.get_ylim()
    assert 0.59 < low < 0.601 and 0.61 < high < 0.62
    assert [line.get_label() for line in axis.lines] == ["AP", "AR100"]


def test_a_single_point_is_visible(tmp_path: Path) -> None:
    rows = [{"kind": "train", "iteration": "1", "loss": "40", "lr": "1e-4"},
            {"kind": "eval", "iteration": "1", "AP": "0.004"}]  # fmt: skip
    axes = curves(rows).axes
    assert [axis.lines[0].get_marker() for axis in axes] == ["o"] * 3
    low, high = axes[2].get_ylim()
    assert low < 0.004 < high < 0.1


def test_no_rows_draw_empty_axes(tmp_path: Path) -> None:
    draw_curves(tmp_path / "metrics.csv", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:4] == b"\x89PNG"
