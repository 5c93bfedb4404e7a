"""Going on under other settings: where a run is follows from the images it has seen, not from steps of old size."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_helpers import NUM_TRAIN, tiny_config
from messages import message

from rtdetr import cli
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.engine.trainer import Trainer
from rtdetr.weights.checkpoint import CheckpointError, load_checkpoint, save_checkpoint

CPU = torch.device("cpu")
EPOCHS = 4
SEEN = {6: (2, 0), 4: (1, 4), 5: (1, 8)}  # epoch and images of it after so many steps of 4 images


@pytest.fixture(scope="module")
def stopped(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """last.pth after so many steps of a run of four epochs of three steps."""
    found = {}
    for steps in SEEN:
        folder = tmp_path_factory.mktemp(f"after{steps}")
        trainer = Trainer(tiny_config(data, f"train.epochs={EPOCHS}"), folder, CPU)
        train_step = trainer.train_step

        def counted(batches: list[Any], trainer: Trainer = trainer, step: Any = train_step, last: int = steps) -> Any:
            trainer.signals.received = 15 if trainer.state.iteration == last - 1 else None
            return step(batches)

        trainer.train_step = counted  # type: ignore[method-assign]
        assert trainer.run() == 15
        found[steps] = folder / "last.pth"
    return found


def go_on(path: Path, folder: Path, data: Path, *updates: str) -> list[tuple[int, int, list[int]]]:
    """Finishes the run; (iteration, epoch, ids of images) of each of its steps."""
    metrics = path.parent / "metrics.csv"
    (folder / "metrics.csv").write_bytes(metrics.read_bytes())
    trainer = Trainer(tiny_config(data, f"train.epochs={EPOCHS}", *updates), folder, CPU, resume=path)
    train_step = trainer.train_step
    steps: list[tuple[int, int, list[int]]] = []

    def noted(batches: list[Any]) -> Any:
        ids = [info.image_id for batch in batches for info in batch.infos]
        steps.append((trainer.state.iteration, trainer.state.epoch, ids))
        return train_step(batches)

    trainer.train_step = noted  # type: ignore[method-assign]
    assert trainer.run() is None
    return steps


def test_each_changed_setting_is_printed(
    stopped: dict[int, Path], data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, epochs = stopped[6], f"train.epochs={EPOCHS}"
    Trainer(tiny_config(data, epochs), tmp_path, CPU, resume=path)
    assert capsys.readouterr().out.count(str(path)) == 0
    Trainer(tiny_config(data, epochs, "optimizer.lr=3e-4", "train.seed=5"), tmp_path, CPU, resume=path)
    lr = tiny_config(data).optimizer.lr
    assert f"{path}: optimizer.lr {lr} -> 0.0003, train.seed 0 -> 5\n" in capsys.readouterr().out
    Trainer(tiny_config(data, "train.epochs=1"), tmp_path, CPU, resume=path)  # which is over
    assert f"{path}: train.epochs {EPOCHS} -> 1\n" in capsys.readouterr().out


def test_other_classes_under_the_same_ids_are_refused(stopped: dict[int, Path], data: Path, tmp_path: Path) -> None:
    renamed = shutil.copytree(data, tmp_path / "renamed")
    for file in (renamed / "annotations").iterdir():
        content = json.loads(file.read_text())
        first, second = content["categories"][:2]
        first["name"], second["name"] = second["name"], first["name"]
        file.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message("other classes than the data's", first["name"], second["name"])):
        Trainer(tiny_config(renamed, f"train.epochs={EPOCHS}"), tmp_path, CPU, resume=stopped[6])


@pytest.mark.parametrize("after", SEEN)
@pytest.mark.parametrize(
    ("updates", "global_batch", "step_size"),
    [
        (["train.accumulate=2"], 4, 8),
        (["data.train_batch_size=8"], 8, 8),
        (["data.train_batch_size=2"], 2, 2),
        (["data.train_batch_size=2", "train.accumulate=4"], 2, 8),
    ],
)
def test_it_trains_what_is_left_and_ends_with_the_last_epoch(
    stopped: dict[int, Path], data: Path, tmp_path: Path, after: int, updates: list[str], global_batch: int,
    step_size: int, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    steps = go_on(stopped[after], tmp_path, data, *updates)
    said = capsys.readouterr().out
    epoch, images = SEEN[after]
    usable = NUM_TRAIN // global_batch * global_batch
    left = max(usable - images // global_batch * global_batch, 0) + (EPOCHS - epoch - 1) * usable
    assert sum(len(ids) for _, _, ids in steps) == left
    assert {epoch for _, epoch, _ in steps} <= set(range(EPOCHS)) and steps[-1][1] == EPOCHS - 1
    per_epoch = -(-usable // step_size)
    assert [iteration for iteration, _, _ in steps] == list(range(steps[0][0], EPOCHS * per_epoch))
    state = load_checkpoint(tmp_path / "last.pth")["training"]
    assert (state["epoch"], state["pictures"], state["iteration"]) == (EPOCHS, 0, EPOCHS * per_epoch)
    assert all(f"{update.partition('=')[0]} " in said for update in updates), said
    assert f"at iteration {steps[0][0]} of {EPOCHS * per_epoch}" in said
    rows = [int(row["iteration"]) for row in read_rows(tmp_path / "metrics.csv")]
    assert rows == sorted(rows) and rows[-1] == EPOCHS * per_epoch


def test_the_rest_of_an_epoch_is_the_images_it_has_not_seen(
    stopped: dict[int, Path], data: Path, tmp_path: Path
) -> None:
    whole = Trainer(tiny_config(data), tmp_path, CPU).train_loader.stream(1)
    seen = {info.image_id for info in next(whole).infos}
    steps = go_on(stopped[4], tmp_path, data, "data.train_batch_size=2")
    rest = {i for _, epoch, ids in steps if epoch == 1 for i in ids}
    assert len(rest) == NUM_TRAIN - 4 and not rest & seen


def test_another_number_of_processes(stopped: dict[int, Path], data: Path, tmp_path: Path) -> None:
    """Two processes with batches of two are where one with a batch of four is."""
    content = load_checkpoint(stopped[4])
    content["training"]["rng"] *= 2
    content["config"]["data"]["train_batch_size"] = 2
    save_checkpoint(tmp_path / "last.pth", content)
    trainer = Trainer(tiny_config(data, f"train.epochs={EPOCHS}"), tmp_path, CPU, resume=tmp_path / "last.pth")
    assert (trainer.state.epoch, trainer.state.start_batch, trainer.state.iteration) == (1, 1, 4)


def test_fewer_images_than_seen_end_the_epoch(stopped: dict[int, Path], data: Path, tmp_path: Path) -> None:
    file = data / "annotations" / "instances_train.json"
    content = json.loads(file.read_text())
    content["images"] = content["images"][:6]
    kept = {image["id"] for image in content["images"]}
    content["annotations"] = [box for box in content["annotations"] if box["image_id"] in kept]
    (tmp_path / "six.json").write_text(json.dumps(content))
    steps = go_on(stopped[5], tmp_path, data, f"data.train.annotations={tmp_path}/six.json", "train.eval_every=2")
    assert [(iteration, epoch) for iteration, epoch, _ in steps] == [(2, 2), (3, 3)]
    kinds = [row["kind"] for row in read_rows(tmp_path / "metrics.csv")]
    assert kinds[-4:] == ["eval", "train", "train", "eval"]


def test_an_epoch_that_ends_so_is_evaluated_as_others_are(stopped: dict[int, Path], data: Path, tmp_path: Path) -> None:
    """After five steps, 4 of 12 images are left, too few for a batch of 8."""
    for every, due in ((0, False), (2, True), (3, False)):
        updates = [f"train.epochs={EPOCHS}", "data.train_batch_size=8", f"train.eval_every={every}"]
        state = Trainer(tiny_config(data, *updates), tmp_path, CPU, resume=stopped[5]).state
        assert (state.epoch, state.start_batch, state.evaluation_due) == (2, 0, due)


def test_checkpoints_that_count_batches_still_load(stopped: dict[int, Path], data: Path, tmp_path: Path) -> None:
    results = []
    for old in (False, True):
        folder = tmp_path / str(old)
        content = load_checkpoint(stopped[4])
        if old:
            del content["training"]["pictures"], content["training"]["num_pictures"]
            content["training"] |= {"start_batch": 1, "batch_size": 4}
        save_checkpoint(folder / "before.pth", content)
        (folder / "metrics.csv").write_bytes((stopped[4].parent / "metrics.csv").read_bytes())
        cfg = tiny_config(data, f"train.epochs={EPOCHS}")
        Trainer(cfg, folder, CPU, resume=folder / "before.pth").run()
        results.append(load_checkpoint(folder / "last.pth")["model"])
    assert all(torch.equal(results[1][name], tensor) for name, tensor in results[0].items())


@pytest.mark.parametrize("limit", ["epochs=2", "max_iterations=2"])
def test_a_finished_run_says_so_and_touches_nothing(
    data: Path, tmp_path: Path, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Trainer(tiny_config(data, f"train.{limit}"), tmp_path, CPU).run()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert cli.main(["train", "-r", str(tmp_path / "last.pth"), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    steps = {"epochs=2": 6, "max_iterations=2": 2}[limit]
    sentence = f"finished at iteration {steps} of {steps}; raise train.{limit.partition('=')[0]} to continue\n"
    assert said.out.startswith(f"{sentence}best AP ") and len(said.out.splitlines()) == 4 and said.err == ""
    elsewhere = ["--output-dir", str(tmp_path / "elsewhere")]
    assert cli.main(["train", "-r", str(tmp_path / "last.pth"), "--device", "cpu", *elsewhere]) == 0
    assert f"next: rtdetr predict {tmp_path / 'best.pth'} " in capsys.readouterr().out
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("torn", ["train,7", "train,", "tr", "train,6,2,44.1"])
def test_a_torn_last_row_of_the_metrics_is_dropped(
    stopped: dict[int, Path], data: Path, tmp_path: Path, torn: str
) -> None:
    folder = stopped[6].parent
    (tmp_path / "metrics.csv").write_bytes((folder / "metrics.csv").read_bytes() + torn.encode())
    trainer = Trainer(tiny_config(data, "train.epochs=3"), tmp_path, CPU, resume=stopped[6])
    trainer.log.open()
    trainer.log.close()
    assert (tmp_path / "metrics.csv").read_bytes() == (folder / "metrics.csv").read_bytes()


@pytest.mark.parametrize(
    "content",
    [
        "kind;iteration;epoch;loss\ntrain;1;0;43,5\n",
        "kind,iteration,epoch\ntrain,,0\n",
        "iteration,loss\n1,2\n",
        "\udcff\n",
    ],
)
def test_metrics_that_somebody_changed_stand_in_no_ones_way(
    stopped: dict[int, Path], data: Path, tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by a spreadsheet."""
    (tmp_path / "metrics.csv").write_bytes(content.encode(errors="surrogateescape"))
    trainer = Trainer(tiny_config(data, "train.epochs=3"), tmp_path, CPU, resume=stopped[6])
    capsys.readouterr()
    trainer.log.open()
    trainer.log.close()
    said = (
        f"{tmp_path / 'metrics.csv'}: was not written by a run; renamed to metrics-other.csv, and a new one started\n"
    )
    assert said in capsys.readouterr().out
    assert (tmp_path / "metrics-other.csv").read_bytes() == content.encode(errors="surrogateescape")
    assert read_rows(tmp_path / "metrics.csv") == []


def test_an_evaluation_that_is_done_again_has_one_row(data: Path, tmp_path: Path) -> None:
    """The run ends between the row and the state that knows of it."""
    cfg = tiny_config(data, "train.epochs=1")
    trainer = Trainer(cfg, tmp_path, CPU)
    save = trainer.saver.save

    def dying(background: bool = False, final: bool = False) -> None:
        if not trainer.state.evaluation_due:
            raise InterruptedError
        save(background, final)

    trainer.saver.save = dying  # type: ignore[method-assign]
    with pytest.raises(InterruptedError):
        trainer.run()
    assert Trainer(cfg, tmp_path, CPU, resume=tmp_path / "last.pth").run() is None
    rows = [(row["kind"], row["iteration"]) for row in read_rows(tmp_path / "metrics.csv")]
    assert rows == [("train", "1"), ("train", "2"), ("train", "3"), ("eval", "3")]
