"""Models of the Hub, from one that is played here: the library of the Hub itself asks it, in another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hub_server import HubServer
from huggingface_cases import write_model
from safetensors.torch import load_file

import rtdetr

pytest.importorskip("huggingface_hub", reason='not installed: pip install "rtdetr[hub]"')

# Prints a line for each call of a list: what came of it, or the sentence of its refusal.
CALLS = """
import json, sys
from rtdetr import RTDETRv3
for name, push in json.loads(sys.argv[1]):
    try:
        detector = RTDETRv3.from_pretrained(name, device="cpu")
        urls = [detector.push_to_hub(to, licence="MIT", format=how, figures={"AP": 0.5}) for to, how in push]
        print(json.dumps({"classes": detector.classes.names, "urls": urls}))
    except ValueError as error:
        print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    server = HubServer(tmp_path / "models")
    yield server
    server.close()


def calls(hub: HubServer, tmp_path: Path, *wanted: tuple[str, list[tuple[str, str]]]) -> list[dict[str, Any]]:
    """What came of detectors by name, each then pushed to names in formats."""
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": "hf_none"}
    settings |= {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    path = os.pathsep.join([str(Path(rtdetr.__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", CALLS, json.dumps(wanted)],
        env=os.environ | settings | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_models_come_from_the_hub_and_go_there_in_every_format(hub: HubServer, tmp_path: Path) -> None:
    theirs = write_model(hub.models / "someone" / "tiny")
    formats = {"me/ours": "rtdetr", "me/theirs": "transformers", "me/both": "both"}
    done, *again = calls(hub, tmp_path, ("someone/tiny", [*formats.items()]), *((name, []) for name in formats))
    assert ["/".join(url.removeprefix(hub.url).split("/")[1:3]) for url in done["urls"]] == [*formats]
    assert [each["classes"] for each in again] == [["cat", "dog", "traffic light"]] * 3
    before, after = (load_file(each / "model.safetensors") for each in (theirs, hub.models / "me" / "theirs"))
    padded = "model.denoising_class_embed.weight"  # whose last row is padding, zero here
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before if name != padded)
    both = hub.models / "me" / "both"
    for name in ("model.safetensors", "preprocessor_config.json"):
        assert (both / name).read_bytes() == (hub.models / "me" / "theirs" / name).read_bytes()
    ours, within = hub.models / "me" / "ours", both / "rtdetr"
    assert (within / "config.json").read_bytes() == (ours / "config.json").read_bytes()  # which has a digest of weights
    assert load_file(within / "model.safetensors").keys() == load_file(ours / "model.safetensors").keys()
    got = {path.split("/", 5)[5] for path in hub.asked if path.startswith("/me/both/resolve/")}
    assert got == {"config.json", "rtdetr/config.json", "rtdetr/model.safetensors"}  # no weights twice
    for name, format in formats.items():
        head, text = (hub.models / name / "README.md").read_text().split("---\n")[1:]
        about = yaml.safe_load(head)
        assert (about["library_name"], about["license"]) == ("rtdetr" if format == "rtdetr" else "transformers", "mit")
        assert "| AP | 0.5000 |" in text and "RTDetrForObjectDetection" in text
        assert (f'RTDETRv3.from_pretrained("{name}")' in text) is (format != "transformers")
        assert (f'pipeline("object-detection", model="{name}")' in text) is (format != "rtdetr")


def test_after_a_cut_it_works_and_a_model_that_is_here_needs_no_hub(hub: HubServer, tmp_path: Path) -> None:
    write_model(hub.models / "someone" / "tiny")
    hub.sent = 300_000
    (cut,) = calls(hub, tmp_path, ("someone/tiny", []))
    assert cut["error"].startswith("someone/tiny: no such file or folder, and not to be had from the Hub (")
    hub.sent = 1 << 40
    (whole,) = calls(hub, tmp_path, ("someone/tiny", []))
    assert whole["classes"] == ["cat", "dog", "traffic light"]
    hub.close()
    here, missing = calls(hub, tmp_path, ("someone/tiny", []), ("someone/else", []))
    assert here == whole
    assert missing["error"].startswith("someone/else: no such file or folder, and not to be had from the Hub (")
    assert not any("\n" in each["error"] for each in (cut, missing))


def test_hostile_models_of_the_hub_are_refused(hub: HubServer, tmp_path: Path) -> None:
    class Code:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    code = write_model(hub.models / "someone" / "code", pickled=True)
    torch.save({"model.enc_output.0.weight": Code()}, code / "pytorch_model.bin")
    write_model(hub.models / "someone" / "other", {"model_type": "detr", "auto_map": {"AutoModel": "code.Model"}})
    (hub.models / "someone" / "other" / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    names = ["someone/code", "someone/other", "someone/none"]
    sentences = [each["error"] for each in calls(hub, tmp_path, *((name, []) for name in names))]
    wanted = [
        "nothing of it was run",
        "model_type: expected rt_detr or rt_detr_v2, got 'detr'",
        "someone/none: no such",
    ]
    for sentence, part in zip(sentences, wanted, strict=True):
        assert part in sentence and "\n" not in sentence
    assert not (tmp_path / "ran").exists() and not any("code.py" in path for path in hub.asked)
