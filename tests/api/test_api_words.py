"""The Python API: arguments and names that cannot be used, and the words in which it says so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from api_cases import PIXELS
from engine_helpers import NANO
from messages import message

from rtdetr import RTDETRv3
from rtdetr.cli import main
from rtdetr.data.classes import DataError
from rtdetr.weights.checkpoint import CheckpointError


@pytest.mark.parametrize(
    ("classes", "sentence"),
    [
        ([], r"expected a list of names, got \[\]"),
        (["a", 1], r"expected a list of names, got \['a', 1\]"),
        ({"b", "a"}, "expected a list of names, got {"),
        (["a", "b", "a"], "names that are there more than once: 'a'$"),
        (["a", " "], "every class needs a name, number 1 of the list is ' '"),
    ],
)
def test_classes_that_are_none_are_one_sentence(classes: Any, sentence: str) -> None:
    with pytest.raises(DataError, match=rf"^classes: {sentence}"):
        RTDETRv3.from_pretrained(NANO, classes=classes)


@pytest.mark.parametrize("given", [None, 5, b"model.pth", [], {}, ""])
def test_what_is_no_path_is_one_sentence(given: Any, model: RTDETRv3) -> None:
    with pytest.raises(ValueError, match=r"^name: expected a path, got "):
        RTDETRv3.from_pretrained(given)
    if given is not None:
        for argument in ("output_dir", "resume"):
            with pytest.raises(ValueError, match=rf"^{argument}: expected a path, got "):
                model.train(**{argument: given})
    with pytest.raises(ValueError, match=r"^folder: expected a path, got "):
        model.save_pretrained(given)
    with pytest.raises(ValueError, match=r"^repo_id: expected owner/model, got "):
        model.push_to_hub(given)
    if given is not None:
        with pytest.raises(ValueError, match=r"^path: expected a path, got "):
            model.predict(PIXELS).save(given)


def test_a_mistyped_folder_is_no_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def from_hub(name: str, revision: str | None) -> Path:
        asked.append(revision)
        raise CheckpointError("the Hub was asked")

    monkeypatch.setattr("rtdetr.weights.catalogue.from_hub", from_hub)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    with pytest.raises(CheckpointError, match=message("no such file", "runs/mine", "Hub", "runs")):
        RTDETRv3.from_pretrained("runs/mine")
    assert not asked
    for name, revision in (("runs/mine", "main"), ("other/mine", None)):
        with pytest.raises(CheckpointError, match=r"^the Hub was asked$"):
            RTDETRv3.from_pretrained(name, revision=revision)
    assert asked == ["main", None]
    for name in ("a.pth", NANO, "rtdetrv3_nano_shapes", "rtdetr_r18vd_coco"):
        with pytest.raises(CheckpointError, match=r"^revision: .*Hub") as raised:
            RTDETRv3.from_pretrained(name, revision="main")
        assert f"got {str(name)!r}" in str(raised.value)


def test_sentences_name_what_python_calls_it(
    model: RTDETRv3, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And on the command line its options, in the same process."""
    (tmp_path / "last.pth").write_bytes(checkpoint.read_bytes())
    with pytest.raises(ValueError) as taken:
        model.train(output_dir=tmp_path)
    with pytest.raises(ValueError) as replaced:
        model.train(resume=tmp_path / "last.pth", overwrite=True)
    with pytest.raises(ValueError) as no_state:
        model.train(resume=checkpoint, output_dir=tmp_path / "new")
    with pytest.raises(ValueError, match=rf"{tmp_path}: is a folder; did you mean {tmp_path / 'last.pth'}\?$"):
        model.train(resume=tmp_path)
    with pytest.raises(ValueError) as no_device:
        RTDETRv3.from_pretrained(checkpoint, device="cuda:99")
    with pytest.raises(ValueError) as no_data:
        RTDETRv3.from_pretrained(NANO).train(output_dir=tmp_path / "new", **{"data.train.annotations": ""})
    for raised in (taken, replaced, no_state, no_device, no_data):
        assert not re.search(r"(?<!\w)--?[a-z]", str(raised.value)), raised.value
    assert message("run there", f"resume='{tmp_path / 'last.pth'}'", "output_dir").search(str(taken.value))
    assert message("overwrite with resume", "overwrite=True").search(str(replaced.value))
    command = ["train", "-c", str(NANO), "--output-dir", str(tmp_path), "--device", "cpu"]
    assert main(command) == 2
    assert message("run there", f"-r {tmp_path / 'last.pth'}", "--output-dir").search(capsys.readouterr().err)
