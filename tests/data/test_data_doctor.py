"""The doctor names every defect of sets that have one each, and training on them goes on or refuses in a sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from coco_set import open_coco
from full_disk import small_files
from fuzz_data import Tracer, make_sets, try_one
from hostile_folders import VOC, YOLO, write_voc, write_yolo
from hostile_named import Case as FolderCase
from hostile_sets import CASES, SOUND, Case, config_of, write_case
from messages import message
from PIL import Image
from sound_set import HEIGHT, WIDTH, sound_document

from rtdetr import cli
from rtdetr.data.classes import DataError
from rtdetr.data.doctor.examine import examine
from rtdetr.data.formats import json_lists
from rtdetr.data.loader import build_train_loader
from rtdetr.engine.evaluation.evaluator import score
from rtdetr.engine.trainer import Trainer
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import as_floats


def loss_or_sentence(annotations: Path, folder: Path, with_loss: bool = True) -> float | str:
    """Of the batches of an epoch in a nano model, or why there is none."""
    try:
        cfg = config_of(annotations, folder)
        loader = build_train_loader(cfg, 0)
        batches = list(loader)
    except DataError as error:
        return str(error)
    if not with_loss:
        return 0.0
    torch.manual_seed(0)
    model = build_model(cfg.model, len(loader.classes)).train()
    criterion = build_criterion(cfg, len(loader.classes))
    images, targets = as_floats(batches[0].images), batches[0].targets
    return float(criterion(model(images, targets), targets, 0)["loss"].detach())


def test_there_are_enough() -> None:
    assert len(CASES) >= 120 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_doctor_names_it(case: Case, tmp_path: Path, images: Path) -> None:
    annotations, folder = write_case(case, tmp_path, images)
    report = examine(annotations, str(folder))
    kinds = {each.kind for each in report.defects()}
    assert kinds & set(case.kind.split("|")), (kinds, list(report.lines()))
    assert report.code() == case.code, list(report.lines())
    for line in report.lines():
        assert "\n" not in line and len(line) < 1500
    found = json.loads(json.dumps([each.plain() for each in report.defects()]))
    assert all(set(each) == {"file", "record", "defect", "what", "action"} for each in found)
    assert all(each["action"] in ("kept", "clipped", "dropped", "refused") for each in found)


@pytest.mark.parametrize(
    ("write", "case"),
    [(write_voc, case) for case in VOC] + [(write_yolo, case) for case in YOLO],
    ids=[f"voc, {case.name}" for case in VOC] + [f"yolo, {case.name}" for case in YOLO],
)
def test_folders_of_other_formats(
    write: Callable[[Path, Path], None], case: FolderCase, tmp_path: Path, images: Path
) -> None:
    write(tmp_path / "set", images)
    case.change(tmp_path / "set")
    report = examine(tmp_path / "set")
    kinds = {each.kind for each in report.defects()}
    assert kinds & set(case.kind.split("|")), (kinds, list(report.lines()))
    assert report.code() == case.code, list(report.lines())
    result = loss_or_sentence(tmp_path / "set", Path(), with_loss=False)
    assert "\n" not in str(result)
    if not kinds & {"picture_size", "picture_damaged"}:  # which training finds when it reads that image
        assert (report.code() == 2) == isinstance(result, str), result


def check_training(case: Case, root: Path, images: Path) -> None:
    result = loss_or_sentence(*write_case(case, root, images))
    if isinstance(result, str):
        assert "\n" not in result and str(root) in result and len(result) < 1500
    else:
        assert torch.isfinite(torch.tensor(result))


def in_groups(cases: list[Case], parts: int) -> list[list[Case]]:
    return [cases[i::parts] for i in range(parts)]


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.name)
def test_training_goes_on_or_refuses(case: Case, tmp_path: Path, images: Path) -> None:
    check_training(case, tmp_path, images)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_goes_on_or_refuses_for_all(case: Case, tmp_path: Path, images: Path) -> None:
    """Slow: a model for each of them."""
    check_training(case, tmp_path, images)


TRACED = """
import json, os, sys
opened = []
def hook(event, arguments):
    if event in ("open", "os.listdir", "os.scandir", "os.open") and isinstance(arguments[0], (str, bytes)):
        opened.append(os.path.realpath(os.path.join(os.getcwd(), os.fsdecode(arguments[0]))))
from rtdetr.cli import main
import rtdetr.data.doctor.examine, rtdetr.commands.progress
sys.addaudithook(hook)
code = main(["doctor", *sys.argv[1:]])
print(json.dumps([code, opened]))
"""


def test_nothing_outside_the_image_folder_is_opened(tmp_path: Path, images: Path) -> None:
    """Whatever the names are; looked for with an audit hook, which sees every open() of the process."""
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text())
    (tmp_path / "secret").mkdir()
    shutil.copy(folder / "00.png", tmp_path / "secret" / "x.png")
    names = ("../secret/x.png", str(tmp_path / "secret" / "x.png"), "/etc/passwd", "a/../../secret/x.png", "~/x.png")
    for each, name in zip(document["images"], names):
        each["file_name"] = name
    annotations.write_text(json.dumps(document))
    done = subprocess.run(
        [sys.executable, "-c", TRACED, str(annotations), "--images", str(folder)], capture_output=True, text=True
    )
    assert done.stderr.count("Traceback") == 0, done.stderr
    code, opened = json.loads(done.stdout.splitlines()[-1])
    assert code == 2 and done.stdout.count("picture_path_outside") == 4 and "~/x.png: no such image" in done.stdout
    assert not [path for path in opened if str(tmp_path / "secret") in path or path.startswith("/etc/passwd")]
    inside = [path for path in opened if path.startswith(str(tmp_path.resolve()))]
    assert str(folder / "23.png") in inside


def test_a_sound_set_is_one_line_and_counts(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, _ = write_case(SOUND, tmp_path, images)
    assert cli.main(["doctor", str(annotations), "--json", str(tmp_path / "found.json")]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{annotations}: sound\n") and json.loads((tmp_path / "found.json").read_text()) == []
    assert all(text in out for text in ("cup        3       16  33.3%", "boxes per image: ", "median 12 x 10"))


@pytest.mark.parametrize("fast", [False, True])
def test_the_json_lists_every_defect(tmp_path: Path, images: Path, fast: bool) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text())
    document["annotations"][1]["bbox"] = [1, 2, 0, 4]
    document["annotations"][2]["bbox"] = [30, 2, 20, 4]
    annotations.write_text(json.dumps(document))
    if not fast:
        (folder / "09.png").unlink()
        (folder / "09.png").write_bytes(b"no image")
    out = tmp_path / "found.json"
    assert cli.main(["doctor", str(annotations), "--images", str(folder), "--json", str(out)] + ["--fast"] * fast) == 1
    found = {each["defect"]: each for each in json.loads(out.read_text())}
    zero, clipped = found["box_zero"], found["box_clipped"]
    assert (zero["file"], zero["record"], zero["action"]) == (str(annotations), 2, "dropped")
    assert (clipped["record"], clipped["action"]) == (3, "clipped") and "by 10 pixels" in clipped["what"]
    if not fast:
        image = found["picture_not_a_picture"]
        assert (image["file"], image["record"], image["action"]) == (str(folder / "09.png"), 109, "dropped")


UP_TO_A_PERSON = ("picture_copy", "picture_twice", "class_name")
REPAIRED = [each for each in CASES if each.code == 1 and each.kind not in UP_TO_A_PERSON]


@pytest.mark.parametrize("cases", [REPAIRED[i::12] for i in range(12)], ids=range(12))
def test_a_clean_copy_is_sound(cases: list[Case], tmp_path: Path, images: Path) -> None:
    for i, case in enumerate(cases):
        (tmp_path / str(i)).mkdir()
        annotations, folder = write_case(case, tmp_path / str(i), images)
        out = tmp_path / str(i) / "clean.json"
        assert cli.main(["doctor", str(annotations), "--images", str(folder), "--fix", str(out)]) == 1, case.name
        report = examine(out, str(folder))
        assert report.code() == 0, (case.name, list(report.lines()))
        assert len(json.loads(out.read_text())["annotations"]) >= 44


def test_a_clean_copy_keeps_what_else_the_file_says(tmp_path: Path, images: Path) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text()) | {"info": {"year": 2026}}
    document["annotations"][0]["segmentation"] = [[1, 2, 3, 4, 5, 6]]
    document["annotations"][1]["bbox"] = None
    document["images"][3]["flickr_url"] = "http://x"
    annotations.write_text(json.dumps(document))
    assert cli.main(["doctor", str(annotations), "--images", str(folder), "--fix", str(tmp_path / "out")]) == 1
    clean = json.loads((tmp_path / "out" / "annotations" / "a.json").read_text())
    assert clean["info"] == {"year": 2026} and clean["images"] == document["images"]
    assert clean["annotations"] == [each for each in document["annotations"] if each["bbox"]]


def test_existing_places_are_refused(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, _ = write_case(SOUND, tmp_path, images)
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for place in ("there", "link", "a.json"):
        assert cli.main(["doctor", str(annotations), "--fix", str(tmp_path / place)]) == 2
        assert "exists already" in capsys.readouterr().err
    same = str(tmp_path / "new.json")
    assert cli.main(["doctor", str(annotations), "--json", same, "--fix", same]) == 2
    assert "is named for two results" in capsys.readouterr().err
    assert cli.main(["doctor", str(annotations), "--json", str(annotations), "--overwrite"]) == 2
    assert "would be read and replaced" in capsys.readouterr().err


def test_a_full_disk_keeps_the_earlier_list(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text())
    annotations.write_text(json.dumps(document | {"annotations": document["annotations"] + [{}] * 300}))
    (listed := tmp_path / "list.json").write_text("[]")
    with small_files():
        command = ["doctor", str(annotations), "--images", str(folder), "--json", str(listed), "--overwrite"]
        assert cli.main(command) == 1 and "File too large" in capsys.readouterr().err
    assert listed.read_text() == "[]" and not [*tmp_path.glob(".*")]


def test_what_is_read_is_not_replaced(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    for broken in (False, True):
        if broken:
            annotations.write_text("{")
        for place in (annotations, *([] if broken else sorted(folder.iterdir())[:1])):
            before = place.read_bytes()
            assert cli.main(["doctor", str(tmp_path), "--json", str(place), "--overwrite"]) == 2
            assert f"{place}: would be read and replaced" in capsys.readouterr().err and place.read_bytes() == before


def test_a_file_for_several_sets_is_refused_before_they_are_read(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    for name in ("train", "val"):
        shutil.copy(annotations, tmp_path / f"instances_{name}.json")
    monkeypatch.setattr("rtdetr.data.doctor.examine._open", None)
    command = ["doctor", str(tmp_path), "--images", str(folder), "--fix", str(tmp_path / "out.json")]
    assert cli.main(command) == 2 and "2 sets do not go into one file" in capsys.readouterr().err


def test_train_and_val_of_a_config(tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    (tmp_path / "val").mkdir()
    shutil.copy(folder / "03.png", tmp_path / "val" / "x.png")
    Image.new("RGB", (WIDTH, HEIGHT)).save(tmp_path / "val" / "y.png")
    images = [{"id": i, "file_name": name} for i, name in enumerate(("x.png", "y.png"))]
    boxes = [{"id": 1, "image_id": 0, "category_id": 3, "bbox": [1, 2, 3, 4]}]
    document = {"images": images, "annotations": boxes, "categories": sound_document()["categories"]}
    (tmp_path / "val.json").write_text(json.dumps(document))
    config = tmp_path / "my.yml"
    splits = {"train": (annotations, folder), "val": (tmp_path / "val.json", tmp_path / "val")}
    lines = [f"  {name}: {{annotations: {file}, images: {where}}}" for name, (file, where) in splits.items()]
    config.write_text("data:\n" + "\n".join(lines))
    assert cli.main(["doctor", str(config)]) == 1
    out = capsys.readouterr().out
    assert "picture_in_two_sets" in out and "is in train too" in out and out.count("kept    image_size_missing") == 2
    document["categories"] = [{"id": 3, "name": "cup"}, {"id": 99, "name": "dog"}]
    (tmp_path / "val.json").write_text(json.dumps(document))
    assert cli.main(["doctor", str(config)]) == 2
    assert "classes_differ" in capsys.readouterr().out
    text = config.read_text()
    config.write_text(text.replace(str(annotations), "nowhere.json"))
    assert cli.main(["doctor", str(config)]) == 2
    out = capsys.readouterr().out
    assert "nowhere.json: no such annotation file" in out and out.count("kept    image_size_missing") == 2
    config.write_text(text + "\n  max_defects: 0.0\n")
    document["categories"] = sound_document()["categories"]
    document["annotations"].append({"id": 2, "image_id": 0, "category_id": 3, "bbox": None})
    (tmp_path / "val.json").write_text(json.dumps(document))
    assert cli.main(["doctor", str(config)]) == 2
    assert "and none may be" in capsys.readouterr().out


@pytest.mark.parametrize("text", ["data: {train: 3}", "dta: {}", "data: [", "data: {}", "a: 1\na: 2"])
def test_configs_that_cannot_be_used(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my.yml").write_text(text)
    assert cli.main(["doctor", str(tmp_path / "my.yml")]) == 2
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["nowhere.json", "nowhere", "empty", "noise.json", "a.xml"])
def test_sources_that_are_none(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "noise.json").write_bytes(bytes(range(256)))
    (tmp_path / "a.xml").write_text("<annotation></annotation>")
    assert cli.main(["doctor", str(tmp_path / name)]) == 2
    assert name in capsys.readouterr().out


def test_an_image_folder_that_is_not_there_is_one_defect_of_many(tmp_path: Path, images: Path) -> None:
    annotations, _ = write_case(next(each for each in CASES if each.name == "zero width"), tmp_path, images)
    document = json.loads(annotations.read_text())
    document["annotations"][0]["bbox"] = None
    annotations.write_text(json.dumps(document))
    write_voc(tmp_path / "voc", images)
    for source, kinds in ((annotations, {"folder_missing", "box_missing"}), (tmp_path / "voc", {"folder_missing"})):
        out = tmp_path / f"{source.name}-found.json"
        assert cli.main(["doctor", str(source), "--images", str(tmp_path / "nowhere"), "--json", str(out)]) == 2
        assert kinds <= {each["defect"] for each in json.loads(out.read_text())}


def test_the_clean_copy_says_where_its_images_are(
    tmp_path: Path, images: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_yolo(tmp_path / "set", images)
    assert cli.main(["doctor", str(tmp_path / "set"), "--fix", str(tmp_path / "clean")]) == 0
    line = capsys.readouterr().out.splitlines()[-2]
    assert line.startswith(str(tmp_path / "clean")) and f"images, in {tmp_path / 'set'}, " in line
    copy = tmp_path / "clean" / "annotations" / "instances_train.json"
    assert cli.main(["doctor", str(copy), "--images", str(tmp_path / "set")]) == 0


@pytest.mark.parametrize(("max_defects", "refused"), [(0.05, False), (0, True)])
def test_training_lists_what_it_drops(max_defects: float, refused: bool, tmp_path: Path, images: Path) -> None:
    annotations, folder = write_case(next(each for each in CASES if each.name == "nan"), tmp_path, images)
    cfg = config_of(annotations, folder, f"data.max_defects={max_defects}", "train.max_iterations=1")
    if refused:
        with pytest.raises(DataError, match=message("none may be dropped", "rtdetr doctor")):
            build_train_loader(cfg, 0)
        return
    Trainer(cfg, tmp_path / "run", torch.device("cpu")).run()
    report = json.loads((tmp_path / "run" / "data_report.json").read_text())
    for part in report.values():
        assert part["dropped"] == {"pictures": 0, "boxes": 1} and "left out: 1 defective box" in part["summary"]
        assert [(each["record"], each["defect"]) for each in part["defects"]] == [(6, "box_not_finite")]


def test_a_missing_image_is_left_out_of_the_figures(tmp_path: Path, images: Path) -> None:
    """The same figures as if the annotations did not name it."""
    annotations, folder = write_case(SOUND, tmp_path, images)
    whole = json.loads(annotations.read_text())
    (folder / "04.png").unlink()
    data = open_coco(folder, annotations)
    assert [len(data), [each.kind for each in data.defects]] == [23, ["picture_missing"]]
    sizes = {info.image_id: (info.height, info.width) for info in map(data.info, range(len(data)))}
    found = [{**box, "score": 0.5 + box["id"] / 100} for box in whole["annotations"] if box["image_id"] != 104]
    result = score(found, annotations, "pycocotools", sizes)
    rest = {key: [each for each in whole[key] if 104 not in (each["id"], each.get("image_id"))] for key in whole}
    annotations.write_text(json.dumps(rest))
    assert result.figures == score(found, annotations, "pycocotools").figures and result.figures["AP"] > 0.99


def test_what_costs_nothing_takes_little_memory(tmp_path: Path, images: Path) -> None:
    """A set that says no size of any image: each is named by the doctor, and one stands for all in training."""
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text())
    names = [each["file_name"] for each in document["images"]]
    document["images"] = [{"id": 100 + i, "file_name": names[i % 24]} for i in range(150)]
    annotations.write_text(json.dumps(document))
    found = [each.kind for each in examine(annotations, str(folder), fast=True).defects()]
    assert found == ["image_size_missing"] * 150
    (only,) = open_coco(folder, annotations).defects
    assert only.kind == "image_size_missing" and "and 149 more of these" in only.what


def test_names_do_not_break_lines(tmp_path: Path, images: Path) -> None:
    annotations, folder = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text())
    for each in document["images"][:4]:
        each["file_name"] = "a\nerror: b\x1b[31m\u2028.png"
    document["categories"][0]["name"] = "cup\n\x1b[31m"
    (folder / "04.png").rename(folder / "04\n.png")
    document["images"][4]["file_name"] = "04\n.png"
    document["annotations"][0]["image_id"] = document["images"][4]["id"]  # the fullest
    annotations.write_text(json.dumps(document))
    assert all(line.isprintable() for line in examine(annotations, str(folder)).lines())
    with pytest.raises(DataError) as caught:
        open_coco(folder, annotations)
    assert str(caught.value).isprintable() and "a\\nerror: b\\x1b[31m" in str(caught.value)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.json")
    assert cli.main(["doctor", str(tmp_path / "a.json")]) == 2


def test_large_files_are_read_in_a_stream_to_the_same_end(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows that end anywhere, against the plain reader."""
    annotations, _ = write_case(SOUND, tmp_path, images)
    document = json.loads(annotations.read_text()) | {"info": {"a": [1, {"b": "ä, ]}"}]}}
    document["images"][0]["file_name"] = 'ä"\\ \U0001f600.png'
    document["annotations"] += [None, 7, {"id": 99, "bbox": [1e-5, 2, 3, 4e3]}]
    for indent in (None, 1):
        annotations.write_text(json.dumps(document, indent=indent), encoding="utf-8")
        for window in (1, 7, 100, 2**22):
            monkeypatch.setattr(json_lists, "WINDOW", window)
            taken: dict[str, list[Any]] = {"images": [], "annotations": [], "categories": []}
            assert json_lists.read_lists(annotations, {key: each.append for key, each in taken.items()})
            assert taken == {key: document[key] for key in taken}
        text = annotations.read_text()
        for broken in (text[:-1], text + "x", text.replace('"images"', '"imges"'), text.replace("[", "[,", 1)):
            annotations.write_text(broken)
            assert not json_lists.read_lists(annotations, {key: each.append for key, each in taken.items()})


@pytest.mark.parametrize(("write", "case"), [(write_voc, VOC[8]), (write_voc, VOC[9]), (write_yolo, YOLO[5])])
def test_the_clean_copy_of_another_format_is_coco(
    write: Callable[[Path, Path], None], case: FolderCase, tmp_path: Path, images: Path
) -> None:
    write(tmp_path / "set", images)
    case.change(tmp_path / "set")
    out = tmp_path / "out"
    assert cli.main(["doctor", str(tmp_path / "set"), "--fix", str(out)]) == 1
    images = tmp_path / "set" / ("JPEGImages" if write is write_voc else "")
    assert cli.main(["doctor", str(out), "--images", str(images)]) == 0


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path, images: Path) -> None:
    path, folder = write_case(CASES[0], tmp_path, images)
    command = [sys.executable, "-m", "rtdetr", "doctor", str(path), "--images", str(folder), "--fast"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


MEASURED = """
import sys
from pathlib import Path
from rtdetr.data.dataset import DetectionSet
from rtdetr.data.formats.coco import read_coco
from rtdetr.data.formats.records import DataSource
def status(key):
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if key in line)
before = status("VmRSS")
Path("/proc/self/clear_refs").write_text("5")
images, annotations = map(Path, sys.argv[1:])
data = DetectionSet(read_coco(annotations), DataSource("coco", annotations, "", images))
print(len(data), data.num_boxes, len(data.defects), (status("VmHWM") - before) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from Linux' /proc")
def test_a_file_of_cocos_size_takes_little_memory(tmp_path: Path) -> None:
    """Slow: 118,000 images and 860,000 boxes, 100 MB. Measured: 220 MB at most, of which 250 are allowed."""
    (tmp_path / "p").mkdir()
    for i in range(118_000):
        (tmp_path / "p" / f"{i:012d}.jpg").touch()
    image = '{"id": %d, "file_name": "%012d.jpg", "width": 640, "height": 480}'
    box = (
        '{"id": %d, "image_id": %d, "category_id": %d, "bbox": [%d.25, %d.5, 30.75, 40.5], "area": 99.5, "iscrowd": 0}'
    )
    images = ",".join(image % (i, i) for i in range(118_000))
    boxes = ",".join(box % (i, i * 7 % 118_000, 1 + i % 80, i % 600, i % 430) for i in range(860_000))
    classes = json.dumps([{"id": i, "name": f"class {i}"} for i in range(1, 81)])
    path = tmp_path / "a.json"
    path.write_text(f'{{"images": [{images}], "annotations": [{boxes}], "categories": {classes}}}')
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "p"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    num_images, num_boxes, num_defects, megabytes = map(float, done.stdout.split())
    assert (num_images, num_boxes, num_defects) == (118_000, 860_000, 0)
    assert megabytes < 250


def test_random_damage(tmp_path: Path) -> None:
    """tests/support/fuzz_data.py does ten thousand of them."""
    sets, tracer = make_sets(tmp_path), Tracer()
    for number in range(240):
        name = ("coco", "voc", "yolo")[number % 3]
        try_one(name, sets[name], tmp_path, number, 7, tracer)
    assert tracer.outside == []
