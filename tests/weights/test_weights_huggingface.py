"""Models of transformers, in and out. Most of it needs no transformers: the folder is made here from stored names, and
what transformers answered for it is stored too."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_cases import CONFIG, IMAGES, NAMES, formula_entries, golden, write_model
from messages import message
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode, functional
from weight_cases import nano_config

from rtdetr import RTDETRv3
from rtdetr.config import Resize, config_from_dict, config_to_dict
from rtdetr.data.class_names import COCO_CLASSES
from rtdetr.data.classes import Classes
from rtdetr.data.resize import resize_cubic
from rtdetr.export.cases import stack
from rtdetr.inference.predictor import Predictor
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import CheckpointError, make_checkpoint
from rtdetr.weights.hub import _card, saver
from rtdetr.weights.huggingface import is_huggingface, read_huggingface, save_huggingface
from rtdetr.weights.load import model_from_checkpoint, model_from_content, read_checkpoint, warm_start

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_model(tmp_path / "theirs")


def own_content(*updates: str) -> dict[str, Any]:
    """A small model of ours, with numbers that tell entries apart."""
    changed = ["data.image_size=[64,96]", *updates]
    cfg = config_from_dict(config_to_dict(nano_config()), "nano", changed)
    torch.manual_seed(1)
    model = build_model(cfg.model, 3)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.uniform_(0.7, 1.5)
            elif tensor.is_floating_point() and not name.endswith("bins"):
                tensor.add_(torch.randn_like(tensor) * 0.05)
    return make_checkpoint(cfg, Classes(("a", "b", "c"), (3, 7, 9)), model.state_dict())


def files(folder: Path) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in sorted(folder.iterdir())}


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        model_from_checkpoint(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", ["rt_detr", "rt_detr_v2"])
def test_logits_and_boxes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / kind, {"model_type": kind})
    if kind == "rt_detr_v2":
        entries = formula_entries()
        scales = {f"model.decoder.layers.{i}.encoder_attn.n_points_scale": torch.full((6,), 0.5) for i in range(2)}
        save_file(entries | scales, folder / "model.safetensors")
    model, cfg, classes = model_from_checkpoint(folder)
    with torch.inference_mode():
        found = model.double()(IMAGES)
    for ours, theirs in ((found.logits, golden()["logits"]), (found.boxes, golden()["boxes"])):
        assert (ours - torch.tensor(theirs, dtype=torch.float64)).abs().max() < 1e-9
    assert classes == Classes(tuple(NAMES.values()), (0, 1, 2))
    assert cfg.data.image_size == (64, 96) and cfg.data.interpolation == "bilinear"
    assert cfg.model.backbone.norm == "frozen" and cfg.name == f"{kind.replace('rt_detr', 'rtdetr')}_r18vd"


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "cubic"])
def test_every_way_in_resizes_as_the_config_says(interpolation: Resize, tmp_path: Path) -> None:
    """Files read by threads and by processes, arrays, and the evaluation's samples."""
    pixels = np.random.default_rng(0).integers(0, 256, (90, 150, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    planes = torch.from_numpy(pixels).permute(2, 0, 1)
    if interpolation == "cubic":
        expected = resize_cubic(pixels, (64, 96))
    else:
        theirs = functional.resize(planes, [64, 96], InterpolationMode(interpolation), antialias=True)
        expected = theirs.permute(1, 2, 0).numpy()
        assert np.abs(expected.astype(int) - resize_cubic(pixels, (64, 96))).max() > 10
    content = own_content(f"data.interpolation={interpolation}")
    model, cfg, classes = model_from_content(content, tmp_path)
    seen: list[Tensor] = []
    predictor = Predictor.of(model, cfg, classes, threshold=0.0)
    predictor._detect = lambda images, sizes, inner=predictor._detect: (
        seen.append(images.clone()),
        inner(images, sizes),
    )[1]  # type: ignore[misc]
    predictor.predict([Image.fromarray(pixels)])
    list(predictor.predict_files([tmp_path / "a.png"]))
    list(predictor.predict_files([tmp_path / "a.png"], num_processes=1))
    assert len(seen) == 3
    for images in seen:
        assert np.array_equal(images[0].permute(1, 2, 0).numpy(), expected)
    cases = stack([Image.fromarray(pixels)], (64, 96), cfg.data.interpolation)
    assert np.array_equal(cases[0].permute(1, 2, 0).numpy(), expected)
    assert content["preprocess"]["interpolation"] == interpolation


def test_names_of_other_releases_and_twins_of_heads(folder: Path) -> None:
    def renamed(name: str) -> str:
        name = name.replace(".fc", ".mlp.fc").replace("out_proj", "o_proj").replace("encoder.encoder.", "encoder.aifi.")
        return name.removeprefix("model.decoder.") if "_embed." in name and "denoising" not in name else name

    expected = read_huggingface(folder)["model"]
    entries = {renamed(name): tensor for name, tensor in formula_entries().items()}
    assert "class_embed.1.bias" in entries and "model.encoder.aifi.0.layers.0.mlp.fc1.bias" in entries
    save_file(entries, folder / "model.safetensors")
    found = read_huggingface(folder)["model"]
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_training_parts_start_from_the_only_selector(folder: Path) -> None:
    weights = read_huggingface(folder)["model"]
    for name in ("proj.weight", "norm.bias", "score_head.weight", "box_head.layers.2.bias"):
        for group in range(3):
            assert torch.equal(weights[f"query_groups.selectors.{group}.{name}"], weights[f"decoder.selector.{name}"])
    table = formula_entries()["model.denoising_class_embed.weight"]
    assert torch.equal(weights["query_groups.label_embedding.weight"], table[:-1])
    again = read_huggingface(folder)["model"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)  # new parts are the same every time
    state = torch.get_rng_state()
    read_huggingface(folder)
    assert torch.equal(state, torch.get_rng_state())


def test_classes_of_coco_have_their_ids(folder: Path) -> None:
    other = {"airplane": "aeroplane", "couch": "sofa", "tv": "tvmonitor"}
    names = {str(i): other.get(name, name) for i, name in enumerate(COCO_CLASSES.names)}
    entries = {}
    for name, tensor in formula_entries().items():
        rows = {3: 80, 4: 81}.get(len(tensor)) if tensor.dim() and ("class_embed" in name or "score" in name) else None
        entries[name] = tensor[:1].expand(rows, *tensor.shape[1:]).contiguous() if rows else tensor
    write_model(folder, {"id2label": names})
    save_file(entries, folder / "model.safetensors")
    classes = model_from_checkpoint(folder)[2]
    assert classes.category_ids == COCO_CLASSES.category_ids and classes.names[4] == "aeroplane"


@pytest.mark.parametrize("depth", [18, 50])
def test_writing_and_reading_changes_no_bit(depth: int, tmp_path: Path) -> None:
    content = own_content(f"model.backbone.depth={depth}")
    save_huggingface(tmp_path / "one", content, "Apache-2.0")
    again = read_huggingface(tmp_path / "one")
    detecting = [
        name for name in content["model"] if not name.startswith(("query_groups.s", "query_groups.m", "dense"))
    ]
    assert all(torch.equal(again["model"][name], content["model"][name]) for name in detecting)
    assert again["classes"] == content["classes"] and again["source"]["licence"] == "Apache-2.0"
    save_huggingface(tmp_path / "two", again, "Apache-2.0")
    assert files(tmp_path / "one") == files(tmp_path / "two")
    about = json.loads((tmp_path / "one" / "config.json").read_text())
    assert about["architectures"] == ["RTDetrForObjectDetection"] and about["id2label"] == {
        "0": "a",
        "1": "b",
        "2": "c",
    }


def test_version_2_read_and_written_is_version_1_of_the_same_weights(tmp_path: Path) -> None:
    content = read_huggingface(write_model(tmp_path / "theirs", {"model_type": "rt_detr_v2"}))
    save_huggingface(tmp_path / "one", content)
    again = read_huggingface(tmp_path / "one")
    assert _same(again["model"], content["model"]) and "licence" not in again["source"]
    save_huggingface(tmp_path / "two", again)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    assert json.loads((tmp_path / "one" / "config.json").read_text())["model_type"] == "rt_detr"


def test_thresholds_of_classes_are_kept(tmp_path: Path) -> None:
    content = own_content()
    content["classes"]["thresholds"] = [0.2, 0.3, 0.4]
    save_huggingface(tmp_path, content)
    assert read_huggingface(tmp_path)["classes"] == content["classes"]
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"thresholds": [0.2, "high", 0.4]}))
    with pytest.raises(CheckpointError, match="threshold of its classes is no number from 0 to 1"):
        read_huggingface(tmp_path)


def test_names_written_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    save_huggingface(tmp_path / "ours", read_huggingface(folder))
    ours, theirs = load_file(tmp_path / "ours" / "model.safetensors"), formula_entries()
    assert {name: list(tensor.shape) for name, tensor in ours.items()} == golden()["entries"]
    padded = "model.denoising_class_embed.weight"  # whose last row is padding, zero here
    assert all(torch.equal(ours[name], theirs[name]) for name in ours if name != padded)
    assert torch.equal(ours[padded][:-1], theirs[padded][:-1]) and not ours[padded][-1].any()


@pytest.mark.parametrize(
    ("update", "key"),
    [
        (
            "model.encoder.num_csp_blocks=1",
            "model.encoder.num_csp_blocks: transformers supports only 3, the model has 1",
        ),
        ("model.official_rectangles=true", "model.official_rectangles: transformers supports only False"),
    ],
)
def test_models_without_counterpart_are_not_written(update: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=key):
        save_huggingface(tmp_path / "out", own_content(update))
    assert not (tmp_path / "out").exists()


def test_other_peoples_folders_are_not_written_to(folder: Path) -> None:
    before = files(folder)
    with pytest.raises(CheckpointError, match=message("already", "format", "folder")):
        save_huggingface(folder, own_content())
    assert files(folder) == before


HOSTILE: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "detr"}, "model_type: expected rt_detr or rt_detr_v2, got 'detr'"),
    ({"model_type": ["rt_detr"]}, "model_type: expected"),
    ({"decoder_method": "discrete"}, "decoder_method: the model here has 'default', got 'discrete'"),
    ({"decoder_offset_scale": 1.0}, "decoder_offset_scale: the model here has 0.5, got 1.0"),
    ({"encoder_layers": True}, "encoder_layers: the model here has 1, got True"),
    ({"learn_initial_query": True}, "learn_initial_query"),
    ({"eval_size": [640, 640]}, "eval_size"),
    ({"use_timm_backbone": True, "backbone": "resnet18d"}, "backbone: the model here has None, got 'resnet18d'"),
    ({"backbone_config": ["x"]}, "backbone_config: expected a mapping"),
    ({"backbone_config": {"model_type": "hgnet_v2"}}, r"backbone_config.model_type"),
    ({"backbone_config": {**CONFIG["backbone_config"], "depths": [10**9] * 4}}, "expected a ResNet-vd of 18, 34, 50"),
    ({"backbone_config": {**CONFIG["backbone_config"], "embedding_size": "8"}}, "embedding_size '8'"),
    ({"d_model": "16"}, "config.json: d_model must be a whole number"),
    ({"d_model": 10**12}, "config.json: d_model must be a whole number"),
    ({"num_queries": float("nan")}, "config.json: num_queries must be"),
    ({"decoder_layers": -1}, "config.json: decoder_layers must be"),
    ({"decoder_attention_heads": 3}, "config.json: decoder_attention_heads must divide d_model=16"),
    (
        {"decoder_layers": 3},
        r"does not fit its config.json in 34 entries .* model.decoder.layers.2.self_attn.q_proj.weight missing",
    ),
    ({"decoder_layers": 1}, r"does not fit its config.json in \d+ entries .*left over"),
    ({"d_model": 4000}, r"model.decoder_input_proj.0.0.weight \(\(16, 16, 1, 1\), \(4000, 16, 1, 1\)\)"),
    ({"id2label": {"0": "a", "2": "b"}}, "id2label: expected names under 0, 1, 2"),
    ({"id2label": {"0": 1}}, "id2label: expected names"),
    ({"id2label": ["a", "b", "c"]}, "id2label: expected names"),
    ({"id2label": {}}, "id2label: expected names"),
    ({"category_ids": [1, 2]}, "category_ids: expected 3 whole numbers"),
    ({"anchor_image_size": [640, 640]}, r"anchor_image_size: expected null or \[64, 96\]"),
    ({"freeze_backbone_batch_norms": "no"}, "freeze_backbone_batch_norms: expected true or false, got 'no'"),
]


@pytest.mark.parametrize(("changes", "sentence"), HOSTILE)
def test_what_has_no_counterpart_is_refused_by_name(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert re.search(sentence, refusal(write_model(tmp_path / "m", changes)))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"do_normalize": True}, "do_normalize: the model here has False, got True"),
        ({"do_pad": True}, "do_pad"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
        ({"size": {"shortest_edge": 800}}, "size: expected height and width"),
        ({"size": {"height": 65, "width": 96}}, "size.height of preprocessor_config.json must be"),
        ({"size": {"height": 64, "width": "96"}}, "size.width of preprocessor_config.json must be"),
        ({"resample": 0}, "resample: expected 2"),
    ],
)
def test_other_preprocessing_is_refused_by_name(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    assert sentence in refusal(write_model(tmp_path / "m", processor=changes))


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "null", '{"model_type": "rt_detr"'])
def test_files_that_are_no_json_are_refused(text: str, folder: Path) -> None:
    for name in ("preprocessor_config.json", "config.json"):
        (folder / name).write_text(text)
        refusal(folder)


def test_code_in_a_pickle_is_not_run(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", pickled=True)
    assert len(model_from_checkpoint(folder)[2]) == 3

    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    torch.save({"model.enc_output.0.weight": Code()}, folder / "pytorch_model.bin")
    assert "nothing of it was run" in refusal(folder)
    torch.save([1, 2], folder / "pytorch_model.bin")
    assert "expected a dict of tensors, got list" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "tensor", "difference"),
    [
        ("model.enc_output.0.weight", None, "missing"),
        ("model.decoder.layers.0.self_attn.q_proj.weight", None, "missing"),
        ("model.decoder.layers.0.self_attn.q_proj.weight", torch.zeros(3, 3), "((3, 3), (16, 16))"),
        ("model.denoising_class_embed.weight", torch.zeros(()), "((), (4, 16))"),
        ("model.other.weight", torch.zeros(3), "left over"),
    ],
)
def test_an_entry_that_differs_has_the_name_of_the_file(
    name: str, tensor: Tensor | None, difference: str, folder: Path
) -> None:
    entries = formula_entries() | {name: tensor}
    save_file({key: value for key, value in entries.items() if value is not None}, folder / "model.safetensors")
    assert refusal(folder).endswith(
        f"does not fit its config.json in 1 entry (shape in the file, by the config): {name} {difference}"
    )


def test_missing_and_damaged_weights_are_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "damaged, or no safetensors file" in refusal(folder)
    file.unlink()
    assert "no such weight file" in refusal(folder)


def test_half_precision_becomes_float32(folder: Path) -> None:
    halves = {name: t.half() if t.is_floating_point() else t for name, t in formula_entries().items()}
    save_file(halves, folder / "model.safetensors")
    weights = read_huggingface(folder)["model"]
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32, torch.int64}


def test_api_and_warm_start_take_folders(folder: Path, tmp_path: Path) -> None:
    assert is_huggingface(folder) and is_huggingface(folder / "model.safetensors")
    detector = RTDETRv3.from_pretrained(folder, device="cpu")
    assert detector.classes.names == tuple(NAMES.values())
    detector.save_pretrained(tmp_path / "ours")
    assert not is_huggingface(tmp_path / "ours")
    detector.save_pretrained(tmp_path / "theirs2", format="transformers")
    again = RTDETRv3.from_pretrained(tmp_path / "theirs2", device="cpu")
    assert _same(again.model.state_dict(), detector.model.state_dict())  # type: ignore[union-attr]
    card = _card("owner/model", read_huggingface(folder), "MIT", "transformers", {"AP": 0.5})
    assert "library_name: transformers\npipeline_tag: object-detection\nlicense: mit\n" in card
    assert 'pipeline("object-detection", model="owner/model")' in card and "RTDetrForObjectDetection" in card
    with pytest.raises(ValueError, match=message("expected", "format", "rtdetr", "transformers", "both", "'hf'")):
        detector.save_pretrained(tmp_path / "x", format="hf")  # type: ignore[arg-type]
    model = build_model(detector.cfg.model, 2)
    report = warm_start(model, folder, Classes(("dog", "bird"), (1, 2)))
    assert message("classes carried over", "1 of 2", "dog", "bird").search(report.classes)
    assert torch.equal(model.decoder.score_heads[0].weight[0], detector.model.decoder.score_heads[0].weight[1])  # type: ignore[union-attr]


def test_new_weights_never_stand_beside_old_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the reverse: wherever a save ends early, the folder is the old one or has no weights."""
    old, folder, replace, write = own_content(), tmp_path / "saved", os.replace, Path.write_bytes
    new = own_content() | {"classes": Classes(("x", "y", "z"), (3, 7, 9)).entries()}
    save_huggingface(folder, old)
    before = files(folder)

    def full(path: Path, content: bytes) -> int:
        if "config.json" in path.name:
            raise OSError(28, "No space left on device")
        return write(path, content)

    with monkeypatch.context() as patched, pytest.raises(CheckpointError, match=message("not written", "No space")):
        patched.setattr(Path, "write_bytes", full)
        save_huggingface(folder, new)
    assert files(folder) == before
    for renamed in range(3):
        allowed = iter(range(renamed))

        def killed(*paths: Any, allowed: Any = allowed) -> None:
            next(allowed)  # StopIteration
            replace(*paths)

        with monkeypatch.context() as patched, pytest.raises((StopIteration, RuntimeError)):
            patched.setattr(os, "replace", killed)
            save_huggingface(folder, new)
        assert "no such weight file" in refusal(folder)
    save_huggingface(folder, new)
    assert read_huggingface(folder)["classes"]["names"] == ["x", "y", "z"]


def test_a_folder_of_both_formats_is_read_as_ours(tmp_path: Path) -> None:
    content, folder = own_content(), tmp_path / "both"
    saver("both")(folder, content, "MIT")
    read = read_checkpoint(folder)
    assert _same(read["model"], content["model"]) and read["config"]["data"]["interpolation"] == "cubic"
    assert not is_huggingface(folder) and is_huggingface(folder / "model.safetensors")
    found = read_huggingface(folder / "model.safetensors")
    assert found["config"]["data"]["interpolation"] == "bicubic" and found["classes"] == content["classes"]
    content["model"]["decoder.score_heads.0.bias"] += 1
    saver("transformers")(folder, content, "MIT")  # over both: ours within is of other weights now
    assert torch.equal(
        read_checkpoint(folder)["model"]["decoder.score_heads.0.bias"], content["model"]["decoder.score_heads.0.bias"]
    )


def test_a_card_tells_data_and_licence_of_the_first_weights() -> None:
    content = own_content()
    assert "started from" not in _card("owner/model", content, None, "both", {})
    content["began"] = {"weights": "rtdetr_r18vd_o365.pth", "in_full": False, "images": 233, "licence": "Apache-2.0"}
    card = _card("owner/model", content, None, "both", {})
    assert "| data | 233 images |" in card
    assert "| started from | rtdetr_r18vd_o365.pth, licence: Apache-2.0 |" in card
    content["classes"]["names"], content["began"]["images"] = ["mug"], 1
    card = _card("owner/model", content, None, "both", {})
    assert "RT-DETRv3 for 1 class: mug." in card and "| data | 1 image |" in card


def _same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
