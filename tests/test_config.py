from __future__ import annotations

from pathlib import Path

import pytest

from rtdetr.config import Config, ConfigError, config_from_dict, config_to_dict, load_config, save_config

ROOT = Path(__file__).resolve().parents[1]
OFFICIAL = sorted((ROOT / "configs").glob("rtdetrv3_*.yml"))


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


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
    assert (r18.backbone.norm, r50.backbone.norm, r50.backbone.freeze_stem) == ("train", "frozen", True)
    assert by_name["rtdetrv3_r18vd_6x_lvis"].num_classes == 1203
    assert by_name["rtdetrv3_r50vd_6x_lvis"].model.supervision.num_noise_groups == 1


def test_later_bases_and_own_keys_win(tmp_path: Path) -> None:
    write(tmp_path / "a.yml", "train: {epochs: 1, seed: 1}\nname: a\n")
    write(tmp_path / "b.yml", "train: {epochs: 2}\n")
    config = load_config(write(tmp_path / "c.yml", "base: [a.yml, b.yml]\nname: c\n"), ["optimizer.lr=1e-3"])
    assert (config.train.epochs, config.train.seed, config.name, config.optimizer.lr) == (2, 1, "c", 1e-3)


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


def test_a_misspelt_update_names_the_option() -> None:
    with pytest.raises(ConfigError, match=r"^-u: unknown key `train.epoch`, the nearest valid key is `train.epochs`$"):
        load_config(OFFICIAL[0], ["train.epoch=3"])


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ("train.epochs", "expected key=value"),
        ("train.epochs=many", "train.epochs must be int, got 'many'"),
        ("train.epochs=true", "train.epochs must be int, got True"),
        ("model.decoder.msda_backend=gpu", "must be one of auto, cuda, cpu, torch, got 'gpu'"),
        ("data.image_size=[640]", "data.image_size must be a list"),
        ("model=3", "model is a section"),
        ("name.first=3", "`name` is a value, not a section"),
        ("train.epochs=[", "the value is not valid YAML"),
    ],
)
def test_wrong_values_are_named(update: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        load_config(OFFICIAL[0], [update])


def test_missing_and_circular_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yml: no such config file"):
        load_config(tmp_path / "nowhere.yml")
    with pytest.raises(ConfigError, match="goes round in a circle"):
        load_config(write(tmp_path / "a.yml", "base: a.yml\n"))


def test_defaults_are_usable() -> None:
    assert config_from_dict({}, "empty") == Config()
