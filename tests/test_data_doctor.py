"""The doctor names every defect of sets that have one each, and training on them goes on or refuses in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hostile_sets import CASES, Case, config_of, sound_document, write_case, write_pictures

from rtdetr import cli
from rtdetr.data.classes import DataError
from rtdetr.data.doctor.examine import examine, plain
from rtdetr.data.loader import build_train_loader
from rtdetr.losses.criterion import build_criterion
from rtdetr.models.rtdetrv3 import build_model

SOUND = Case("sound", "", 0, lambda document, folder: None)


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound") / "pictures"
    write_pictures(folder)
    return folder


def loss_or_sentence(annotations: Path, folder: Path) -> float | str:
    """Of the batches of an epoch in a nano model, or why there is none."""
    try:
        cfg = config_of(annotations, folder)
        loader = build_train_loader(cfg, 0)
        batches = list(loader)
    except DataError as error:
        return str(error)
    torch.manual_seed(0)
    model = build_model(cfg.model, len(loader.classes)).train()
    criterion = build_criterion(cfg, len(loader.classes))
    batch = batches[0]
    return float(criterion(model(batch.images, batch.targets), batch.targets, 0)["loss"].detach())


def test_there_are_enough() -> None:
    assert len(CASES) >= 120 and len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_doctor_names_it(case: Case, tmp_path: Path, pictures: Path) -> None:
    annotations, folder = write_case(case, tmp_path, pictures)
    report = examine(annotations, str(folder))
    kinds = {each.kind for each in report.defects()}
    assert kinds & set(case.kind.split("|")), (kinds, list(report.lines()))
    assert report.code() == case.code, list(report.lines())
    for line in report.lines():
        assert "\n" not in line and len(line) < 1500
    found = json.loads(json.dumps(plain(report)))
    assert all(set(each) == {"file", "record", "defect", "what", "action"} for each in found)
    assert all(each["action"] in ("kept", "clipped", "dropped", "refused") for each in found)


def check_training(case: Case, root: Path, pictures: Path) -> None:
    result = loss_or_sentence(*write_case(case, root, pictures))
    if isinstance(result, str):
        assert "\n" not in result and str(root) in result and len(result) < 1500
    else:
        assert torch.isfinite(torch.tensor(result))


def in_groups(cases: list[Case], parts: int) -> list[list[Case]]:
    return [cases[i::parts] for i in range(parts)]


@pytest.mark.parametrize("case", CASES[::8], ids=lambda case: case.name)
def test_training_goes_on_or_refuses(case: Case, tmp_path: Path, pictures: Path) -> None:
    check_training(case, tmp_path, pictures)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_training_goes_on_or_refuses_for_all(case: Case, tmp_path: Path, pictures: Path) -> None:
    """Slow: a model for each of them."""
    check_training(case, tmp_path, pictures)
