"""Wrong and right commands: exit code, what the message must contain, and that nothing else changes on disk.

Each row runs in a folder of its own: what write_folder of command_cases.py makes, and in-images, a link to images/.
"""

from __future__ import annotations

import csv
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_cases import RENUMBERED, Row, check, run
from messages import message
from PIL import Image

import rtdetr
from rtdetr import cli, config_file
from rtdetr.commands import benchmark
from rtdetr.config import find_config

ROOT = Path(__file__).resolve().parents[2]


PREDICT = "predict -w model.pth --device cpu"
ALL_FOUND = "predict -w model.pth --device cpu --threshold 0"
ALL_FORMATS = ("a.jpg", "results.json", "coco.json", "classes.txt", "labels/a.txt", "detections.csv")
TABLE = {
    # the command itself
    "help": Row(
        "--help",
        0,
        ("train ", "eval ", "predict ", "doctor ", "convert ", "benchmark ", "detect objects in images and videos"),
    ),
    "version": Row("--version", 0, (rtdetr.__version__,)),
    "nothing": Row("", 2, ("usage: rtdetr COMMAND", "predict ")),
    "misspelt": Row("trian -c x.yml", 2, (message("not a command", "trian", "rtdetr train"),)),
    "formerly demo": Row("demo images", 2, (message("did you mean", "`rtdetr predict`"),)),
    "formerly val": Row("val x", 2, (message("did you mean", "`rtdetr eval`"),)),
    "detect, as elsewhere": Row("detect x", 2, (message("did you mean", "`rtdetr predict`"),)),
    "conf": Row(f"{PREDICT} images --conf 0.3", 2, (message("did you mean", "--conf", "--threshold"),)),
    "conf is not config": Row("eval model.pth --conf=.3", 2, (message("did you mean", "--threshold"),)),
    "save txt": Row(f"{PREDICT} images --save-txt", 2, (message("did you mean", "--format yolo"),)),
    "epochs": Row("train shapes --epochs 3", 2, (message("did you mean", "-u train.epochs=N"),)),
    "imgsz": Row("train shapes -u imgsz=640", 2, (message("unknown key", "-u", "imgsz", "data.image_size"),)),
    "short key": Row("train shapes -u epochs=many", 2, ("train.epochs must be a whole number",)),
    "no data": Row("train", 2, ("-c CONFIG or DATA is needed",)),
    "weights twice": Row("eval model.pth -w model.pth", 2, ("not allowed with",)),
    "unlike any": Row("fly", 2, (message("not a command", "fly", "train, eval, predict"),)),
    "unknown option": Row(f"{PREDICT} images --treshold 1", 2, ("--treshold", "did you mean --threshold?", "--help")),
    "no weights": Row("predict images", 2, (message("expected", "rtdetr predict best.pth images"),)),
    "weights first": Row(
        "predict model.pth images/a.jpg --device cpu --format coco,yolo --format csv --output-dir new",
        0,
        ("1 image, ",),
        tuple(f"new/{each}" for each in ALL_FORMATS),
    ),
    "weights first, none there": Row("predict bset.pth images", 2, (message("no such weights", "bset.pth"),)),
    "weights by option, too": Row(
        f"{PREDICT} model.pth", 1, ("1 of 1 file could not be read",), ("output/predict/results.json",)
    ),
    "weights and nothing": Row("predict model.pth", 2, ("expected a SOURCE",)),
    "formats": Row(f"{PREDICT} images --format coco,txt", 2, (message("expected", "coco", "yolo", "csv", "coco,csv"),)),
    "keyword": Row("predict model=model.pth source=images", 2, (message("not an argument", "model=model.pth"),)),
    "GPUs": Row("eval model.pth --device 0,1", 2, (message("expected", "device 0,1", "cpu", "cuda", "cuda:N"),)),
    "data of nobody": Row(
        "train -c rtdetrv3_r18vd_6x_coco --device cpu", 2, ("error: --data DATA is needed", "datasets/coco/annotations")
    ),
    # nothing of the user's is lost
    "own folder": Row(f"{PREDICT} images --output-dir images", 2, (message("would be replaced", "images/a.jpg"),)),
    "own folder, by force": Row(f"{PREDICT} images --output-dir images --overwrite", 2, ("images/a.jpg",)),
    "linked folder": Row(
        f"{PREDICT} images --output-dir in-images --overwrite", 2, (message("would be replaced", "in-images/a.jpg"),)
    ),
    "hard link": Row(
        f"{PREDICT} images/b.png other/a.jpg --output-dir hard --overwrite",
        2,
        (message("would be replaced", "hard/a.jpg"),),
    ),
    "weights as result": Row(
        f"{PREDICT} images/a.jpg --output-dir odd --overwrite", 2, (message("would be replaced", "odd/a.jpg"),)
    ),
    "taken results": Row(
        f"{PREDICT} images/b.png --output-dir taken", 2, (message("already", "taken/results.json"), "--overwrite")
    ),
    "taken image": Row(f"{PREDICT} images/a.jpg --output-dir other", 2, (message("already", "other/a.jpg"),)),
    "taken coco": Row(
        f"{PREDICT} images/b.png --output-dir part --format coco", 2, (message("already", "part/coco.json"),)
    ),
    "taken label": Row(
        f"{PREDICT} images/a.jpg --output-dir part --format yolo", 2, (message("already", "part/labels/a.txt"),)
    ),
    "overwrite": Row(
        f"{PREDICT} images/a.jpg --output-dir taken --overwrite",
        0,
        ("taken/results.json",),
        ("taken/results.json", "taken/a.jpg"),
    ),
    "taken json": Row(
        "eval -w model.pth --save-json taken/results.json", 2, (message("already", "taken/results.json"),)
    ),
    "json over what is found in a folder": Row(
        "eval -w model.pth --data shapes --save-json shapes/annotations/instances_val.json --overwrite --device cpu",
        2,
        (message("would be replaced", "shapes/annotations/instances_val.json"),),
    ),
    "json is a folder": Row("eval -w model.pth --save-json taken", 2, ("taken: is a folder",)),
    "json is the weights": Row(
        "eval -w model.pth --save-json model.pth --overwrite", 2, (message("would be replaced", "model.pth"),)
    ),
    "json is the truth": Row(
        "eval -w model.pth --save-json shapes/annotations/instances_val.json --overwrite",
        2,
        (message("would be replaced", "instances_val.json"),),
    ),
    "json": Row(
        "eval -w model.pth --save-json new/d.json --device cpu",
        0,
        ("instances_val.json: 4 images", "AP  IoU .50:.95", "4/4"),
        ("new/d.json",),
    ),
    # annotations of another kind, or with other ids
    "other ids": Row(
        f"{RENUMBERED} --save-json new/d.json", 2, ("ids unknown to the model: 0 ('Cross'), ", "--match-classes name")
    ),
    "matched by name": Row(
        f"{RENUMBERED} --match-classes name --save-json new/d.json",
        0,
        ("4 images", "Cross         0 "),
        ("new/d.json",),
    ),
    "other names": Row(
        "eval -w model.pth -u data.val.annotations=shapes/other.json --match-classes name",
        2,
        (message("unknown class names", "other.json"), "8 ('dog')", "'circle', 'square'"),
    ),
    "matched by nothing": Row("eval -w model.pth --match-classes colour", 2, ("choice: 'colour'",)),
    "a folder as annotations": Row(
        "eval -w model.pth -u data.val.annotations=other",
        2,
        (message("no annotations", "other", "COCO", "LVIS"),),
    ),
    "text as annotations": Row(
        "eval -w model.pth -u data.val.annotations=notes.txt", 2, ("notes.txt: not valid JSON",)
    ),
    "images elsewhere": Row(
        "eval -w model.pth -u data.val.images=shapes",
        2,
        ("4 of the 4 in", "one of that name is in shapes/val; is that the image folder?"),
    ),
    "convert onto a file": Row("convert notes.txt -o model.pth", 2, (message("already", "model.pth"),)),
    "convert onto itself": Row(
        "convert model.pth -o model.pth --overwrite", 2, (message("would be replaced", "model.pth"),)
    ),
    # places that cannot be written
    "predict nowhere": Row(
        f"{PREDICT} images --output-dir notes.txt/out", 2, (message("nothing written there", "notes.txt/out"),)
    ),
    "eval nowhere": Row(
        "eval -w model.pth --save-json notes.txt/d.json", 2, (message("nothing written there", "notes.txt"),)
    ),
    "train nowhere": Row(
        "train -c rtdetrv3_nano_shapes --output-dir notes.txt/run",
        2,
        (message("nothing written there", "notes.txt/run"),),
    ),
    "train into a file": Row(
        "train -c rtdetrv3_nano_shapes --output-dir notes.txt",
        2,
        (message("nothing written there", "notes.txt"), "it is a file"),
    ),
    "train where nobody can write": Row(
        "train -c rtdetrv3_nano_shapes --output-dir /proc/run", 2, (message("nothing written there", "/proc/run"),)
    ),
    "train beside a config": Row(
        "train -c rtdetrv3_nano_shapes --output-dir taken",
        2,
        (message("already", "taken", "config.yml", "--output-dir"), "--overwrite"),
    ),
    "doctor on a sound set": Row(
        "doctor shapes/annotations/instances_val.json --json new/d.json", 0, ("sound",), ("new/d.json",)
    ),
    "doctor nowhere": Row(
        "doctor shapes/annotations/instances_val.json --fix notes.txt/x",
        2,
        (message("nothing written there", "notes.txt"),),
    ),
    "doctor onto a file": Row("doctor shapes/annotations/other.json --fix taken", 2, (message("already", "taken"),)),
    "doctor onto its source": Row(
        "doctor shapes/other.json --json shapes/other.json --overwrite",
        2,
        (message("would be replaced", "other.json"),),
    ),
    "convert nowhere": Row(
        "convert model.pth -o notes.txt/out.pth", 2, (message("nothing written there", "notes.txt"),)
    ),
    "refused at the model": Row("predict -w notes.txt images --output-dir new/er", 2, ("notes.txt",)),
    # sources
    "one bad image": Row(
        f"{ALL_FOUND} mixed --output-dir new",
        1,
        (
            message("not an image", "mixed/cut.jpg"),
            message("not an image", "mixed/bomb.png"),
            message("not an image", "mixed/empty.jpg"),
            message("not an image", "mixed/page.jpg"),
            message("not an image", "mixed/x.jpg", "folder"),
            "5 of 7 files could not be read",
            "left out: 1 file without",
        ),
        ("new/results.json", "new/good.jpg", "new/good_1.jpg"),
    ),
    "no image": Row(f"{PREDICT} deep --output-dir new", 2, ("deep: no image found", "2 sub-folders", "--recursive")),
    "recursive": Row(
        f"{PREDICT} deep --output-dir new --recursive",
        0,
        ("2 images",),
        ("new/results.json", "new/fa/a.jpg", "new/er/a.jpg"),
    ),
    "same names": Row(
        f"{PREDICT} images deep/fa/a.png --output-dir new",
        0,
        ("3 images",),
        ("new/results.json", "new/a.jpg", "new/b.jpg", "new/a_1.jpg"),
    ),
    # settings
    "threshold 5": Row(f"{PREDICT} images --threshold 5", 2, (message("expected", "--threshold", "0 to 1", "5"),)),
    "threshold nan": Row(f"{PREDICT} images --threshold nan", 2, ("from 0 to 1, got nan",)),
    "threshold word": Row(f"{PREDICT} images --threshold high", 2, ("from 0 to 1, got high",)),
    "format": Row(f"{PREDICT} images --format voc", 2, (message("expected", "--format", "coco", "yolo", "csv"),)),
    "nothing found": Row(
        f"{PREDICT} images/a.jpg --threshold 1",
        0,
        (
            "1 image, 0 objects",
            message("nothing reached the threshold", "1"),
            "--threshold sets a lower one",
        ),
        ("output/predict/results.json", "output/predict/a.jpg"),
    ),
    "all formats": Row(
        f"{ALL_FOUND} images/a.jpg --output-dir new --format coco --format yolo --format csv",
        0,
        ("s per image", "1/1"),
        ("new/results.json", "new/a.jpg", "new/coco.json", "new/classes.txt", "new/labels/a.txt", "new/detections.csv"),
    ),
    # lists, slices, videos
    "no source": Row("predict -w model.pth", 2, ("expected a SOURCE", "or a --manifest, got none")),
    "source and list": Row(f"{PREDICT} images --manifest notes.txt", 2, ("or a --manifest, not both",)),
    "resume what": Row("predict -w model.pth --manifest notes.txt --resume", 2, ("--resume needs --manifest and",)),
    "list as video": Row("predict -w model.pth --manifest notes.txt --track", 2, ("do not go with --manifest",)),
    "no list": Row("predict -w model.pth --manifest gone.txt", 2, (message("not an image", "gone.txt"),)),
    "results that are none": Row(
        "predict -w model.pth --manifest notes.txt --output-dir taken --resume",
        2,
        (message("no result", "taken/results.jsonl", "line 1"),),
    ),
    "taken list": Row(
        "predict -w model.pth --manifest notes.txt --output-dir taken", 2, (message("already", "taken/results.jsonl"),)
    ),
    "list": Row(
        f"{ALL_FOUND} --manifest list.txt --output-dir new --slices 64",
        1,
        (message("not an image", "mixed/page.jpg"), "1 of 2 files could not be read", "2/2"),
        ("new/results.jsonl",),
    ),
    "slices word": Row(f"{PREDICT} images --slices many", 2, ("ROWSxCOLUMNS up to 64, got 'many'",)),
    "slices of nothing": Row(f"{PREDICT} images --slices 0x2", 2, ("ROWSxCOLUMNS up to 64, got '0x2'",)),
    "tiny slices": Row(f"{PREDICT} images --slices 3", 2, ("from 16 pixels, got 3",)),
    "overlap": Row(f"{PREDICT} images --overlap 1", 2, (message("expected", "--overlap", "0", "0.9", "1"),)),
    "overlap of what": Row(f"{PREDICT} images --overlap 0.5", 2, ("--overlap needs --slices",)),
    "batch of none": Row(f"{PREDICT} images --batch-size 0", 2, ("expected a whole number from 1, got 0",)),
    "half": Row(f"{PREDICT} images --half on", 2, (message("expected", "half", "GPU", "cpu"),)),
    "half before the weights": Row(
        "predict --half model.pth images --device cpu", 2, (message("expected", "half", "GPU", "cpu"),)
    ),
    "half an export": Row("predict -w a.onnx images --half off", 2, (message("runs as exported", "a.onnx", "--half"),)),
    "tracks of images": Row(f"{PREDICT} images --track", 2, ("--track and --every: expected a video",)),
    "no address": Row(f"{PREDICT} http:// --output-dir new", 1, ("names no machine",), ("new/results.json",)),
    "crops over crops": Row(f"{PREDICT} images --output-dir part --crops", 2, (message("already", "part/crops"),)),
    "crops over sources": Row(
        f"{PREDICT} part/crops --output-dir part --crops --overwrite",
        2,
        (message("would be replaced", "part/crops", "part/crops/c.png"),),
    ),
    "crops over results": Row(
        f"{PREDICT} part --recursive --output-dir new --crops", 2, (message("would be replaced", "part/crops/c.png"),)
    ),
    # configs
    "a folder as config": Row("train -c taken", 2, (message("folder", "taken", "taken/config.yml"),)),
    "a folder as config of eval": Row("eval -w model.pth -c images", 2, (message("folder", "images"),)),
    "an unknown name": Row(
        "train -c rtdetrv3_r18vd_6x_cocco",
        2,
        (message("no such config", "rtdetrv3_r18vd_6x_cocco"), "rtdetrv3_r18vd_6x_coco,"),
    ),
    "a shipped name": Row("train -c rtdetrv3_nano_shapes --device cpu", 2, ("--data DATA is needed",)),
    "a path": Row("train -c rtdetrv3_nano_shapes.yml", 2, (message("no such config", "rtdetrv3_nano_shapes.yml"),)),
}


@pytest.mark.parametrize("row", TABLE.values(), ids=list(TABLE))
def test_command(row: Row, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(row, folder, capsys)


def test_a_broken_image_is_listed_where_it_was(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(f"{ALL_FOUND} mixed --output-dir new") == 1
    assert capsys.readouterr().err.count("images [") == 2  # a log file has no room for every state of the bar
    listed = json.loads((folder / "new" / "results.json").read_text())
    assert [each["file"] for each in listed] == [
        f"mixed/{name}" for name in ("bomb.png", "cut.jpg", "empty.jpg", "good.jpg", "good.png", "page.jpg", "x.jpg")
    ]
    for each in listed:
        if "good" in each["file"]:
            assert each["detections"] and (each["width"], each["height"]) == (96, 96)
            assert all(0 <= v <= 96 for found in each["detections"] for v in found["box"])
        else:
            assert set(each) == {"file", "error"} and each["file"] in each["error"]


def test_the_default_folder_gets_a_number(folder: Path) -> None:
    for number, name in enumerate(("predict", "predict-2", "predict-3"), start=1):
        assert run(f"{PREDICT} images") == 0
        written = sorted(path.name for path in (folder / "output").iterdir())
        assert len(written) == number and name in written


def test_all_formats_tell_the_same(folder: Path) -> None:
    assert run(f"{ALL_FOUND} images --output-dir new --format coco --format yolo --format csv") == 0
    detections = [
        each for image in json.loads((folder / "new/results.json").read_text()) for each in image["detections"]
    ]
    coco = json.loads((folder / "new/coco.json").read_text())
    with open(folder / "new/detections.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    lines = [line for name in "ab" for line in (folder / "new/labels" / f"{name}.txt").read_text().splitlines()]
    assert len(detections) == len(coco) == len(rows) == len(lines) > 0
    assert [each["category_id"] for each in detections] == [each["category_id"] for each in coco]
    assert [each["box"] for each in detections] == [
        [float(row[key]) for key in ("x1", "y1", "x2", "y2")] for row in rows
    ]
    classes = (folder / "new/classes.txt").read_text().splitlines()
    assert [each["name"] for each in detections] == [classes[int(line.split()[0])] for line in lines]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_is_done(
    number: signal.Signals, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Any] = []

    def draw_and_press(*arguments: Any) -> Image.Image:
        drawn.append(arguments)
        if len(drawn) == 2:
            signal.raise_signal(number)
        return arguments[0]

    monkeypatch.setattr("rtdetr.inference.draw.draw", draw_and_press)
    assert run(f"{PREDICT} images images/b.png deep/fa/a.png shapes/val --output-dir new") == 128 + number
    done = len(json.loads((folder / "new" / "results.json").read_text()))
    err = capsys.readouterr().err
    assert 2 <= done <= 7  # threads draw: those that had begun are kept as well
    who = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "signal 15"}[number]
    assert message("stopped", who, f"{done} of 7", "new/results.json").search(err)
    assert "Traceback" not in err


def test_ctrl_c_before_the_work_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def press(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rtdetr.inference.predictor.model_from_checkpoint", press)
    assert run(f"{PREDICT} images --output-dir new") == 130
    assert capsys.readouterr().err == "stopped\n" and not (folder / "new").exists()


def test_a_full_disk_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    assert run(f"{PREDICT} images --output-dir new") == 1
    assert message("not written", "new", "No space left on device").search(capsys.readouterr().err)
    assert json.loads((folder / "new" / "results.json").read_text()) == []


def test_a_bug_stays_a_traceback(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("rtdetr.inference.predictor.model_from_checkpoint", broken)
    with pytest.raises(ValueError, match="a bug"):
        run(f"{PREDICT} images --output-dir new")


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "train --help",
        "eval --help",
        "predict --help",
        "doctor --help",
        "convert --help",
        "serve --help",
    ],
)
def test_help_imports_nothing_slow(command: str) -> None:
    code = (
        "import sys\nfrom rtdetr.cli import main\ntry: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "slow = {'torch', 'torchvision', 'numpy', 'cv2', 'PIL', 'scipy', 'yaml', 'tqdm'} & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "rtdetr" in done.stdout, done.stderr


def test_python_m_rtdetr() -> None:
    done = subprocess.run([sys.executable, "-m", "rtdetr", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"rtdetr {rtdetr.__version__}\n")


def test_benchmark_is_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(subprocess, "call", lambda command, env: called.append(command) or 3)
    assert cli.main(["benchmark", "op", "--device", "cpu"]) == 3
    assert called == [[sys.executable, "-c", benchmark.CODE, "op", "--device", "cpu"]]


def test_benchmark_imports_nothing_of_the_users_folder(tmp_path: Path) -> None:
    (tmp_path / "html.py").touch()  # the name of a module of Python
    code = f"import sys; sys.path.append({str(ROOT)!r}); from rtdetr.commands.benchmark import run; run(['--help'])"
    ended = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert ended.stdout.startswith("usage: rtdetr benchmark") and not ended.stderr


def test_a_wheel_carries_the_configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What setuptools puts into a wheel, without compiling; and the lookup there."""
    ignored = shutil.ignore_patterns("*.so", "_build.json", "__pycache__")
    for name in ("rtdetr", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_py", "--build-lib", "built"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    carried, own = tmp_path / "built" / "rtdetr" / "configs", ROOT / "configs"
    assert {path.relative_to(carried) for path in carried.rglob("*.yml")} == {
        path.relative_to(own) for path in own.rglob("*.yml")
    }
    monkeypatch.setattr(config_file, "PACKAGE", carried.parent)
    assert find_config("rtdetrv3_nano_shapes") == carried / "rtdetrv3_nano_shapes.yml"
