"""What `rtdetr eval` prints and writes, beyond what fits a row of the commands' table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_cases import RENUMBERED, run
from messages import message


def test_matched_by_name_the_results_are_the_same_but_for_the_ids(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures, found = [], []
    for command in ("eval -w model.pth --device cpu", f"{RENUMBERED} --match-classes name"):
        assert run(f"{command} --save-json d{len(found)}.json") == 0
        figures.append(capsys.readouterr().out.splitlines()[1:13])
        found.append(json.loads((folder / f"d{len(found)}.json").read_text()))
    new_id = {2: 4, 3: 3, 5: 13, 7: 1, 11: 0}
    assert found[1] == [each | {"category_id": new_id[each["category_id"]]} for each in found[0]]
    assert figures[0] == figures[1] and len({each["category_id"] for each in found[1]}) > 1


def test_the_summary_and_the_table_count_the_same_boxes(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = folder / "shapes" / "renumbered.json"
    document = json.loads(path.read_text())
    first = document["annotations"][0]
    document["annotations"] += [first | {"id": 900 + i, "bbox": [96 * i, 5, 9, 0 if i == 0 else 9]} for i in range(3)]
    path.write_text(json.dumps(document))
    assert run(f"{RENUMBERED} --match-classes name") == 0
    lines = capsys.readouterr().out.splitlines()
    assert message("boxes left out", "14 boxes", "5 classes", "3 boxes without area").search(lines[0])
    assert sum(int(line.split()[2]) for line in lines[14:]) == 14


def test_deployed_the_figures_are_the_same(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = []
    for options in ("", "--deployed float32"):
        assert run(f"eval -w model.pth --device cpu --save-json d{len(found)}.json {options}") == 0
        figures = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()[1:13] if line[-1] != "-"]
        found.append((figures, json.loads((folder / f"d{len(found)}.json").read_text())))
    assert found[0][0] == pytest.approx(found[1][0], abs=5e-4)
    scores = [[each["score"] for each in detections] for _, detections in found]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4) and found[0][1] != found[1][1]
    assert run("eval -w model.pth --device cpu --deployed float16") == 2
    assert message("expected", "--deployed float16", "GPU", "cpu").search(capsys.readouterr().err)
