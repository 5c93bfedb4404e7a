"""A warm start takes the rows of the heads by class name, and its report says which."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from engine_helpers import tiny_config, tiny_data
from messages import message
from torch import Tensor, nn
from weight_cases import nano_config

from rtdetr.config import ModelConfig
from rtdetr.data.class_names import COCO_CLASSES
from rtdetr.data.classes import Classes, pair_names
from rtdetr.engine.trainer import Trainer
from rtdetr.models.rtdetrv3 import build_model
from rtdetr.weights.checkpoint import make_checkpoint, save_checkpoint
from rtdetr.weights.class_rows import CLASS_ENTRY, SELECTION
from rtdetr.weights.load import warm_start
from rtdetr.weights.official_names import official_names

OLD = ("circle", "square", "star")


def classes(*names: str) -> Classes:
    return Classes(names, tuple(range(1, len(names) + 1)))


def model_of(num_classes: int, seed: int, config: ModelConfig | None = None) -> nn.Module:
    """Every value is drawn: a fresh bias of a head is the same in all rows."""
    model = build_model(config or nano_config().model, num_classes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def save_model(path: Path, names: tuple[str, ...], config: ModelConfig | None = None) -> dict[str, Tensor]:
    """Writes a checkpoint of a model with these classes; its state."""
    state = model_of(len(names), 1, config).state_dict()
    save_checkpoint(path, make_checkpoint(nano_config(), classes(*names), state))
    return state


def class_entries(state: dict[str, Tensor]) -> list[str]:
    return [name for name in state if CLASS_ENTRY.search(name)]


def test_class_entries_are_those_that_grow_with_the_classes() -> None:
    with torch.device("meta"):
        seven, eight = (build_model(nano_config().model, n).state_dict() for n in (7, 8))
    assert class_entries(seven) == [name for name in seven if seven[name].shape != eight[name].shape]


@pytest.mark.parametrize("new", [("triangle", "star", "circle", "cross", "square"), ("star", "cross", "circle")])
def test_rows_go_over_by_name(new: tuple[str, ...], tmp_path: Path) -> None:
    """More classes, and as many in another order, which would fit by index."""
    given = save_model(tmp_path / "old.pth", OLD)
    model = model_of(len(new), 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = warm_start(model, tmp_path / "old.pth", classes(*new))
    for name in class_entries(before):
        for row, label in enumerate(new):
            new_row = given[name].mean(dim=0) if SELECTION.search(name) else before[name][row]
            expected = given[name][OLD.index(label)] if label in OLD else new_row
            assert torch.equal(model.state_dict()[name][row], expected), (name, label)
    assert sorted(report.partial) == sorted(class_entries(before))
    assert not set(report.partial) & set(report.matched) and not report.mismatched
    assert torch.equal(model.state_dict()["encoder.aifi.linear1.weight"], given["encoder.aifi.linear1.weight"])
    old, fresh = ([label for label in new if (label in OLD) is known] for known in (True, False))
    line = f"classes: {len(old)} of {len(new)} carried over by name ({', '.join(old)}); new: {', '.join(fresh)}"
    assert line in report.text() and "100.0%" not in report.text()


def test_the_same_classes_in_another_order_are_all_there(tmp_path: Path) -> None:
    given = save_model(tmp_path / "old.pth", OLD)
    model = model_of(3, 2)
    report = warm_start(model, tmp_path / "old.pth", classes("Star ", "circle", "SQUARE"))
    assert "(100.0%)" in report.text() and message("classes carried over", "3 of 3", "Star , circle, SQUARE").search(
        report.text()
    )
    for name in class_entries(given):
        assert torch.equal(model.state_dict()[name], given[name][[2, 0, 1]]), name


def test_no_class_in_common(tmp_path: Path) -> None:
    given = save_model(tmp_path / "old.pth", OLD)
    model = model_of(3, 2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    report = warm_start(model, tmp_path / "old.pth", classes("cat", "dog", "cow"))
    selecting = [name for name in class_entries(before) if SELECTION.search(name)]
    assert len(selecting) == 2 * (1 + len(model.query_groups.selectors))
    for name in class_entries(before):
        mean = given[name].mean(dim=0, keepdim=True).expand_as(before[name])
        assert torch.equal(model.state_dict()[name], mean if name in selecting else before[name]), name
    words = "0 of 3 carried over by name (the file has circle, square, star); new: cat, dog, cow"
    assert words in report.text() and "100.0%" not in report.text()


def test_heads_of_another_width_stay_new(tmp_path: Path) -> None:
    """Biases would fit, and mean nothing without their weights. The dense head hangs on the encoder, and goes over."""
    model_config = nano_config().model
    narrow = dataclasses.replace(model_config, decoder=dataclasses.replace(model_config.decoder, hidden_dim=32))
    given = save_model(tmp_path / "old.pth", OLD, narrow)
    model = model_of(3, 2)
    before = model.state_dict()["decoder.score_heads.0.bias"].clone()
    report = warm_start(model, tmp_path / "old.pth", classes("star", "circle", "square"))
    assert torch.equal(model.state_dict()["decoder.score_heads.0.bias"], before)
    assert "decoder.score_heads.0.bias" in report.partial
    dense = "dense_head.class_heads.0.bias"
    assert torch.equal(model.state_dict()[dense], given[dense][[2, 0, 1]])


def test_numbers_of_the_converter_are_no_names(tmp_path: Path) -> None:
    """By index where there are as many, with a word about it; else not at all."""
    given = save_model(tmp_path / "old.pth", ("class 1", "class 2", "class 3"))
    model = model_of(3, 2)
    report = warm_start(model, tmp_path / "old.pth", classes(*OLD))
    assert message("unnamed classes", "by index").search(report.text())
    assert all(torch.equal(model.state_dict()[name], given[name]) for name in class_entries(given))
    report = warm_start(model_of(4, 2), tmp_path / "old.pth", classes(*OLD, "cross"))
    assert message("unnamed classes", "new").search(report.text())
    assert {each.split(" ")[0] for each in report.mismatched} == set(class_entries(given))


def save_official(path: Path, num_classes: int) -> dict[str, Tensor]:
    """A file of other origin, which names no classes; its state under our names."""
    state = model_of(num_classes, 1).state_dict()
    torch.save({official: state[ours] for ours, official in official_names(state).items()}, path)
    return state


def test_official_weights_know_the_classes_of_coco(tmp_path: Path) -> None:
    given = save_official(tmp_path / "coco.pth", 80)
    model = model_of(3, 2)
    report = warm_start(model, tmp_path / "coco.pth", classes("zebra", "star", "person"))
    assert message("classes carried over", "80", "COCO", "2 of 3", "zebra, person", "star").search(report.text())
    for name in class_entries(given):
        for row, label in ((0, "zebra"), (2, "person")):
            assert torch.equal(model.state_dict()[name][row], given[name][COCO_CLASSES.names.index(label)]), name


def test_foreign_weights_of_other_data_go_over_by_index(tmp_path: Path) -> None:
    given = save_official(tmp_path / "three.pth", 3)
    model = model_of(3, 2)
    report = warm_start(model, tmp_path / "three.pth", classes(*OLD))
    assert message("unnamed classes", "by index").search(report.text())
    assert all(torch.equal(model.state_dict()[name], given[name]) for name in class_entries(given))


def test_training_names_its_classes(tmp_path: Path) -> None:
    cfg = tiny_config(tiny_data(tmp_path / "shapes"), "train.max_iterations=1")
    save_model(tmp_path / "old.pth", ("star", "pen", "circle"), cfg.model)
    trainer = Trainer(cfg, tmp_path / "run", torch.device("cpu"), tuning=tmp_path / "old.pth")
    trainer.run()
    shared = ", ".join(name for name in trainer.classes.names if name in ("star", "circle"))
    report = (tmp_path / "run" / "load_report.txt").read_text(encoding="utf-8")
    assert f"2 of {len(trainer.classes)} carried over by name ({shared}); new: " in report


@pytest.mark.parametrize(
    ("names", "file_names", "pairs"),
    [
        (("a", "b"), ("b", "a"), {0: 1, 1: 0}),
        (("Cat", "dog"), ("cat ", "Dog", "DOG"), {0: 0}),  # DOG and Dog: which one?
        (("cat", "Cat"), ("CAT",), {}),
        (("cat", "Cat"), ("Cat", "cat"), {0: 1, 1: 0}),  # exact names win
        (("a", "a", "b"), ("a", "b"), {2: 1}),
        (("a", "a"), ("a", "a"), {0: 0, 1: 1}),  # the same list is the same list
    ],
)
def test_pairs_of_names(names: tuple[str, ...], file_names: tuple[str, ...], pairs: dict[int, int]) -> None:
    assert pair_names(names, file_names) == pairs
