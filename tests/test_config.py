"""Configs load, merge and come back as they were; whatever is wrong in one is a single sentence at load."""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from rtdetr import config as declared
from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict, load_config, save_config
from rtdetr.config_file import MAX_BYTES, Range
from rtdetr.data.pixels import INTERPOLATIONS
from rtdetr.engine.planning.auto_config import BY_WEIGHTS
from rtdetr.models.backbone import STAGE_BLOCKS

ROOT = Path(__file__).resolve().parents[1]
OFFICIAL = sorted((ROOT / "configs").glob("rtdetrv3_*.yml"))

# Every number of the config: just below its range, and above it.
WRONG: dict[str, tuple[float, float]] = {
    "model.backbone.depth": (17, 102),
    "model.backbone.width": (0, 100),
    "model.backbone.freeze_stages": (-1, 5),
    "model.encoder.hidden_dim": (0, 8192),
    "model.encoder.feedforward_dim": (0, 10**9),
    "model.encoder.num_heads": (0, 512),
    "model.encoder.expansion": (0, 10),
    "model.encoder.num_csp_blocks": (-1, 1000),
    "model.decoder.hidden_dim": (0, 8192),
    "model.decoder.feedforward_dim": (0, 10**9),
    "model.decoder.num_heads": (0, 512),
    "model.decoder.num_points": (0, 1000),
    "model.decoder.num_layers": (0, 1000),
    "model.decoder.num_queries": (0, 10**9),
    "model.supervision.num_noise_groups": (-1, 1000),
    "model.supervision.num_one_to_many_queries": (-1, 10**9),
    "model.supervision.num_denoising": (-1, 10**9),
    "loss.weights": (-0.1, 1e10),
    "loss.match_costs": (-0.1, 1e10),
    "loss.atss_epochs": (-1, 10**9),
    "data.image_size": (0, 8224),
    "data.train_batch_size": (0, 10**9),
    "data.num_workers": (-1, 10**9),
    "data.max_megapixels": (0, 10_001),
    "data.sampling": (-0.1, 1.1),
    "data.max_defects": (-0.1, 1.1),
    "data.augment.distort_prob": (-0.1, 1.1),
    "data.augment.expand_prob": (-0.1, 1.1),
    "data.augment.expand_max_ratio": (0.9, 100),
    "data.augment.crop_prob": (-0.1, 1.1),
    "data.augment.flip_prob": (-0.1, 2.5),
    "data.augment.paste_prob": (-0.1, 1.1),
    "data.augment.turn_prob": (-0.1, 1.1),
    "data.augment.turn_after": (-1, 10**9),
    "data.augment.zoom_ramp": (-1, 10**9),
    "data.augment.batch_sizes": (0, 8224),
    "optimizer.lr": (0, 0.5),
    "optimizer.lr_batch": (0, 10**9),
    "optimizer.backbone_lr_multiplier": (-0.1, 1e10),
    "optimizer.weight_decay": (-0.1, 1.1),
    "optimizer.betas": (-0.1, 1),
    "optimizer.warmup_iterations": (-1, 10**10),
    "optimizer.flat_ratio": (-0.1, 1.1),
    "optimizer.min_lr_ratio": (-0.1, 1.1),
    "optimizer.clip_grad_norm": (-0.1, 1e10),
    "optimizer.muon_lr_multiplier": (-0.1, 1e10),
    "ema.decay": (-0.1, 1),
    "ema.warmup": (-1, 1e10),
    "train.epochs": (0, 10**9),
    "train.accumulate": (0, 10**9),
    "train.eval_every": (-1, 10**9),
    "train.log_every": (0, 10**9),
    "train.patience": (-1, 10**9),
    "train.save_seconds": (-1, 1e10),
    "train.seed": (-1, 2**32),
    "train.max_skips": (-1, 10**9),
    "train.max_iterations": (-1, 10**10),
    "eval.max_detections": (0, 10**9),
}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(*updates: str, path: Path = OFFICIAL[0]) -> str:
    """The one sentence that refuses a config."""
    with pytest.raises(ConfigError) as error:
        load_config(path, list(updates))
    assert "\n" not in str(error.value)
    return str(error.value)


def leaves(cls: Any = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and declared type of every value; of a list, the type of its entries."""
    for key, hint in typing.get_type_hints(cls, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            yield from leaves(hint, f"{prefix}{key}.")
        else:
            yield prefix + key, typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint


def is_number(hint: Any) -> bool:
    (inner,) = typing.get_args(hint)[:1] or (hint,)
    if typing.get_origin(inner) is typing.Union:  # a number or `auto`
        inner = typing.get_args(inner)[0]
    return inner in (int, float) or type(inner) is int  # Annotated[int, ...], int, Literal[18, ...]


def given(dotted: str, value: object) -> str:
    """An update with the value, or with a list of it where the config has a list."""
    default: Any = Config()
    for key in dotted.split("."):
        default = getattr(default, key)
    return f"{dotted}={[value] * len(default) if isinstance(default, tuple) else value}"


@pytest.mark.parametrize("path", OFFICIAL, ids=lambda p: p.stem)
def test_every_config_loads_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    assert config.name == path.stem
    assert config_from_dict(config_to_dict(config), "checkpoint") == config
    save_config(config, tmp_path / "config.yml")
    assert load_config(tmp_path / "config.yml") == config


def test_official_sizes_differ_where_they_should() -> None:
    by_name = {path.stem: load_config(path) for path in OFFICIAL}
    r18, r34, r50 = (by_name[f"rtdetrv3_{m}vd_6x_coco"].model for m in ("r18", "r34", "r50"))
    assert [m.decoder.num_layers for m in (r18, r34, r50)] == [3, 4, 6]
    assert [m.supervision.num_noise_groups for m in (r18, r34, r50)] == [3, 3, 2]
    assert [m.encoder.expansion for m in (r18, r34, r50)] == [0.5, 0.5, 1.0]
    assert (r18.backbone.norm, r50.backbone.norm) == ("train", "frozen")
    assert [m.backbone.freeze_stages for m in (r18, r34, r50)] == [0, 0, 1]
    assert by_name["rtdetrv3_r50vd_6x_lvis"].model.supervision.num_noise_groups == 1


def test_later_bases_and_own_keys_win(tmp_path: Path) -> None:
    write(tmp_path / "a.yml", "train: {epochs: 1, seed: 1}\nname: a\n")
    write(tmp_path / "b.yml", "train: {epochs: 2}\n")
    config = load_config(write(tmp_path / "c.yml", "base: [a.yml, b.yml]\nname: c\n"), ["optimizer.lr=1e-3"])
    assert (config.train.epochs, config.train.seed, config.name, config.optimizer.lr) == (2, 1, "c", 1e-3)


@pytest.mark.parametrize("path", [path for path in OFFICIAL if "_6x_" in path.stem], ids=lambda p: p.stem)
def test_official_configs_decide_nothing_more(path: Path) -> None:
    config = load_config(path)
    assert (config.train.patience, config.optimizer.lr_batch, config.optimizer.flat_ratio) == (0, 16, 1)
    assert config.model.backbone.freeze_stages == (config.model.backbone.norm == "frozen")  # the stem
    assert (config.train.epochs, config.data.train_batch_size, config.optimizer.lr) == (72, 16, 4e-4)
    assert (config.data.augment.paste_prob, config.data.augment.turn_prob) == (0, 0)


@pytest.mark.parametrize("depth", [18, 50])
def test_presets_for_small_sets_differ_in_the_model_alone(depth: int) -> None:
    small = load_config(ROOT / "configs" / f"rtdetrv3_r{depth}vd_small.yml")
    other = load_config(ROOT / "configs" / f"rtdetrv3_r{68 - depth}vd_small.yml")
    assert dataclasses.replace(small, name="", model=other.model) == dataclasses.replace(other, name="")
    assert (small.model.backbone.norm, small.train.epochs) == ("train", "auto")
    assert small.data.train.annotations == small.data.val.annotations == ""
    assert {attrgetter(key)(small) for key in BY_WEIGHTS} == {"auto"}
    assert (small.optimizer.flat_ratio, small.loss.weights) == (1, (1, 5, 2))
    augment = small.data.augment
    assert (augment.paste_prob, augment.turn_prob) == (0.5, 0.5)


def test_a_misspelt_key_names_file_path_and_neighbour(tmp_path: Path) -> None:
    path = write(tmp_path / "typo.yml", "model: {decoder: {num_querys: 3}}\n")
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert str(error.value) == (
        f"{path}: unknown key `model.decoder.num_querys`, the nearest valid key is `model.decoder.num_queries`"
    )


def test_a_misspelt_key_in_a_base_names_the_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yml", "optimizer: {learning_rate: 1.0}\n")
    with pytest.raises(ConfigError, match=f"^{base}: unknown key `optimizer.learning_rate`"):
        load_config(write(tmp_path / "top.yml", "base: base.yml\noptimizer: {weight_decay: 0.0}\n"))


@pytest.mark.parametrize(
    ("content", "end"),
    [
        ("epochs: 3", "unknown key `epochs`; did you mean `train.epochs`?"),
        ("batch_size: 3", "did you mean `data.train_batch_size`?"),
        ("train: {lr: 0.1}", "unknown key `train.lr`; did you mean `optimizer.lr`?"),
        ("decoder: {num_layers: 3}", "unknown key `decoder`; did you mean `model.decoder`?"),
        ("hidden_dim: 3", "did you mean `model.encoder.hidden_dim` or `model.decoder.hidden_dim`?"),
        ("imgsz: 640", "did you mean data.image_size=[H,W], and data.augment.batch_sizes=[N] in a training?"),
        ("train: {nc: 3}", "unknown key `train.nc`; classes come from the annotations"),
        ("model.backbone.depth: 18", "did you mean model: {backbone: {depth: ...}}?"),
        ("model: {num_classes: 3}", "; num_classes is gone: classes come from the annotations"),
        ("ephocs: 3", "the nearest valid key is `train.epochs`"),
        ("data: {nonsense: 3}", "unknown key `data.nonsense`; the config.yml of a run has them all"),
        ("train: {zzz: 3}", "unknown key `train.zzz`; the config.yml of a run has them all"),
    ],
)
def test_an_unknown_key_names_one_that_may_be_meant(content: str, end: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path / "own.yml", content))
    assert str(error.value).startswith(f"{tmp_path / 'own.yml'}: unknown key `") and str(error.value).endswith(end)


def test_a_misspelt_update_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^-u: unknown key `train.epoch`, the nearest valid key is `train.epochs`$"):
        load_config(OFFICIAL[0], ["train.epoch=3"])
    with pytest.raises(ConfigError, match=r"^-u: unknown key `optimiser`, the nearest valid key is `optimizer`$"):
        load_config(OFFICIAL[0], ["optimiser.lr=3"])


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ("train.epochs", "expected key=value"),
        ("=3", "-u =3: expected key=value"),
        ("a..b=1", "-u a..b=1: expected key=value"),
        ("train.epochs=many", "-u: train.epochs must be a whole number from 1 to 100,000 or auto, got 'many'"),
        ("train.epochs=true", "train.epochs must be a whole number from 1 to 100,000 or auto, got True"),
        ("train.epochs=2.5", "train.epochs must be a whole number from 1 to 100,000 or auto, got 2.5"),
        ("train.epochs=", "train.epochs must be a whole number from 1 to 100,000 or auto, got nothing"),
        ("optimizer.lr=" + "9" * 400, "optimizer.lr must be a number above 0 and up to 0.1, got 9999"),
        ("ema.decay=1", "ema.decay must be a number from 0 to below 1, got 1"),
        ("train.deterministic=maybe", "train.deterministic must be true or false, got 'maybe'"),
        ("model.backbone.depth=18.0", "must be one of 18, 34, 50, 101, got 18.0"),
        ("kernels=fast", "kernels must be one of auto, plain, got 'fast'"),
        (
            "loss.match_backend=gpu",
            "-u: loss.match_backend is now `kernels`, and was one of auto, cuda, cpu, scipy, got",
        ),
        (
            "data.sampling=often",
            "data.sampling must be a number from 0 to 1 or uniform or repeat_factor, got 'often'",
        ),
        ("train.on_nan=false", "-u: train.on_nan is now `train.max_skips`, and was one of stop, skip, got False"),
        ("loss.class_weight=many", "-u: loss.weights[0] must be a number from 0 to 1,000,000,000, got 'many'"),
        (
            "loss={class_weight: 1, weights: 3}",
            "loss.weights must be a list of 3 numbers, such as [1.0, 5.0, 2.0], got",
        ),
        ("model.encoder.hidden_dim=66", "must be a whole number from 4 to 4,096, a multiple of 4, got 66"),
        ("data.image_size=640", "data.image_size must be a list of 2 whole numbers, such as [640, 640], got 640"),
        ("data.image_size=[640]", "data.image_size must be a list of 2 whole numbers, such as [640, 640], got [640]"),
        ("data.image_size=[650, 640]", "data.image_size[0] must be a whole number from 32 to 8,192, a multiple of 32,"),
        ("data.augment.batch_sizes=[]", "must be a list of whole numbers, such as [480, 512], got []"),
        ("data.augment.interpolations=[cubik]", "interpolations[0] must be one of nearest, linear, area, cubic, lan"),
        ("optimizer.betas=0.9", "optimizer.betas must be a list of 2 numbers, such as [0.9, 0.999], got 0.9"),
        ("model=3", "model is a section; set a key below it, such as model.backbone, got 3"),
        ("name=2024", "name must be text (in quotes where it looks like a number or a date), got 2024"),
        ("name.first=3", "-u: name must be text"),
        ("name=" + "a" * 300, "-u: name must have at most 200 bytes, as folders are named after it, got 300"),
        ("data.train.images=my data #2/x", "-u data.train.images=my data #2/x: the value ends before ` #`, which"),
        ("train.epochs= # many", "put it in quotes"),
        ("train.loggers=[wandb, mlflow, wandb]", "-u: train.loggers must be given once each, got wandb, mlflow, wandb"),
        ('train.epochs=!!int ""', "not valid YAML: a number or date that does not exist"),
        ("name=runs/a", "name must be the name of a folder, got 'runs/a'"),
        ('data.train.images="a\\0b"', "data.train.images must be text"),
        ("train.epochs=[", "-u train.epochs=[: not valid YAML at line 1, column 2: "),
        ("name=2024-13-45", "not valid YAML: a number or date that does not exist (month must be in 1..12)"),
        ("train={seed: 1, seed: 2}", "the key `seed` is given twice, at line 1, column 2 and line 1, column 11"),
        ("train=&a [*a]", "nested more than 20 deep"),
    ],
)
def test_wrong_values_are_named(update: str, message: str) -> None:
    assert message in refusal(update)


def test_an_update_changes_one_key_of_a_section() -> None:
    config = load_config(OFFICIAL[0], ["train={epochs: 3}", "train.seed=4"])
    assert config.train == dataclasses.replace(load_config(OFFICIAL[0]).train, epochs=3, seed=4)


def test_quotes_keep_what_looks_like_a_comment() -> None:
    config = load_config(OFFICIAL[0], ['data.train.images="my data #2/x"', "data.val.images=a#b"])
    assert (config.data.train.images, config.data.val.images) == ("my data #2/x", "a#b")


def test_keys_are_few_enough_to_be_read() -> None:
    assert len([*leaves()]) <= 80, "make it a constant, or take another key out"


def test_every_number_has_a_range() -> None:
    numbers = {dotted: hint for dotted, hint in leaves() if is_number(hint)}
    assert [dotted for dotted, hint in numbers.items() if hint in (int, float)] == [], "give them a Range"
    assert list(numbers) == list(WRONG), "a value below and one above its range belong in WRONG"


@pytest.mark.parametrize("dotted", WRONG)
def test_numbers_out_of_range_are_refused(dotted: str) -> None:
    for value in (*WRONG[dotted], "many", ".nan", ".inf", "-.inf"):
        sentence = refusal(given(dotted, value))
        assert re.match(rf"-u: {re.escape(dotted)}(\[0\])? must be (a (whole )?number (from|above)|one of) ", sentence)


@pytest.mark.parametrize("dotted", [dotted for dotted, hint in leaves() if is_number(hint)])
def test_both_ends_of_a_range_fit_the_kind(dotted: str) -> None:
    hint = dict(leaves())[dotted]
    ends = typing.get_args(hint)
    if isinstance(ends[1], Range):
        within = ends[1]
        ends = (within.low + 1e-9 if within.above else within.low, within.high - 1e-9 if within.below else within.high)
    for end in ends:
        try:
            load_config(OFFICIAL[0], [given(dotted, end)])
        except ConfigError as error:  # together with other values an end may be wrong, alone it is not
            assert not re.search(r"must be a (whole )?number (from|above)|must be one of", str(error))


@pytest.mark.parametrize(
    ("updates", "sentence"),
    [
        (
            ["model.encoder.num_heads=3"],
            "-u: model.encoder.num_heads must divide model.encoder.hidden_dim=64, got 3",
        ),
        (
            ["model.decoder.hidden_dim=63"],
            "-u: model.decoder.num_heads must divide model.decoder.hidden_dim=63, got 4",
        ),
        (
            ["model.encoder.expansion=0.01"],
            "-u: model.encoder.expansion must leave a channel of model.encoder.hidden_dim=64, got 0.64",
        ),
        (
            ["data.image_size=[32, 64]"],
            "-u: data.image_size must give each query of model.decoder.num_queries=43 a cell of its own, "
            "got 42 cells of 32 x 64 pixels",
        ),
        (
            ["data.augment.batch_sizes=[32, 640]"],
            "-u: data.augment.batch_sizes must give each query of model.decoder.num_queries=43 a cell of its own, "
            "got 21 cells of 32 x 32 pixels",
        ),
        (
            ["model.supervision.num_one_to_many_queries=337", "data.augment.batch_sizes=[128, 160]"],
            "-u: data.augment.batch_sizes must give each query of model.supervision.num_one_to_many_queries=337 a cell "
            "of its own, got 336 cells of 128 x 128 pixels",
        ),
        (
            ["loss.match_costs=[0, 0, 0]"],
            "-u: loss.match_costs must have one above 0, got zeros",
        ),
    ],
)
def test_values_that_do_not_go_together(updates: list[str], sentence: str) -> None:
    nano = ROOT / "configs" / "rtdetrv3_nano_shapes.yml"
    assert refusal("model.decoder.num_queries=43", *updates, path=nano) == sentence


def test_values_that_just_go_together() -> None:
    nano = ROOT / "configs" / "rtdetrv3_nano_shapes.yml"
    updates = ["model.decoder.num_queries=42", "data.image_size=[32, 64]", "data.augment.batch_sizes=[128]"]
    load_config(nano, [*updates, "model.supervision.num_one_to_many_queries=336", "loss.match_costs=[0, 5, 0]"])


def test_choices_are_those_of_the_code() -> None:
    assert typing.get_args(declared.Depth) == tuple(STAGE_BLOCKS)
    assert typing.get_args(declared.Interpolation) == tuple(INTERPOLATIONS)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (
            "train:\n  epochs: 3\n seed: 4\n",
            "not valid YAML at line 3, column 2: while parsing a block mapping, expected",
        ),
        (
            "train:\n\tepochs: 3\n",
            "not valid YAML at line 2, column 1: while scanning for the next token, found character",
        ),
        ("name: a\nx: \0\n", "not valid YAML at line 2, column 4: the character U+0000 is not allowed"),
        (
            "train:\n  epochs: 3\n  epochs: 4\n",
            "the key `epochs` is given twice, at line 2, column 3 and line 3, column 3",
        ),
        ("[a]: 3\n", "line 1, column 1: a key must be a word, got a list or a section"),
        ("- a\n", "expected `key: value` lines at the top, got ['a']"),
        ("train:\n  # epochs: 3\n", "train is a section; set a key below it, such as train.epochs, got nothing"),
        ("base: 3\n", "base must be a file or a list of files, got 3"),
        ('base: "a\\0b"\n', "base must be a file or a list of files, got ['a\\x00b']"),
        ("name: !!python/name:os.system\n", "not valid YAML at line 1, column 7: could not determine a constructor"),
        (
            "name: caf\xe9\n".encode("latin-1"),
            "not text in UTF-8 (byte 10 is 0xe9); expected a YAML config, save it as",
        ),
        (b"#" * (MAX_BYTES + 1), "more than 100,000 bytes, which no config has; is it another file?"),
        ("train:\n" + " [\n" * 2000, "nested more than 20 deep, which no config is"),
        ("train: " + "{a: " * 30 + "1" + "}" * 30, "nested more than 20 deep or more than 10,000 values, aliases writ"),
        ("train: &a\n  epochs: *a\n", "nested more than 20 deep or more than 10,000 values, aliases written out"),
    ],
)
def test_broken_files(content: str | bytes, sentence: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yml"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert refusal(path=path).startswith(f"{path}: {sentence}")


def test_an_empty_section_is_refused_whatever_comes_on_top(tmp_path: Path) -> None:
    path = write(tmp_path / "empty.yml", "base: rtdetrv3_nano_shapes\ntrain:\n")
    assert refusal("train.max_iterations=3", path=path).startswith(f"{path}: train is a section")


@pytest.mark.parametrize("form", ["[{0}, {0}, {0}]", "{{<<: [{0}, {0}, {0}]}}"])
def test_aliases_that_multiply_do_not_hang(form: str, tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"] + [f"a{i + 1}: &a{i + 1} {form.format(f'*a{i}')}" for i in range(60)]
    assert "aliases written out" in refusal(path=write(tmp_path / "bomb.yml", "\n".join(lines)))


def test_an_alias_serves_as_a_value(tmp_path: Path) -> None:
    config = load_config(write(tmp_path / "a.yml", "train: {epochs: &e 7, eval_every: *e}\n"))
    assert (config.train.epochs, config.train.eval_every) == (7, 7)


def test_a_folder_is_called_a_folder(tmp_path: Path) -> None:
    assert refusal(path=tmp_path) == f"{tmp_path}: is a folder, expected a config file"
    config = write(tmp_path / "config.yml", "name: a\n")
    assert refusal(path=tmp_path) == f"{tmp_path}: is a folder, expected a config file, such as {config}"


def test_a_stored_config_out_of_range_names_its_file() -> None:
    stored = config_to_dict(Config())
    stored["train"]["epochs"] = 0
    with pytest.raises(ConfigError) as error:
        config_from_dict(stored, "runs/last.pth")
    sentence = (
        "runs/last.pth (the config stored in it): train.epochs must be a whole number from 1 to 100,000 or auto, got 0"
    )
    assert str(error.value) == sentence
    assert config_from_dict(stored, "runs/last.pth", ["train.epochs=3"]).train.epochs == 3


def test_a_base_is_a_shipped_name_or_a_file_beside(tmp_path: Path) -> None:
    write(tmp_path / "mine.yml", "base: rtdetrv3_r18vd_small\ntrain: {epochs: 7}\n")
    cfg = load_config(write(tmp_path / "again.yml", "base: mine.yml\nname: again\n"))
    shipped = load_config(ROOT / "configs" / "rtdetrv3_r18vd_small.yml")
    assert cfg == dataclasses.replace(shipped, name="again", train=dataclasses.replace(shipped.train, epochs=7))


def test_missing_and_circular_files(tmp_path: Path) -> None:
    assert refusal(path=tmp_path / "nowhere.yml") == f"{tmp_path}/nowhere.yml: no such config file"
    asks = write(tmp_path / "asks.yml", "base: nowhere.yml\n")
    assert refusal(path=asks) == f"{tmp_path}/nowhere.yml: no such config file, a `base` of {asks}"
    a, b = write(tmp_path / "a.yml", "base: b.yml\n"), write(tmp_path / "b.yml", "base: [a.yml]\n")
    assert refusal(path=a) == f"{a}: `base` goes round in a circle: {a} -> {b} -> {a}"


def test_defaults_are_usable() -> None:
    assert config_from_dict({}, "empty") == Config()
