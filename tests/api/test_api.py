"""The Python API: results, training, evaluation, saving and sharing."""

from __future__ import annotations

import copy
import json
import pickle
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from api_cases import IDS, NAMES, PIXELS
from engine_helpers import NANO
from messages import message
from PIL import Image
from torch import Tensor

import rtdetr
from rtdetr import RTDETRv3
from rtdetr.commands.eval import run as evaluate_command
from rtdetr.commands.predict import run as predict_command
from rtdetr.config import ConfigError, find_config, keyword_updates
from rtdetr.data.classes import Classes, DataError
from rtdetr.data.data_arguments import data_updates
from rtdetr.engine.run_files.metrics import read_rows
from rtdetr.extras import MissingPackage, optional
from rtdetr.inference.predictors import Predictors
from rtdetr.models.postprocess import EndToEnd
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.types import Detections
from rtdetr.weights.checkpoint import CheckpointError, why_no_weight_file


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, rtdetr; assert 'torch' not in sys.modules; assert 'RTDETRv3' in dir(rtdetr)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_the_class_imports_what_detecting_needs_alone() -> None:
    """Each of these takes long; `from rtdetr import RTDETRv3` is to take little longer than `import torch`."""
    slow = "torchvision torch._dynamo triton torch.utils.flop_counter scipy matplotlib tensorboard pycocotools "
    slow += "faster_coco_eval tqdm safetensors huggingface_hub onnx onnxruntime av rtdetr.data.formats.sources "
    slow += "rtdetr.data.loader rtdetr.engine.trainer rtdetr.losses rtdetr.export rtdetr.serve"
    code = (
        "import sys, torch; before = set(sys.modules); from rtdetr import RTDETRv3; "
        f"found = set({slow!r}.split()) & set(sys.modules) - before; assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_detecting_imports_neither_torchvision_nor_the_compiler(checkpoint: Path, image: Path) -> None:
    """Each takes as long as torch itself, torch.onnx a tenth of a second."""
    slow = "torchvision torch._dynamo torch.onnx triton scipy matplotlib"
    code = (
        "import sys; from rtdetr import RTDETRv3; from rtdetr.cli import main; "
        f"assert main(['predict', '-w', {str(checkpoint)!r}, {str(image)!r}, '--device', 'cpu']) == 0; "
        f"assert not set({slow!r}.split()) & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=checkpoint.parent)


def test_there_is_nothing_else_in_the_package() -> None:
    with pytest.raises(AttributeError, match="no attribute 'RTDETR'"):
        rtdetr.RTDETR  # noqa: B018
    assert rtdetr.RTDETRv3 is RTDETRv3
    assert (Path(rtdetr.__file__).parent / "py.typed").is_file()


def test_a_result_is_arrays_names_and_what_others_expect(model: RTDETRv3, image: Path) -> None:
    result = model.predict(image, threshold=np.float32(0))
    n = len(result)
    assert n and result.boxes.shape == (n, 4) and result.boxes.dtype == np.float32
    assert result.scores.shape == (n,) and (np.diff(result.scores) <= 0).all()
    assert set(result.class_ids.tolist()) <= set(IDS)
    assert result.names == [NAMES[IDS.index(each)] for each in result.class_ids]
    assert (result.width, result.height, result.source) == (90, 70, str(image))
    assert (result.boxes.min(axis=0) >= 0).all() and (result.boxes.max(axis=0) <= [90, 70, 90, 70]).all()
    first = next(iter(result))
    hf, coco = result.to_hf()[0], result.to_coco(5)[0]
    assert hf["label"] == first.name and list(hf["box"].values()) == list(first.box)
    x1, y1, x2, y2 = first.box
    assert coco == {
        "image_id": 5,
        "category_id": first.category_id,
        "bbox": [x1, y1, x2 - x1, y2 - y1],
        "score": hf["score"],
    }
    assert result.to_coco()[0] == {**coco, "image_id": 0}
    numbered = image.rename(image.with_name("000000000139.png"))
    assert model.predict(numbered, threshold=0).to_coco()[0] == {**coco, "image_id": 139}
    numbered.rename(image)
    written = json.loads(result.to_json())
    assert len(written["detections"]) == n and written["detections"][0]["category_id"] == first.category_id
    assert result.draw().width == 7 * 90 and result._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("opened", [Path, Image.open])
def test_a_result_does_not_replace_its_source(model: RTDETRv3, image: Path, opened: Any) -> None:
    before = image.read_bytes()
    with pytest.raises(ValueError, match=message("would be replaced", image.name)):
        model.predict(opened(image)).save(image)
    assert image.read_bytes() == before


def test_the_file_is_as_good_as_the_command_line_says(
    model: RTDETRv3, checkpoint: Path, image: Path, tmp_path: Path
) -> None:
    """The five lines and the one line find the same."""
    assert predict_command([str(image), "-w", str(checkpoint), "--threshold", "0", "--output-dir", str(tmp_path)]) == 0
    (listed,) = json.loads((tmp_path / "results.json").read_text())
    assert listed["detections"] == json.loads(model.predict(image, threshold=0).to_json())["detections"]


def test_a_missing_package_is_one_sentence(
    model: RTDETRv3, tmp_path: Path, image: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("av", "supervision", "huggingface_hub", "safetensors", "safetensors.torch"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "film.mp4").touch()
    result = model.predict(image)
    calls: dict[str, Any] = {
        "video": lambda: model.predict(tmp_path / "film.mp4"),
        "supervision": result.to_supervision,
        "hub": lambda: model.save_pretrained(tmp_path / "model"),
    }
    for extra, call in calls.items():
        with pytest.raises(MissingPackage, match=rf'pip install "rtdetr\[{extra}\]"'):
            call()
    for call in (lambda: RTDETRv3.from_pretrained("owner/model"), lambda: model.push_to_hub("owner/model")):
        with pytest.raises(MissingPackage, match=r'pip install "rtdetr\[hub\]"'):
            call()
    (tmp_path / "broken.py").write_text("raise ModuleNotFoundError('a part is not there')")  # names no module
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingPackage, match="the package broken, which"):
        optional("broken", "onnx", "the format onnx")


def test_supervision_gets_its_detections(model: RTDETRv3, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "supervision", types.SimpleNamespace(Detections=dict))
    result = model.predict(image, threshold=0)
    given: Any = result.to_supervision()
    assert given["xyxy"] is not None and given["class_id"].tolist() == result.class_ids.tolist()
    assert given["data"]["class_name"].tolist() == result.names


def test_saved_as_safetensors_and_read_again(model: RTDETRv3, checkpoint: Path, image: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    folder = model.save_pretrained(tmp_path / "model")
    assert sorted(each.name for each in folder.iterdir()) == ["config.json", "model.safetensors"]
    about = json.loads((folder / "config.json").read_text())
    assert about["classes"] == {"names": list(NAMES), "category_ids": list(IDS)} and about["licence"] == "MIT"
    assert about["rtdetr_version"] == rtdetr.__version__ and about["preprocess"]["size"] == [64, 64]
    assert str(checkpoint.parent) not in (folder / "config.json").read_text()  # nobody else has our folders
    assert about["source"]["checkpoint"] == "model.pth" and len(about["source"]["checkpoint_sha256"]) == 64
    expected = model.predict(image, threshold=0).boxes
    for path in (folder, folder / "model.safetensors"):
        again = RTDETRv3.from_pretrained(path)
        np.testing.assert_array_equal(again.predict(image, threshold=0).boxes, expected)
        assert again.source == model.source
        out = tmp_path / f"out-{path.name}"
        assert predict_command([str(image), "-w", str(path), "--output-dir", str(out)]) == 0
    again.save_pretrained(folder)  # its own files may be replaced
    (folder / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=message("foreign model", "config.json")):
        model.save_pretrained(folder)


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "model.safetensors").unlink(), "no such weight file"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "the file is empty"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "damaged, or no safetensors file"),
        (lambda f: (f / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}"), "damaged"),
        (lambda f: (f / "config.json").unlink(), "but without its config.json|config.json: not there"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text('{"format": "rtdetr"}'), "checkpoint version None"),
    ],
    ids=range(8),
)
def test_a_damaged_folder_is_one_sentence(model: RTDETRv3, damage: Any, sentence: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    folder = model.save_pretrained(tmp_path / "model")
    damage(folder)
    for path in (folder, folder / "model.safetensors"):
        with pytest.raises(CheckpointError, match=sentence) as raised:
            RTDETRv3.from_pretrained(path)
        assert "\n" not in str(raised.value)


def test_the_hub_gives_and_takes_a_model(
    model: RTDETRv3, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    taken: dict[str, Any] = {}

    class Api:
        def __init__(self, token: str | None) -> None:
            pass

        def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
            taken["repo"] = repo_id, private

        def upload_folder(self, repo_id: str, folder_path: str, commit_message: str) -> str:
            taken["files"] = {each.name: each.read_bytes() for each in Path(folder_path).iterdir()}
            return "https://hub/commit"

    def snapshot_download(repo_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        if repo_id != "owner/model":
            raise OSError("404 Client Error\nmore")
        for name in set(allow_patterns) & taken["files"].keys():
            (tmp_path / name).write_bytes(taken["files"][name])
        return str(tmp_path)

    errors = types.SimpleNamespace(HfHubHTTPError=OSError)
    fake = types.SimpleNamespace(HfApi=Api, snapshot_download=snapshot_download, errors=errors)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    assert model.push_to_hub("owner/model", private=True, figures={"AP": 0.1234}) == "https://hub/commit"
    card = taken["files"]["README.md"].decode()
    assert "| AP | 0.1234 |" in card and "epochs" in card and "library_name: rtdetr" in card
    assert taken["repo"] == ("owner/model", True) and b"license: mit" in taken["files"]["README.md"]
    again = RTDETRv3.from_pretrained("owner/model")
    np.testing.assert_array_equal(again.predict(image, threshold=0).boxes, model.predict(image, threshold=0).boxes)
    with pytest.raises(CheckpointError, match=message("not on the Hub", "owner/other", "404 Client Error")):
        RTDETRv3.from_pretrained("owner/other")
    with pytest.raises(CheckpointError, match="expected owner/model"):
        model.push_to_hub("model")


def test_a_shipped_config_with_classes_is_a_new_model(caplog: pytest.LogCaptureFixture) -> None:
    new = RTDETRv3.from_pretrained("rtdetrv3_nano_shapes", classes=["a", "b"])
    assert new.classes == Classes(("a", "b"), (1, 2)) and "random weights" in caplog.text
    assert len(RTDETRv3.from_pretrained(NANO).classes) == 80
    with pytest.raises(DataError, match="expected a list of names, got 'ab'"):
        RTDETRv3.from_pretrained(NANO, classes="ab")


def test_an_exported_file_can_only_detect(model: RTDETRv3) -> None:
    class Exported(EndToEnd):
        def forward(self, images: Tensor, sizes: Tensor) -> Detections:
            number = len(images)
            return Detections(torch.ones(number, 1), torch.zeros(number, 1).long(), torch.ones(number, 1, 4))

    exported = RTDETRv3(Predictors(Exported(), model.cfg, model.classes, torch.device("cpu"), False, "auto"))
    for method, call in {
        "train": exported.train,
        "refresh": exported.refresh,
        "push_to_hub": lambda: exported.push_to_hub("owner/model"),
        "model": lambda: setattr(exported, "model", model.model),
    }.items():
        with pytest.raises(CheckpointError, match=rf"^{method}\(\): .* exported file, which can only detect"):
            call()
    assert exported.model is None and not len(exported.predict(PIXELS))


def test_what_does_not_belong_to_the_model_is_refused(model: RTDETRv3) -> None:
    other = build_model(model.cfg.model, num_classes=7)
    with pytest.raises(DataError, match="model: expected a network of 3 classes, got one of 7"):
        model.model = other
    with pytest.raises(DataError, match="model: expected a network of 3 classes, got a DataParallel"):
        model.model = torch.nn.DataParallel(model.model)
    with pytest.raises(DataError, match="compile: expected True, False or \"max\", got 'maximum'"):
        model.compile("maximum")  # type: ignore[arg-type]
    for section, key in (("model", "num_queries"), ("optimizer", "lr"), ("train", "epochs"), ("ema", "ema.decay")):
        with pytest.raises(ConfigError, match=rf"^evaluate\(\): keys of `{section}` have no effect on it"):
            model.evaluate(**{key: 0.05 if "." in key or key == "lr" else 5})


def test_names_that_lead_nowhere_are_one_sentence(checkpoint: Path) -> None:
    with pytest.raises(CheckpointError, match="no such weight file"):
        RTDETRv3.from_pretrained("missing.pth")
    assert why_no_weight_file(Path("rtdetr_r18vd")) == "no such weight file; `rtdetr weights` lists those that download"
    with pytest.raises(DataError, match="knows its own"):
        RTDETRv3.from_pretrained(checkpoint, classes=["a"])
    with pytest.raises(CheckpointError, match="cannot be accessed"):
        RTDETRv3.from_pretrained("x" * 300)
    with pytest.raises(CheckpointError, match=message("no such weights")):
        RTDETRv3.from_pretrained("x\0/y")
    with pytest.raises(ConfigError, match=message("no such config", "rtdetrv3_r18vd_6x_coco")):
        RTDETRv3.from_pretrained("rtdetrv3_r19vd_6x_coco")
    with pytest.raises(ConfigError, match=message("no such config")):
        find_config("x" * 300)


def test_train_evaluate_and_detect(checkpoint: Path, tmp_path: Path) -> None:
    data, model = checkpoint.parent, RTDETRv3.from_pretrained(checkpoint, device="cpu")
    result = model.train(data, epochs=1, output_dir=tmp_path / "run", eval_every=1, optimizer__lr=1e-4)
    assert result.best == tmp_path / "run" / "best.pth" and len(result.figures) == 12
    assert model.weights == result.best and len(model.classes) == 5  # those of the data
    assert model.cfg.optimizer.lr == 1e-4 and model.cfg.train.epochs == 1
    evaluated = model.evaluate()
    assert evaluated is not None and evaluated.figures["AP"] == pytest.approx(result.figures["AP"], abs=1e-5)
    assert len(evaluated.classes) == 5 and len(evaluated.figures) == 12
    pair = data / "val", data / "annotations" / "instances_val.json"
    again = model.evaluate(pair)
    assert again is not None and again.figures == evaluated.figures


def test_a_training_on_lvis_returns_its_figures(checkpoint: Path, tmp_path: Path) -> None:
    document = json.loads((checkpoint.parent / "annotations" / "instances_val.json").read_text())
    for image in document["images"]:
        image |= {"neg_category_ids": [], "not_exhaustive_category_ids": []}
    (tmp_path / "lvis.json").write_text(json.dumps(document))
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    result = model.train(
        (checkpoint.parent / "val", tmp_path / "lvis.json"), max_iterations=1, output_dir=tmp_path / "r"
    )
    evaluated = model.evaluate()
    assert evaluated is not None and list(result.figures) == list(evaluated.figures) and "AR300" in result.figures


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied(model: RTDETRv3, copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match=r"cannot be pickled or copied.* from_pretrained\(\)"):
        copied(model)
    copied(model.model)


def test_epochs_are_whole_ones_whatever_the_last_training_was(checkpoint: Path, tmp_path: Path) -> None:
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    model.train(max_iterations=1, output_dir=tmp_path / "first")
    assert model.cfg.train.max_iterations == 1
    run = model.train(epochs=1, output_dir=tmp_path / "second")
    rows = read_rows(run.output_dir / "metrics.csv")
    assert [row["iteration"] for row in rows if row["kind"] == "train"] == ["1", "2", "3"]
    model.train(epochs=3, max_iterations=2, output_dir=tmp_path / "third")
    assert model.cfg.train.max_iterations == 2


def test_data_is_whatever_knows_its_images(checkpoint: Path) -> None:
    folder = checkpoint.parent  # annotations/instances_train.json and instances_val.json: readers find images and set
    assert data_updates(None) == []
    assert data_updates(folder) == [
        'data.train.images=""',
        f'data.train.annotations="{folder}"',
        'data.val.images=""',
        f'data.val.annotations="{folder}"',
    ]
    assert data_updates(str(folder), ("val",)) == ['data.val.images=""', f'data.val.annotations="{folder}"']
    pairs = {"train": ("a", "a.json"), "valid": {"images": "b", "annotations": "b.json"}}
    assert data_updates(pairs)[3] == 'data.val.annotations="b.json"'
    assert data_updates(("a", "a.json"), ("val",)) == ['data.val.images="a"', 'data.val.annotations="a.json"']


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ("missing", "missing: no such annotation file or folder"),
        ({"train": ("a", "b")}, "nothing is given for val"),
        ({"training": ("a", "b")}, "a split is called train or val, got 'training'"),
        (("a", "b", "c"), "expected .images, annotations."),
        (("a", 3), "got 3 in place of a path"),
        (3, "expected .images, annotations."),
    ],
)
def test_wrong_data_is_one_sentence(data: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        data_updates(data)


def test_keys_of_the_config_as_keywords() -> None:
    assert keyword_updates({"epochs": 3, "batch_size": 2, "lr": 1e-5, "optimizer__betas": (0.9, 0.99), "seed": 1}) == [
        "train.epochs=3",
        "data.train_batch_size=2",
        "optimizer.lr=1e-05",
        "optimizer.betas=[0.9, 0.99]",
        "train.seed=1",
    ]
    sides = {"image_size": np.array([640, 640]), "betas": torch.tensor([0.5, 0.75]), "epochs": np.int64(3)}
    expected = ["data.image_size=[640, 640]", "optimizer.betas=[0.5, 0.75]", "train.epochs=3"]
    assert keyword_updates(sides) == expected
    assert keyword_updates({"name": "mine", "model.backbone.depth": 18}) == ['name="mine"', "model.backbone.depth=18"]
    with pytest.raises(ConfigError, match=message("ambiguous key", "hidden_dim")):
        keyword_updates({"hidden_dim": 3})
    with pytest.raises(ConfigError, match=message("unknown key", "epoch", "train.epochs")):
        keyword_updates({"epoch": 3})
    assert keyword_updates({"train": {"epochs": 3}}) == ['train={"epochs": 3}']
    with pytest.raises(ConfigError, match=message("expected", "optimizer.lr", "optimizer__lr", "lr")):
        keyword_updates({"optimizer__lr": 1e-4, "lr": 1e-5})


def test_a_misspelt_keyword_names_its_neighbour(model: RTDETRv3, checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=message("unknown key", "train()", "train.epoch", "train.epochs")):
        model.train(checkpoint.parent, train__epoch=1)


def test_training_goes_on_from_a_shared_model_and_from_a_run(model: RTDETRv3, checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="sharing: safetensors is not installed")
    shared = RTDETRv3.from_pretrained(model.save_pretrained(tmp_path / "shared"), device="cpu")
    result = shared.train(checkpoint.parent, max_iterations=1, output_dir=tmp_path / "run")
    assert "loaded" in (tmp_path / "run" / "load_report.txt").read_text()
    shared.train(resume=tmp_path / "run" / "last.pth", max_iterations=2)
    assert shared.weights == result.output_dir / "best.pth"
    arguments = ["-w", str(shared.save_pretrained(tmp_path / "trained")), "-u", *data_updates(checkpoint.parent)]
    assert evaluate_command(arguments) == 0


def test_export_hands_over_the_weights(
    model: RTDETRv3, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def export_model(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return types.SimpleNamespace(path=tmp_path / "model.onnx")

    monkeypatch.setitem(sys.modules, "rtdetr.export", types.SimpleNamespace(export_model=export_model))
    assert model.export("onnx", half=True, calibrate="pictures") == tmp_path / "model.onnx"
    options = {"int8": False, "calibrate": "pictures", "input_type": "uint8", "images": None}
    assert asked == [((checkpoint, "onnx", None, True, False), options)]


def test_only_other_weights_are_a_change(checkpoint: Path, tmp_path: Path) -> None:
    """Whatever way they were changed, or the file was."""
    copied = Path(shutil.copy(checkpoint, tmp_path))
    model = RTDETRv3.from_pretrained(copied, device="cpu")
    assert model.model is not None
    model.model.load_state_dict(model.model.state_dict())
    assert not model._changed()
    first = next(model.model.parameters()).data  # a change of `.data` is one that torch does not count
    kept = first.clone()
    first += 1
    assert model._changed()
    first.copy_(kept)
    assert not model._changed()
    copied.unlink()
    assert model._changed()
    made = RTDETRv3.from_pretrained("rtdetrv3_nano_shapes", classes=["a"], device="cpu")
    assert made.model is not None and not made._changed()
    next(made.model.parameters()).data += 1
    assert made._changed()


def test_a_network_that_was_worked_on_is_what_is_used(
    checkpoint: Path, image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an old prepared copy nor the file that it once came from."""
    model = RTDETRv3.from_pretrained(checkpoint, device="cpu")
    before = model.predict(image, threshold=0)
    assert model.model is not None
    changed = {name: value + 0.01 for name, value in model.model.state_dict().items() if "score_heads" in name}
    model.model.load_state_dict(changed, strict=False)
    assert not np.array_equal(model.predict(image, threshold=0).scores, before.scores)
    asked: list[Any] = []
    exporter = types.SimpleNamespace(export_model=lambda weights, *_, **__: asked.append(weights) or exporter, path="x")
    monkeypatch.setitem(sys.modules, "rtdetr.export", exporter)
    model.export()
    assert asked[0][0] is model.model
    assert model._content()["source"] == {"licence": "MIT"}
    model.train(checkpoint.parent, max_iterations=1, output_dir=tmp_path / "run", eval_every=0)
    assert "changed.pth" in (tmp_path / "run" / "load_report.txt").read_text()
