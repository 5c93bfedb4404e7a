"""Keys of before: configs and checkpoints that have them load, and one line says what became of them."""

from __future__ import annotations

import copy
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from messages import message

from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict, keyword_updates, load_config

ROOT = Path(__file__).resolve().parents[1]
R18, NANO = (ROOT / "configs" / f"rtdetrv3_{name}.yml" for name in ("r18vd_6x_coco", "nano_shapes"))
# Every key that has gone, as checkpoints of its day have it.
BEFORE = {
    "num_classes": 0,
    "model.backbone.freeze_stem": True,
    "model.backbone.zero_init_residual": False,
    "model.backbone.weights": "",
    "model.decoder.msda_backend": "auto",
    "model.supervision.noise_mask_ratio": 0.1,
    "model.supervision.label_noise_ratio": 0.5,
    "model.supervision.box_noise_scale": 1.0,
    "model.supervision.one_to_many_repeats": 4,
    "model.supervision.crowd_limit": 200,
    "loss.class_weight": 1.0,
    "loss.l1_weight": 5.0,
    "loss.giou_weight": 2.0,
    "loss.match_class_cost": 2.0,
    "loss.match_l1_cost": 5.0,
    "loss.match_giou_cost": 2.0,
    "loss.match_backend": "auto",
    "loss.dense_iou_weight": 2.5,
    "loss.dense_dfl_weight": 0.5,
    "data.val_batch_size": 8,
    "data.repeat_threshold": "auto",
    "data.on_defect": "drop",
    "data.max_unreadable": 0.05,
    "data.augment.backend": "fused",
    "optimizer.warmup_factor": 0.001,
    "optimizer.decay_norm_and_bias": True,
    "optimizer.schedule": "constant",
    "optimizer.flat_ratio": 0.5,
    "ema.from_zeros": False,
    "train.counted_batches": 0,
    "train.min_delta": 0.0,
    "train.rehearsal": True,
    "train.data_seed": "auto",
    "train.on_nan": "stop",
    "train.max_skips": 10,
    "train.sync_batch_norm": True,
    "train.find_unused_parameters": False,
    "eval.evaluator": "faster-coco-eval",
}
NOW = ("loss.weights", "loss.match_costs", "data.max_defects", "train.estimate_memory", "kernels")  # unknown then


def put(tree: dict[str, Any], dotted: str, value: object) -> None:
    *sections, key = dotted.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[key] = value


def of_before(**changes: object) -> dict[str, Any]:
    """The default config as a checkpoint of before has it; changes: keys with __ in place of dots."""
    tree = config_to_dict(Config())
    for dotted in NOW:
        *sections, key = dotted.split(".")
        section = tree
        for name in sections:
            section = section[name]
        del section[key]
    put(tree, "model.backbone.freeze_stages", 0)
    for dotted, value in (BEFORE | {key.replace("__", "."): value for key, value in changes.items()}).items():
        put(tree, dotted, value)
    return tree


def file_of(path: Path, content: dict[str, Any]) -> Path:
    path.write_text(json.dumps(content))
    return path


def test_a_checkpoint_of_before_loads_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    assert config_from_dict(of_before(), "old.pth") == Config() and not caplog.messages


def test_a_key_of_another_version_is_left_out_of_a_checkpoint_where_it_only_trained(tmp_path: Path) -> None:
    stored = of_before(train__rehearsal=False, train__of_tomorrow=3)
    assert config_from_dict(stored, "old.pth") == Config()
    for updates in (["train.rehearsal=false"], ["train.of_tomorrow=3"]):
        with pytest.raises(ConfigError, match=message("unknown key", updates[0].partition("=")[0])):
            config_from_dict(stored, "old.pth", updates)
    with pytest.raises(ConfigError, match=message("unknown key", "train.rehearsal")):
        load_config(file_of(tmp_path / "config.yml", {"train": {"rehearsal": False}}))
    with pytest.raises(ConfigError, match=message("unknown key", "model.of_tomorrow")):
        config_from_dict(of_before(model__of_tomorrow=3), "old.pth")


def test_a_config_file_of_before_loads_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = of_before()
    del content["train"]["rehearsal"]
    path = file_of(tmp_path / "config.yml", content)
    assert load_config(path) == Config()
    (line,) = caplog.messages
    named = {"train.rehearsal"} | {key for key in BEFORE if re.search(rf"{re.escape(key)}\b", line)}
    assert line.startswith(f"{path}: ") and set(BEFORE) - named == {"train.max_skips", "optimizer.flat_ratio"} - named


# Old keys in one source, what they are now, and what the line says of them.
BECAME = [
    (["model.backbone.freeze_stem=true"], {"model.backbone.freeze_stages": 1}, "freeze_stem=True is now "),
    (
        ["model.backbone.freeze_stem=false"],
        {"model.backbone.freeze_stages": 0},
        "is now model.backbone.freeze_stages=0",
    ),
    (["freeze_stem=true", "freeze_stages=0"], {"model.backbone.freeze_stages": 1}, "freeze_stages=1"),
    (["freeze_stem=true", "freeze_stages=3"], {"model.backbone.freeze_stages": 3}, "freeze_stages=3"),
    (["freeze_stem=false", "freeze_stages=1"], {"model.backbone.freeze_stages": 1}, "freeze_stages=1"),
    (["freeze_stem=true", "freeze_stages=auto"], {"model.backbone.freeze_stages": "auto"}, "freeze_stages=auto"),
    (
        ["data.sampling=repeat_factor", "data.repeat_threshold=0.5"],
        {"data.sampling": 0.5},
        "is gone: data.sampling takes",
    ),
    (
        ["data.sampling=uniform", "data.repeat_threshold=0.5"],
        {"data.sampling": "uniform"},
        "is gone: data.sampling takes",
    ),
    (["data.on_defect=refuse"], {"data.max_defects": 0}, "data.on_defect=refuse is now data.max_defects=0.0"),
    (["data.on_defect=drop", "data.max_unreadable=0.2"], {"data.max_defects": 0.2}, "is now data.max_defects=0.2"),
    (["data.max_unreadable=0.2"], {"data.max_defects": 0.2}, "data.max_unreadable is now data.max_defects"),
    (["optimizer.schedule=cosine"], {"optimizer.flat_ratio": 0}, "optimizer.schedule=cosine is now "),
    (["optimizer.schedule=flat_cosine"], {"optimizer.flat_ratio": 0.5}, "is now optimizer.flat_ratio=0.5"),
    (["schedule=flat_cosine", "flat_ratio=0.7"], {"optimizer.flat_ratio": 0.7}, "is now optimizer.flat_ratio=0.7"),
    (["schedule=constant", "flat_ratio=0.7"], {"optimizer.flat_ratio": 1}, "is now optimizer.flat_ratio=1.0"),
    (["train.on_nan=skip"], {"train.max_skips": 10}, "train.on_nan=skip is now train.max_skips=10"),
    (["train.on_nan=skip", "train.max_skips=2"], {"train.max_skips": 2}, "is now train.max_skips=2"),
    (["train.on_nan=stop", "train.max_skips=2"], {"train.max_skips": 0}, "is now train.max_skips=0"),
    (["loss.class_weight=2"], {"loss.weights": (2, 5, 2)}, "loss.class_weight is now number 1 of loss.weights"),
    (["loss.l1_weight=1", "loss.giou_weight=3"], {"loss.weights": (1, 1, 3)}, "l1_weight is now number 2 of "),
    (["loss.match_l1_cost=1"], {"loss.match_costs": (2, 1, 2)}, "match_l1_cost is now number 2 of loss.match_costs"),
    (["loss.match_class_cost=0", "match_giou_cost=4"], {"loss.match_costs": (0, 5, 4)}, "is now number 3 of "),
    (["loss.match_backend=scipy"], {"kernels": "plain"}, "loss.match_backend=scipy is now kernels=plain"),
    (["data.augment.backend=plain"], {"kernels": "plain"}, "data.augment.backend=plain is now kernels=plain"),
    (["model.decoder.msda_backend=cuda"], {"kernels": "auto"}, "msda_backend=cuda is now up to kernels"),
    (["num_classes=3"], {}, "num_classes is gone: classes come from the annotations"),
    (["model.backbone.zero_init_residual=true"], {}, "zero_init_residual is gone: follows from model.backbone.depth"),
    (["data.val_batch_size=2"], {}, "data.val_batch_size is gone: evaluation takes data.train_batch_size images, at "),
    (["eval.evaluator=pycocotools"], {}, "eval.evaluator is gone: see `rtdetr eval --evaluator`"),
    (["train.counted_batches=1"], {}, "train.counted_batches is gone: follows from train.accumulate"),
    (["train.find_unused_parameters=true"], {}, "train.find_unused_parameters is gone: every parameter is used"),
    (["optimizer.decay_norm_and_bias=true"], {}, "optimizer.decay_norm_and_bias=True cannot be changed any more"),
    (["min_delta=0", "data_seed=auto"], {}, "train.min_delta=0, train.data_seed=auto cannot be changed any more"),
]


@pytest.mark.parametrize(
    ("updates", "now", "said"), BECAME, ids=lambda each: " ".join(each) if isinstance(each, list) else ""
)
def test_a_key_of_before_says_what_became_of_it(
    updates: list[str], now: dict[str, object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    changed = config_to_dict(load_config(NANO))
    for dotted, value in now.items():
        put(changed, dotted, list(value) if isinstance(value, tuple) else value)
    assert config_to_dict(load_config(NANO, updates)) == changed
    (line,) = caplog.messages
    assert line.startswith("-u: ") and said in line


@pytest.mark.parametrize(
    ("update", "instead"),
    [
        ("model.backbone.weights=r50.pth", "always ''; start from the weights with -t instead"),
        (
            "model.supervision.noise_mask_ratio=0.2",
            "always 0.1; change NOISE_MASK_RATIO in rtdetr/models/query_groups.py",
        ),
        (
            "model.supervision.label_noise_ratio=0.2",
            "always 0.5; change NEW_LABELS, half of it, in rtdetr/models/denoising.py",
        ),
        ("model.supervision.box_noise_scale=2", "always 1.0; change noise_targets in rtdetr/models/denoising.py"),
        (
            "model.supervision.one_to_many_repeats=6",
            "always 4; change ONE_TO_MANY_REPEATS in rtdetr/losses/criterion.py",
        ),
        ("model.supervision.crowd_limit=500", "always 200; change CROWD_LIMIT in rtdetr/types.py instead"),
        ("loss.dense_iou_weight=2", "always 2.5; change DENSE_WEIGHTS in rtdetr/losses/criterion.py instead"),
        ("loss.dense_dfl_weight=2", "always 0.5; change DENSE_WEIGHTS in rtdetr/losses/criterion.py instead"),
        ("optimizer.warmup_factor=0.1", "always 0.001; change WARMUP_FACTOR in rtdetr/engine/optim.py instead"),
        (
            "optimizer.decay_norm_and_bias=false",
            "always True; change parameter_groups in rtdetr/engine/optim.py instead",
        ),
        ("ema.from_zeros=true", "always False; change ModelEma in rtdetr/engine/ema.py instead"),
        ("train.min_delta=0.01", "always 0.0; change EarlyStop in rtdetr/engine/early_stop.py instead"),
        ("train.data_seed=1", "always auto; set train.seed instead"),
        ("train.sync_batch_norm=false", "always True; change Trainer in rtdetr/engine/trainer.py instead"),
    ],
)
def test_a_value_that_can_be_had_no_more_is_refused_but_of_a_checkpoint(
    update: str, instead: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key, _, text = update.partition("=")
    value = text if text.endswith(".pth") else json.loads(text)
    sentence = rf": {re.escape(key)} is no key any more, and {re.escape(instead)}"
    with pytest.raises(ConfigError, match="^-u" + sentence):
        load_config(NANO, [update])
    old = of_before(**{key.replace(".", "__"): value})
    with pytest.raises(ConfigError, match=f"^{tmp_path}/old.yml" + sentence):
        load_config(file_of(tmp_path / "old.yml", old))
    assert not caplog.messages
    assert config_from_dict(old, "old.pth") == Config()
    said = [] if value == "r50.pth" else [f"old.pth (the config stored in it): {key} was {value} and is "]
    assert [line[: len(start)] for line, start in zip(caplog.messages, said, strict=True)] == said
    if named := re.search(r"; change (\w+).* in (rtdetr/\S+\.py)", instead):
        assert re.search(rf"^(def |class )?{named[1]}\b", (ROOT / named[2]).read_text(), re.MULTILINE)


def test_each_source_is_read_before_it_is_merged(tmp_path: Path) -> None:
    """What a file of before says wins over its base, and an option over both, whichever of them has the old keys."""
    base = file_of(tmp_path / "base.yml", {"model": {"backbone": {"freeze_stem": True, "freeze_stages": 2}}})
    content = {"base": "base.yml", "model": {"backbone": {"freeze_stem": False}}, "train": {"on_nan": "skip"}}
    top = file_of(tmp_path / "top.yml", content)
    stages, skips = attrgetter("model.backbone.freeze_stages"), attrgetter("train.max_skips")
    assert (stages(load_config(base)), stages(load_config(top)), skips(load_config(top))) == (2, 0, 10)
    for updates, expected in (
        (["freeze_stages=3", "max_skips=1"], (3, 1)),
        (["freeze_stem=true", "on_nan=stop"], (1, 0)),
    ):
        for cfg in (load_config(top, updates), config_from_dict(of_before(train__on_nan="skip"), "old.pth", updates)):
            assert (stages(cfg), skips(cfg)) == expected
    shipped = file_of(tmp_path / "mine.yml", {"base": str(R18), "model": {"backbone": {"freeze_stem": True}}})
    assert stages(load_config(R18)) == 0 and stages(load_config(shipped)) == 1


def test_a_checkpoint_keeps_its_threshold_of_rare_classes(caplog: pytest.LogCaptureFixture) -> None:
    """It decides how long an epoch is, and so where a resumed run goes on."""
    for threshold, sampling in ((0.5, 0.5), ("auto", "repeat_factor")):
        old = of_before(data__sampling="repeat_factor", data__repeat_threshold=threshold)
        assert config_from_dict(old, "old.pth").data.sampling == sampling and not caplog.messages


def test_plain_kernels_of_a_checkpoint_are_said(caplog: pytest.LogCaptureFixture) -> None:
    old = of_before(loss__match_backend="scipy")
    kept = copy.deepcopy(old)
    assert config_from_dict(old, "old.pth").kernels == "plain" and old == kept
    assert caplog.messages == ["old.pth (the config stored in it): loss.match_backend=scipy is now kernels=plain"]
    assert config_from_dict(old, "old.pth", ["kernels=auto"]).kernels == "auto"


def test_python_says_it_too(caplog: pytest.LogCaptureFixture) -> None:
    cfg = config_from_dict(
        config_to_dict(Config()), "x", keyword_updates({"on_nan": "skip", "max_skips": 3}), "train()"
    )
    assert cfg.train.max_skips == 3
    assert caplog.messages == ["train(): train.on_nan=skip is now train.max_skips=3"]
