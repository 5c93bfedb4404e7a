"""`rtdetr benchmark data` and `eval` run on small sets, agree with themselves and write what they print."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RecordOf = Callable[..., tuple[str, Any]]


@pytest.fixture
def record_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RecordOf:
    """What a benchmark prints, and the JSON that it writes."""
    tool = importlib.import_module("rtdetr.benchmarks.__main__")

    def run(*command: str) -> tuple[str, Any]:
        file = tmp_path / "numbers.json"
        assert tool.main([*command, "--json", str(file)]) == 0
        return capsys.readouterr().out, json.loads(file.read_text())

    return run


def test_data(record_of: RecordOf) -> None:
    printed, record = record_of("data", "--count", "3", "--rounds", "1", "--profile")
    rows = {row["variant"]: row for row in record["measurements"]}
    assert set(rows) == {"decode, plain", "decode, fused", "torchvision", "plain", "fused", "fused, bytes"}
    assert rows["torchvision"]["times_torchvision"] == 1 and all(row["images_per_second"] > 0 for row in rows.values())
    assert "| fused | " in printed and record["opencv"] in printed
    assert {"read", "draw", "colours", "boxes", "float tensor"} <= set(record["milliseconds"]["fused"])
    assert record["milliseconds"]["plain"]["expand and crop"] > 0


def test_wrong_arguments_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool = importlib.import_module("rtdetr.benchmarks.__main__")
    assert tool.main(["data", "--pictures", str(tmp_path / "nowhere")]) == 2
    assert "no such annotation file" in capsys.readouterr().err
    for wrong in (["data", "--rounds", "0"], ["eval", "--pictures", "-1"]):
        with pytest.raises(SystemExit):
            tool.main(wrong)
        assert "expected a whole number from 1, got" in capsys.readouterr().err


def test_eval(record_of: RecordOf) -> None:
    printed, rows = record_of("eval", "--pictures", "20", "--detections", "30", "--profile")
    assert [row["evaluator"] for row in rows] == ["faster-coco-eval", "pycocotools"]
    assert rows[0]["figures"] == pytest.approx(rows[1]["figures"], abs=1e-12) and len(rows[0]["figures"]) == 12
    assert rows[0]["figures"]["AP"] > 0 and "| faster-coco-eval | " in printed
    assert len(rows[0]["top"]) == 10
