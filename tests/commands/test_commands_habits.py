"""What people type who come from Ultralytics, YOLOv5, RF-DETR, RT-DETR or transformers: each of 60 commands and 60
calls in Python works, or is answered by the sentence that says what it is called here."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_cases import PIXELS, write_images
from command_cases import run
from messages import message

import rtdetr
from rtdetr import RTDETRv3
from rtdetr.commands.arguments import is_weights
from rtdetr.config import load_config
from rtdetr.inference.model_info import model_info
from rtdetr.inference.runtimes import runtime_of
from rtdetr.weights.official import guess_classes

MEANT = "; did you mean "
ELSEWHERE = " here; other commands take "
COMMANDS = {
    # works
    "predict model.pth images --device cpu": (0, "2 images"),
    "predict model.pth --device cpu images/a.jpg --half off images": (0, "2 images"),
    "predict -w model.pth images/a.jpg --device cpu": (0, "1 image, "),
    "predict model.pth images --format coco,yolo,csv --device cpu": (0, "2 images"),
    "predict model.pth images/a.jpg --threshold 0.3 --threshold circle=0.1 --device cpu": (0, "1 image, "),
    "eval model.pth --device cpu --data shapes": (0, "precision"),
    # Ultralytics
    "detect val data=shapes": (2, f"`detect` is not a command{MEANT}`rtdetr eval`?"),
    "val model=model.pth data=shapes": (2, f"`val` is not a command{MEANT}`rtdetr eval`?"),
    "track model=model.pth source=0": (2, f"`track` is not a command{MEANT}`rtdetr predict --track`?"),
    "predict model=model.pth source=images": (2, f"model=model.pth is not an argument{MEANT}the file alone"),
    "predict model.pth source=images": (2, f"source=images is not an argument{MEANT}the source alone"),
    "predict model.pth imgsz=640": (2, "imgsz=640 is not an argument; images get the size that the model was trained"),
    "predict model.pth images epochs=3": (2, f"epochs=3 is not an argument{ELSEWHERE}-u train.epochs=N; `rtdetr"),
    "predict model.pth images save=True": (2, "save=True is not an argument; images with boxes are always written"),
    "predict yolo11n.pt images": (2, "yolo11n.pt: no such weight file; `rtdetr weights` lists those that download"),
    "predict run images": (2, f"run: is a folder{MEANT}run/best.pth?"),
    "predict model.pth images conf=0.25": (2, f"conf=0.25 is not an argument{MEANT}--threshold?"),
    "predict model.pth --device cpu images conf=0.25": (2, f"conf=0.25 is not an argument{MEANT}--threshold?"),
    "predict model.pth --device cpu images --save-crop": (2, f"--save-crop is not an option{MEANT}--crops?"),
    "predict model.pth images save_txt=True": (2, f"{MEANT}--format yolo?"),
    "train data=shapes epochs=3": (2, f"data=shapes is not an argument{MEANT}the data alone, as in rtdetr train DATA?"),
    "train shapes epochs=3": (2, f"epochs=3 is not an argument{MEANT}-u train.epochs=N?"),
    "train shapes --batch 4": (2, f"--batch is not an option{MEANT}-u data.train_batch_size=N"),
    "train shapes -u imgsz=640": (2, f"unknown config key imgsz{MEANT}data.image_size=[H,W]"),
    "train shapes -u lr0=0.01": (2, f"unknown config key lr0{MEANT}optimizer.lr=X?"),
    "train model=rtdetr-l.yaml data=shapes": (2, f"is not an argument{MEANT}-c CONFIG, or -t WEIGHTS?"),
    "train shapes cos_lr=True": (
        2,
        f"cos_lr=True is not an argument{MEANT}-u optimizer.flat_ratio=0, a cosine from the warm-up on?",
    ),
    "train shapes weight_decay=0.1": (2, f"is not an argument{MEANT}-u optimizer.weight_decay=X?"),
    "train shapes optimizer=SGD": (2, "optimizer=SGD is not an argument; AdamW is used, and Muon where"),
    "train shapes -u mosaic=0": (2, f"unknown config key mosaic{MEANT}data.augment.paste_prob=X?"),
    "train shapes -u device=0": (2, f"unknown config key device{MEANT}--device?"),
    "train shapes -u kernel=plain": (2, f"unknown config key kernel{MEANT}kernels?"),
    "train shapes --resume": (2, "argument -r/--resume: expected one argument"),
    "eval model.pth batch=3": (
        2,
        f"batch=3 is not an argument{MEANT}-u data.train_batch_size=N, of which eval takes up to 8?",
    ),
    "eval model.pth shapes": (2, f"shapes is one argument too many{MEANT}--data shapes?"),
    "export model.pth format=engine half=True": (2, f"format=engine is not an argument{MEANT}--format engine?"),
    "export model.pth --format engine": (
        2,
        f"triton, transformers, executorch, litert, coreml, ncnn, got 'engine'{MEANT}tensorrt?",
    ),
    "compare": (2, "expected WEIGHTS, as in `rtdetr compare best.pth`, or -w, got none"),
    "export model.pth onnx": (2, f"onnx is one argument too many{MEANT}--format onnx?"),
    "help": (2, f"`help` is not a command{MEANT}`rtdetr --help`?"),
    "train shapes resume=True": (2, f"resume=True is not an argument{MEANT}-r RUN/last.pth"),
    "export model=model.pth format=onnx": (2, f"model=model.pth is not an argument{MEANT}"),
    "predict model.pth images --device 0,1": (2, "expected cpu, cuda or cuda:N; for several GPUs, torchrun"),
    # YOLOv5
    "predict --weights model.pth --source images": (2, f"--source is not an option{MEANT}SOURCE, without an option"),
    "predict model.pth images --conf-thres 0.25": (2, f"--conf-thres is not an option{MEANT}--threshold?"),
    "predict model.pth images --img 640": (2, "--img is not an option; images get the size that the model was trained"),
    "predict model.pth images --save_txt": (2, f"--save_txt is not an option{MEANT}--format yolo?"),
    "predict model.pth images --line-thickness 2": (2, "--line-thickness is not an option; lines and texts fit the"),
    "predict model.pth images -o found": (2, f"-o is not an option{MEANT}--output-dir?"),
    "train shapes --batch-size 4": (2, f"--batch-size is not an option{MEANT}-u data.train_batch_size=X?"),
    "train shapes --weights model.pth": (2, f"--weights is not an option{MEANT}-t WEIGHTS?"),
    "train shapes --cfg x.yaml": (2, f"--cfg is not an option{MEANT}-c CONFIG?"),
    "train shapes --tresume x": (2, f"--tresume is not an option{MEANT}--resume?"),
    "eval model.pth --batch-size 4": (
        2,
        f"--batch-size is not an option{MEANT}-u data.train_batch_size=N, of which eval takes up to 8?",
    ),
    "serve model.pth --workers 4": (
        2,
        "--workers is not an option; one process answers, which detects up to --max-batch",
    ),
    "predict model.pth images --save-crop": (2, f"--save-crop is not an option{MEANT}--crops?"),
    "predict model.pth images --name exp --exist-ok": (2, f"--name is not an option{MEANT}--output-dir?"),
    "export model.pth --include onnx": (2, f"--include is not an option{MEANT}--format?"),
    # RF-DETR, RT-DETR
    "train --dataset-dir shapes": (2, f"--dataset-dir is not an option{MEANT}--data DATA?"),
    "train shapes --num-classes 3": (2, "--num-classes is not an option; classes come from"),
    "train shapes --early-stopping": (2, f"--early-stopping is not an option{MEANT}-u train.patience=N?"),
    "train shapes --wandb": (2, f"--wandb is not an option{MEANT}-u train.loggers=[tensorboard,wandb]?"),
    "eval -c x.yml -r model.pth": (2, f"-r is not an option{MEANT}-w FILE?"),
    "train -c x.yml --use-amp": (2, f"--use-amp is not an option{MEANT}-u train.precision=auto"),
    "train -c x.yml -r model.pth --test-only": (2, f"--test-only is not an option{MEANT}rtdetr eval FILE?"),
}


def test_there_are_60_or_more_of_each() -> None:
    assert min(len(COMMANDS), len(PYTHON)) >= 60


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command(command: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, sentence = COMMANDS[command]
    Path("run").mkdir()
    Path("run/best.pth").touch()
    assert run(command) == code
    out, err = capsys.readouterr()
    assert sentence in out + err and (code == 0 or len(err.splitlines()) == 1)


def boxes_of(found: Any) -> Any:
    return found.boxes


Model = RTDETRv3
PYTHON: dict[str, tuple[Callable[[Model], Any], Any]] = {
    # call: what it is, or the sentence
    "model(path)": (lambda model: len(model("a.png", threshold=0)), 36),
    "model(path).boxes": (lambda model: boxes_of(model("a.png", threshold=0)).shape, (36, 4)),
    "model([path, path])": (lambda model: len(model(["a.png", "b.png"])), 2),
    "model(cv2.imread(path), bgr=True)": (
        lambda model: np.array_equal(
            boxes_of(model(np.ascontiguousarray(PIXELS[..., ::-1]), threshold=0, bgr=True)),
            boxes_of(model("a.png", threshold=0)),
        ),
        True,
    ),
    "model(bytes)": (lambda model: model(Path("a.png").read_bytes()).width, 90),
    "model(BytesIO)": (lambda model: model(io.BytesIO(Path("a.png").read_bytes())).height, 70),
    "model(grey)": (lambda model: model(PIXELS[..., 0]).width, 90),
    "model(rgba)": (lambda model: model(np.dstack([PIXELS, PIXELS[..., :1]])).width, 90),
    "model(floats)": (lambda model: model(PIXELS / 255).width, 90),
    "result[0]": (lambda model: model("a.png", threshold=0)[0].name in ("cat", "dog", "cow"), True),
    "result[:2]": (lambda model: len(model("a.png", threshold=0)[:2]), 2),
    "result.save()": (lambda model: str(model("a.png").save()), "a-detected.jpg"),
    "result.save(path)": (lambda model: model("a.png").save("new.png").is_file(), True),
    "thresholds=": (lambda model: {*model("a.png", 0, thresholds={"cat": 1, "dog": 1}).names} <= {"cow"}, True),
    "model.info()": (lambda model: "GFLOPs" in str(model.info()), True),
    "YOLO(path)": (lambda model: RTDETRv3("model.pth"), "RTDETRv3.from_pretrained('model.pth')"),  # type: ignore[arg-type]
    "conf=": (lambda model: model("a.png", conf=0.25), "no argument 'conf'; did you mean threshold=?"),
    "imgsz=": (lambda model: model.predict("a.png", imgsz=640), "did you mean size=?"),
    "iou=": (lambda model: model.predict("a.png", iou=0.7), "predict() has no argument 'iou'; there is no NMS"),
    "stream=": (lambda model: model.predict("a.png", stream=True), "videos and generators give an iterator"),
    "weights=": (lambda model: Model.from_pretrained(weights="model.pth"), "did you mean name?"),
    "num_classes=": (lambda model: Model.from_pretrained("model.pth", num_classes=3), "classes come from the file"),
    "train(imgsz=)": (lambda model: model.train(imgsz=640), "did you mean data.image_size=[H,W]"),
    "train(batch=)": (lambda model: model.train(batch=4), "did you mean data.train_batch_size=N"),
    "results[0].boxes": (lambda model: model("a.png", 0)[0].boxes, "predict() of one image gives its Result"),
    "result.xyxy": (lambda model: model("a.png").xyxy, "no attribute 'xyxy'; did you mean boxes?"),
    "result.confidence": (lambda model: model("a.png").confidence, "did you mean scores?"),
    "result.plot()": (lambda model: model("a.png").plot(), "did you mean draw()?"),
    "YOLO": (lambda model: rtdetr.YOLO(), "no attribute 'YOLO'; did you mean RTDETRv3.from_pretrained(FILE)?"),
    "RFDETRBase()": (lambda model: RTDETRv3(), "a model is opened by RTDETRv3.from_pretrained(NAME OR FILE)"),
    "RTDETRv3(network)": (lambda model: RTDETRv3(model.model), "RTDETRv3.from_pretrained(NAME OR FILE)"),
    "device='mps'": (lambda model: Model.from_pretrained("m.pth", device="mps"), "device mps: expected cpu, cuda or"),
    "torch_dtype=": (lambda model: Model.from_pretrained("m.pth", torch_dtype=1), "did you mean half=?"),
    "from_pretrained('rtdetr-l.pt')": (lambda model: Model.from_pretrained("rtdetr-l.pt"), "`rtdetr weights` lists"),
    "save_txt=": (lambda model: model("a.png", save_txt=True), "did you mean `rtdetr predict --format yolo`?"),
    "vid_stride=": (lambda model: model("a.mp4", vid_stride=2), "did you mean `rtdetr predict --every N`?"),
    "classes=": (lambda model: model("a.png", classes=[0]), "'classes'; results have names and class_ids to choose by"),
    "threshold={}": (lambda model: model("a.png", {"cat": 0.3}), "those of classes are thresholds={'cat': 0.3}"),
    "model(cv2.imread('none.jpg'))": (
        lambda model: model(None),
        "got None, which is cv2.imread's for a file it cannot",
    ),
    "model(generator)": (lambda model: len(list(model(each for each in ("a.png", "b.png")))), 2),
    "model('*.png')": (lambda model: len(model("*.png")), 2),
    "model(bytearray)": (lambda model: model(bytearray(Path("a.png").read_bytes())).width, 90),
    "each._asdict()": (lambda model: ["box" in each._asdict() for each in model("a.png", 0)], [True] * 36),
    "results[0] of nothing": (
        lambda model: model("a.png", 1)[0],
        "found 0 objects, got number 0; predict() of one",
    ),
    "result['boxes']": (
        lambda model: model("a.png", 0)["boxes"],
        "expected a number or a slice, got str; boxes, scores",
    ),
    "result[mask]": (
        lambda model: model("a.png", 0)[np.ones(36, bool)],
        "boxes, scores and class_ids are arrays, which",
    ),
    "result.xywh": (lambda model: model("a.png").xywh, "did you mean to_coco(), whose bbox is x, y, width, height?"),
    "result.cpu()": (lambda model: model("a.png").cpu(), "'cpu'; boxes and scores are NumPy arrays of the host"),
    "result.to_df()": (lambda model: model("a.png").to_df(), "did you mean pandas.DataFrame(list(result))?"),
    "result.masks": (lambda model: model("a.png").masks, "Result has no attribute 'masks'; it detects boxes"),
    "result[0].class_name": (lambda model: model("a.png", 0)[0].class_name, "did you mean name?"),
    "export(format='engine')": (lambda model: model.export(format="engine"), "got 'engine'; did you mean tensorrt?"),
    "export(imgsz=)": (
        lambda model: model.export(imgsz=640),
        "'imgsz'; batch, height and width of an export stay open",
    ),
    "train(device=0)": (lambda model: model.train(device=0), "did you mean device= of from_pretrained()?"),
    "train(dataset_dir=)": (lambda model: model.train(dataset_dir="shapes"), "did you mean data=?"),
    "train(learning_rate=)": (lambda model: model.train(learning_rate=1), "did you mean optimizer.lr=X?"),
    "train(foo=)": (lambda model: model.train(foo=1), "unknown config key foo; the config.yml of a run has them all"),
    "train(callbacks=f)": (
        lambda model: model.train(callbacks=print),
        "expected a list of rtdetr.Callback objects, got",
    ),
    "model.add_callback()": (lambda model: model.add_callback("on_end", print), "did you mean train(callbacks=[...])?"),
    "model.val()": (lambda model: model.val(), "no attribute 'val'; did you mean evaluate()?"),
    "model.names": (lambda model: model.names, "did you mean classes.names?"),
    "model.optimize_for_inference()": (lambda model: model.optimize_for_inference(), "did you mean compile()?"),
}


@pytest.mark.parametrize("name", PYTHON)
def test_a_call(name: str, model: RTDETRv3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    call, expected = PYTHON[name]
    try:
        answer = call(model)
    except (ValueError, TypeError, AttributeError, IndexError) as error:
        assert isinstance(expected, str) and expected in str(error) and "\n" not in str(error)
    else:
        assert answer == expected


def test_saved_results_take_the_place_of_nothing(
    model: RTDETRv3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path)
    result = model("a.png", threshold=0)
    names = [result.save().name for _ in range(3)]
    assert names == ["a-detected.jpg", "a-detected-2.jpg", "a-detected-3.jpg"]
    assert model(PIXELS).save().name == "array-detected.jpg"
    assert result.save("new.json").read_text() == result.to_json()
    with pytest.raises(ValueError, match=message("not written", "new.odd", ".odd")):
        result.save("new.odd")
    with pytest.raises(ValueError, match=message("not written", "none/a.jpg", "No such file or directory")):
        result.save("none/a.jpg")


@pytest.mark.parametrize(("name", "number"), [("r18vd", 20_122_608), ("r50vd", 42_821_084)])
def test_info_counts_what_detects_as_the_official_model_does(name: str, number: int) -> None:
    """With the scale and shift of frozen norms, without the score heads of the first decoder layers."""
    cfg = load_config(f"rtdetrv3_{name}_6x_coco")
    assert model_info(cfg, guess_classes(80), None, None).parameters == number


def test_what_info_says(model: RTDETRv3) -> None:
    info, network = model.info(), model.model
    assert network is not None
    counts = sum(each.numel() for each in network.parameters())
    assert info.parameters + info.training_parameters == counts and 0 < info.parameters < counts
    assert info.size == (64, 64) and info.classes == ("cat", "dog", "cow") and info.weights == model.weights
    assert info.source["licence"] == "MIT" and 0 < info.gflops < 1
    lines = str(info).splitlines()
    assert f"{info.megabytes:.1f} MB" in lines[3] and "3 classes: cat, dog, cow" in lines and "licence: MIT" in lines


WEIGHTS = [
    "best.pth",
    "a.onnx",
    "a.pt2",
    "a.pte",
    "a.tflite",
    "a.mlpackage/Manifest.json",
    "run/best.pth",
    "hf/config.json",
]
WEIGHTS += ["a_ncnn/model.ncnn.param", "a_openvino/model.xml", "a_triton/rtdetr/1/model.onnx"]


@pytest.mark.parametrize("name", WEIGHTS)
def test_every_export_is_known_as_weights(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    for each in (file, file.with_suffix(".bin")):
        each.touch()
    (tmp_path / "images").mkdir()
    assert is_weights(str(tmp_path / Path(name).parts[0])) and not is_weights(str(tmp_path / "images"))


def test_a_name_of_the_hub_is_known_as_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images").mkdir()
    assert is_weights("owner/model") and not is_weights("images/model") and not is_weights("owner/a.jpg")


def test_an_xml_alone_is_no_export(tmp_path: Path) -> None:
    """It may be an annotation of Pascal VOC."""
    (tmp_path / "a.xml").touch()
    assert runtime_of(tmp_path) is None and not is_weights(str(tmp_path))
