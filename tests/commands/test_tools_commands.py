"""The commands as a user meets them: results, one-line errors, exit codes, signals."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_helpers import NANO, NUM_TRAIN, NUM_VAL, tiny_updates
from plain_kernels import OurOperators

from rtdetr import cli
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.ops.compiled import WHY_NOT
from rtdetr.weights.checkpoint import load_checkpoint, save_checkpoint

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    updates = [*tiny_updates(data), "train.epochs=1"]
    assert cli.main(["train", "-c", str(NANO), "-u", *updates, "--output-dir", str(folder), "--device", "cpu"]) == 0
    return folder


def refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> str:
    """The one line on stderr of a command that exits with 2."""
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err.strip()
    assert text.startswith("error: ") and "\n" not in text
    return text


def test_train_leaves_checkpoints_metrics_and_curves(trained: Path) -> None:
    for name in ("best.pth", "last.pth", "config.yml", "metrics.csv", "curves.png"):
        assert (trained / name).stat().st_size > 0, name
    assert load_checkpoint(trained / "last.pth")["classes"]["category_ids"] == [2, 3, 5, 7, 11]


def test_eval_needs_only_the_checkpoint(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = []
    for evaluator in ("faster-coco-eval", "pycocotools"):
        saved = tmp_path / f"{evaluator}.json"
        command = ["eval", "-w", str(trained / "best.pth"), "--evaluator", evaluator, "--save-json", str(saved)]
        assert cli.main([*command, "--device", "cpu"]) == 0
        tables.append(capsys.readouterr().out)
        detections = json.loads(saved.read_text())
        truth = json.loads((data / "annotations" / "instances_val.json").read_text())
        assert {d["image_id"] for d in detections} == {each["id"] for each in truth["images"]}
        assert {d["category_id"] for d in detections} <= {each["id"] for each in truth["categories"]}
    assert tables[0] == tables[1] and "AP  IoU .50:.95" in tables[0] and "triangle" in tables[0]
    logged = read_rows(trained / "metrics.csv")[-1]
    assert f"{float(logged['AP']):7.4f}" in tables[0].splitlines()[1]


def test_eval_takes_updates(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["eval", "-w", str(trained / "best.pth"), "--save-json", str(tmp_path / "d.json"), "--device", "cpu"]
    assert cli.main([*command, "-u", "eval.max_detections=3"]) == 0
    capsys.readouterr()
    assert len(json.loads((tmp_path / "d.json").read_text())) == 3 * NUM_VAL
    assert "eval.max_detections" in refused(capsys, [*command, "-u", "eval.max_detection=3"])


def test_eval_by_plain_kernels(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kernels in ("auto", "plain"):
        with OurOperators() as called:
            assert cli.main(["eval", str(trained / "best.pth"), "--kernels", kernels, "--device", "cpu"]) == 0
        assert (not called.names) == (kernels == "plain" or WHY_NOT["cpu"] is not None)
    capsys.readouterr()
    assert "--kernels is for checkpoints" in refused(capsys, ["eval", "model.onnx", "--kernels", "plain"])


def test_predict_draws_and_lists(trained: Path, data: Path, tmp_path: Path) -> None:
    val, one = data / "val", data / "train" / "000000.jpg"
    command = ["predict", "-w", str(trained / "best.pth"), "--output-dir", str(tmp_path), "--threshold", "0"]
    command += ["--device", "cpu"]
    assert cli.main([*command, str(val), str(one), str(data / "train" / "00000[12].jpg")]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == NUM_VAL + 3
    assert len({each["annotated"] for each in results}) == NUM_VAL + 3  # equal names do not overwrite each other
    assert all(Path(each["annotated"]).stat().st_size > 0 for each in results)
    names = {2: "circle", 3: "square", 5: "triangle", 7: "star", 11: "cross"}
    for each in results:
        assert each["detections"] and (each["width"], each["height"]) == (96, 96)
        assert all(names[d["category_id"]] == d["name"] for d in each["detections"])


def test_a_misspelt_key_names_file_path_and_nearest_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = refused(capsys, ["train", "-c", str(NANO), "-u", "train.epoch=3"])
    assert "-u" in text and "train.epoch" in text and "train.epochs" in text
    config = tmp_path / "mine.yml"
    config.write_text("optimizer: {learning_rate: 1}\n")
    text = refused(capsys, ["train", "-c", str(config)])
    assert "mine.yml" in text and "optimizer.learning_rate" in text and "`optimizer." in text


def test_missing_data_is_one_line(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "-c", str(NANO), "--output-dir", str(tmp_path), "--device", "cpu", "-u", *tiny_updates(data)]
    text = refused(capsys, [*command, "data.train.annotations=nowhere/a.json"])
    assert "nowhere/a.json: no such annotation file" in text
    text = refused(capsys, [*command, "data.val.images=nowhere/val"])
    assert "nowhere/val: no such image folder" in text


def test_wrong_weights_are_one_line(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_cpu = ["--device", "cpu"]
    assert "no such weight file" in refused(capsys, ["eval", "-w", "nowhere.pth", *on_cpu])
    assert "not a checkpoint" in refused(capsys, ["predict", "-w", str(NANO), str(data / "val"), *on_cpu])
    content = load_checkpoint(trained / "best.pth")
    save_checkpoint(tmp_path / "other.pth", {**content, "model": {"fc.weight": next(iter(content["model"].values()))}})
    text = refused(capsys, ["eval", "-w", str(tmp_path / "other.pth"), *on_cpu])
    assert "weights of another model" in text and "something else than RT-DETRv3" in text
    tuned = ["train", "-c", str(NANO), "-t", str(tmp_path / "other.pth"), *on_cpu, "-u", *tiny_updates(data)]
    assert "none of its 1 entries fits" in refused(capsys, tuned)
    wider = ["train", "-r", str(trained / "last.pth"), *on_cpu, "-u", "model.decoder.num_layers=3"]
    assert "3 decoder layers" in refused(capsys, wider)


def test_other_misuse_is_one_line(
    trained: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["predict", "-w", str(trained / "best.pth")]
    assert "no image found" in refused(capsys, [*command, str(tmp_path), "--device", "cpu"])
    assert "expected cpu, cuda" in refused(capsys, [*command, str(data / "val"), "--device", "tpu9x"])
    assert cli.main(["fly"]) == 2 and cli.main([]) == 2
    assert cli.main(["--help"]) == 0
    with pytest.raises(SystemExit) as exit_code:
        cli.main(["train", "-r", "a.pth", "-t", "b.pth"])
    assert exit_code.value.code == 2


def test_sigterm_saves_and_resumes(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`tools/train.py` in a process of its own, stopped from outside, then resumed without -c."""
    updates = [*tiny_updates(data), "train.epochs=1000"]
    command = [sys.executable, str(ROOT / "tools" / "train.py"), "-c", str(NANO), "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--output-dir", str(tmp_path), "-u", *updates],
        cwd=tmp_path, env={"PATH": "", "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len(read_rows(tmp_path / "metrics.csv")) < 2:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert "stopped by signal 15" in errors and "-r " in errors and "Traceback" not in errors
    rows = read_rows(tmp_path / "metrics.csv")
    state = load_checkpoint(tmp_path / "last.pth")["training"]
    steps_per_epoch = NUM_TRAIN // 4
    assert state["iteration"] == len(rows) == state["epoch"] * steps_per_epoch + state["pictures"] // 4
    stop = f"train.max_iterations={state['iteration'] + 2}"
    assert cli.main(["train", "-r", str(tmp_path / "last.pth"), "-u", stop, "--device", "cpu"]) == 0
    rows = read_rows(tmp_path / "metrics.csv")
    assert [row["kind"] for row in rows[-3:]] == ["train", "train", "eval"]
    assert [int(row["iteration"]) for row in rows[:-1]] == list(range(1, state["iteration"] + 3))


def test_tools_are_thin() -> None:
    commands = {"train", "eval", "demo", "convert", "doctor", "benchmark"}
    sizes = {tool.stem: len(tool.read_text(encoding="utf-8").splitlines()) for tool in (ROOT / "tools").glob("*.py")}
    assert commands <= sizes.keys()
    assert {name: size for name, size in sizes.items() if size > (20 if name in commands else 120)} == {}
